"""Tokenizers of other kinds, with Hugging Face's tokenizers: the extra `tokenizers`."""

import codecs
import copy
import re
from codecs import charmap_build, charmap_encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property

import tokenizers
from tokenizers import normalizers

from gpt_cli.errors import CheckpointError, GPTCLIError
from gpt_cli.folder.base_tokenizer import Stream, Tokenizer, unknown
from gpt_cli.folder.byte_bpe import byte_alphabet
from gpt_cli.system.terminal import silent_stderr

SPACE = "\u2581"  # as SentencePiece writes a space
_TRIAL = "A text, 1 \u00e9\u4e2d\U0001f600\n"
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # the name of a byte's token
_ALPHABET = byte_alphabet()
_TABLE = charmap_build(_ALPHABET)


def _replace_byte(error: UnicodeError) -> tuple[str, int]:
    """Replace one undecodable byte, as SentencePiece does; Python may replace several as one."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "\ufffd", error.start + 1


_EACH_BYTE = "gpt_cli.each_byte"
codecs.register_error(_EACH_BYTE, _replace_byte)


class Pipeline(Tokenizer):
    """A normalizer, a split, a model and a decoder of the library.

    Names of special tokens in texts are text, unless a call says otherwise. Nothing is put around a
    text.
    """

    def __init__(
        self,
        build: Callable[[], tokenizers.Tokenizer],
        source: str,  # the files, as errors name them
        *,
        joins_bytes: bool = False,  # whether the text is that of all bytes, as in SentencePiece
    ):
        """Raise CheckpointError if the library refuses what `build` makes."""
        self.source = source
        self._joins_bytes = joins_bytes
        with silent_stderr(), self._checked():  # Rust would write about a panic
            self._library = library = build()
            library.no_padding()
            library.no_truncation()
            library.post_processor = None  # it would trim spans
            library.encode_special_tokens = True  # their names are text
            library.decode(library.encode(_TRIAL, add_special_tokens=False).ids)
        self.kind = type(library.model).__name__
        decoder = b"" if library.decoder is None else library.decoder.__getstate__()
        self._is_byte_level = b'"ByteLevel"' in decoder
        self._falls_back = b'"ByteFallback"' in decoder
        self._drops_space = b'"Strip"' in decoder  # at the start of a text
        self.has_bytes = self._is_byte_level or SPACE.encode() in decoder
        added = library.get_added_tokens_decoder()
        vocab = library.get_vocab(with_added_tokens=True)
        self._set_ids([id for id in vocab.values() if id not in added], added)
        self.special = {token.content: id for id, token in added.items() if token.special}
        of_bytes = [f"<0x{n:02X}>" if self._falls_back else _ALPHABET[n] for n in range(256)]
        has_all = self.has_bytes and all(name in vocab for name in of_bytes)
        self.byte_ids = [vocab[name] for name in of_bytes] if has_all else []

    @contextmanager
    def _checked(self) -> Iterator[None]:
        """Raise CheckpointError for an error of the library."""
        try:
            yield
        except (GPTCLIError, MemoryError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            problem = " ".join(f"{error!r}".split())
            raise CheckpointError(
                f"{self.source}: damaged ({problem:.120}): get it again"
            ) from None

    @cached_property
    def _with_special(self) -> tokenizers.Tokenizer:
        """A tokenizer for which the names of special tokens are these tokens."""
        library = copy.deepcopy(self._library)
        library.encode_special_tokens = False
        return library

    @cached_property
    def _exact(self) -> tokenizers.Tokenizer:
        """A tokenizer that changes nothing in a text but how spaces are written."""
        rules = self._library.to_str()
        rules = rules.replace('"add_prefix_space":true', '"add_prefix_space":false')
        library = tokenizers.Tokenizer.from_str(rules)
        library.encode_special_tokens = True
        library.normalizer = None
        if not self._is_byte_level:
            library.normalizer = normalizers.Replace(" ", SPACE)
            library.pre_tokenizer = None
        return library

    def _encode(self, text: str, *, special: bool) -> list[int]:
        library = self._with_special if special else self._library
        with self._checked():
            return library.encode(text, add_special_tokens=False).ids

    def _encode_with_spans(
        self, text: str, *, special: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        library = self._with_special if special else self._library
        with self._checked():
            encoding = library.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def _exact_ids(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of a text in which the names of special tokens are text."""
        ids: list[int] = []
        for line in text.splitlines(keepends=True):
            with self._checked():
                line_ids = self._exact.encode(line, add_special_tokens=False).ids
            is_exact = b"".join(map(self.piece, line_ids, line_ids)) == line.encode()
            ids += line_ids if is_exact or not self.byte_ids else self._single_bytes(line.encode())
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        ids = list(ids)
        if self._joins_bytes:
            text = b"".join(self.token_bytes(id) or b"" for id in ids).decode(errors=_EACH_BYTE)
            # The space of a piece, not that of a byte's token.
            begins = self._drops_space and ids and self.name(ids[0]).startswith(SPACE)
            return text[1:] if begins else text
        for id in ids:
            self.name(id)  # the library leaves out unknown ids
        with self._checked():
            return self._library.decode(ids, skip_special_tokens=False)

    def piece(self, id: int, before: int | None = None) -> bytes:
        data = self.token_bytes(id)
        if data is not None and before is not None:
            return data
        # Some decoders drop the space at the start of a text, or write one between words.
        start = "" if before is None else self.decode([before])
        text = self.decode([id] if before is None else [before, id]).removeprefix(start)
        return text.encode() if data is None or "\ufffd" not in text else data

    def stream(self, prompt: Sequence[int] = ()) -> Stream:
        if self._joins_bytes:
            return Stream(self, prompt, _EACH_BYTE)
        return _RunStream(self, prompt) if self._falls_back else Stream(self, prompt)

    def token_bytes(self, id: int) -> bytes | None:
        name = self.name(id)
        if not self.has_bytes:
            return None
        if self._is_byte_level:
            with suppress(UnicodeEncodeError):  # an added token
                return charmap_encode(name, "strict", _TABLE)[0]
            return name.encode()
        if self._falls_back and (byte := _BYTE.fullmatch(name)):
            return bytes([int(byte[1], 16)])
        return name.replace(SPACE, " ").encode()

    def token_name(self, id: int) -> str:
        return super().token_name(id) if self.has_bytes else self.name(id)

    def name(self, id: int) -> str:
        """Return a token as the vocabulary writes it; raise InputError if there is none."""
        with suppress(OverflowError):
            if (name := self._library.id_to_token(id)) is not None:
                return name
        raise unknown(id)

    def token_id(self, name: str) -> int | None:
        return self._library.token_to_id(name)


class _RunStream(Stream):
    """The same with byte fallback: the bytes of a run of tokens that is not UTF-8 are U+FFFD."""

    _tokenizer: Pipeline
    _run = b""  # the bytes of the last tokens

    def push(self, id: int) -> str:
        data = self._piece(id)
        if _BYTE.fullmatch(self._tokenizer.name(id)):
            self._run += data
            return ""
        return self.flush() + data.decode()

    def flush(self) -> str:
        run = self._run
        self._run = b""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)
