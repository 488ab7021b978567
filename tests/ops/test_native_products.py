"""Compiled products, and the matrices that they take: packed, quantized, cut into parts."""

import ctypes
import errno
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_cli.errors import CheckpointError
from gpt_cli.folder.dtypes import GROUP
from gpt_cli.folder.tensors import Tensor
from gpt_cli.ops import Linear, bindings, packing
from gpt_cli.ops.int8 import LARGEST, Int8Rows, quantize
from gpt_cli.ops.memory import Arena
from gpt_cli.ops.short import RoundedRows
from support.checkpoints import filed
from support.native_arrays import (
    COLUMNS,
    FLOATS,
    NAN_AND_INF,
    NUMPY,
    activated,
    activations,
    array,
    assert_same_bits,
    at_each_level,
    chain,
    matrix_of,
    multiply_add,
    rows_of_x,
    seeds,
    sizes,
)
from support.processes import posix
from support.rounding import nearest

pytestmark = pytest.mark.usefixtures("library")


# --- products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, "int8"])
@given(C=sizes, V=sizes, tokens=st.integers(1, 40), seed=seeds)
@at_each_level
def test_embed(level, native, dtype, C, V, tokens, seed):
    random = np.random.default_rng(seed)
    wte, wpe = matrix_of(dtype, V, C, seed=seed), array("wpe", 9, C, seed=seed)
    ids, positions = random.integers(V, size=(1, tokens)), random.integers(9, size=(1, tokens))
    ops = native(dtype)
    x = ops.embed(ops.place_matrix(wte, transposed=True), wpe, ids, positions)
    rows = quantize(wte, transposed=True) if dtype == "int8" else wte
    assert_same_bits(x, rows[:][ids] + wpe[positions])


@pytest.mark.parametrize("dtype", FLOATS)
@given(
    rows=rows_of_x, n_in=sizes, n_out=sizes, activation=activations, has_bias=st.booleans(),
    transposed=st.booleans(), seed=seeds,
)  # fmt: skip
@at_each_level
def test_linear_is_a_chain_of_multiply_adds(
    level, native, dtype, rows, n_in, n_out, activation, has_bias, transposed, seed
):
    ops, x = native(dtype), array("x", rows, n_in, seed=seed)
    stored = matrix_of(dtype, *((n_out, n_in) if transposed else (n_in, n_out)), seed=seed)
    bias = array("bias", n_out, seed=seed) if has_bias else None
    start = np.zeros((rows, n_out), np.float32) + (bias if has_bias else 0)
    w = Linear(ops.place_matrix(stored, transposed=transposed), bias)
    sums = chain(x, stored[:].T if transposed else stored[:], start)
    assert_same_bits(ops.linear(x, w, activation), activated(native("float32"), sums, activation))


@pytest.mark.parametrize("dtype", FLOATS)
@given(
    rows=st.integers(45, 75), n_in=st.sampled_from([255, 256, 257, 600]), n_out=sizes,
    activation=activations, has_bias=st.booleans(), seed=seeds,
)  # fmt: skip
@settings(max_examples=10)
def test_many_rows_have_the_bits_of_single_rows(
    level, native, dtype, rows, n_in, n_out, activation, has_bias, seed
):
    ops, x = native(dtype), array("x", rows, n_in, seed=seed)
    bias = array("bias", n_out, seed=seed) if has_bias else None
    w = Linear(ops.place_matrix(matrix_of(dtype, n_in, n_out, seed=seed)), bias)
    together = ops.linear(x, w, activation)
    for row, y in zip(x, together, strict=True):
        assert_same_bits(y, ops.linear(row[None], w, activation)[0])


