"""The tokens that may follow in a text that must match a constraint.

Before a token is sampled, llguidance lists the tokens that can begin the rest of a matching text.
`row.Sampler` removes all others before the filters of sampling. The draw from what remains uses the
random number of its position, so a constraint that allows every token changes nothing.

If all matching texts go on in the same way, only the tokens of the tokenizer are allowed, because a
model has seldom seen a word in other pieces. (In a Lark grammar, any pieces are allowed.)
"""

import json
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Literal, TypeAlias
from weakref import WeakKeyDictionary, proxy

import numpy as np
from numpy.typing import NDArray

from gpt_cli.folder.config import GPT2Config
from gpt_cli.folder.tokenizer import Tokenizer, check_bytes
from gpt_cli.options.constraint import CACHED, Constraint, import_llguidance, with_stack
from gpt_cli.options.declare import OptionError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Parts of a grammar that may go on at a position, beyond which a text is stuck: an object has four
# for each optional property. llguidance's 2000 would leave 600 properties without an end.
_MOST_ITEMS = 20_000

End: TypeAlias = Literal["complete", "stuck"]  # nothing more may follow; it should, but cannot


class Matcher:
    """The state of one text. Drafts, which may reach a limit, are checked on a copy of it."""

    def __init__(self, tokenizer: Tokenizer, config: GPT2Config, constraint: Constraint):
        """Begin a text, or raise what `check` raises."""
        self._guide = _guide(tokenizer, config)
        self._size = config.vocab_size
        self._state = _begin(self._guide, constraint).deep_copy()
        self.end: End | None = None  # why no token can follow
        self._renew()

    def fork(self) -> "Matcher":
        """Return a copy, to which other tokens may be appended."""
        fork = copy(self)
        fork._state = self._state.deep_copy()
        return fork

    def push(self, id: int) -> None:
        """Append the next token."""
        self._state.consume_token(id)
        self._renew()

    def allowed(self, drafts: Sequence[int] = ()) -> NDArray[np.bool_]:
        """Return which tokens may follow the text and drafts (V,); none if only the end may."""
        key = tuple(drafts)
        if key not in self._allowed:
            state = self._state
            if drafts:
                state = state.deep_copy()
                state.consume_tokens(list(key))
            self._allowed[key] = _allowed(state, self._guide)[: self._size]
        return self._allowed[key]

    def fitting(self, drafts: list[int]) -> list[int]:
        """Return the drafts before the first that may not follow."""
        return drafts[: self._state.deep_copy().validate_tokens(drafts)]

    def forced(self) -> list[int]:
        """Return the tokens that have to follow, up to the first that is a choice."""
        return self._state.deep_copy().compute_ff_tokens()

    def _renew(self) -> None:
        self._allowed: dict[tuple[int, ...], NDArray[np.bool_]] = {}
        if not self.allowed().any():
            self.end = "stuck" if self._state.is_error() else "complete"


def check(tokenizer: Tokenizer, config: GPT2Config, constraint: Constraint | None) -> None:
    """Raise OptionError if a constraint is not valid, or no text of a model but the empty matches.

    ResourceError if llguidance is not installed.
    """
    if constraint:
        _begin(_guide(tokenizer, config), constraint)


@lru_cache(CACHED)
def _begin(guide: "LLTokenizer", constraint: Constraint) -> "LLMatcher":
    """Return the state of an empty text."""
    llguidance = import_llguidance()
    grammar = constraint.grammar
    limits = llguidance.LLParserLimits(max_items_in_row=_MOST_ITEMS)
    state = with_stack(
        constraint.kind, lambda: llguidance.LLMatcher(guide, grammar, log_level=0, limits=limits)
    )
    if state.is_error():  # such as a special token that the tokenizer does not have
        raise constraint.error(state.get_error())
    choices = json.loads(constraint.text) if constraint.kind == "choices" else []
    for choice in choices:
        if guide.decode_bytes(guide.tokenize_str(choice)) != choice.encode():
            cure = "leave it out, or write it in other characters"
            raise OptionError("choices", f"has {choice!r:.40}, which no tokens write: {cure}")
    if not _allowed(state, guide).any():
        raise OptionError(constraint.kind, "must match some text, and matches none")
    return state


def _allowed(state: "LLMatcher", guide: "LLTokenizer") -> NDArray[np.bool_]:
    """Return which tokens may follow, of all that the tokenizer has; none if only the end may."""
    bits = np.frombuffer(state.compute_bitmask(), np.uint8)
    mask = np.unpackbits(bits, count=guide.vocab_size, bitorder="little").view(np.bool_)
    if state.is_error() or np.count_nonzero(mask) == np.count_nonzero(mask[guide.eos_tokens]):
        mask[:] = False
    return mask


_guides: "WeakKeyDictionary[Tokenizer, dict[GPT2Config, LLTokenizer]]" = WeakKeyDictionary()


def _guide(tokenizer: Tokenizer, config: GPT2Config) -> "LLTokenizer":
    """Return llguidance's form of a tokenizer; that of GPT-2 takes 0.1 s to make."""
    guides = _guides.setdefault(tokenizer, {})
    if config in guides:
        return guides[config]
    llguidance = import_llguidance()
    size = config.vocab_size
    check_bytes(tokenizer, "a constraint")
    tokens = tokenizer.all_bytes(size)
    ends = [id for id in config.eos_token_id if id < size]
    if not ends:  # one that the model cannot choose
        ends = [size]
        tokens.append(b"")
    # An end token may be one that texts have, too, such as a line end; it is no text then.
    special = [id for id in {*tokenizer.special.values(), *ends} if id < size]
    wrapped = llguidance.TokenizerWrapper(_Wrapped(proxy(tokenizer), tokens, ends[0], special))
    # Slices would make masks 10 us faster, and this 60 ms slower.
    guides[config] = llguidance.LLTokenizer(wrapped, eos_token=ends, slices=[])
    return guides[config]


@dataclass(frozen=True)
class _Wrapped:
    """A tokenizer with the interface that llguidance needs."""

    tokenizer: Tokenizer  # a weak reference: `_guides` keeps this as long as the tokenizer
    tokens: list[bytes]
    eos_token_id: int
    special_token_ids: list[int]
    bos_token_id: None = None

    def __call__(self, text: bytes) -> list[int]:
        ids = self.tokenizer.encode_bytes(text)
        # The tokens after an end token in the text cannot be forced.
        return list(takewhile(lambda id: id not in self.special_token_ids, ids))
