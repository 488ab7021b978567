"""Make tests/golden/beams.json: the likeliest texts, as the beam search of transformers finds them.

It needs PyTorch and transformers, in an environment of its own: see tools/make_golden.py. Run it
again only if its cases or tests/support/checkpoints.py change.

Each prompt is the first one whose hypotheses stay the same if noise, far above the errors of
float32, is added to all log-probabilities. So no near tie decides.
"""

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel, GPT2Tokenizer
from transformers.generation import GenerationConfig, GenerationMode, LogitsProcessor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.checkpoints import CASES, END_ID, VOCAB, noise  # noqa: E402 (it is not installed)

NOISE = 2e-4  # of a log-probability
DEAD = -1e6  # the score of a text that is none is far below

LETTERS = [VOCAB["a"], VOCAB["b"]]

# Options as gpt-cli names them, beside the model, the length of the prompt, and the end tokens: a
# range of the likeliest ones after the prompt.
SEARCHES: list[dict[str, Any]] = [
    {"model": "hub", "beams": 1, "max_tokens": 12},
    {"model": "hub", "beams": 1, "max_tokens": 12, "ends": (1, 40)},
    {"model": "saved", "beams": 2, "max_tokens": 20},
    {"model": "shards", "beams": 3, "max_tokens": 12, "ends": (3, 30)},
    {"model": "f16", "beams": 4, "max_tokens": 9, "ends": (4, 60)},
    {"model": "bf16", "beams": 5, "max_tokens": 8, "ends": (7, 70)},
    {"model": "untied", "beams": 4, "max_tokens": 10, "ends": (2, 90)},
    {"model": "tied_but_stored", "beams": 7, "max_tokens": 6, "ends": (5, 60)},
    {"model": "tied_but_different", "beams": 2, "max_tokens": 15, "ends": (3, 50)},
    {"model": "n_inner", "beams": 16, "max_tokens": 6, "ends": (8, 24)},
    {"model": "gelu", "beams": 32, "max_tokens": 4, "ends": (9, 50)},
    {"model": "tanh", "beams": 32, "max_tokens": 5, "ends": (1, 9)},
    {"model": "relu", "beams": 4, "max_tokens": 1},
    {"model": "relu", "beams": 16, "max_tokens": 1, "ends": (0, 17)},
    {"model": "silu", "beams": 3, "max_tokens": 100, "prompt": 70, "ends": (2, 40)},
    {"model": "upcast", "beams": 2, "max_tokens": 4, "prompt": 76},
    {"model": "unscaled", "beams": 5, "max_tokens": 3, "prompt": 79},
    {"model": "inverse_layer", "beams": 3, "max_tokens": 10, "ends": (0, 1), "length_penalty": 0},
    {"model": "epsilon", "beams": 2, "max_tokens": 10, "ends": (0, 5)},
    {"model": "minimal", "beams": 4, "max_tokens": 10, "ends": (3, 60)},
    {"model": "padded_vocabulary", "beams": 3, "max_tokens": 9, "ends": (2, 60)},
    *(
        {"model": "hub", "beams": 2, "max_tokens": 12, "ends": (5, 40)}
        | {"length_penalty": length_penalty, "early_stopping": early_stopping}
        for length_penalty in (-1, 0, 0.6, 1, 2)
        for early_stopping in (False, True, "never")
    ),
    *(
        {"model": "tanh", "beams": 4, "max_tokens": 30, "ends": (2, 90), "early_stopping": early}
        for early in (False, True, "never")
    ),
    {"model": "tanh", "beams": 4, "max_tokens": 12, "repeat_penalty": 1.4, "ends": (4, 9)},
    {"model": "one_head", "beams": 3, "max_tokens": 12, "repeat_penalty": 0.7, "ends": (2, 9)},
    {"model": "hub", "beams": 4, "max_tokens": 9, "logit_bias": [[139, -9], [41, 3.5], [288, 2]]},
    {"model": "tanh", "beams": 5, "max_tokens": 14, "no_repeat_ngram": 1, "ends": (9, 30)},
    {"model": "tanh", "beams": 5, "max_tokens": 14, "no_repeat_ngram": 2, "ends": (5, 20)},
    {"model": "one_head", "beams": 2, "max_tokens": 20, "no_repeat_ngram": 3, "ends": (8, 11)},
    {"model": "tanh", "beams": 4, "max_tokens": 10, "ends": (3, 20), "logit_bias": [[139, 2]]}
    | {"repeat_penalty": 1.2, "no_repeat_ngram": 2, "length_penalty": 0.6, "early_stopping": True},
    {"model": "hub", "beams": 4, "max_tokens": 9, "stop": list("abcdefghijklmn")},
    {"model": "one_head", "beams": 6, "max_tokens": 9, "stop": list(" EFGHIJKLM"), "ends": (5, 8)},
    {"model": "hub", "beams": 8, "max_tokens": 2, "regex": "[ab]{1,9}"},
    {"model": "tanh", "beams": 16, "max_tokens": 3, "regex": "[ab]{1,9}", "length_penalty": 2},
]


