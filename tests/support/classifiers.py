"""Small classifiers, as transformers saves GPT2ForSequenceClassification."""

import json
from pathlib import Path
from typing import Any

from support.checkpoints import (
    CONFIG,
    END_ID,
    noise,
    safetensors_bytes,
    store,
    stored_tensors,
    write_checkpoint,
)

# Fields of config.json, and the number of labels.
CLASSIFIERS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (2, {}),  # without names and without a padding token
    "padded": (3, {"id2label": {"0": "bad", "1": "so so", "2": "good"}, "pad_token_id": END_ID}),
    "several": (
        3,
        {
            "id2label": {"0": "a", "1": "b", "2": "c"},
            "problem_type": "multi_label_classification",
            "pad_token_id": 0,
        },
    ),
    "number": (1, {"id2label": {"0": "grade"}, "problem_type": "regression", "pad_token_id": 0}),
}
ROWS = [
    [72, 5, 258, 286, 199],
    [287, 41, 41, 120, 7, 9, 3],
    [5, 80, 7, END_ID, END_ID],  # ends with a padding token of one case
    [5, 80, 7, 0, 0, 0],
    [END_ID, END_ID],
    [0],
    [41],
]


def write_classifier(folder: Path, case: str, **fields: Any) -> Path:
    """Write a classifier and return its folder; `fields` of config.json replace those of its case.

    A field that is None is left out.
    """
    count, of_case = CLASSIFIERS[case]
    config = CONFIG | of_case | fields
    write_checkpoint(folder, {name: value for name, value in config.items() if value is not None})
    tensors = stored_tensors(CONFIG, layout="saved")
    tensors["score.weight"] = store(noise(f"score {case}", count, CONFIG["n_embd"]))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    about = json.loads((folder / "config.json").read_bytes())
    if "id2label" in about:
        about["label2id"] = {name: int(index) for index, name in about["id2label"].items()}
        (folder / "config.json").write_text(json.dumps(about))
    return folder
