"""Tokenizers of other kinds, with Hugging Face's tokenizers: the extra `tokenizers`."""

import copy
import json
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gpt_cli.errors import CheckpointError, GPTCLIError, InputError
from gpt_cli.folder.byte_bpe import STRETCHES, byte_alphabet, check_unicode, unknown
from gpt_cli.folder.special_tokens import SpecialIds

_CONTEXT = 8  # tokens before a text that decide how it begins
_TRIAL = "A text, 1 \u00e9\u4e2d\U0001f600\n"
_BYTE = re.compile("<0x([0-9A-F]{2})>")


class Pipeline:
    """A normalizer, a split, a model and a decoder of the library; see `Tokenizer`.

    Names of special tokens in texts are text, unless a call says otherwise. Nothing is put around a
    text.
    """

    special_ids = SpecialIds()

    def __init__(self, build: Callable[[], Tokenizer], special: Iterable[str], source: str):
        """Raise CheckpointError if the library refuses what `build` makes from `source`."""
        self._source = source
        with _silence(), self._checked():
            self._library = library = build()
            library.no_padding()
            library.no_truncation()
            names = [name for name in sorted(special) if library.token_to_id(name) is not None]
            library.add_special_tokens(names)
            library.encode_special_tokens = True  # their names are text
            library.decode(library.encode(_TRIAL, add_special_tokens=False).ids)
        self._ids = array("q", library.get_vocab(with_added_tokens=True).values())
        if len(set(self._ids)) < len(self._ids):  # the library would choose one of them at random
            raise CheckpointError(f"{source}: two tokens have the same id: get it again")
        self.kind = type(library.model).__name__
        added = library.get_added_tokens_decoder()
        self.special = {token.content: id for id, token in added.items() if token.special}
        parts = _parts(library.decoder)
        self._falls_back = any(part["type"] == "ByteFallback" for part in parts)
        self._spell = _spelling(parts)
        self.has_bytes = self._spell is not None
        characters = {byte: chr(character) for character, byte in byte_alphabet().items()}
        names = [f"<0x{b:02X}>" if self._falls_back else characters[b] for b in range(256)]
        ids = [library.token_to_id(name) for name in names] if self.has_bytes else [None]
        self._byte_ids = [id for id in ids if id is not None]
        self.has_all_bytes = len(self._byte_ids) == 256

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Raise CheckpointError for an error of the library, which may be a panic of Rust."""
        try:
            yield
        except BaseException as error:
            is_panic = type(error).__name__ == "PanicException"
            if isinstance(error, GPTCLIError | MemoryError) or not (
                is_panic or isinstance(error, Exception)
            ):
                raise
            problem = " ".join(f"{error!r}".split())
            raise CheckpointError(
                f"{self._source}: damaged ({problem:.120}): get it again"
            ) from None

    @cached_property
    def _with_special(self) -> Tokenizer:
        """A tokenizer for which the names of special tokens are these tokens."""
        with self._checked():
            library = copy.deepcopy(self._library)
        library.encode_special_tokens = False
        return library

    @cached_property
    def _exact(self) -> Tokenizer:
        """A tokenizer that changes nothing in a text but how spaces are written."""
        description = json.loads(self._library.to_str())
        rules = [
            part
            for part in _parts(self._library.normalizer)
            if part["type"] == "Replace" and "String" in part["pattern"]
        ]
        splits = []
        for part in _parts(self._library.pre_tokenizer):
            if part["type"] == "Metaspace":
                splits.append(part | {"prepend_scheme": "never", "split": False})
            elif part["type"] == "ByteLevel":
                splits.append(part | {"add_prefix_space": False})
            elif part["type"] != "WhitespaceSplit":
                splits.append(part)
        description["normalizer"] = {"type": "Sequence", "normalizers": rules}
        description["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": splits}
        with self._checked():
            library = Tokenizer.from_str(json.dumps(description))
        library.encode_special_tokens = True
        return library

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        check_unicode(text)
        library = self._with_special if special else self._library
        with self._checked():
            return library.encode(text, add_special_tokens=False).ids

    def encode_bytes(self, data: bytes, *, special: bool = False) -> list[int]:
        ids: list[int] = []
        for stretch in STRETCHES.finditer(data.decode(errors="surrogateescape")):
            if bad := stretch[1]:
                ids += self._single_bytes(bad.encode(errors="surrogateescape"))
            else:
                ids += self._exact_ids(stretch[0])
        return ids

    def _exact_ids(self, text: str) -> list[int]:
        """Return ids whose joined bytes are those of a text, if there are tokens for all bytes."""
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
        if not self.has_all_bytes:
            raise InputError("this model has no tokens for single bytes: give text in UTF-8")
        return [self._byte_ids[byte] for byte in data]

    def decode(self, ids: Iterable[int]) -> str:
        ids = list(ids)
        for id in ids:
            self.token_name(id)  # the library leaves out unknown ids
        with self._checked():
            return self._library.decode(ids, skip_special_tokens=False)

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
        with suppress(OverflowError):
            if (name := self._library.id_to_token(id)) is not None:
                return name
        raise unknown(id)

    def token_id(self, name: str) -> int | None:
        return self._library.token_to_id(name)

    def missing_ids(self, vocab_size: int) -> list[int]:
        return sorted({*range(vocab_size)}.difference(self._ids))


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


def _parts(component: Any) -> list[dict[str, Any]]:
    """Return the parts of a normalizer, a split or a decoder, as a tokenizer.json writes them."""
    parts = [] if component is None else [json.loads(component.__getstate__())]
    while any(part["type"] == "Sequence" for part in parts):
        parts = [
            inner
            for part in parts
            for inner in (
                next(value for value in part.values() if isinstance(value, list))
                if part["type"] == "Sequence"
                else [part]
            )
        ]
    return parts


def _spelling(decoder: list[dict[str, Any]]) -> Callable[[str], bytes] | None:
    """Return what turns the name of a token into the bytes that it adds to a text, or None."""
    kinds = {part["type"]: part for part in decoder}
    if "ByteLevel" in kinds:
        alphabet = {chr(character): byte for character, byte in byte_alphabet().items()}

        def byte_level(name: str) -> bytes:
            try:
                return bytes(alphabet[character] for character in name)
            except KeyError:
                return name.encode()

        return byte_level
    space = " "
    if metaspace := kinds.get("Metaspace"):
        space = metaspace["replacement"]
    elif (replace := kinds.get("Replace")) and replace["content"] == " ":
        space = replace["pattern"].get("String", " ")
    elif "ByteFallback" not in kinds:
        return None

    def spelled(name: str) -> bytes:
        if "ByteFallback" in kinds and (byte := _BYTE.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        return name.replace(space, " ").encode()

    return spelled


@contextmanager
def _silence() -> Iterator[None]:
    """Keep what Rust writes about a panic from standard error, where one line will say it."""
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    try:
        with Path(os.devnull).open("wb") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
