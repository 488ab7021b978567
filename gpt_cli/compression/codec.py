"""Compress any bytes with a model: a token costs -log2 of its probability in bits, and no more.

The data is cut into blocks of tokens, which a range coder encodes with the model's distributions.
A block is read without the others, from the start token on, so that many are computed side by side
at both ends. Within a block, the context moves on by half when it is full, as in `score`. What the
model cannot predict, such as a picture, is stored.

To read a file, a machine must compute the bits of the one that wrote it: one other count anywhere,
and the rest of the block is noise. One end computes whole windows, the other token by token, so it
needs operations whose results do not depend on that (`Ops.batch_invariant`).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import islice
from zlib import compress as deflate
from zlib import crc32

import numpy as np

from gpt_cli.compression.archive import (
    BLOCK,
    LARGEST_BLOCK,
    LARGEST_CODE,
    Block,
    Header,
    Readable,
    Reader,
    check,
    end,
)
from gpt_cli.compression.range_coder import Decoder, Encoder
from gpt_cli.errors import InputError, ResourceError
from gpt_cli.folder.tokenizer import Tokenizer
from gpt_cli.generation.loaded import LoadedModel
from gpt_cli.gpt2.digests import logits_digest, weights_digest
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.memory import cache_bytes, cache_itemsize, logits_bytes
from gpt_cli.gpt2.model import GPT2, forward
from gpt_cli.gpt2.prefill import next_logits
from gpt_cli.gpt2.tokens import start_token
from gpt_cli.ops import Array, Ops
from gpt_cli.scoring.score import measure_texts, windows

_LAST = 4  # a block may end with any line of its last quarter
_PIECE = 1 << 16  # bytes that are tokenized at a time
_TOGETHER = 32_768  # tokens whose intervals are computed at a time
_SIDE_BY_SIDE = 64  # blocks that are decoded at a time, if memory allows
_PROBABLY_TEXT = 1024  # bytes; text of more is smaller after deflate


class Codec:
    """Both ends of the compressor, for one model.

    Attributes:
        header: of the files that it writes and reads.
    """

    def __init__(self, model: GPT2, tokenizer: Tokenizer):
        """Compute the digests, which takes about a second for gpt2.

        Raises:
            InputError: the model has no start token.
            ResourceError: the bits of results depend on how they are computed here.
        """
        if not model.ops.batch_invariant:
            raise ResourceError(
                f"compress and decompress must compute the same bits, and {model.ops.name} does "
                "not give them: use the compiled library on a CPU (see `gpt-cli doctor`)"
            )
        self._start = start_token(model.config, "compressed texts begin with one")
        self._model, self._tokenizer = model, tokenizer
        self._stride = max(1, model.config.n_positions // 2)
        hashes = weights_digest(model, tokenizer), logits_digest(model, tokenizer)
        weights, bits = (bytes.fromhex(digest)[:8] for digest in hashes)
        self.header = Header(model.ops.dtype, weights, bits)

    @cached_property
    def _begins(self) -> Array:
        """Return the logits (V,) of a block's first token, by which to choose where blocks end."""
        ops = self._model.ops
        return ops.to_host(forward(self._model, ops.xp.asarray([[self._start]])))[0, 0]

    def compress(
        self, file: Readable, block: int = BLOCK, advance: Callable[[int], None] = lambda _: None
    ) -> Iterator[bytes]:
        """Yield the compressed file, a part at a time.

        Args:
            file: the data, any bytes.
            block: tokens of a block. Fewer can be decompressed side by side sooner; more cost less.
            advance: is called with the number of tokens of each step of the computation.

        Raises:
            InputError: `block` is out of range.
            CheckpointError: the weights are damaged.
        """
        if not 1 <= block <= LARGEST_BLOCK:
            raise InputError(f"block must be from 1 to {LARGEST_BLOCK}")
        yield self.header.pack()
        index = size = crc = 0
        blocks = self._blocks(file, block)
        while texts := list(islice(blocks, max(1, _TOGETHER // block))):
            parts = [b"".join(map(self._tokenizer.token_bytes, ids)) for ids in texts]
            codes = self._codes(texts, parts, advance)
            for ids, data, code in zip(texts, parts, codes, strict=True):
                stored = len(code) >= len(data)
                length = len(data) if stored else len(ids)
                yield Block(index, length, stored, check(data), data if stored else code).pack()
                index, size, crc = index + 1, size + len(data), crc32(data, crc)
            advance(0)
        yield end(index, size, crc).pack()

    def _blocks(self, file: Readable, block: int) -> Iterator[list[int]]:
        """Yield the tokens of each block."""
        ids: list[int] = []
        while piece := file.read(_PIECE):
            ids += self._encode(piece)
            start = 0
            while len(ids) - start > block:
                stop = self._cut(ids, start + block - block // _LAST, start + block)
                yield ids[start:stop]
                start = stop
            ids = ids[start:]
        if ids:
            yield ids

    def _cut(self, ids: Sequence[int], first: int, last: int) -> int:
        """Return where to end a block: after a line, where the model would begin, or at `last`."""
        ends = range(last, first, -1)
        lines = (n for n in ends if self._tokenizer.token_bytes(ids[n - 1]).endswith(b"\n"))
        return max(lines, key=lambda end: self._begins[ids[end]], default=last)

    def _encode(self, data: bytes) -> list[int]:
        """Return ids whose joined bytes are `data`, with special tokens if the model has them."""
        for special in (True, False):
            ids = self._tokenizer.encode_bytes(data, special=special)
            if max(ids) < self._model.config.vocab_size:
                return ids
        raise InputError(
            "the tokenizer has tokens for this data that the model does not have: "
            "use the tokenizer of the model"
        )

    def _codes(
        self, texts: Sequence[list[int]], parts: Sequence[bytes], advance: Callable[[int], None]
    ) -> list[bytes]:
        """Return the code of each block, or its data if that is no text."""

        def measure(ops: Ops, logits: Array, ids: Array) -> Array:
            advance(len(ids))
            return intervals(ops, logits, ids)

        computed = {n: ids for n, ids in enumerate(texts) if _may_be_text(parts[n])}
        given = [[self._start, *ids] for ids in computed.values()]
        codes = list(parts)
        loaded = LoadedModel(self._model, self._tokenizer)
        columns = measure_texts(loaded, given, [measure], self._stride)
        for n, (found,) in zip(computed, columns, strict=True):
            encoder = Encoder()
            for interval in found[1:]:
                encoder.encode(*interval)
            codes[n] = encoder.finish()
        return codes

    def decompress(
        self, reader: Reader, advance: Callable[[int], None] = lambda _: None
    ) -> Iterator[bytes]:
        """Yield the data of a compressed file, a block at a time.

        A block is checked before it is yielded. If the reader salvages, damaged ones are left out.

        Args:
            reader: of the file.
            advance: is called with the number of tokens of each step of the computation.

        Raises:
            InputError: the file is damaged, or was written with another model or other bits.
            CheckpointError: the weights are damaged.
            ResourceError: there is not enough memory.
        """
        if reader.header:
            self._check(reader.header)
        size = crc = 0
        for some in self._groups(reader.blocks()):
            for block, data in zip(some, self._decoded(some, advance), strict=True):
                if data is None or check(data) != block.check:
                    reader.lose(block)
                    continue
                size, crc = size + len(data), crc32(data, crc)
                yield data
        reader.finish(size, crc)

    def _groups(self, blocks: Iterator[Block]) -> Iterator[list[Block]]:
        """Yield the blocks to decode side by side; an error comes after the blocks before it."""
        group: list[Block] = []
        most = self._side_by_side()
        try:
            for block in blocks:
                group.append(block)
                if len(group) == most:
                    yield group
                    group, most = [], self._side_by_side()
        except InputError:
            yield group
            raise
        yield group

    def _check(self, header: Header) -> None:
        """Raise InputError if another model or machine has written a file."""
        own = self.header
        if header.dtype != own.dtype:
            raise InputError(
                f"the data was compressed with a model in {header.dtype}, and this one is in "
                f"{own.dtype}: name that model with --model"
            )
        if header.weights != own.weights:
            raise InputError(
                f"the data was compressed with another model (digest {header.weights.hex()}, and "
                f"this one has {own.weights.hex()}): name it with --model"
            )
        if header.bits != own.bits:
            raise InputError(
                "the data was compressed with this model by a machine or a version of gpt-cli "
                "that computes other bits: see `gpt-cli verify`"
            )

    def _side_by_side(self) -> int:
        """Return how many blocks to decode at a time: as many as fit half of the free memory."""
        config, free = self._model.config, self._model.ops.free_memory()
        cache = cache_bytes(config, config.n_positions, cache_itemsize(self._model.ops))
        logits_and_counts = 3 * logits_bytes(config, 1)  # counts have 8 bytes
        most = (free or sys.maxsize) // (2 * (cache + logits_and_counts))
        return max(1, min(_SIDE_BY_SIDE, most))

    def _decoded(
        self, blocks: Sequence[Block], advance: Callable[[int], None]
    ) -> list[bytes | None]:
        """Return the data of each block; None for a code that no encoder writes for this model."""
        texts = {n: _Text(self._start, block) for n, block in enumerate(blocks) if not block.stored}
        self._decode(sorted(texts.values(), key=lambda text: -text.size), advance)
        data: list[bytes | None] = [block.code if block.stored else None for block in blocks]
        for n, text in texts.items():
            if not text.damaged:
                with suppress(InputError):  # an id without a token
                    data[n] = b"".join(map(self._tokenizer.token_bytes, text.ids[1:]))
        return data

    def _decode(self, texts: Sequence["_Text"], advance: Callable[[int], None]) -> None:
        """Decode texts side by side, the longest first, a token of each at a time."""
        model = self._model
        longest = max((text.size for text in texts), default=0)
        for w in windows(1 + longest, model.config.n_positions, self._stride):
            texts = [text for text in texts if text.size >= w.first]
            cache = KVCache(model.config, model.ops, len(texts), w.end - w.start - 1)
            logits = next_logits(model, [text.ids[w.start :] for text in texts], cache)
            for place in range(w.first, w.end):
                for text, sums in zip(texts, self._counts(logits), strict=True):
                    text.decode(sums)
                advance(len(texts))
                texts = [text for text in texts if text.size > place]
                if place + 1 < w.end:
                    cache = cache.view(len(texts))
                    logits = next_logits(model, [text.ids[-1:] for text in texts], cache)

    def _counts(self, logits: Array) -> Array:
        ops = self._model.ops
        return ops.to_host(ops.cumulative_counts(logits))


class _Text:
    """A block while it is decoded."""

    def __init__(self, start: int, block: Block):
        self.ids, self.size = [start], block.size
        self.damaged = False
        self._decoder = Decoder(block.code)

    def decode(self, sums: Array) -> None:
        """Append the next token, given the running sums (V,) of the counts of all tokens."""
        try:
            target = self._decoder.target(int(sums[-1]))
        except ValueError:
            self.damaged, self._decoder = True, Decoder(b"")
            target = self._decoder.target(int(sums[-1]))
        id = int(np.searchsorted(sums, target, side="right"))
        self._decoder.advance(int(sums[id - 1]) if id else 0, int(sums[id]))
        self.ids.append(id)


def intervals(ops: Ops, logits: Array, ids: Array) -> Array:
    """Return where each row's token is in the running sum of counts: start, end, total (B, 3)."""
    sums, rows = ops.cumulative_counts(logits), ops.xp.arange(len(ids))
    starts = ops.xp.where(ids > 0, sums[rows, ids - 1], 0)
    return ops.xp.stack([starts, sums[rows, ids], sums[:, -1]], axis=-1)


def _may_be_text(data: bytes) -> bool:
    size = len(data)
    return not _PROBABLY_TEXT <= size <= LARGEST_CODE or len(deflate(data, 1)) < size
