"""Jobs: a task for the rows of a file, a table, a folder or a pipe; outputs can be resumed.

    jobs.run(jobs.Generation(Options(max_tokens=20, seed=1)), "prompts.txt", "texts.jsonl")

The names below are imported on first use.
"""

from typing import TYPE_CHECKING

from gpt_cli import on_first_use

if TYPE_CHECKING:
    from gpt_cli.jobs.cluster import Cluster
    from gpt_cli.jobs.layout import InputRow, Template
    from gpt_cli.jobs.runner import Summary, run
    from gpt_cli.jobs.sinks import Observer, Resumed, Sink
    from gpt_cli.jobs.task import Task
    from gpt_cli.jobs.tasks.activations import Activations
    from gpt_cli.jobs.tasks.choices import spaced
    from gpt_cli.jobs.tasks.classifying import Classifying
    from gpt_cli.jobs.tasks.filtering import Filtering
    from gpt_cli.jobs.tasks.generation import Generation
    from gpt_cli.jobs.tasks.ranking import Ranking
    from gpt_cli.jobs.tasks.scoring import Scoring

__all__ = [
    "Activations",
    "Classifying",
    "Cluster",
    "Filtering",
    "Generation",
    "InputRow",
    "Observer",
    "Ranking",
    "Resumed",
    "Scoring",
    "Sink",
    "Summary",
    "Task",
    "Template",
    "run",
    "spaced",
]
__getattr__, __dir__ = on_first_use(
    __name__,
    "layout",
    "sinks",
    "task",
    "tasks.choices",
    "tasks.generation",
    "tasks.scoring",
    "tasks.filtering",
    "tasks.ranking",
    "tasks.classifying",
    "tasks.activations",
    "runner",
    "cluster",
)
