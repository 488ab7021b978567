"""GPT-2's own kind of tokenizer, byte-level BPE, with tiktoken.

The caller parses the files. tiktoken's loader would need another host, or a cache in a temporary
folder, which can be stale and which other users can write.
"""

import re
from codecs import charmap_build, charmap_encode
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, count, pairwise, permutations, product

import tiktoken

from gpt_cli.errors import CheckpointError
from gpt_cli.folder.base_tokenizer import Tokenizer, unknown
from gpt_cli.folder.special_tokens import LONGEST_NAME, AddedToken

# GPT-2's split into words, in tiktoken's possessive form (r50k). The published form gives the same
# tokens, but overflows the stack of the regex engine on a million spaces.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# Limits for added tokens: with more, tiktoken or a check of them would take seconds.
_MOST_CHARACTERS = 1_000_000  # of all names
_MOST_NAMES = 100  # if a space is put before each text
_MOST_PAIRS = 20_000

_SAME = "get the vocabulary and the merges of the same model"


def byte_alphabet() -> str:
    """Return the characters that the vocabulary's files use for the 256 bytes.

    A visible Latin-1 character represents the byte of its number. The other 68 bytes, in order,
    are written as the characters from U+0100.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = count(0x100)
    return "".join(chr(byte if byte in visible else next(others)) for byte in range(256))


class ByteBPE(Tokenizer):
    """Byte-level BPE; without `adds_space`, `decode` is the inverse of `encode` for every text."""

    kind = "GPT-2's own"

    def __init__(
        self,
        ranks: dict[bytes, int],  # the tokens of the BPE and their ids: see `byte_ranks`
        added: Iterable[AddedToken],  # all other tokens, and perhaps some of these: see `can_match`
        source: str = "tokenizer",  # the files, as errors name them
        *,
        adds_space: bool = False,  # before a text that does not begin with one
    ):
        """Raise CheckpointError if two tokens have the same id."""
        self.source = source
        self._adds_space = adds_space
        matched = {token.content: token for token in added}
        self._in_every_text = {name for name, token in matched.items() if not token.special}
        beside = [token for name, token in matched.items() if ranks.get(name.encode()) != token.id]
        self.special = {token.content: token.id for token in beside if token.special}
        ids = list(ranks.values())
        self.byte_ids = ids[:256]
        self._set_ids(ids, [token.id for token in beside])
        self._encoding = tiktoken.Encoding(
            source,
            pat_str=PATTERN,
            mergeable_ranks=ranks,
            special_tokens={name: token.id for name, token in matched.items()},
        )

    def _encode(self, text: str, *, special: bool) -> list[int]:
        if self._adds_space:  # also after each added token
            names = "|".join(map(re.escape, self._names(special=special))) or "(?!)"
            text = re.sub(rf"(\A|{names})(?!\Z| |{names})", r"\1 ", text)
        return self._exact_ids(text, special=special)

    def _encode_with_spans(
        self, text: str, *, special: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        ids = self._encode(text, special=special)
        data = text.encode()
        # The number of characters that begin within the first bytes.
        begun = list(accumulate((byte & 0xC0 != 0x80 for byte in data), initial=0))
        begun.append(begun[-1])
        spans = []
        place = 0  # in `data`
        for piece in self.pieces(ids):
            # All pieces are in the text but the spaces of `adds_space`.
            is_in_text = data.startswith(piece, place)
            end = place + len(piece) - (not is_in_text)
            begins_character = place < len(data) and data[place] & 0xC0 != 0x80
            start = begun[place] if begins_character or place == end else begun[place] - 1
            spans.append((start, begun[end]))
            place = end
        return ids, spans

    def _exact_ids(self, text: str, *, special: bool) -> list[int]:
        names = self._names(special=special)
        if not names:
            return self._encoding.encode_ordinary(text)
        return self._encoding.encode(text, allowed_special=names, disallowed_special=())

    def _names(self, *, special: bool) -> set[str]:
        """Return the names of tokens that are searched for in a text."""
        return self._encoding.special_tokens_set if special else self._in_every_text

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def piece(self, id: int, before: int | None = None) -> bytes:
        return self.token_bytes(id)

    def pieces(self, ids: Iterable[int], prompt: Sequence[int] = ()) -> Iterator[bytes]:
        return map(self.token_bytes, ids)  # `detokenize` may have millions

    def token_bytes(self, id: int) -> bytes:
        try:
            return self._encoding.decode_single_token_bytes(id)
        except (KeyError, OverflowError):
            raise unknown(id) from None

    def token_id(self, name: str) -> int | None:
        ids = self._exact_ids(name, special=True)
        return ids[0] if len(ids) == 1 else None


def byte_ranks(
    vocab: Mapping[str, int], merged: Sequence[str], source: str
) -> dict[bytes, int] | None:
    """Return the tokens of a BPE as bytes, with their ids; None if tiktoken cannot hold it.

    tiktoken needs a token for each byte, and uses one number as a token's id and its priority.

    Args:
        vocab: tokens, in the files' printable alphabet, and their ids.
        merged: the tokens that the merges produce, in order of priority.
        source: the files, as errors name them.

    Raise CheckpointError if a token of the merges is not in the vocabulary.
    """
    alphabet = byte_alphabet()
    tokens = [*alphabet, *merged]
    table = charmap_build(alphabet)
    try:
        ranks = {charmap_encode(token, "strict", table)[0]: vocab[token] for token in tokens}
    except (KeyError, UnicodeEncodeError):
        missing = next((token for token in merged if token not in vocab), None)
        if missing is None:  # a byte has no token, or a merge is beyond the alphabet
            return None
        problem = f"a token of the merges is not in the vocabulary ({missing!r:.40})"
        raise CheckpointError(f"{source}: {problem}: {_SAME}") from None
    ids = list(ranks.values())
    is_held = len(ids) == len(tokens) and ids[256:] == sorted(ids[256:])
    return ranks if is_held else None


def check_merges(vocab: Container[str], others: Iterable[str], source: str) -> None:
    """Raise CheckpointError if a token looks like a merge of two others, and no merge makes it.

    `others` are the tokens that no merge makes and that are not added ones. Names in brackets are
    special: `<|endoftext|>`, `<pad>`, `[SEP]`.
    """
    for token in others:
        in_brackets = (token[:1], token[-1:]) in (("<", ">"), ("[", "]"))
        if in_brackets or len(token) > LONGEST_NAME:
            continue
        if any(token[:cut] in vocab and token[cut:] in vocab for cut in range(1, len(token))):
            raise CheckpointError(f"{source}: no merge makes the token {token!r:.40}: {_SAME}")


def can_match(
    added: Collection[AddedToken], ranks: Mapping[bytes, int], *, adds_space: bool
) -> bool:
    """Return whether tiktoken finds added tokens where the library of transformers does.

    tiktoken has none of their flags, no rule for tokens that overlap, and one text for an id: the
    library gives the name "é" the id of the byte that the vocabulary writes so.
    """
    if any(token.lstrip or token.rstrip or token.single_word for token in added):
        return False
    in_bpe = set(ranks.values())
    for token in added:
        id = ranks.get(token.content.encode())
        if id != token.id and (id is not None or token.id in in_bpe):
            return False
    names = sorted(token.content for token in added)
    if sum(map(len, names)) > _MOST_CHARACTERS or (adds_space and len(names) > _MOST_NAMES):
        return False
    if any(longer.startswith(name) for name, longer in pairwise(names)):
        return False
    # The library first searches for those that are not normalized, and special ones may be text.
    groups: dict[tuple[bool, bool], list[str]] = {}
    for token in added:
        groups.setdefault((token.normalized, token.special), []).append(token.content)
    for first, second in permutations(groups.values(), 2):
        if len(first) * len(second) > _MOST_PAIRS:
            return False
        if any(_may_begin_within(left, right) for left, right in product(first, second)):
            return False
    return True


def _may_begin_within(left: str, right: str) -> bool:
    """Return whether a text may have the name `right` from within the name `left` on."""
    rests = (left[cut:] for cut in range(1, len(left)))
    return any(rest.startswith(right) or right.startswith(rest) for rest in rests)
