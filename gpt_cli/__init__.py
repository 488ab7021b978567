"""GPT-2 in a terminal and in Python, without PyTorch.

    import gpt_cli

    engine = gpt_cli.load("tiny")
    for piece in engine.stream("Once upon a time", seed=1):
        print(piece, end="", flush=True)

The names below are imported on first use, so that `gpt-cli --help` need not wait for NumPy.
"""

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__version__ = "1.0.0"

if TYPE_CHECKING:
    from gpt_cli.display.page import Page
    from gpt_cli.engine import Engine
    from gpt_cli.errors import (
        CheckpointError,
        ContextError,
        GPTCLIError,
        InputError,
        MismatchError,
        ModelNotFoundError,
        ResourceError,
        RowsError,
    )
    from gpt_cli.generation.generate import Completion, Run
    from gpt_cli.generation.row import Step
    from gpt_cli.gpt2.weights import Weights
    from gpt_cli.loading import load
    from gpt_cli.options.edit import Edit
    from gpt_cli.options.request import Options
    from gpt_cli.scoring.attribution import Ablation, Attribution, Patching
    from gpt_cli.scoring.classify import Classification
    from gpt_cli.scoring.rank import Choice
    from gpt_cli.scoring.score import Score
    from gpt_cli.scoring.trace import Trace
    from gpt_cli.scoring.tree import Node, Tree
    from gpt_cli.scoring.vectors import Direction
    from gpt_cli.texts.text import Word

__all__ = [
    "Ablation",
    "Attribution",
    "CheckpointError",
    "Choice",
    "Classification",
    "Completion",
    "ContextError",
    "Direction",
    "Edit",
    "Engine",
    "GPTCLIError",
    "InputError",
    "MismatchError",
    "ModelNotFoundError",
    "Node",
    "Options",
    "Page",
    "Patching",
    "ResourceError",
    "RowsError",
    "Run",
    "Score",
    "Step",
    "Trace",
    "Tree",
    "Weights",
    "Word",
    "load",
]


def on_first_use(
    package: str, *modules: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package: `__all__` is imported from its modules."""
    names = vars(sys.modules[package])

    def find(name: str) -> Any:
        if name not in names["__all__"]:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        imported = (importlib.import_module(f"{package}.{module}") for module in modules)
        return next(getattr(module, name) for module in imported if hasattr(module, name))

    return find, lambda: list(names["__all__"])


__getattr__, __dir__ = on_first_use(
    __name__,
    "errors",
    "options.edit",
    "options.request",
    "generation.row",
    "generation.generate",
    "scoring.rank",
    "scoring.score",
    "texts.words",
    "scoring.trace",
    "scoring.tree",
    "engine",
    "loading",
    "scoring.attribution",
    "scoring.vectors",
    "gpt2.weights",
    "display.page",
)
