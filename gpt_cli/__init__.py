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
    from gpt_cli.generate import Completion, Options, Step
    from gpt_cli.score import Choice, Score
    from gpt_cli.trace import Trace
    from gpt_cli.tree import Node

_HOME = {
    "Engine": "engine",
    "load": "engine",
    "CheckpointError": "errors",
    "ContextError": "errors",
    "GPTCLIError": "errors",
    "InputError": "errors",
    "MismatchError": "errors",
    "ModelNotFoundError": "errors",
    "ResourceError": "errors",
    "RowsError": "errors",
    "Completion": "generate",
    "Options": "generate",
    "Step": "generate",
    "Choice": "score",
    "Score": "score",
    "Trace": "trace",
    "Node": "tree",
}

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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
