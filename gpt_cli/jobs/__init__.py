"""Jobs: a task for each row of a file, a table, a folder or a pipe, with its output resumed.

    jobs.run(jobs.Generation(Options(max_tokens=20, seed=1)), "prompts.txt", "texts.jsonl")

The names below are imported on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt_cli.jobs.cluster import Cluster
    from gpt_cli.jobs.observer import Observer
    from gpt_cli.jobs.rows import Row
    from gpt_cli.jobs.runner import Summary, run
    from gpt_cli.jobs.sinks import Resumed, Sink
    from gpt_cli.jobs.tasks import Generation, Scoring, Task, error_record

__all__ = [
    "Cluster",
    "Generation",
    "Observer",
    "Resumed",
    "Row",
    "Scoring",
    "Sink",
    "Summary",
    "Task",
    "error_record",
    "run",
]
_MODULES = ("observer", "rows", "sinks", "tasks", "runner", "cluster")


def __getattr__(name: str) -> Any:
    if name in __all__:
        modules = (importlib.import_module(f"{__name__}.{module}") for module in _MODULES)
        return next(getattr(module, name) for module in modules if hasattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
