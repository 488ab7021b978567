"""Compress any bytes with a model: a token costs -log2 of its probability in bits.

The data is cut into segments of tokens, and a range coder encodes them with the distributions of
the model. A segment begins with the start token and does not depend on the others, so both ends
compute several side by side. In a segment, the context moves on by half when it is full, as in
`score`. Data that the model cannot predict, such as a picture, is stored as it is.

The machine that reads a file must compute the same bits as the machine that wrote it: if one count
differs, the rest of the segment is noise. The compressor computes whole windows, and the
decompressor token by token. So the codec needs operations that give the same results for both
(`Ops.batch_invariant`).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from itertools import islice
from zlib import compress as deflate
from zlib import crc32

import numpy as np

from gpt_cli.compression import archive
from gpt_cli.compression.archive import ArchiveReader, Header, Readable, Segment
from gpt_cli.compression.range_coder import Decoder, Encoder
from gpt_cli.errors import InputError, ResourceError
from gpt_cli.folder.dtypes import SHORT
from gpt_cli.folder.tokenizer import Tokenizer, check_bytes
from gpt_cli.gpt2.digests import logits_digest, weights_digest
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.memory import cache_bytes, logits_bytes
from gpt_cli.gpt2.model import GPT2, forward
from gpt_cli.gpt2.prefill import next_logits
from gpt_cli.ops import Array, Ops
from gpt_cli.options.declare import check
from gpt_cli.scoring.score import measure_texts, windows
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.text import Text

_LAST = 4  # a segment may end after a line in its last quarter
_PIECE = 1 << 16  # bytes that are tokenized at a time
_TOGETHER = 32_768  # tokens whose intervals are computed at a time
_SIDE_BY_SIDE = 64  # segments that are decoded at a time, if memory allows
_PROBABLY_TEXT = 1024  # bytes; longer text is smaller after deflate

CountTokens = Callable[[int], None]  # gets the number of tokens of a step


class Codec:
    """Both ends of the compressor, for one model.

    The constructor computes digests, which takes about a second for gpt2. It raises InputError if
    the model has no start token, CheckpointError if its weights are damaged, and ResourceError if
    bits depend on how they are computed here.
    """

    def __init__(self, model: GPT2, tokenizer: Tokenizer):
        if not model.ops.batch_invariant:
            raise ResourceError(
                f"compress and decompress must compute the same bits, and {model.ops.name} does "
                "not give them: use the compiled library on a CPU (see `gpt-cli doctor`)"
            )
        check_bytes(tokenizer, "compression", every=True)
        self._start = model.config.start_token("compressed texts begin with one")
        self._model = model
        self._tokenizer = tokenizer
        self._stride = max(1, model.config.n_positions // 2)
        bits = bytes.fromhex(logits_digest(model, tokenizer))[:8]
        # The header of the files that `compress` writes.
        self.header = Header(model.ops.dtype, self._weights_digest(model.ops.dtype), bits)

    def _weights_digest(self, dtype: str) -> bytes:
        """Return the digest of the weights and of the start token: all codes depend on both."""
        digest = weights_digest(self._model, self._tokenizer, dtype)
        if self._start != self._tokenizer.special.get("<|endoftext|>"):  # GPT-2's is not written
            digest = sha256(f"{digest} {self._start}".encode()).hexdigest()
        return bytes.fromhex(digest)[:8]

    @cached_property
    def _first_logits(self) -> Array:
        """The logits (V,) of the first token of a segment."""
        ops = self._model.ops
        return ops.to_host(forward(self._model, ops.xp.asarray([[self._start]])))[0, 0]

    def compress(
        self,
        file: Readable,
        segment: int = archive.SEGMENT_TOKENS,
        advance: CountTokens = lambda _: None,
        store: Callable[[int], None] = lambda _: None,
    ) -> Iterator[bytes]:
        """Yield the compressed file, a part at a time.

        A segment has up to `segment` tokens. Small segments are decompressed sooner, side by side;
        large ones take fewer bytes. `store` gets the size of each segment that is stored as it is.
        """
        check("segment", segment, archive.SEGMENT_RANGE)
        yield self.header.pack()
        index = size = crc = 0
        segments = self._segments(file, segment)
        while texts := list(islice(segments, max(1, _TOGETHER // segment))):
            parts = list(map(self._bytes, texts))
            codes = self._codes(texts, parts, advance)
            for ids, data, code in zip(texts, parts, codes, strict=True):
                if len(code) < len(data):
                    packed = Segment(index, len(ids), False, archive.check(data), code)
                else:
                    packed = Segment(index, len(data), True, archive.check(data), data)
                    store(len(data))
                yield packed.pack()
                index += 1
                size += len(data)
                crc = crc32(data, crc)
            advance(0)
        yield archive.end(index, size, crc).pack()

    def _segments(self, file: Readable, tokens: int) -> Iterator[list[int]]:
        ids: list[int] = []
        while piece := file.read(_PIECE):
            ids += self._encode(piece)
            start = 0
            while len(ids) - start > tokens:
                stop = self._cut(ids, start + tokens - tokens // _LAST, start + tokens)
                yield ids[start:stop]
                start = stop
            ids = ids[start:]
        if ids:
            yield ids

    def _cut(self, ids: Sequence[int], first: int, last: int) -> int:
        """Return where to end a segment: preferably after a line end."""
        ends = range(last, first, -1)
        lines = (n for n in ends if self._bytes(ids[n - 1 : n]).endswith(b"\n"))
        return max(lines, key=lambda end: self._first_logits[ids[end]], default=last)

    def _encode(self, data: bytes) -> list[int]:
        """Return the ids of `data`, with special tokens if the model has them.

        Single bytes stand for data of which the model lacks a token.
        """
        size = self._model.config.vocab_size
        for special in (True, False):
            ids = self._tokenizer.encode_bytes(data, special=special)
            if max(ids) < size:
                return ids
        return [self._tokenizer.byte_ids[byte] for byte in data]

    def _bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(self._tokenizer.token_bytes(id) or b"" for id in ids)

    def _codes(
        self, texts: Sequence[list[int]], parts: Sequence[bytes], advance: CountTokens
    ) -> list[bytes]:
        """Return the codes of segments; data that is not text is its own code."""

        def measure(ops: Ops, logits: Array, ids: Array) -> Array:
            advance(len(ids))
            return intervals(ops, logits, ids)

        numbers = [n for n, part in enumerate(parts) if _may_be_text(part)]
        rows = [Text([self._start, *texts[n]], first=1) for n in numbers]
        loaded = LoadedModel(self._model, self._tokenizer)
        measured = measure_texts(loaded, rows, {"intervals": measure}, self._stride)
        codes = list(parts)
        for n, columns in zip(numbers, measured, strict=True):
            encoder = Encoder()
            for interval in columns["intervals"][1:]:
                encoder.encode(*interval)
            codes[n] = encoder.finish()
        return codes

    def decompress(
        self, reader: ArchiveReader, advance: CountTokens = lambda _: None
    ) -> Iterator[bytes]:
        """Yield the data of a compressed file, a segment as soon as it is checked.

        Raise InputError for a file of another model or of other bits, and for a damaged segment. If
        the reader salvages, leave the damaged segment out instead.
        """
        if reader.header:
            self._check(reader.header)
        size = crc = 0
        for group in self._groups(reader.segments()):
            for segment, data in zip(group, self._decoded(group, advance), strict=True):
                if data is None or archive.check(data) != segment.check:
                    reader.lose(segment)
                    continue
                size += len(data)
                crc = crc32(data, crc)
                yield data
        reader.finish(size, crc)

    def _groups(self, segments: Iterator[Segment]) -> Iterator[list[Segment]]:
        """Yield groups to decode side by side; raise an error only after the segments before it."""
        group: list[Segment] = []
        most = self._side_by_side()
        try:
            for segment in segments:
                group.append(segment)
                if len(group) == most:
                    yield group
                    group = []
                    most = self._side_by_side()
        except InputError:
            yield group
            raise
        yield group

    def _check(self, header: Header) -> None:
        """Raise InputError if another model or machine has written a file."""
        dtype = self.header.dtype
        if header.dtype != dtype and "int8" in (header.dtype, dtype):
            raise InputError(
                f"the data was compressed with a model in {header.dtype}, and this one is in "
                f"{dtype}: use that model"
            )
        weights = self._weights_in(header.dtype)
        if header.weights != weights:
            raise InputError(
                "the data was compressed with another model or start token (digest "
                f"{header.weights.hex()}, and here it is {weights.hex()}): use that model, and the "
                "same bos_token"
            )
        if header.bits != self.header.bits:
            raise InputError(
                "the data was compressed with this model by a machine or a version of gpt-cli "
                "that computes other bits: see `gpt-cli verify`"
            )

    def must_round_for(self, reader: ArchiveReader) -> bool:
        """Return whether this model can have written a file only if its weights were rounded."""
        if reader.dtype not in SHORT or self.header.dtype == "int8":
            return False
        if reader.header is None:
            return reader.dtype != self.header.dtype
        return reader.header.weights != self._weights_in(reader.dtype)

    def _weights_in(self, dtype: str) -> bytes:
        """Return the digest of the same weights in another type; int8 is not converted."""
        # float32 and 16-bit types compute the same bits from the same values.
        return self.header.weights if dtype == self.header.dtype else self._weights_digest(dtype)

    def _side_by_side(self) -> int:
        """Return how many segments fit in half of the free memory, to be decoded side by side."""
        config = self._model.config
        ops = self._model.ops
        cache = cache_bytes(config, config.n_positions, ops.cache_type.itemsize)
        logits_and_counts = 3 * logits_bytes(config, 1)  # counts have 8 bytes
        most = (ops.free_memory() or sys.maxsize) // (2 * (cache + logits_and_counts))
        return max(1, min(_SIDE_BY_SIDE, most))

    def _decoded(self, segments: Sequence[Segment], advance: CountTokens) -> list[bytes | None]:
        """Return the data of segments, or None for a code that no encoder writes."""
        texts = {n: _Text(self._start, s) for n, s in enumerate(segments) if not s.stored}
        longest_first = sorted(texts.values(), key=lambda text: text.size, reverse=True)
        self._decode(longest_first, advance)
        data: list[bytes | None] = [s.code if s.stored else None for s in segments]
        for n, text in texts.items():
            if not text.damaged:
                with suppress(InputError):  # an id without a token
                    data[n] = self._bytes(text.ids[1:])
        return data

    def _decode(self, texts: Sequence["_Text"], advance: CountTokens) -> None:
        """Decode texts side by side, the longest first, in steps of one token."""
        model = self._model
        longest = max((text.size for text in texts), default=0)
        for start, first, end in windows(1 + longest, model.config.n_positions, self._stride):
            texts = [text for text in texts if text.size >= first]
            cache = KVCache(model.config, model.ops, len(texts), end - start - 1)
            logits = next_logits(model, [text.ids[start:] for text in texts], cache)
            for position in range(first, end):
                sums_of_rows = model.ops.to_host(model.ops.cumulative_counts(logits))
                for text, sums in zip(texts, sums_of_rows, strict=True):
                    text.decode(sums)
                advance(len(texts))
                texts = [text for text in texts if text.size > position]
                if position + 1 < end:
                    cache = cache.view(len(texts))
                    logits = next_logits(model, [text.ids[-1:] for text in texts], cache)


class _Text:
    """A segment while it is decoded."""

    def __init__(self, start: int, segment: Segment):
        self.ids = [start]
        self.size = segment.size
        self.damaged = False
        self._decoder = Decoder(segment.code)

    def decode(self, sums: Array) -> None:
        """Append the next token, from the running sums (V,) of the counts of all tokens."""
        total = int(sums[-1])
        try:
            target = self._decoder.target(total)
        except ValueError:
            self.damaged = True
            self._decoder = Decoder(b"")  # of any tokens: the others of the batch go on
            target = self._decoder.target(total)
        id = int(np.searchsorted(sums, target, side="right"))
        self._decoder.advance(int(sums[id - 1]) if id else 0, int(sums[id]))
        self.ids.append(id)


def intervals(ops: Ops, logits: Array, ids: Array) -> Array:
    """Return the intervals of tokens in the running sum of counts: start, end, total (B, 3)."""
    sums = ops.cumulative_counts(logits)
    rows = ops.xp.arange(len(ids))
    starts = ops.xp.where(ids > 0, sums[rows, ids - 1], 0)
    return ops.xp.stack([starts, sums[rows, ids], sums[:, -1]], axis=-1)


def _may_be_text(data: bytes) -> bool:
    """Return whether a model may predict data, or it is too large to be stored."""
    size = len(data)
    if size < _PROBABLY_TEXT or size > archive.MAX_CODE_BYTES:
        return True
    return len(deflate(data, 1)) < size
