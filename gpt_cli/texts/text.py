"""A text as tokens, prepared for a model."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpt_cli.gpt2.edits import Bound


@dataclass(frozen=True)
class Text:
    """A text, as all that computes texts takes it: see `LoadedModel.text` and `prompt`.

    Attributes:
        ids: of all tokens that are computed.
        start: the number of tokens before the text itself, such as a start token. They are no part
            of its scores, means and words.
        edits: of values in the forward pass.
        size: the bytes of the text in UTF-8; None if it is that of the tokens. The tokenizer may
            lose or add characters.
        continuations: ids that may follow, each of which is computed after the text alone.
    """

    ids: list[int]
    start: int = 0
    edits: Sequence[Bound] = ()
    size: int | None = None
    continuations: Sequence[list[int]] = ()

    @property
    def content(self) -> list[int]:
        """Return the ids of the text itself."""
        return self.ids[self.start :]
