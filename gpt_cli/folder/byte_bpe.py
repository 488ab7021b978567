"""GPT-2's own kind of tokenizer, byte-level BPE, with tiktoken.

The caller parses the files. tiktoken's loader would need another host, or a cache in a temporary
folder, which can be stale and which other users can write.
"""

import codecs
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence

import tiktoken

from gpt_cli.errors import CheckpointError, InputError
from gpt_cli.folder.special_tokens import SpecialIds

# GPT-2's split into words, in tiktoken's possessive form (r50k). The published form gives the same
# tokens, but overflows the stack of the regex engine on a million spaces.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

_SAME = "get the vocabulary and the merges of the same model"
_AGAIN = "get it again"

# Undecodable bytes, as Python's surrogateescape represents them, or any other text.
STRETCHES = re.compile("([\udc80-\udcff]+)|[^\udc80-\udcff]+")


def byte_alphabet() -> dict[int, int]:
    """Map the characters that the vocabulary's files use for bytes back to the bytes.

    A visible Latin-1 character represents the byte of its number. The other 68 bytes, in order,
    are written as the characters from U+0100.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: byte for byte in visible} | {0x100 + i: byte for i, byte in enumerate(hidden)}


class ByteBPE:
    """Byte-level BPE: `decode` is the inverse of `encode` for every text; see `Tokenizer`."""

    kind = "GPT-2's own"
    special_ids = SpecialIds()
    has_bytes = has_all_bytes = True

    def __init__(
        self,
        vocab: dict[str, int],  # tokens, in the files' printable alphabet, and their ids
        merged: Sequence[str],  # the tokens that the merges produce, in order of priority
        added: dict[str, int],  # tokens outside the BPE, such as `<|endoftext|>`
        source: str = "tokenizer",  # the files, as errors name them
    ):
        """Raise CheckpointError if the parts do not match."""

        def mismatch(problem: str, cure: str = _SAME) -> CheckpointError:
            return CheckpointError(f"{source}: {problem}: {cure}")

        alphabet = byte_alphabet()
        bpe = [*map(chr, alphabet), *merged]
        try:
            ranks = {token.translate(alphabet).encode("latin-1"): vocab[token] for token in bpe}
        except (KeyError, UnicodeEncodeError) as error:
            problem = f"a token of the merges is not in the vocabulary ({error!r:.80})"
            raise mismatch(problem) from None
        # tiktoken uses one number as a token's id and its priority.
        ids = list(ranks.values())[len(alphabet) :]
        if len(ids) != len(merged) or ids != sorted(ids):
            raise mismatch("the ids are not in the order of the merges, or one repeats")
        in_bpe = set(ranks.values())
        special = {token: id for token, id in vocab.items() if id not in in_bpe}
        if lost := [name for name in special if name not in added and _is_merge(name, vocab)]:
            raise mismatch(f"no merge makes the token {lost[0]!r:.40}")
        # Transformers also lists added tokens that the BPE has; they need no entry.
        added = {token: id for token, id in added.items() if ranks.get(token.encode()) != id}
        self.special = special | added
        if "" in self.special:  # tiktoken would find it endlessly
            raise mismatch("a token is empty", _AGAIN)
        self._byte_ids = [ranks[bytes([byte])] for byte in range(256)]
        ids = [*ranks.values(), *self.special.values()]
        if len(set(ids)) != len(ids):
            raise mismatch("two tokens have the same id", _AGAIN)
        self._ids = array("q", ids)  # 8 bytes for an id; a set would take 60
        self._encoding = tiktoken.Encoding(
            source, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.special
        )

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        check_unicode(text)
        if special:
            return self._encoding.encode(text, allowed_special="all")
        return self._encoding.encode_ordinary(text)

    def encode_bytes(self, data: bytes, *, special: bool = False) -> list[int]:
        """Encode valid UTF-8 by `encode`, and every other byte as the token of this byte."""
        ids: list[int] = []
        for stretch in STRETCHES.finditer(data.decode(errors="surrogateescape")):
            if bad := stretch[1]:
                ids += (self._byte_ids[byte] for byte in bad.encode(errors="surrogateescape"))
            else:
                ids += self.encode(stretch[0], special=special)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def pieces(self, ids: Iterable[int], prompt: Sequence[int] = ()) -> Iterator[bytes]:
        return map(self.token_bytes, ids)

    def stream(self, prompt: Sequence[int] = ()) -> "ByteStream":
        return ByteStream(self)

    def token_bytes(self, id: int) -> bytes:
        try:
            return self._encoding.decode_single_token_bytes(id)
        except (KeyError, OverflowError):
            raise unknown(id) from None

    def token_name(self, id: int) -> str:
        return self.token_bytes(id).decode(errors="replace")

    def token_id(self, name: str) -> int | None:
        ids = self.encode(name, special=True)
        return ids[0] if len(ids) == 1 else None

    def missing_ids(self, vocab_size: int) -> list[int]:
        return sorted({*range(vocab_size)}.difference(self._ids))


def check_unicode(text: str) -> None:
    """Raise InputError if a text has a lone surrogate, which is not a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"the text is not valid Unicode at character {error.start}: give it in UTF-8"
        ) from None


def unknown(id: int) -> InputError:
    """Return the error about an id that has no token."""
    return InputError(f"{id} is not a token id of this model: give ids from `gpt-cli tokenize`")


def _is_merge(token: str, vocab: dict[str, int]) -> bool:
    """Return whether a token looks like a merge of two others, and not like a special token.

    Names in brackets are special: `<|endoftext|>`, `<pad>`, `[SEP]`.
    """
    if (token[:1], token[-1:]) in (("<", ">"), ("[", "]")):
        return False
    return any(token[:cut] in vocab and token[cut:] in vocab for cut in range(1, len(token)))


class ByteStream:
    """Decode a stream of ids: a character is returned as soon as it is complete.

    The joined pieces equal `ByteBPE.decode` of all ids.
    """

    def __init__(self, tokenizer: ByteBPE):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)