@given(
    rows=rows_of_x, n_in=sizes, n_out=sizes, activation=activations, has_bias=st.booleans(),
    seed=seeds,
)  # fmt: skip
@at_each_level
def test_linear_with_int8_weights_is_a_chain_over_groups(
    level, native, rows, n_in, n_out, activation, has_bias, seed
):
    ops, x = native("int8"), array("x", rows, n_in, seed=seed)
    quantized = quantize(array("matrix", n_in, n_out, seed=seed))
    bias = array("bias", n_out, seed=seed) if has_bias else None
    y = ops.linear(x, Linear(ops.place_matrix(quantized), bias), activation)
    most, largest = np.float32(32639), abs(x).max(axis=-1, keepdims=True)
    whole = np.rint(x.astype(np.float64) * (most / largest)).astype(np.int64)
    total = np.zeros((rows, n_out), np.float32)
    for index, scale in enumerate(quantized.scale):
        group = slice(index * GROUP, (index + 1) * GROUP)
        sums = whole[:, group] @ quantized.weight[group].astype(np.int64)
        total = multiply_add(sums.astype(np.float32), scale, total)
    total = multiply_add(total, largest / most, bias if has_bias else np.float32(0))
    assert_same_bits(y, activated(native("float32"), total, activation))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("shape", [(768, 768), (768, 2304), (3072, 768), (768, 3072)])
def test_a_matrix_has_parts_for_all_threads_and_none_that_is_too_small(
    library, native, dtype, shape
):
    packed = packing.Packed(*shape, dtype, Arena())
    panels, panel_bytes = len(packed.panels), packed.panels.strides[0]
    call = bindings.LinearRows(w=packed.struct)
    for threads in range(2, 65):
        ranges = library.gpt2_linear_ranges(ctypes.byref(call), threads)
        least = -(-min(256 * 1024, panels * panel_bytes // (2 * threads)) // panel_bytes)
        assert min(threads, panels) <= ranges <= panels
        assert (ranges - 1) * least < panels  # all but the last have at least this many panels


@pytest.mark.parametrize("dtype", [*FLOATS, "int8"])
@pytest.mark.parametrize("damage", NAN_AND_INF)
@given(rows=rows_of_x, n_in=sizes, activation=activations, data=st.data())
@settings(max_examples=15)
def test_nan_and_inf_spoil_only_their_row_as_in_numpy(
    native, dtype, damage, rows, n_in, activation, data
):
    ops, x = native(dtype), array("x", rows, n_in)
    stored, bias = matrix_of(dtype, n_in, 40), array("bias", 40)
    w = Linear(ops.place_matrix(stored), bias)
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, n_in - 1))
    before = ops.linear(x, w, activation)
    x[row, column] = damage
    y = ops.linear(x, w, activation)
    others = np.arange(rows) != row
    assert_same_bits(y[others], before[others])
    with np.errstate(all="ignore"):
        expected = NUMPY.linear(x.astype(np.float64), Linear(stored[:], bias), activation)
    finite = np.isfinite(y[row])
    if dtype == "int8" and activation is None:
        assert not finite.any()
    elif dtype != "int8":
        assert np.array_equal(finite, np.isfinite(expected[row]))


def test_linear_rejects_wrong_shapes(parts):
    for x, bias, activation in (
        ((2, 11), (20,), None),
        ((2, 13), (20,), None),
        ((2, 12), (19,), None),
        ((2, 12), (1, 20), None),
        ((2, 12), (20,), "tan"),
    ):
        with pytest.raises(ValueError, match=r"cannot be|not in tuple"):
            parts["ops"].linear(array("x", *x), Linear(parts["w"], array("b", *bias)), activation)


@pytest.mark.parametrize(("id", "position"), [(20, 0), (-1, 0), (0, 6), (0, -1), (2**40, 0)])
@pytest.mark.parametrize("dtype", [*FLOATS, "int8"])
def test_an_id_or_position_out_of_range_is_rejected(native, parts, dtype, id, position):
    ops, wte = native(dtype), native(dtype).place_matrix(matrix_of(dtype, 12, 20))
    with pytest.raises(IndexError, match="an id or a position is out of range"):
        ops.embed(wte, parts["wpe"], np.array([[0, id]]), np.array([[0, position]]))


# --- packing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("piece", [1, 100, 5000, 10**6])
@pytest.mark.parametrize("kind", ["float32", "int8", "rounded"])
def test_packing_in_pieces_equals_packing_at_once(native, monkeypatch, kind, transposed, piece):
    ops, matrix = native("float32" if kind == "float32" else "int8"), array("matrix", 131, 97)
    whole = ops.place_matrix(matrix, transposed=transposed)
    if kind == "rounded":
        matrix = quantize(matrix, transposed=transposed)
    monkeypatch.setattr(packing, "_PIECE", piece)
    again = ops.place_matrix(matrix, transposed=transposed)
    assert (again.n_in, again.n_out) == ((97, 131) if transposed else (131, 97))
    assert np.array_equal(again.panels.view(np.uint8), whole.panels.view(np.uint8))


