"""Tokenizers of other kinds, with Hugging Face's tokenizers: the extra `tokenizers`."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from gpt_cli.errors import CheckpointError, InputError, import_extra
from gpt_cli.folder.byte_bpe import STRETCHES, byte_alphabet, check_unicode, unknown
from gpt_cli.folder.special_tokens import SpecialIds

_CONTEXT = 8  # tokens before a text that decide how it begins
_TRIAL = "A text, 1 \u00e9\u4e2d\U0001f600\n"
_BYTE = re.compile("<0x([0-9A-F]{2})>")


class Pipeline:
    """A normalizer, a split, a model and a decoder, as a tokenizer.json describes them.

    Names of special tokens in texts are text, unless a call says otherwise. Nothing is put around a
    text. See `Tokenizer`.
    """

    special_ids = SpecialIds()

    def __init__(self, description: dict[str, Any], special: Iterable[str], source: str):
        """Raise CheckpointError for a description that the library refuses."""
        purpose = f"{source} needs the package tokenizers"
        self._library = import_extra(purpose, "tokenizers", "tokenizers")
        self._description, self._names, self._source = description, sorted(special), source
        self._plain = self._made(description, special=False)
        added = self._plain.get_added_tokens_decoder()
        self.special = {token.content: id for id, token in added.items() if token.special}
        self._spell = _spelling(description.get("decoder"))
        self.has_bytes = self._spell is not None
        self._byte_ids = self._ids_of_bytes()
        self.has_all_bytes = None not in self._byte_ids
        self._falls_back = _has(description.get("decoder"), "ByteFallback")

    def _made(self, description: dict[str, Any], *, special: bool) -> Any:
        """Return the library's tokenizer, which has encoded and decoded a text."""
        with _silence(), self._checked():
            tokenizer = self._library.Tokenizer.from_str(json.dumps(description))
            tokenizer.no_padding()
            tokenizer.no_truncation()
            names = [name for name in self._names if tokenizer.token_to_id(name) is not None]
            tokenizer.add_special_tokens(names)
            tokenizer.encode_special_tokens = not special
            tokenizer.decode(tokenizer.encode(_TRIAL, add_special_tokens=False).ids)
        return tokenizer

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Raise CheckpointError for an error of the library, which may be a panic of Rust."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            problem = f"the package tokenizers refuses it ({' '.join(str(error).split()):.120})"
            raise CheckpointError(f"{self._source}: {problem}: get it again") from None

    @cached_property
    def _with_special(self) -> Any:
        """The tokenizer for which the names of special tokens are these tokens."""
        return self._made(self._description, special=True)

    @cached_property
    def _exact(self) -> Any:
        """A tokenizer that keeps white space and puts no space before a text."""
        return self._made(_without_spacing(self._description), special=False)

    def _ids_of_bytes(self) -> list[int | None]:
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        if self.has_bytes and not _has(self._description["decoder"], "ByteFallback"):
            characters = {byte: chr(character) for character, byte in byte_alphabet().items()}
            names = [characters[byte] for byte in range(256)]
        return [self._plain.token_to_id(name) for name in names]

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        check_unicode(text)
        tokenizer = self._with_special if special else self._plain
        with self._checked():
            return tokenizer.encode(text, add_special_tokens=False).ids

    def encode_bytes(self, data: bytes, *, special: bool = False) -> list[int]:
        ids: list[int] = []
        for stretch in STRETCHES.finditer(data.decode(errors="surrogateescape")):
            if bad := stretch[1]:
                ids += self._single_bytes(bad.encode(errors="surrogateescape"))
            else:
                ids += self._exact_ids(stretch[0])
        return ids

    def _exact_ids(self, text: str) -> list[int]:
        """Return ids whose joined bytes are those of a text."""
        with self._checked():
            ids = self._exact.encode(text, add_special_tokens=False).ids
        data = text.encode()
        if not self.has_all_bytes or b"".join(self.token_bytes(id) or b"" for id in ids) == data:
            return ids
        lines = text.splitlines(keepends=True)
        if len(lines) > 1:
            return [id for line in lines for id in self._exact_ids(line)]
        return self._single_bytes(data)

    def _single_bytes(self, data: bytes) -> list[int]:
        ids = [id for byte in data if (id := self._byte_ids[byte]) is not None]
        if len(ids) < len(data):
            raise InputError(
                "the text has bytes for which the tokenizer of this model has no token: give text "
                "in UTF-8"
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        ids = list(ids)
        for id in ids:
            self.token_name(id)  # the library leaves out unknown ids
        with self._checked():
            return self._plain.decode(ids, skip_special_tokens=False)

    def pieces(self, ids: Iterable[int], prompt: Sequence[int] = ()) -> Iterator[bytes]:
        if self._spell is None:
            stream = self.stream(prompt)
            yield from (stream.push(id).encode() for id in ids)
            return
        is_first = not prompt
        for id in ids:
            data = self._spell(self.token_name(id))
            if is_first and data.startswith(b" ") and not self.decode([id]).startswith(" "):
                data = data[1:]
            is_first = False
            yield data

    def stream(self, prompt: Sequence[int] = ()) -> "TextStream":
        begin = max(0, len(prompt) - _CONTEXT)
        while begin and self._is_byte(prompt[begin]):
            begin -= 1
        return TextStream(self.decode, self._is_byte, prompt[begin:])

    def _is_byte(self, id: int) -> bool:
        """Return whether more bytes after a token may change its text."""
        return self._falls_back and _BYTE.fullmatch(self.token_name(id)) is not None

    def token_bytes(self, id: int) -> bytes | None:
        name = self.token_name(id)
        return self._spell(name) if self._spell else None

    def token_name(self, id: int) -> str:
        try:
            name = self._plain.id_to_token(id)
        except OverflowError:
            name = None
        if name is None:
            raise unknown(id)
        return name

    def token_id(self, name: str) -> int | None:
        return self._plain.token_to_id(name)

    def missing_ids(self, vocab_size: int) -> list[int]:
        known = self._plain.get_vocab(with_added_tokens=True).values()
        return sorted({*range(vocab_size)}.difference(known))


class TextStream:
    """Decode a stream of ids that follow a prompt; text that may still change is held back.

    A run of byte tokens is judged as a whole, so its text is certain when it has ended. Other text
    is certain unless it ends within a character.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        is_byte: Callable[[int], bool],
        prompt: Sequence[int],
    ):
        self._decode, self._is_byte = decode, is_byte
        self._known, self._held = list(prompt), list[int]()  # ids whose text is out, and others

    def push(self, id: int) -> str:
        self._held.append(id)
        return "" if self._is_byte(id) else self._certain()

    def flush(self) -> str:
        return self._certain(final=True) if self._held else ""

    def _certain(self, *, final: bool = False) -> str:
        text = self._decode(self._known + self._held)
        if text.endswith("\ufffd") and not final:
            return ""
        # A prompt may end within a character, which is U+FFFD there.
        before = self._decode(self._known)
        before = before if text.startswith(before) else before.rstrip("\ufffd")
        # Some decoders drop the space at the start of a text, so the context must have text.
        is_enough = bool(self._decode(self._held))
        self._known, self._held = (self._held if is_enough else self._known + self._held), []
        return text[len(before) :]


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a description that are in a sequence, or the only one."""
    if isinstance(value, dict):
        inner = next((item for item in value.values() if isinstance(item, list)), None)
        if value.get("type") == "Sequence" and inner is not None:
            for part in inner:
                yield from _parts(part)
        else:
            yield value


def _has(value: Any, kind: str) -> bool:
    return any(part.get("type") == kind for part in _parts(value))


def _spelling(decoder: Any) -> Callable[[str], bytes] | None:
    """Return what turns the name of a token into the bytes that it adds to a text, or None."""
    if _has(decoder, "ByteLevel"):
        alphabet = {chr(character): byte for character, byte in byte_alphabet().items()}

        def byte_level(name: str) -> bytes:
            if all(character in alphabet for character in name):
                return bytes(map(alphabet.__getitem__, name))
            return name.encode()

        return byte_level
    space = next(
        (
            part.get("replacement") or part["pattern"].get("String")
            for part in _parts(decoder)
            if part.get("type") == "Metaspace"
            or (part.get("type") == "Replace" and part.get("content") == " ")
        ),
        None,
    )
    falls_back = _has(decoder, "ByteFallback")
    if space is None and not falls_back:
        return None

    def spelled(name: str) -> bytes:
        if falls_back and (byte := _BYTE.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        return name.replace(space or " ", " ").encode()

    return spelled


def _without_spacing(description: dict[str, Any]) -> dict[str, Any]:
    """Return a description that changes nothing in a text but how spaces are written."""
    rules = [
        part
        for part in _parts(description.get("normalizer"))
        if part["type"] == "Replace" and "String" in part["pattern"]
    ]
    splits = []
    for part in _parts(description.get("pre_tokenizer")):
        if part["type"] == "Metaspace":
            part = {"type": "Metaspace", "replacement": part["replacement"]}
            part |= {"prepend_scheme": "never", "split": False}
        elif part["type"] == "ByteLevel":
            part = part | {"add_prefix_space": False}
        if part["type"] != "WhitespaceSplit":
            splits.append(part)
    return description | {
        "normalizer": {"type": "Sequence", "normalizers": rules},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
    }


@contextmanager
def _silence() -> Iterator[None]:
    """Keep what Rust writes about a panic from standard error, where one line will say it."""
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
