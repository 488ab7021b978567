"""The configuration of a model's folder: config.json, or what other tools write in its place."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt_cli.errors import CheckpointError
from gpt_cli.folder.config import GPT2Config
from gpt_cli.folder.contents import CONFIG, HPARAMS, NANOGPT
from gpt_cli.system.files import read_json

# Fields of OpenAI's hparams.json, and of `model_args` in nanoGPT's checkpoint.
_OPENAI = {"n_vocab": "vocab_size", "n_ctx": "n_positions"}
_NANOGPT = {"block_size": "n_positions"}


def read_config(folder: Path) -> GPT2Config:
    """Return the configuration of a folder; CheckpointError if it is missing or not valid."""
    if not (folder / CONFIG).exists():
        if (folder / HPARAMS).is_file():
            return _renamed(read_json(folder / HPARAMS), _OPENAI, folder / HPARAMS)
        if (folder / NANOGPT).is_file():
            from gpt_cli.folder.weight_files import read_model_args  # few models need it

            settings = {"activation_function": "gelu"} | read_model_args(folder / NANOGPT)
            return _renamed(settings, _NANOGPT, folder / NANOGPT)
    return GPT2Config.from_folder(folder)


def _renamed(settings: Mapping[str, Any], names: Mapping[str, str], path: Path) -> GPT2Config:
    """Return the configuration that another tool has written, with its names of fields."""
    renamed = {names.get(name, name): value for name, value in settings.items()}
    missing = [
        name for name in ("vocab_size", "n_embd", "n_layer", "n_head") if name not in renamed
    ]
    if missing:
        raise CheckpointError(f"{path} has no {missing[0]}: add the config.json of the model")
    return GPT2Config.from_dict(renamed, str(path))
