"""The display of the results of an engine: see the protocol `Display` in `texts/result.py`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpt_cli import records
from gpt_cli.display import views
from gpt_cli.display.views import View
from gpt_cli.errors import InputError, counted
from gpt_cli.folder.tokenizer import Tokenizer
from gpt_cli.generation.generate import Completion
from gpt_cli.records import Record
from gpt_cli.scoring.attribution import Ablation, Attribution, Patching
from gpt_cli.scoring.classify import Classification
from gpt_cli.scoring.rank import Choice
from gpt_cli.scoring.score import Score
from gpt_cli.scoring.trace import Trace
from gpt_cli.scoring.tree import Tree

_RECORDS: dict[type, Callable[..., Record]] = {
    Completion: records.of_completion,
    Score: records.of_score,
    Choice: records.of_choice,
    Classification: records.of_classification,
}
_VIEWS: dict[type, list[Callable[..., View]]] = {
    Trace: [views.attention, views.lens],
    Tree: [views.tree],
    Attribution: [views.attribution],
    Patching: [views.patch],
    Ablation: [views.ablate],
}


@dataclass(frozen=True)
class ResultDisplay:
    """Shows the results of a model. It is pickled with a result, but without the tokenizer."""

    name: str  # of the model
    adapter: str | None
    load_seconds: float
    known_tokenizer: Tokenizer | None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"known_tokenizer": None}

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer; raise InputError if the result was pickled."""
        if self.known_tokenizer is None:
            raise InputError("a result that was pickled has no texts of tokens: compute it again")
        return self.known_tokenizer

    def text(self, ids: Sequence[int]) -> str | None:
        """Return the text of tokens; None if the result was pickled."""
        return self.known_tokenizer.decode(ids) if self.known_tokenizer else None

    def record(self, result: Any) -> Record:
        """Return a result as a JSON object, as the command line writes it."""
        if type(result) in _RECORDS:
            return _RECORDS[type(result)](self, result)
        _ = self.tokenizer  # or raise: `records.of_token` would name tokens by their ids
        (draw,) = _VIEWS[type(result)]
        return draw(self, result).record()

    def tokens(self, result: Any) -> list[Record]:
        """Return the tokens of a result as JSON objects, as the command line writes them."""
        _ = self.tokenizer  # or raise: `records.of_token` would name tokens by their ids
        tokens: list[Record] = _RECORDS[type(result)](self, result, logprobs=True)["logprobs"]
        return tokens

    def html(self, result: Any) -> str | None:
        """Return a result as HTML; None if it has no picture, or was pickled."""
        if self.known_tokenizer is None:
            return None
        from gpt_cli.display.inline import text_html
        from gpt_cli.display.page import Page, framed

        if isinstance(result, Completion):
            size = counted(len(result.ids), "token")
            return text_html(self.tokens(result), f"{size}, {result.finish_reason}")
        if isinstance(result, Score):
            view = views.surprise(self, result)
            return text_html(view.tokens, view.summary)
        drawn = [draw(self, result) for draw in _VIEWS.get(type(result), [])]
        return "\n".join(framed(Page(view)) for view in drawn) or None
