"""Text to ids and back, by tiktoken, from the tokenizer files of the model's own folder.

tiktoken's own loader wants a second host, or a cache in a temporary folder that other users
can write and that goes stale; so the files are read here and only handed to it.
"""

import codecs
import re
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tiktoken

from gpt_cli.errors import MALFORMED, CheckpointError, InputError
from gpt_cli.files import read_json, read_small

# GPT-2's split into words, in the possessive form that tiktoken calls r50k: the published form
# tokenizes alike, but overflows the regex engine's stack on a million spaces.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

_OTHER = "use a model with GPT-2's own"

# What Python's surrogateescape makes of bytes that are part of no character, and all other text.
_STRETCHES = re.compile("([\udc80-\udcff]+)|[^\udc80-\udcff]+")


def _byte_alphabet() -> dict[int, int]:
    """Map the printable stand-ins that the vocabulary's files use for bytes back to the bytes.

    A byte that is a visible Latin-1 character stands for itself; the other 68, in order, are
    written as the characters from U+0100 on.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: byte for byte in visible} | {0x100 + i: byte for i, byte in enumerate(hidden)}


class Tokenizer:
    """Byte-level BPE: `encode` and `decode` are inverse on every text.

    Args:
        vocab: each token, in the files' printable alphabet, with its id.
        merged: what each merge of two tokens makes, in order of priority.
        added: tokens outside the BPE, such as `<|endoftext|>`, with their ids.
        source: what errors should name.

    Raises:
        CheckpointError: vocabulary and merges do not belong together.
    """

    def __init__(
        self,
        vocab: dict[str, int],
        merged: Sequence[str],
        added: dict[str, int],
        source: str = "tokenizer",
    ):
        alphabet = _byte_alphabet()
        bpe = [*map(chr, alphabet), *merged]
        try:
            ranks = {token.translate(alphabet).encode("latin-1"): vocab[token] for token in bpe}
        except (KeyError, UnicodeEncodeError) as error:
            raise CheckpointError(
                f"{source} and its merges do not belong together ({error!r:.80}): "
                "get both from one place"
            ) from None
        # tiktoken takes one number for both a token's id and its priority.
        ids = list(ranks.values())[len(alphabet) :]
        if len(ids) != len(merged) or ids != sorted(ids):
            raise CheckpointError(
                f"{source}: the ids do not follow the merges, each of which must make a new token: "
                "get both from one place"
            )
        in_bpe = set(ranks.values())
        lost = [token for token in vocab if vocab[token] not in in_bpe and _is_made(token, vocab)]
        if lost := [token for token in lost if token not in added]:
            raise CheckpointError(
                f"{source}: no merge makes {len(lost)} of its tokens, such as {lost[0]!r:.40}: "
                "get both from one place"
            )
        # Transformers also lists a token that is added although the BPE has it; it needs no place.
        added = {token: id for token, id in added.items() if ranks.get(token.encode()) != id}
        self.special = {token: id for token, id in vocab.items() if id not in in_bpe} | added
        if "" in self.special:  # tiktoken would find it without end
            raise CheckpointError(f"{source}: a token has no text: download it again")
        self._byte_ids = [ranks[bytes([byte])] for byte in range(256)]
        ids = [*ranks.values(), *self.special.values()]
        if len(set(ids)) != len(ids):
            raise CheckpointError(f"{source}: two tokens share one id: download it again")
        self._ids = array("q", ids)  # of 8 bytes; a set has 60 for each
        self._encoding = tiktoken.Encoding(
            source,
            pat_str=PATTERN,
            mergeable_ranks=ranks,
            special_tokens=self.special,
        )

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Read `vocab.json` and `merges.txt`, or else `tokenizer.json`.

        Raises:
            CheckpointError: the files are missing, damaged or describe another kind of tokenizer.
        """
        vocab, merges = folder / "vocab.json", folder / "merges.txt"
        single, added = folder / "tokenizer.json", folder / "added_tokens.json"
        try:
            if vocab.is_file() and merges.is_file():
                return cls(
                    read_json(vocab),
                    _read_merges(read_small(merges).decode()),
                    read_json(added) if added.is_file() else {},
                    source=str(vocab),
                )
            if single.is_file():
                return cls._from_tokenizer_json(read_json(single), str(single))
        except (OSError, *MALFORMED) as error:
            raise CheckpointError(
                f"{folder}: damaged tokenizer files ({error!r:.120}): download them again"
            ) from None
        raise CheckpointError(
            f"{folder} has no tokenizer: add the vocab.json and merges.txt, or the tokenizer.json, "
            "of the model"
        )

    @classmethod
    def _from_tokenizer_json(cls, raw: dict[str, Any], source: str) -> "Tokenizer":
        split = raw.get("pre_tokenizer") or {}
        if raw["model"]["type"] != "BPE" or split.get("type") != "ByteLevel":
            raise CheckpointError(
                f"{source}: not a byte-level BPE tokenizer, as GPT-2 has: {_OTHER}"
            )
        if split.get("add_prefix_space") or not split.get("use_regex", True):
            raise CheckpointError(
                f"{source}: it does not split text in words as GPT-2 does: {_OTHER}"
            )
        if raw.get("normalizer"):
            raise CheckpointError(
                f"{source}: it changes the text first, as GPT-2 does not: {_OTHER}"
            )
        merged = [
            "".join(merge.split(" ") if isinstance(merge, str) else merge)
            for merge in raw["model"]["merges"]
        ]
        added = {token["content"]: token["id"] for token in raw.get("added_tokens", [])}
        return cls(raw["model"]["vocab"], merged, added, source)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of `text`.

        Args:
            text: any text; `<|endoftext|>` in it is ordinary characters unless `special`.
            special: let the names of special tokens stand for the tokens.

        Raises:
            InputError: the text holds half of a surrogate pair, which is no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"the text is not valid Unicode at character {error.start}: give it in UTF-8"
            ) from None
        if special:
            return self._encoding.encode(text, allowed_special="all")
        return self._encoding.encode_ordinary(text)

    def encode_bytes(self, data: bytes, *, special: bool = False) -> list[int]:
        """Return ids whose bytes joined are `data`, whatever it holds.

        Stretches of UTF-8 are encoded as `encode` does, which is all where `data` is a text. A byte
        that is part of no character becomes the token of that byte alone.

        Args:
            data: any bytes.
            special: let the names of special tokens stand for the tokens.
        """
        ids: list[int] = []
        for stretch in _STRETCHES.finditer(data.decode(errors="surrogateescape")):
            if stretch[1]:
                ids += (
                    self._byte_ids[byte] for byte in stretch[1].encode(errors="surrogateescape")
                )
            else:
                ids += self.encode(stretch[0], special=special)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; bytes that form no character become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of one token, often only a part of a character.

        Raises:
            InputError: no token has this id.
        """
        try:
            return self._encoding.decode_single_token_bytes(id)
        except (KeyError, OverflowError):
            raise InputError(
                f"{id} is not the id of a token of this model: give ids that `tokenize` has written"
            ) from None

    def missing_ids(self, vocab_size: int) -> list[int]:
        """Return the ids below `vocab_size` that stand for no token, such as rows of padding."""
        known = set(self._ids)
        return [id for id in range(vocab_size) if id not in known]


def _is_made(token: str, vocab: dict[str, int]) -> bool:
    """Return whether a token looks like what a merge of two others makes, and not like a special.

    Names in brackets are special: `<|endoftext|>`, `<pad>`, `[SEP]`.
    """
    if (token[:1], token[-1:]) in (("<", ">"), ("[", "]")):
        return False
    return any(token[:cut] in vocab and token[cut:] in vocab for cut in range(1, len(token)))


def _read_merges(text: str) -> list[str]:
    """Return what each line `left right` makes; the alphabet of the files has no white space."""
    merged = text.replace(" ", "").split()
    return merged[1:] if merged and merged[0].startswith("#version") else merged


class StreamDecoder:
    """Ids to text while they come: a character is given out as soon as its last byte is here.

    The pieces joined are what `Tokenizer.decode` makes of all the ids.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        """Take one token; return the characters it completes, perhaps none."""
        return self._decoder.decode(self._tokenizer.token_bytes(id))

    def flush(self) -> str:
        """End the stream; return U+FFFD where the last character is incomplete, else nothing."""
        return self._decoder.decode(b"", final=True)