def load(case: str, folder: Path) -> GPT2LMHeadModel:
    """Load a checkpoint in float64, in which an attention with `upcast` cannot compute."""
    dtype = torch.float32 if case == "upcast" else torch.float64
    return GPT2LMHeadModel.from_pretrained(
        CASES[case].write(folder / case), dtype=dtype, attn_implementation="eager"
    ).eval()


class Noise(LogitsProcessor):
    """Adds noise to all log-probabilities."""

    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores with noise."""
        return scores + NOISE * (2 * torch.rand(scores.shape, generator=self._generator) - 1)


def allowed(length: int, ends: list[int], batch: int, ids: Tensor) -> list[int]:
    """Return the tokens that the regular expression [ab]{1,9} allows after a prompt."""
    return LETTERS if len(ids) == length else [*LETTERS, *ends]


def search(
    model: GPT2LMHeadModel, tokenizer: GPT2Tokenizer, case: dict[str, Any], noise_seed: int = 0
) -> tuple[list[list[int]], list[float]]:
    """Return the ids and the scores of all hypotheses, without noise if its seed is 0."""
    prompt, ends = case["prompt"], case["ends"]
    length = len(prompt)
    keywords: dict[str, Any] = {
        "num_beams": case["beams"],
        "num_return_sequences": case["beams"],
        "max_length": min(length + case["max_tokens"], model.config.n_positions),
        "length_penalty": float(case.get("length_penalty", 1)),
        "early_stopping": case.get("early_stopping", False),
        "repetition_penalty": case.get("repeat_penalty"),
        "no_repeat_ngram_size": case.get("no_repeat_ngram"),
        "suppress_tokens": list(range(len(VOCAB), model.config.vocab_size)) or None,
        "eos_token_id": ends,
        "pad_token_id": ends[0],
    }
    if "logit_bias" in case:
        keywords["sequence_bias"] = {(id,): float(bias) for id, bias in case["logit_bias"]}
    if "stop" in case:
        keywords |= {"stop_strings": case["stop"], "tokenizer": tokenizer}
    if "regex" in case:
        keywords["prefix_allowed_tokens_fn"] = partial(allowed, length, ends)
    done = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, length, dtype=torch.int64),
        do_sample=False,
        logits_processor=[Noise(noise_seed)] if noise_seed else [],
        output_scores=True,
        return_dict_in_generate=True,
        **keywords,
    )
    scores = done.sequences_scores.tolist()
    tokens = (done.beam_indices >= 0).sum(dim=1).tolist()
    texts = [
        row[length : length + count]
        for row, count, score in zip(done.sequences.tolist(), tokens, scores, strict=True)
        if score > DEAD
    ]
    return texts, scores[: len(texts)]


def likely(model: GPT2LMHeadModel, prompt: list[int], first: int, end: int) -> list[int]:
    """Return the tokens of these ranks after a prompt, without the letters of `allowed`."""
    order = model(torch.tensor([prompt])).logits[0, -1, : len(VOCAB)].argsort(descending=True)
    return sorted(set(order[first:end].tolist()).difference(LETTERS))


def golden(
    case: dict[str, Any], model: GPT2LMHeadModel, tokenizer: GPT2Tokenizer
) -> dict[str, Any]:
    """Return a case with the first prompt that no near tie decides, and its hypotheses."""
    for seed in range(100):
        values = np.abs(noise("beams", case.get("prompt", 5), seed=seed)) * 1000
        prompt = (values.astype(int) % len(VOCAB)).tolist()
        ends = likely(model, prompt, *case["ends"]) if "ends" in case else [END_ID]
        chosen = case | {"prompt": prompt, "ends": ends}
        texts, scores = search(model, tokenizer, chosen)
        if all(search(model, tokenizer, chosen, seed)[0] == texts for seed in (1, 2, 3)):
            print(f"{case['model']}: seed {seed}, {len(texts)} hypotheses, {list(map(len, texts))}")
            pairs = zip(texts, scores, strict=True)
            hypotheses = [{"ids": ids, "score": float(f"{score:.7g}")} for ids, score in pairs]
            return chosen | {"hypotheses": hypotheses}
    raise SystemExit(f"near ties decide all searches of {case}")


@torch.inference_mode()
def main() -> None:
    """Write the file."""
    torch.set_num_threads(1)
    # For one beam, `generate` would not search.
    GenerationConfig.get_generation_mode = lambda self, _=None: GenerationMode.BEAM_SEARCH
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for case in SEARCHES:
            model = load(case["model"], folder)
            tokenizer = GPT2Tokenizer.from_pretrained(folder / case["model"])
            lines.append(json.dumps(golden(case, model, tokenizer)))
    path = ROOT / "tests" / "golden" / "beams.json"
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="ascii")
    print(f"{path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
