"""GPT-2's own kind of tokenizer, byte-level BPE, with tiktoken.

The caller parses the files. tiktoken's loader would need another host, or a cache in a temporary
folder, which can be stale and which other users can write.
"""

import re
from codecs import charmap_build, charmap_encode
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

import tiktoken

from gpt_cli.errors import CheckpointError
from gpt_cli.folder.base_tokenizer import Tokenizer, unknown

# GPT-2's split into words, in tiktoken's possessive form (r50k). The published form gives the same
# tokens, but overflows the stack of the regex engine on a million spaces.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

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
        vocab: dict[str, int],  # tokens, in the files' printable alphabet, and their ids
        merged: Sequence[str],  # the tokens that the merges produce, in order of priority
        added: dict[str, int],  # tokens outside the BPE, such as `<|endoftext|>`
        source: str = "tokenizer",  # the files, as errors name them
        *,
        adds_space: bool = False,  # before a text that does not begin with one
    ):
        """Raise CheckpointError if the parts do not match."""

        def mismatch(problem: str, cure: str = _SAME) -> CheckpointError:
            return CheckpointError(f"{source}: {problem}: {cure}")

        bpe = [*byte_alphabet(), *merged]
        table = charmap_build(byte_alphabet())
        try:
            ranks = {charmap_encode(token, "strict", table)[0]: vocab[token] for token in bpe}
        except (KeyError, UnicodeEncodeError) as error:
            problem = f"a token of the merges is not in the vocabulary ({error!r:.80})"
            raise mismatch(problem) from None
        # tiktoken uses one number as a token's id and its priority.
        ids = list(ranks.values())
        if len(ids) != len(bpe) or ids[256:] != sorted(ids[256:]):
            raise mismatch("the ids are not in the order of the merges, or one repeats")
        in_bpe = set(ids)
        special = {token: id for token, id in vocab.items() if id not in in_bpe}
        if lost := [name for name in special if name not in added and _is_merge(name, vocab)]:
            raise mismatch(f"no merge makes the token {lost[0]!r:.40}")
        # Transformers also lists added tokens that the BPE has; they need no entry.
        special |= {token: id for token, id in added.items() if ranks.get(token.encode()) != id}
        if "" in special:  # tiktoken would find it endlessly
            raise mismatch("a token is empty", "get it again")
        self.source = source
        self.special = special
        self._adds_space = adds_space
        self.byte_ids = ids[:256]
        self._set_ids(ids, special.values())
        self._encoding = tiktoken.Encoding(
            source, pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
        )

    def _encode(self, text: str, *, special: bool) -> list[int]:
        if self._adds_space:  # also after each special token
            names = "|".join(map(re.escape, self.special if special else ())) or "(?!)"
            text = re.sub(rf"(\A|{names})(?!\Z| |{names})", r"\1 ", text)
        return self._exact_ids(text, special=special)

    def _exact_ids(self, text: str, *, special: bool) -> list[int]:
        if special:
            return self._encoding.encode(text, allowed_special="all")
        return self._encoding.encode_ordinary(text)

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


def _is_merge(token: str, vocab: dict[str, int]) -> bool:
    """Return whether a token looks like a merge of two others, and not like a special token.

    Names in brackets are special: `<|endoftext|>`, `<pad>`, `[SEP]`.
    """
    if (token[:1], token[-1:]) in (("<", ">"), ("[", "]")):
        return False
    return any(token[:cut] in vocab and token[cut:] in vocab for cut in range(1, len(token)))
