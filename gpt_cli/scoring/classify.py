"""Classify texts with the head of a classifier."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpt_cli.errors import counted
from gpt_cli.gpt2.classifier import ClassifierHead
from gpt_cli.gpt2.weights import check_finite
from gpt_cli.ops import Array
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.result import Recorded, beginning
from gpt_cli.texts.states import states
from gpt_cli.texts.text import Text

LongTexts: TypeAlias = Literal["error", "truncate"]


@dataclass(frozen=True, repr=False)
class Classification(Recorded):
    """The labels of a text.

    Attributes:
        ids: the tokens that were read.
        logits: the outputs by the names of the labels.
        label: the likeliest label; None for a regression.
        probabilities: of the labels, by their names. Those of several labels are independent of
            each other if a text may have any number of them. None for a regression.
    """

    ids: list[int]
    logits: dict[str, float]
    label: str | None
    probabilities: dict[str, float] | None

    @property
    def value(self) -> float | None:
        """Return the number that a regression with one output gives; None for labels."""
        numbers = list(self.logits.values())
        return numbers[0] if self.probabilities is None and len(numbers) == 1 else None

    def _facts(self) -> str:
        size = counted(len(self.ids), "token")
        if self.label is None or self.probabilities is None:
            numbers = ", ".join(f"{number:.4g}" for number in [*self.logits.values()][:4])
            return f"{numbers}, {size}: {self._quoted(self.ids)}"
        share = self.probabilities[self.label]
        return f"{beginning(self.label)} {share:.4g}, {size}: {self._quoted(self.ids)}"


def classify(
    loaded: LoadedModel, classifier: ClassifierHead, texts: Sequence[Text]
) -> list[Classification]:
    """Classify texts of 1 to n_positions tokens; their results do not depend on each other."""
    model = loaded.model
    results: dict[int, Classification] = {}
    for computed in states(model, texts, prefixes=loaded.prefixes):
        # A text may end within the prefix, whose states come first.
        rows = []
        for row in computed.rows:
            index = classifier.position(texts[row.text_index].ids)
            rows.append(_state_at(index, computed.prefix.states, row.states))
        logits = model.ops.linear(model.ops.xp.stack(rows), classifier.score)
        check_finite(model, logits, computed.hook)
        outputs = model.ops.to_host(logits)
        for row, output in zip(computed.rows, outputs, strict=True):
            results[row.text_index] = _classification(classifier, texts[row.text_index].ids, output)
    return [results[index] for index in range(len(texts))]


def _state_at(index: int, prefix: Array, after: Array) -> Array:
    """Return the state (C,) of a token of a text, from those of its prefix and those after it."""
    return prefix[index] if index < len(prefix) else after[index - len(prefix)]


def _classification(
    classifier: ClassifierHead, ids: list[int], output: NDArray[np.float32]
) -> Classification:
    """Return the labels of a text from the outputs (labels,) of the head."""
    logits = dict(zip(classifier.labels, output.tolist(), strict=True))
    if classifier.problem == "regression":
        return Classification(ids, logits, None, None)
    wide = output.astype(np.float64)
    if classifier.problem == "multi_label_classification":
        shares = 1 / (1 + np.exp(-wide))
    else:
        weights = np.exp(wide - wide.max())
        shares = weights / weights.sum()
    probabilities = dict(zip(classifier.labels, shares.tolist(), strict=True))
    label = max(probabilities, key=probabilities.__getitem__)
    return Classification(ids, logits, label, probabilities)
