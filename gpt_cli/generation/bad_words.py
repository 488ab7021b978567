"""The tokens that may follow in a text in which some texts must not appear.

A bad word appears with the token that completes it. With the bad word "cat", this is

    always              a token that contains it: " cat", "cats"
    after "... c"       a token that begins with the rest: "at", "ates"
    after "... ca"      "t", "ts", "ther"

Such tokens are never chosen. So it does not matter in which tokens a model writes a word, and a
text may go on in all other ways. Words and tokens are compared as bytes in UTF-8, since a token may
have a part of a character.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from gpt_cli.folder.config import GPT2Config
from gpt_cli.folder.tokenizer import Tokenizer, check_bytes
from gpt_cli.options.constraint import CACHED


class _Vocabulary:
    """The bytes of all tokens; those of an end token are none."""

    def __init__(self, tokenizer: Tokenizer, config: GPT2Config):
        check_bytes(tokenizer, "bad_words")
        size = config.vocab_size
        self.tokens = tokenizer.all_bytes(size)
        for id in config.eos_token_id:
            if id < size:
                self.tokens[id] = b""
        self.exists = np.ones(size, bool)  # (V,)
        self.exists[tokenizer.missing_ids(size)] = False
        self._ids = np.array(sorted(range(size), key=self.tokens.__getitem__))
        self._sorted = [self.tokens[id] for id in self._ids]
        self._joined = b"".join(self._sorted)
        self._ends = np.cumsum([len(token) for token in self._sorted])  # in `_joined`

    def beginning_with(self, part: bytes) -> NDArray[np.int64]:
        """Return the ids of the tokens that begin with bytes."""
        first = bisect_left(self._sorted, part)
        last = bisect_right(self._sorted, part, first, key=lambda token: token[: len(part)])
        return self._ids[first:last]

    def containing(self, word: bytes) -> NDArray[np.int64]:
        """Return the ids of the tokens that contain a word."""
        indices = []
        start = self._joined.find(word)
        while start >= 0:
            index = int(np.searchsorted(self._ends, start, side="right"))
            if start + len(word) <= self._ends[index]:  # it is not in two tokens
                indices.append(index)
            start = self._joined.find(word, start + 1)
        return self._ids[indices]


class BadWords:
    """The tokens that complete one of some bad words."""

    def __init__(self, vocabulary: _Vocabulary, words: Sequence[str]):
        encoded = [word.encode() for word in words]
        self._vocabulary = vocabulary
        self._longest = max(map(len, encoded)) - 1  # bytes of a beginning
        always = [vocabulary.containing(word) for word in encoded]
        self._unless_bad = vocabulary.exists.copy()
        self._unless_bad[np.concatenate(always)] = False
        self._after: dict[bytes, list[NDArray[np.int64]]] = {}  # by the beginning of a word
        for word in encoded:
            for cut in range(1, len(word)):
                rest = vocabulary.beginning_with(word[cut:])
                self._after.setdefault(word[:cut], []).append(rest)

    def end(self, text: bytes, ids: Sequence[int]) -> bytes:
        """Return the end of a text and further tokens, as long as a bad word may begin there."""
        for id in ids:
            text += self._vocabulary.tokens[id]
        return text[-self._longest :] if self._longest else b""

    def allowed(self, end: bytes) -> NDArray[np.bool_]:
        """Return which tokens may follow the `end` of a text: (V,)."""
        allowed = self._unless_bad.copy()
        for length in range(1, len(end) + 1):
            for ids in self._after.get(end[-length:], ()):
                allowed[ids] = False
        return allowed


_vocabularies: "WeakKeyDictionary[Tokenizer, dict[GPT2Config, _Vocabulary]]" = WeakKeyDictionary()


def bad_words(tokenizer: Tokenizer, config: GPT2Config, words: Sequence[str]) -> BadWords:
    """Return the bad words for the tokens of a model; InputError if these have no bytes."""
    vocabularies = _vocabularies.setdefault(tokenizer, {})
    if config not in vocabularies:
        vocabularies[config] = _Vocabulary(tokenizer, config)
    return _bad_words(vocabularies[config], tuple(words))


_bad_words = lru_cache(CACHED)(BadWords)
