"""Hashes of what the compiled library returns for drawn inputs, by the package's own calls.

`tests/native/driver.c` makes the same inputs and calls the library without Python. It must print
these hashes on any system. An array of inputs is drawn by its name.
"""

import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt_cli.folder.dtypes import WEIGHT_TYPES
from gpt_cli.folder.tensors import Tensor
from gpt_cli.gpt2.model import MLP, Attention, Block
from gpt_cli.ops import LayerNorm, Linear, bindings
from gpt_cli.ops.contract import AttentionSteps, Rows
from gpt_cli.ops.int8 import Int8Rows, scales_shape
from gpt_cli.ops.kernels import ACTIVATIONS, KNOWN_STEPS
from gpt_cli.ops.native_ops import NativeOps
from gpt_cli.ops.packing import Packed
from gpt_cli.ops.short import RoundedRows, widen
from gpt_cli.options.request import SamplingParams
from gpt_cli.system.files import version

Array = NDArray[Any]
Hashes = Iterator[tuple[str, int]]

THREADS = (1, 2)

# Of attention: the second text has 33 tokens in the cache, and one new token less.
B, H, T, D, CAPACITY, S = 2, 3, 14, 20, 80, 47
PAST, LENGTHS = np.array([0, 33]), np.array([T, T - 1])
VISIBLE = PAST[:, None] + np.minimum(np.arange(T), LENGTHS[:, None] - 1) + 1
C = H * D  # of the model


def hashes() -> dict[str, str]:
    """Return the hashes by name.

    Raises:
        ValueError: a hash is not the same at all levels of this processor, with 1 and 2 threads.
    """
    before = bindings.choose_level()
    hashes: dict[str, str] = {}
    try:
        for level in bindings.levels():
            bindings.use_level(level)
            for threads in THREADS:
                for name, crc in _all_hashes(threads):
                    if hashes.setdefault(name, f"{crc:08x}") != f"{crc:08x}":
                        raise ValueError(f"{name} differs at {level} with {threads} threads")
    finally:
        bindings.use_level(before)
    return hashes


def _all_hashes(threads: int) -> Hashes:
    for dtype in WEIGHT_TYPES:
        ops = NativeOps(dtype)
        ops.threads = threads
        yield from _packing(ops)
        if dtype != "int8":
            yield from _quantize(ops)
        yield from _linear(ops)
        yield from _embed(ops)
        yield from _model(ops)
        if dtype == "float32":
            yield from _rows(ops)
        if dtype in ("float32", "int8"):  # of the two types of a cache
            yield from _attention(ops)


def _crc(array: Array | None) -> int:
    """Return the hash of an array; None, of an operation that refused, raises TypeError."""
    return zlib.crc32(np.ascontiguousarray(array))


# --- inputs --------------------------------------------------------------------------------------


def _drawn(name: str, *shape: int) -> Array:
    """Return the uint32 numbers that a name stands for."""
    x = np.arange(np.prod(shape), dtype=np.uint32) * np.uint32(0x9E3779B9)
    x += np.uint32(zlib.crc32(name.encode()))
    x = (x ^ x >> 16) * np.uint32(0x7FEB352D)
    x = (x ^ x >> 15) * np.uint32(0x846CA68B)
    return (x ^ x >> 16).reshape(shape)


def _floats(name: str, *shape: int, scale: float = 1) -> Array:
    whole = _drawn(name, *shape).view(np.int32) >> 8
    return whole.astype(np.float32) * np.float32(scale / 2**23)


def _integers(name: str, count: int, last: int) -> Array:
    return (_drawn(name, count) % np.uint32(last + 1)).astype(np.int64)


def _doubles(name: str, *shape: int) -> Array:
    return _drawn(name, *shape) / 2**32


