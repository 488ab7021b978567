"""Shell completion of the values of options; typer completes the rest."""

import shlex
from glob import escape, glob


def models(incomplete: str) -> list[str]:
    """Return values of `--model`: known names, cached models, and folders with this prefix."""
    from gpt_cli.folder.contents import CONFIG
    from gpt_cli.hub.local import BUNDLED, SHORT_NAMES, list_models

    names = dict.fromkeys([*BUNDLED, *SHORT_NAMES, *(model.name for model in list_models())])
    configs = glob(f"{escape(incomplete)}*/{CONFIG}")  # noqa: PTH207 (leaves ./ as it is)
    folders = [file.removesuffix(f"/{CONFIG}") for file in sorted(configs)]
    # bash inserts names unquoted, so names that need quotes are left out.
    return [name for name in [*names, *folders] if shlex.quote(name) == name]


def downloads() -> list[str]:
    """Return the short names that `download` accepts."""
    from gpt_cli.hub.local import SHORT_NAMES

    return list(SHORT_NAMES)
