"""A text as tokens, prepared for a model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from gpt_cli.errors import InputError, brief
from gpt_cli.gpt2.edits import Bound, Editor
from gpt_cli.gpt2.hooks import NO_HOOK, Hook
from gpt_cli.ops import Ops


@dataclass(frozen=True)
class Word:
    """A word of a text."""

    text: str  # without white space around it
    start: int  # in bytes of the text in UTF-8
    end: int  # behind its last byte
    tokens: int  # those of its bytes and of the white space before it
    surprisal: float | None  # in bits; None if one of its tokens is not scored
    layers: list[float | None] | None = field(
        default=None, repr=False
    )  # surprisal after 0 to n_layer layers, if requested


@dataclass(frozen=True)
class Text:
    """A text to run the model over: see `LoadedModel.text` and `LoadedModel.prompt`.

    Attributes:
        ids: of all tokens.
        first: the index of the first token of the text itself. The tokens before it, such as a
            start token, are context only: no part of scores, means and words.
        context: the number of tokens right before `first` that a context of the text has.
        skipped: the bytes of the token `first` that are the end of the context.
        after: the number of end tokens after the text, which are scored and have no bytes of it.
        words: its words without surprisal, if they are not divided by white space.
        edits: of values in the forward pass; a text with edits must fit the context.
        size: the bytes of the original text in UTF-8; None for those of the decoded tokens, which
            differ if the tokenizer loses or adds characters.
        continuations: ids that may follow, each of which is computed after the text alone.
    """

    ids: list[int]
    first: int = 0
    context: int = 0
    skipped: int = 0
    after: int = 0
    words: Sequence[Word] | None = None
    edits: Sequence[Bound] = ()
    size: int | None = None
    continuations: Sequence[list[int]] = ()

    @property
    def content(self) -> list[int]:
        """Return the ids of the text itself."""
        return self.ids[self.first :]

    @property
    def text_ids(self) -> list[int]:
        """Return the ids of the text itself without the end tokens after it."""
        return self.ids[self.first : len(self.ids) - self.after]

    @property
    def context_ids(self) -> list[int]:
        """Return the ids of the context."""
        return self.ids[self.first - self.context : self.first]

    @property
    def is_plain(self) -> bool:
        """Return whether its states depend on its ids alone, so that other texts may share them."""
        return not self.edits


def editing_hook(texts: Sequence[Text], ops: Ops) -> Hook:
    """Return the hook that applies the edits of texts in a pass; NO_HOOK if there are none."""
    if all(text.is_plain for text in texts):
        return NO_HOOK
    return Editor([text.edits for text in texts], ops)


def divided_words(texts: Sequence[str], spans: Sequence[tuple[int, int]]) -> list[Word]:
    """Return words without surprisal, from the spans of the tokens in their joined text.

    Spans are in characters; the first token may begin before the text, at a negative place. Raise
    InputError if a token has characters of two words, or a word has no token.
    """
    ends = list(accumulate(map(len, texts)))
    words = []
    first = 0  # token of the word
    place = 0  # of the word, in bytes
    for text, end in zip(texts, ends, strict=True):
        last = first
        while last < len(spans) and spans[last][1] <= end:
            last += 1
        if last < len(spans) and spans[last][0] < end:
            raise InputError(
                f"the words end within a token after {brief(text)}: divide them elsewhere"
            )
        if last == first:
            raise InputError(f"the word {brief(text)} has no token: join it with another")
        lead = len(text) - len(text.lstrip())
        start = place + len(text[:lead].encode())
        shown = text.strip()
        words.append(Word(shown, start, start + len(shown.encode()), last - first, None))
        first = last
        place += len(text.encode())
    return words