def _weights(name: str, dtype: str, *shape: int) -> Array:
    """Return weights as they are stored."""
    x = _drawn(name, *shape)
    match dtype:
        case "float32":
            return _floats(name, *shape, scale=0.25)
        case "bfloat16":
            return (x & 0x80FF | 0x3E00).astype(np.uint16)
        case "float16":
            return (x & 0x87FF | 0x3000).astype(np.uint16)
        case _:
            return ((x % 255).astype(np.int16) - 127).astype(np.int8)


def _as_rows(stored: Array, dtype: str, *, transposed: bool) -> Rows:
    """Return stored weights as the rows that are packed."""
    if WEIGHT_TYPES[dtype].is_short:
        return RoundedRows(widen(stored, dtype), dtype)
    if dtype == "int8":
        return Int8Rows(stored, _scales(*stored.shape, transposed=transposed), transposed)
    return stored


def _scales(n_rows: int, length: int, *, transposed: bool) -> Array:
    bits = (_drawn("scales", *scales_shape(n_rows, length, transposed)) & 0xFF) << 16 | 0x3A800000
    return bits.view(np.float32)


def _matrix(
    ops: NativeOps, name: str, n_in: int, n_out: int, *, transposed: bool = False
) -> Packed:
    shape = (n_out, n_in) if transposed else (n_in, n_out)
    stored = _weights(name, ops.dtype, *shape)
    return ops.place_matrix(
        _as_rows(stored, ops.dtype, transposed=transposed), transposed=transposed
    )


def _norm(name: str, width: int) -> LayerNorm:
    return LayerNorm(_floats(name, width, scale=2), _floats("norm_bias", width), 2**-17)


# --- operations ----------------------------------------------------------------------------------


def _packing(ops: NativeOps) -> Hashes:
    dtype, n_in, n_out = ops.dtype, 200, 1500
    for transposed in (False, True):
        matrix = _matrix(ops, "pack", n_in, n_out, transposed=transposed)
        yield f"pack {dtype} {transposed:d}", _crc(matrix.panels)
        shape = (n_out, n_in) if transposed else (n_in, n_out)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "weights")
            path.write_bytes(bytes(24) + _weights("pack", dtype, *shape).tobytes())
            rows: Rows = Tensor(path, version(path), 24, WEIGHT_TYPES[dtype].code, shape)
            if dtype == "int8":
                rows = Int8Rows(rows, _scales(*shape, transposed=transposed), transposed)
            matrix = ops.place_matrix(rows, transposed=transposed)
        yield f"pack file {dtype} {transposed:d}", _crc(matrix.panels)


def _quantize(ops: NativeOps) -> Hashes:
    matrix = NativeOps("int8").quantize(_matrix(ops, "quantize", 200, 150))
    yield f"quantize {ops.dtype}", _crc(matrix.panels)


def _linear(ops: NativeOps) -> Hashes:
    w = _matrix(ops, "w", 200, 300)
    for number, rows in enumerate((1, 2, 5, 12, 13, 37)):
        bias = _floats("bias", 300) if number % 2 else None
        y = ops.linear(_floats("x", rows, 200, scale=4), Linear(w, bias), ACTIVATIONS[number])
        yield f"linear {ops.dtype} {rows}", _crc(y)


def _embed(ops: NativeOps) -> Hashes:
    wte = _matrix(ops, "wte", 70, 150, transposed=True)
    ids, positions = _integers("ids", 40, 149), _integers("positions", 40, 59)
    x = ops.embed(wte, _floats("wpe", 60, 70), ids[None], positions[None])
    yield f"embed {ops.dtype}", _crc(x)


def _rows(ops: NativeOps) -> Hashes:
    n = 1000
    x = _floats("rows", 37, n, scale=8)
    yield "layer_norm", _crc(ops.layer_norm(x, _norm("norm", n)))
    yield "exp", _crc(ops.exp(_floats("exponents", 37, n, scale=128)))
    for number, activation in enumerate(ACTIVATIONS):
        if activation is not None:
            yield f"activate {number}", _crc(ops.activate(x, activation))
    yield "log_sum_exp", _crc(ops.log_normalizer(x))
    yield "cumulate", _crc(ops.cumulative_counts(x))
    draws = (
        SamplingParams(top_k=40, top_p=1, temperature=0.75),
        SamplingParams(top_k=40, top_p=0.75, temperature=0.75),
        SamplingParams(top_k=n, top_p=1, temperature=2, min_p=0.0625),
    )
    for number, params in enumerate(draws):
        ids = ops.choose(x, _doubles("uniforms", 37), params)
        yield f"choose {number}", _crc(ids)


