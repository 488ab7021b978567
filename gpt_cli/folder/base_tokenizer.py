"""Tokenizers: what the program needs of one."""

import codecs
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from copy import copy
from itertools import islice

from gpt_cli.errors import CheckpointError, InputError
from gpt_cli.folder.special_tokens import SpecialIds

# The note about a text, with the name in it.
NAME_AS_TEXT = (
    "a text has the name of a special token, %r, which is read as text: set special (--special) to "
    "read it as this token"
)
_MOST_NAMES = 100  # of special tokens, to look for in texts
# Undecodable bytes, as Python's surrogateescape represents them, or any other text.
_STRETCHES = re.compile("([\udc80-\udcff]+)|[^\udc80-\udcff]+")


class Tokenizer(ABC):
    """Converts text to ids and back."""

    kind: str  # "GPT-2's own", or the kind of the library's model, such as "Unigram"
    source: str  # the files, as errors name them
    special: dict[str, int]  # the names of special tokens, and their ids
    byte_ids: Sequence[int]  # the tokens of the 256 single bytes, or none
    size: int  # tokens of the vocabulary have ids below it; added ones may have larger ids
    _ids: "array[int]"  # 8 bytes for an id; a set would take 60
    special_ids: SpecialIds = SpecialIds()
    has_bytes: bool = True  # whether tokens have bytes, which are what they add to a text

    def _set_ids(self, ids: Sequence[int], added: Collection[int]) -> None:
        """Set the ids of the vocabulary and of added tokens; CheckpointError if one repeats."""
        self.size = 1 + max(ids, default=-1)
        self._ids = array("q", [*ids, *added])
        if len(set(self._ids)) < len(self._ids):
            raise CheckpointError(f"{self.source}: two tokens have the same id: get it again")

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of `text`; names such as `<|endoftext|>` are text unless `special`.

        Raise InputError if the text has a lone surrogate, which is not a character.
        """
        _check_unicode(text)
        return self._encode(text, special=special)

    def special_name_in(self, text: str) -> str | None:
        """Return the name of a special token that a text has, of the first 100 names; or None."""
        names = islice(self.special, _MOST_NAMES)
        return next((name for name in names if name in text), None)

    def encode_with_spans(
        self, text: str, *, special: bool = False
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of `text`, and the start and the end of each token in it, in characters.

        Tokens with parts of one character have the span of this character. Spans may overlap, and
        there may be characters without a token between them. InputError as for `encode`.
        """
        _check_unicode(text)
        return self._encode_with_spans(text, special=special)

    @abstractmethod
    def _encode_with_spans(
        self, text: str, *, special: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids and the spans of a text, which is valid Unicode."""

    @abstractmethod
    def _encode(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of a text, which is valid Unicode."""

    def encode_bytes(self, data: bytes, *, special: bool = False) -> list[int]:
        """Return ids whose joined bytes are `data`, which may be any bytes.

        Raise InputError if it is not UTF-8, and single bytes have no tokens.
        """
        ids: list[int] = []
        for stretch in _STRETCHES.finditer(data.decode(errors="surrogateescape")):
            if bad := stretch[1]:
                ids += self._single_bytes(bad.encode(errors="surrogateescape"))
            else:
                ids += self._exact_ids(stretch[0], special=special)
        return ids

    @abstractmethod
    def _exact_ids(self, text: str, *, special: bool) -> list[int]:
        """Return ids whose joined bytes are those of a text, if all bytes have tokens."""

    def _single_bytes(self, data: bytes) -> list[int]:
        if not self.byte_ids:
            raise InputError("this model has no tokens for single bytes: give text in UTF-8")
        return [self.byte_ids[byte] for byte in data]

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; undecodable bytes become U+FFFD."""

    @abstractmethod
    def piece(self, id: int, before: int | None = None) -> bytes:
        """Return the bytes that a token adds to a text with the last token `before`.

        `before` is None if the text is empty.
        """

    def pieces(self, ids: Iterable[int], prompt: Sequence[int] = ()) -> Iterator[bytes]:
        """Yield what each token adds to the text of a prompt and the tokens before it."""
        before = prompt[-1] if prompt else None
        for id in ids:
            yield self.piece(id, before)
            before = id

    def stream(self, prompt: Sequence[int] = ()) -> "Stream":
        """Return a decoder of the ids that follow a prompt."""
        return Stream(self, prompt)

    @abstractmethod
    def token_bytes(self, id: int) -> bytes | None:
        """Return the bytes of a token, perhaps a part of a character; None if it has none.

        Raise InputError if there is no such token.
        """

    def token_name(self, id: int) -> str:
        """Return a token as text, or as the vocabulary writes it if tokens have no bytes."""
        return (self.token_bytes(id) or b"").decode(errors="replace")

    @abstractmethod
    def token_id(self, name: str) -> int | None:
        """Return the id of a special token or of a text that is one token, else None."""

    def all_bytes(self, vocab_size: int) -> list[bytes]:
        """Return the bytes of the ids below `vocab_size`; b"" for those without a token."""
        missing = set(self.missing_ids(vocab_size))
        return [b"" if id in missing else self.token_bytes(id) or b"" for id in range(vocab_size)]

    @property
    def last_id(self) -> int:
        """Return the largest id of a token; -1 if there is none."""
        return max(self._ids, default=-1)

    def missing_ids(self, vocab_size: int) -> list[int]:
        """Return the ids below `vocab_size` that have no token, such as padding rows of wte."""
        return sorted(set(range(vocab_size)).difference(self._ids))


class Stream:
    """Decodes ids one by one: a character is returned as soon as it is complete.

    The joined texts are what the ids add to the decoded prompt, which ends with a whole character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), errors: str = "replace"):
        self._tokenizer = tokenizer
        self._before = prompt[-1] if prompt else None  # the last token
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors=errors)

    def push(self, id: int) -> str:
        """Add a token; return the text that it makes certain, or ""."""
        return self._decoder.decode(self._piece(id))

    def fork(self) -> "Stream":
        """Return a copy, to which other tokens may be added."""
        fork = copy(self)
        fork._decoder = copy(self._decoder)
        return fork

    def flush(self) -> str:
        """End the stream; return the text that was held back, such as U+FFFD, or ""."""
        return self._decoder.decode(b"", final=True)

    def _piece(self, id: int) -> bytes:
        piece = self._tokenizer.piece(id, self._before)
        self._before = id
        return piece


def _check_unicode(text: str) -> None:
    """Raise InputError if a text has a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"the text is not valid Unicode at character {error.start}"
        raise InputError(f"{problem}: give it in UTF-8") from None


def check_bytes(
    tokenizer: Tokenizer, purpose: str, *, every: bool = False, instead: str = ""
) -> None:
    """Raise InputError if tokens have no bytes, or with `every`, if some bytes have no token.

    `instead` is what else the user may do.
    """
    if not (tokenizer.byte_ids if every else tokenizer.has_bytes):
        what = "tokens for all bytes" if every else "the bytes of each token"
        raise InputError(
            f"{purpose} needs {what}, which the tokenizer of this model does not have: "
            f"{instead}use a model with a byte-level tokenizer"
        )


def unknown(id: int) -> InputError:
    """Return the error about an id that has no token."""
    return InputError(f"{id} is not a token id of this model: give ids from `gpt-cli tokenize`")
