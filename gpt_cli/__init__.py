"""GPT-2 in a terminal and in Python, without PyTorch.

    import gpt_cli

    engine = gpt_cli.load("tiny")
    for piece in engine.stream("Once upon a time", seed=1):
        print(piece, end="", flush=True)

The names below are imported on first use, so that `gpt-cli --help` need not wait for NumPy.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gpt_cli.engine import Engine, load
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
    from gpt_cli.generate import Completion, Step
    from gpt_cli.options import Options
    from gpt_cli.score import Choice, Score
    from gpt_cli.trace import Trace
    from gpt_cli.tree import Node

__all__ = [
    "CheckpointError",
    "Choice",
    "Completion",
    "ContextError",
    "Engine",
    "GPTCLIError",
    "InputError",
    "MismatchError",
    "ModelNotFoundError",
    "Node",
    "Options",
    "ResourceError",
    "RowsError",
    "Score",
    "Step",
    "Trace",
    "load",
]
_MODULES = ("errors", "options", "generate", "score", "trace", "tree", "engine")


def __getattr__(name: str) -> Any:
    if name in __all__:
        modules = (importlib.import_module(f"{__name__}.{module}") for module in _MODULES)
        return next(getattr(module, name) for module in modules if hasattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
