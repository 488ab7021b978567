"""What a shell's TAB offers for the values of options; typer does the rest."""

import shlex
from glob import escape, glob


def models(incomplete: str) -> list[str]:
    """What `--model` takes: names, what is in the Hub's cache, and folders that begin so."""
    from gpt_cli.hub.local import BUNDLED, CONFIG, SHORT_NAMES, list_models

    names = dict.fromkeys([*BUNDLED, *SHORT_NAMES, *(model.name for model in list_models())])
    found = glob(f"{escape(incomplete)}*/{CONFIG}")  # noqa: PTH207 (leaves ./ as it is)
    folders = [file.removesuffix(f"/{CONFIG}") for file in sorted(found)]
    # bash puts names in as they are; where there is nothing to offer, each shell offers its files.
    return [name for name in [*names, *folders] if shlex.quote(name) == name]


def downloads() -> list[str]:
    """What `download` takes, as far as it is known without asking the Hub."""
    from gpt_cli.hub.local import SHORT_NAMES

    return list(SHORT_NAMES)


def devices() -> list[str]:
    """What `--device` takes."""
    return ["auto", "cpu", "cuda"]


def dtypes() -> list[str]:
    """What `--dtype` takes."""
    return ["auto", "float32", "bfloat16", "float16", "int8"]
