"""Tasks for lm-evaluation-harness in local files, with each kind of request that it makes."""

import json
from pathlib import Path
from typing import Any

STORY = "Once upon a time, there was a little girl named Emma. She loved the moon. "

# doc_to_text and doc_to_target are templates of these rows.
CHOICES = [
    {"text": "The moon was round and", "choices": ["silver", "golden", "hungry"], "answer": 0},
    {"text": "Once upon a ", "choices": ["time", "moon", "time there was"], "answer": 0},
    {"text": "A fox lived in the woods, and", "choices": ["he", "hein", "h"], "answer": 0},
    {"text": STORY * 60 + "She loved the", "choices": ["moon", "sea and the sand"], "answer": 0},
]
TARGETS = [
    # What greedy decoding gives: of `tiny`, and of a small checkpoint.
    {"text": "Once upon a", "target": " time"},
    {"text": "Once upon a time", "target": "l"},
    {"text": "Once upon a time, there was a", "target": " little"},
    {"text": "She looked up at the moon.   ", "target": "It was round."},
    {"text": "The end.\n\n", "target": "\nOnce"},
    {"text": "", "target": "Once upon a time"},
    {"text": "", "target": "<|endoftext|>Once upon a time"},
    {"text": "The end.<|endoftext|>Once upon", "target": " a time"},
    {"text": "L'été, 中 and 😀", "target": " — in a ring 😀."},
    {"text": STORY * 60, "target": "The end"},
    {"text": STORY, "target": " a" * 70},
]
PROMPTS = ["Once upon a time", "The old woman", "One day, a fox\n", STORY * 60, "中 😀"]


def texts(n_positions: int) -> list[str]:
    """Return texts of any length, such as those that just fill one window or two.

    In the tokenizers of the tests, " a" is one token.
    """
    window = [" a" * (n_positions * windows + more) for windows in (1, 2) for more in (-1, 0, 1)]
    return ["", "x", STORY, *window, STORY * 60]


def write_tasks(folder: Path, n_positions: int) -> list[str]:
    """Write the tasks with their rows, for `--include_path`; return their names."""
    folder.mkdir()
    write_task(
        folder,
        "choice",
        CHOICES,
        output_type="multiple_choice",
        num_fewshot=2,
        fewshot_split="test",
        fewshot_config={"sampler": "first_n"},
        doc_to_choice="{{choices}}",
        doc_to_target="{{answer}}",
    )
    write_task(folder, "target", TARGETS, output_type="loglikelihood", target_delimiter="")
    rows = [{"text": "", "target": text} for text in texts(n_positions)]
    write_task(folder, "rolling", rows, output_type="loglikelihood_rolling")
    write_task(
        folder,
        "continue",
        [{"text": text, "target": ""} for text in PROMPTS],
        output_type="generate_until",
        generation_kwargs={"until": ["\n", ". "], "max_gen_toks": 30, "do_sample": False},
    )
    return ["choice", "target", "rolling", "continue"]


def write_task(folder: Path, name: str, rows: list[dict[str, Any]], **config: Any) -> None:
    """Write a task; the names of its fields are those of lm-eval."""
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")
    config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{target}}",
    } | config
    # JSON is YAML.
    (folder / f"{name}.yaml").write_text(json.dumps(config), encoding="ascii")