def _attention(ops: NativeOps) -> Hashes:
    kind = ops.cache_type.name
    keys, values = (layers[0] for layers in ops.new_cache(1, B, H, CAPACITY, D))
    keys[...] = values[...] = 0
    k, v = (_floats(name, B, H, CAPACITY, D, scale=2) for name in ("old_k", "old_v"))
    ops.store(k, v, keys, values, np.zeros(B, np.int64), PAST)
    k, v = (_floats(name, B, H, T, D, scale=2) for name in ("k", "v"))
    ops.store(k, v, keys, values, PAST, LENGTHS)
    yield f"keys {kind}", _crc(keys)
    yield f"values {kind}", _crc(values)
    q = _floats("q", B, H, T, D, scale=4)
    yield f"attend {kind}", _crc(ops.attend(q, keys, values, 0.25, VISIBLE).swapaxes(1, 2))
    scores, pattern = np.zeros((2, B, H, T, S), np.float32)
    for number, known_step in enumerate(KNOWN_STEPS):
        steps = AttentionSteps(scores, pattern, known_step)
        y = ops.attend_in_steps(q, keys, values, 0.25, VISIBLE, steps)
        yield f"attend {kind} {number}", _crc(y.swapaxes(1, 2))
        yield f"scores {kind} {number}", _crc(scores)
        yield f"pattern {kind} {number}", _crc(pattern)
    if ops.cache_type == np.float32:
        to = np.empty((1, *keys.shape), np.float16)
        NativeOps("int8").copyto(to, keys[None])
        yield "narrow", _crc(to)


def _block(ops: NativeOps) -> Block:
    inner = 100
    c_attn = Linear(_matrix(ops, "c_attn", C, 3 * C), _floats("b_attn", 3 * C))
    c_proj = Linear(_matrix(ops, "c_proj", C, C), _floats("b_proj", C))
    c_fc = Linear(_matrix(ops, "c_fc", C, inner), _floats("b_fc", inner))
    mlp_c_proj = Linear(_matrix(ops, "m_proj", inner, C), _floats("m_bias", C))
    attention = Attention(c_attn, c_proj, H, 0.25)
    return Block(_norm("ln_1", C), attention, _norm("ln_2", C), MLP(c_fc, mlp_c_proj, "gelu_new"))


def _model(ops: NativeOps) -> Hashes:
    h, vocabulary, count = (_block(ops), _block(ops)), 150, 5
    keys, values = ops.new_cache(len(h), B, H, CAPACITY, D)
    keys[...] = values[...] = 0
    cache = SimpleNamespace(keys=keys, values=values, lengths=PAST, new=LENGTHS)
    x = ops.layers(_floats("hidden", B, T, C), h, VISIBLE, cache)
    yield f"layers {ops.dtype}", _crc(x)
    cache.lengths = PAST + LENGTHS
    wte = _matrix(ops, "wte", C, vocabulary, transposed=True)
    model = SimpleNamespace(
        wte=wte, wpe=_floats("wpe", 90, C), h=h, ln_f=_norm("ln_f", C), lm_head=Linear(wte)
    )
    last, banned = _integers("last", B, vocabulary - 1), _integers("banned", 3, vocabulary - 1)
    params = SamplingParams(top_k=40, top_p=1, temperature=1)
    ids = ops.draft(model, cache, last, _doubles("uniforms", count, B), banned, params)
    yield f"draft {ops.dtype}", _crc(ids)
