"""Make tests/golden/classifiers.json: outputs of small classifiers in transformers.

It needs PyTorch and transformers, in an environment of its own: see tools/make_golden.py. Run it
again only if tests/support/classifiers.py changes.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import GPT2ForSequenceClassification

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.classifiers import CLASSIFIERS, ROWS, write_classifier  # noqa: E402 (not installed)


@torch.inference_mode()
def outputs(case: str) -> dict[str, object]:
    """Return the labels of a classifier, and its outputs for ROWS, one row at a time."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_classifier(Path(temporary), case)
        model = GPT2ForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    logits = [model(torch.tensor([row])).logits[0].tolist() for row in ROWS]
    names = [model.config.id2label[index] for index in range(model.config.num_labels)]
    return {"labels": names, "logits": logits}


def main() -> None:
    """Write the file."""
    torch.set_num_threads(1)
    cases = {case: outputs(case) for case in CLASSIFIERS}
    (ROOT / "tests" / "golden" / "classifiers.json").write_text(json.dumps(cases) + "\n")


if __name__ == "__main__":
    main()
