"""The head of a classifier: GPT2ForSequenceClassification of transformers.

A file of weights has it as `score.weight` (labels, C): a linear layer without bias over the last
layer's normalized output at one token. config.json names the labels and the padding token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from gpt_cli.errors import CheckpointError
from gpt_cli.ops import Linear, Ops, Rows

# One of several labels, any number of them, or a number instead of labels.
Problem: TypeAlias = Literal[
    "single_label_classification", "multi_label_classification", "regression"
]


@dataclass(frozen=True, eq=False)
class ClassifierHead:
    """A linear layer over the state of one token.

    Attributes:
        score: (C, labels), without bias.
        labels: the names of the outputs.
        problem: what the outputs are.
        pad_token_id: the token that fills up shorter texts in transformers; None if there is none.
    """

    score: Linear
    labels: Sequence[str]
    problem: Problem
    pad_token_id: int | None

    def position(self, ids: Sequence[int]) -> int:
        """Return the index of the token whose state is classified, as transformers chooses it.

        It is the last one that is not padding, or 0 if all are.
        """
        return max((index for index, id in enumerate(ids) if id != self.pad_token_id), default=0)


def read_classifier(
    settings: Mapping[str, Any], head: Rows, ops: Ops, source: str
) -> ClassifierHead:
    """Return the classifier of a checkpoint.

    Args:
        settings: config.json, parsed.
        head: the tensor `score.weight`.
        ops: hold the layer on their device.
        source: config.json, as errors name it.

    Raise CheckpointError if a field of config.json is not valid.
    """
    count = head.shape[0]
    labels = _labels(settings.get("id2label"), count)
    if labels is None:
        rows = f"id2label does not have {count} different names, one for a row of score.weight"
        raise CheckpointError(f"{source}: {rows}: correct the file or get it again")
    default = "regression" if count == 1 else "single_label_classification"
    problem: Any = settings.get("problem_type") or default
    if problem not in get_args(Problem):
        known = ", ".join(get_args(Problem))
        raise CheckpointError(f"{source}: problem_type is {problem!r:.40}, not one of {known}")
    padding = settings.get("pad_token_id")
    if padding is not None and not isinstance(padding, int):
        raise CheckpointError(f"{source}: pad_token_id is {padding!r:.40}, not a token id")
    score = Linear(ops.place_matrix(head, transposed=True))
    return ClassifierHead(score, labels, problem, padding)


def _labels(names: Any, count: int) -> list[str] | None:
    """Return the names of `count` labels from `id2label`; None if they are not valid."""
    if names is None:
        return [f"LABEL_{index}" for index in range(count)]  # as transformers names them
    try:
        by_index = {int(index): name for index, name in names.items()}
        labels = [by_index[index] for index in range(count)]
    except (AttributeError, LookupError, TypeError, ValueError):
        return None
    valid = len(by_index) == count and all(isinstance(label, str) for label in labels)
    return labels if valid and len(set(labels)) == count else None
