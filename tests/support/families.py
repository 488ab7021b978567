"""Small models with the tokenizers of tests/golden/tokenizers."""

import json
import shutil
from pathlib import Path

from support.checkpoints import CONFIG, write_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
REFERENCE = json.loads((GOLDEN / "tokenizers.json").read_bytes())
TEXTS = REFERENCE.pop("texts")
PLAIN = REFERENCE.pop("plain")
FAMILIES = list(REFERENCE)


def tokenizer_folder(family: str) -> Path:
    """Return the folder with the tokenizer's files and the config.json of a family."""
    return GOLDEN / "tokenizers" / family


def write_family(folder: Path, family: str) -> Path:
    """Write a whole model with the tokenizer of a family, and return its folder."""
    files = tokenizer_folder(family)
    config = json.loads((files / "config.json").read_bytes())
    size = len(REFERENCE[family]["words"]) + 16  # with special tokens and rows of padding
    write_checkpoint(folder, CONFIG | config | {"vocab_size": size})
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    for path in files.iterdir():
        if path.name != "config.json":
            shutil.copyfile(path, folder / path.name)
    return folder