# C reads about 256 kB at a time, or a row (in int8, GROUP rows) if that is longer.
def in_a_file_and_in_memory(matrix, dtype, transposed):
    """Return the same rows of a matrix in a dtype, in a file and in memory."""
    if dtype == "int8":
        rows = quantize(matrix, transposed=transposed)
        return replace(rows, weight=filed(rows.weight, "int8")), rows
    stored = filed(matrix, dtype)
    return stored, stored[:]


def widened(placed):
    """Return the panels of a matrix, those in 16 bits as float32."""
    if placed.format == "bfloat16":
        return (placed.panels.astype(np.uint32) << 16).view(np.float32)
    if placed.format == "float16":
        return placed.panels.view(np.float16).astype(np.float32)
    return placed.panels


@pytest.mark.parametrize(
    ("n_rows", "length"), [(1, 1), (131, 97), (1030, 512), (300, 1001), (70, 5000), (3, 70_000)]
)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [*FLOATS, "int8"])
def test_packing_from_a_file_equals_packing_from_memory(native, dtype, transposed, n_rows, length):
    matrix = array("matrix", n_rows, length)
    stored, expected = in_a_file_and_in_memory(matrix, dtype, transposed)
    placed = native(dtype).place_matrix(stored, transposed=transposed)
    in_memory = native("int8" if dtype == "int8" else "float32")
    panels = in_memory.place_matrix(expected, transposed=transposed).panels
    assert np.array_equal(widened(placed), panels)


@pytest.mark.parametrize(("n_rows", "length"), [(1, 1), (131, 97), (1030, 512), (3, 70_000)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_rows_are_packed_in_16_bits(native, dtype, transposed, n_rows, length):
    matrix = array("matrix", n_rows, length)
    stored = filed(nearest(matrix, dtype), dtype)
    rounded = RoundedRows(matrix, dtype)
    packed, expected = (
        native(dtype).place_matrix(rows, transposed=transposed) for rows in (rounded, stored)
    )
    assert packed.format == expected.format == dtype
    assert np.array_equal(packed.panels, expected.panels)
    for other in {*FLOATS, "int8"} - {dtype}:  # there they are only numbers in float32
        packed, expected = (
            native(other).place_matrix(rows, transposed=transposed) for rows in (rounded, stored[:])
        )
        assert packed.format == expected.format != dtype
        assert np.array_equal(packed.panels.view("u1"), expected.panels.view("u1"))


@pytest.mark.parametrize("dtype", [*FLOATS, "int8"])
def test_a_truncated_file_is_rejected(native, dtype):
    stored = filed(np.ones((3, 4), np.int8 if dtype == "int8" else np.float32), dtype)
    longer = replace(stored, shape=(4, 4))
    rows = Int8Rows(longer, np.ones((1, 4), np.float32), False) if dtype == "int8" else longer
    with pytest.raises(CheckpointError, match="changed while it was read"):
        native(dtype).place_matrix(rows)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("wrong", "in_file"),
    [("weight", False), ("scale", False), ("weight", True), ("scale", True), ("no scale", True)],
)
def test_int8_in_another_format_is_rejected(native, transposed, wrong, in_file):
    rows = quantize(array("matrix", 70, 40), transposed=transposed)
    if wrong == "weight":
        rows.weight[69, 39] = -128  # some levels cannot negate it
    elif wrong == "scale":
        rows.scale[-1, -1] = 0.0117999
    if in_file:
        rows = replace(rows, weight=filed(rows.weight, "int8"))
    rows = rows.weight if wrong == "no scale" else rows
    with pytest.raises(CheckpointError, match="int8 weights must be from -127 to 127"):
        native("int8").place_matrix(rows, transposed=transposed)


@pytest.fixture
def small_parts(monkeypatch):
    """Let a matrix be read in several parts."""
    monkeypatch.setattr(packing, "_PART", 1 << 16)


def placed_together(ops, matrices):
    with ops.placing(matrices) as wait:
        return wait()


@pytest.mark.parametrize("dtype", [*FLOATS, "int8"])
def test_matrices_that_are_placed_together_are_those_in_memory(native, dtype, small_parts):
    ops, matrices, expected = native(dtype), [], []
    in_memory = native("int8" if dtype == "int8" else "float32")
    for n_rows, length in [(2000, 300), (70, 40), (1, 1), (300, 500)]:
        matrix = array("matrix", n_rows, length)
        for transposed in (False, True):
            stored, rows = in_a_file_and_in_memory(matrix, dtype, transposed)
            matrices += [(stored, transposed), (rows, transposed)]
            expected += [in_memory.place_matrix(rows, transposed=transposed)] * 2
    for placed, other in zip(placed_together(ops, matrices), expected, strict=True):
        assert (placed.n_in, placed.n_out) == (other.n_in, other.n_out)
        assert np.array_equal(widened(placed), other.panels)


def test_the_error_names_the_file_of_several(native, small_parts):
    first, second, third = (filed(np.ones((300, 400), np.float32)) for _ in range(3))
    matrices = [(first, False), (replace(second, shape=(301, 400)), False), (third, False)]
    with pytest.raises(CheckpointError, match=f"{second.path} changed while it was read"):
        placed_together(native("float32"), matrices)
    refusal = OSError(errno.EMFILE, "Too many open files", str(second.path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", refusing(second.path, refusal))
        with pytest.raises(OSError, match=f"Too many open files: '{second.path}'"):
            placed_together(native("float32"), [(first, False), (second, False)])


def refusing(refused, error):
    """Return `Path.open`, which raises an error for one path."""
    path_open = Path.open

    def open_or_refuse(path, *arguments, **options):
        if path == refused:
            raise error
        return path_open(path, *arguments, **options)

    return open_or_refuse


def test_a_matrix_that_cannot_be_converted_is_an_error(native):
    class Damaged:
        shape = (10, 20)

        def __getitem__(self, rows):
            raise EOFError("damaged")

    matrices = [(array("matrix", 70, 40), False), (Damaged(), False)]
    with pytest.raises(EOFError, match="damaged"):
        placed_together(native("float32"), matrices)


@posix
@pytest.mark.parametrize("error", [CheckpointError("the tokenizer"), KeyboardInterrupt()])
def test_an_error_ends_the_reading_of_matrices(native, small_parts, error):
    matrices = [(filed(np.ones((20_000, 300), np.float32)), False)] * 8
    before = threading.active_count(), open_files()
    with pytest.raises(type(error)), native("float32").placing(matrices):
        raise error
    assert (threading.active_count(), open_files()) == before


def open_files():
    """Return the descriptors of this process."""
    return sorted(path.name for path in Path("/dev/fd").iterdir())


def test_a_wait_for_matrices_can_be_interrupted(native, monkeypatch):
    """Python raises an interrupt in the main thread when this returns from C."""
    run, threads = packing._Reading.run, []

    def record(reading):
        threads.append(threading.current_thread())
        run(reading)

    monkeypatch.setattr(packing._Reading, "run", record)
    stored = filed(np.ones((300, 400), np.float32))
    placed_together(native("float32"), [(stored, False)])
    assert threads and threading.main_thread() not in threads


def test_a_reading_that_is_stopped_reads_nothing_more(library):
    stored = filed(np.ones((300, 400), np.float32))
    matrix = packing._unpacked(stored, "float32", Arena(), transposed=False)
    reading = packing._Reading([(matrix, stored)])
    reading.stop()
    reading.run()
    reading.close()
    assert not matrix.packed.panels.any()


def test_rows_with_gaps_are_read_as_they_are(native):
    matrix = array("matrix", 70, 40)
    stored = filed(matrix)
    turned = stored.transposed()
    assert turned.strides
    placed = native("float32").place_matrix(turned)
    assert np.array_equal(placed.panels, native("float32").place_matrix(matrix.T).panels)


def test_matrices_that_other_ops_placed_or_of_an_unreadable_file_are_rejected(
    native, tmp_path, monkeypatch
):
    @contextmanager
    def open_to_write(path, version):
        with path.open("wb", buffering=0) as file:
            yield file

    monkeypatch.setattr(packing, "open_unchanged", open_to_write)
    ops, placed = native("float32"), native("int8").place_matrix(array("matrix", 40, 40))
    with pytest.raises(ValueError, match="the weight cannot be"):
        ops.linear(array("x", 1, 40), Linear(placed))
    with pytest.raises(ValueError, match="rows and columns"):
        ops.place_matrix(np.empty((0, 4), np.float32))
    with pytest.raises(OSError, match=r"Bad file descriptor: .*written"):
        ops.place_matrix(Tensor(tmp_path / "written", None, 0, "F32", (2, 2)))


# --- int8 from matrices in memory ----------------------------------------------------------------


def quantized(ops, matrix, transposed=False):
    return ops.draft_ops().quantize(ops.place_matrix(matrix, transposed=transposed))


def assert_quantized_as_packed(native, dtype, matrix, transposed=False):
    matrix = matrix if dtype == "float32" else filed(matrix, dtype)
    expected = native("int8").place_matrix(matrix[:], transposed=transposed)
    packed = quantized(native(dtype), matrix, transposed)
    assert (packed.n_in, packed.n_out, packed.format) == (expected.n_in, expected.n_out, "int8")
    assert np.array_equal(packed.panels, expected.panels)


@pytest.mark.parametrize("dtype", FLOATS)
@given(
    n_in=sizes, n_out=sizes, transposed=st.booleans(), exponent=st.integers(-150, 122),
    threads=st.integers(1, 3), seed=seeds,
)  # fmt: skip
@at_each_level
def test_quantizing_in_memory_equals_packing(
    level, native, dtype, n_in, n_out, transposed, exponent, threads, seed
):
    random = np.random.default_rng(seed)
    exponent = exponent // 13 if dtype == "float16" else exponent
    matrix = array("matrix", n_in, n_out, seed=seed) ** 3 * np.float32(2) ** exponent
    matrix[random.random(matrix.shape) < 0.2] = -0.0
    matrix[:, random.integers(n_out, size=n_out // 9)] = 0
    matrix[:GROUP, n_out // 2] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native(dtype), "threads", threads)
        matrix = matrix.T.copy() if transposed else matrix
        assert_quantized_as_packed(native, dtype, matrix, transposed)


@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_of_every_size_are_quantized_as_they_are_packed(level, native, dtype):
    if dtype == "float16":
        numbers = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    else:
        numbers = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)
    if dtype == "float32":
        numbers = np.concatenate([numbers, np.nextafter(numbers, np.float32(0))])
    for order in (numbers, -np.random.default_rng(1).permutation(numbers)):
        assert_quantized_as_packed(native, dtype, np.resize(order, (384, 170)))


def test_ties_are_quantized_as_they_are_packed(level, native):
    matrix = np.resize(np.arange(-126.5, 127), (GROUP, 130))
    matrix[0] = LARGEST
    matrix *= 2.0 ** np.arange(-142, 118, 2)
    assert_quantized_as_packed(native, "float32", matrix.astype(np.float32))


def test_int8_is_not_quantized_again(native):
    placed = native("int8").place_matrix(array("matrix", 40, 40))
    with pytest.raises(ValueError, match="the matrix cannot be"):
        native("float32").draft_ops().quantize(placed)


@pytest.mark.parametrize("damage", NAN_AND_INF)
def test_a_damaged_weight_changes_only_its_group_in_int8(level, native, damage):
    matrix = array("matrix", 150, 70)
    expected = quantized(native("float32"), matrix).panels
    matrix[70, 40] = damage
    same = quantized(native("float32"), matrix).panels == expected
    panels, groups, _ = same.shape
    weights = same[..., : GROUP * COLUMNS].reshape(panels, groups, GROUP // 4, COLUMNS, 4)
    scales = same[..., GROUP * COLUMNS :].reshape(panels, groups, COLUMNS, 2)
    weights[1, 1, :, 40 % COLUMNS] = scales[1, 1, 40 % COLUMNS] = True
    assert weights.all()
    assert scales.all()
