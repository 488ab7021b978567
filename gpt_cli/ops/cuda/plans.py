"""Rules for the launches of kernels: grids, blocks and shared memory, for any sizes.

The sums of a result are the same in all tiles, so these rules change the time and never the bits.
"""

from dataclasses import dataclass
from functools import lru_cache

from gpt_cli.folder.dtypes import GROUP, WEIGHT_TYPES, WeightType

PANEL = 8  # columns of a panel of a matrix
SLOTS = 32  # tokens of a panel of a cache
WARP = 32
_FLOAT_ROWS = 32  # of a unit of a panel, without groups
_STAGES = 3  # of products.cu
_ROW_THREADS = 256  # of operations on single rows and numbers
_NORM_THREADS = 128  # of `layer_norm`
_ROW_MEMORY = 21_120  # bytes of `struct row_memory`, at least
SPAN = 64  # columns whose largest logit is computed first
PARTIAL_SUMS = 16  # of a sum over a row
LOG_SUM_STEP = 256  # logits whose exponentials are added in float32
_RESERVED = 1024  # bytes of shared memory that the system takes for each block


@dataclass(frozen=True)
class Launch:
    """A kernel and the arguments of its launch."""

    kernel: str
    grid: tuple[int, int]  # blocks
    threads: int
    shared: int = 0  # bytes


@dataclass(frozen=True)
class Device:
    """The limits of a GPU."""

    processors: int  # multiprocessors
    shared: int  # bytes of shared memory of a block, at most


@dataclass(frozen=True)
class Tile:
    """A tile of results: rows x columns of a block, high x wide of a thread; see products.cu.

    The times were measured on an H100, in microseconds. A multiprocessor takes `start` for a
    launch, and then `pace` for each tile and 768 rows of the matrix, but `alone` for a single
    tile, whose threads wait for their own sums and loads.
    """

    rows: int
    columns: int
    high: int
    wide: int
    start: float
    pace: float
    alone: float
    step: int = 0  # along k, of a stage; 0 in int8, where a stage is a group

    @property
    def kernel(self) -> str:
        """Return the name of the kernel of this tile."""
        return f"linear_{self.rows}x{self.columns}"

    @property
    def threads(self) -> int:
        """Return the threads of a block."""
        return self.rows // self.high * (self.columns // self.wide)

    @property
    def shared(self) -> int:
        """Return the bytes of shared memory: of the stages, or of the results for an activation."""
        panels = self.columns // PANEL
        if self.step:
            stage = 4 * (self.rows * (self.step + 4) + self.columns * self.step)
        else:
            stage = self.rows * (2 * GROUP + 16) + panels * PANEL * (GROUP + 2)
        return max(_STAGES * stage, 4 * self.rows * self.columns)

    def time(self, tiles: int, n_in: int) -> float:
        """Return about how long a multiprocessor takes for tiles of a product with n_in rows."""
        return self.start + n_in / 768 * max(self.alone, tiles * self.pace)


_FLOAT_TILES = (
    Tile(64, 96, 8, 6, 14, 29, 29, 16),
    Tile(64, 64, 8, 4, 12, 20.4, 20.4, 16),
    Tile(32, 48, 4, 3, 9, 9.4, 11.4, 32),
    Tile(16, 24, 1, 3, 8, 6, 7.7, 32),
)
_INT8_TILES = (
    Tile(64, 64, 8, 4, 10, 14.5, 14.5),
    Tile(32, 48, 4, 3, 8, 5.6, 6.7),
    Tile(16, 24, 1, 3, 7, 2.7, 3.4),
)


@dataclass(frozen=True)
class WeightLayout:
    """The layout of the weights of a type, and the tiles and passes that multiply by them.

    Attributes:
        unit_rows: rows of a unit of a panel.
        unit_bytes: bytes of a unit.
        tiles: tiles for products of many rows.
        pass_rows: the numbers of rows that the kernel of a pass is compiled for. With more rows,
            tiles are faster.
    """

    unit_rows: int
    unit_bytes: int
    tiles: tuple[Tile, ...]
    pass_rows: tuple[int, ...]

    def units(self, n_in: int) -> int:
        """Return how many units of a panel hold the rows of a matrix."""
        return -(-n_in // self.unit_rows)

    def padded(self, n_in: int) -> int:
        """Return a number of rows of a matrix, padded to whole units."""
        return self.units(n_in) * self.unit_rows


def _layout(kind: WeightType) -> WeightLayout:
    if kind.has_groups:
        return WeightLayout(GROUP, PANEL * (GROUP + 2), _INT8_TILES, (1, 4, 8))
    return WeightLayout(_FLOAT_ROWS, kind.stored_bytes * PANEL * _FLOAT_ROWS, _FLOAT_TILES, (4, 8))


LAYOUTS = {name: _layout(kind) for name, kind in WEIGHT_TYPES.items()}


@lru_cache(maxsize=256)
def linear(rows: int, n_in: int, n_out: int, dtype: str, device: Device) -> Launch:
    """Return the launch whose busiest multiprocessor takes the least time."""

    def time(tile: Tile) -> float:
        blocks = -(-rows // tile.rows) * -(-n_out // tile.columns)
        return tile.time(-(-blocks // device.processors), n_in)

    fitting = [tile for tile in LAYOUTS[dtype].tiles if tile.shared <= device.shared]
    tile = min(fitting, key=time)
    grid = -(-n_out // tile.columns), -(-rows // tile.rows)
    return Launch(tile.kernel, grid, tile.threads, tile.shared)


def pack(count: int, length: int, device: Device) -> Launch:
    """Return the launch that packs `count` stored rows of `length` weights."""
    return Launch("pack", (_blocks(count * length, device), 1), _ROW_THREADS)


@lru_cache(maxsize=256)
def embed(tokens: int) -> Launch:
    """Return the launch that embeds tokens, one in each block."""
    return Launch("embed", (tokens, 1), _ROW_THREADS)


@lru_cache(maxsize=256)
def layer_norm(rows: int, C: int) -> Launch:
    """Return the launch that normalizes rows, one in each block."""
    return Launch("layer_norm", (rows, 1), _NORM_THREADS, 16 * -(-C // 4) + 8)


@lru_cache(maxsize=256)
def round_rows(rows: int) -> Launch:
    """Return the launch that rounds rows to integers, before `linear` with int8 weights."""
    return Launch("round_rows", (rows, 1), _ROW_THREADS, _ROW_THREADS // WARP * 4)


def elementwise(kernel: str, numbers: int, device: Device) -> Launch:
    """Return the launch of `add`, `exponentials` or `activations`."""
    return Launch(kernel, (_blocks(numbers, device), 1), _ROW_THREADS)


def _blocks(numbers: int, device: Device) -> int:
    """Return how many blocks share the work on many numbers."""
    return max(1, min(-(-numbers // _ROW_THREADS), 32 * device.processors))


@lru_cache(maxsize=256)
def store(heads: int, T: int) -> Launch:
    """Return the launch that stores T new tokens of B * H heads."""
    return Launch("store", (heads, -(-T // SLOTS)), 128)


@lru_cache(maxsize=256)
def attend(heads: int, T: int, D: int, S: int, device: Device) -> Launch:
    """Return the launch of the attention of T queries of B * H heads to S keys."""

    def shared(queries: int, scores: int) -> int:
        sums = -(-queries // 4) * 4
        return 4 * (queries * -(-D // 4) * 4 + sums + queries * scores)

    stride = -(-S // SLOTS) * SLOTS
    half = device.shared // 2 - _RESERVED  # two blocks at a time hide each other's waits
    for queries, most in ((16, half), (8, half), (8, device.shared)):
        if T > 1 and shared(queries, stride) <= most:
            grid = heads * -(-T // queries), 1
            return Launch(f"attend_{queries}", grid, 128, shared(queries, stride))
    if shared(1, stride) <= device.shared:
        return Launch("attend_1", (heads * T, 1), 128, shared(1, stride))
    return Launch("attend_long", (heads * T, 1), 128, shared(1, 0))


def attend_scratch(launch: Launch, S: int) -> int:
    """Return the number of floats of `scratch` for an attention."""
    return launch.grid[0] * -(-S // SLOTS) * SLOTS if launch.kernel == "attend_long" else 0


@lru_cache(maxsize=256)
def of_rows(kernel: str, rows: int, n: int) -> Launch:
    """Return the launch of a kernel for rows of n logits, with one block for each row."""
    return Launch(kernel, (rows, 1), _ROW_THREADS, _ROW_MEMORY + 4 * -(-n // SPAN))


# --- the pass: see pass.cu -----------------------------------------------------------------------

PASS_WARPS = 8  # of a block, that compute
PASS_THREADS = 12 * WARP  # the last warp copies; see COPYING_WARP
_PADDING = 4  # floats behind a row of x
_TILE_KEYS = 32  # whose values are copied together
_MOST_STAGES = 8  # of a ring
_LAYER_BYTES = 216  # of `struct layer`

# How shared memory is divided, the best first: tiles of values, the size of a stage / 4 KB, and the
# fewest stages of a ring. A copy of weights takes about as long as the use of two to four stages of
# 4 KB.
_DIVISIONS = ((6, 1.0, 5), (3, 1.0, 4), (3, 1.0, 3), (3, 0.5, 3), (2, 0.25, 3))


@dataclass(frozen=True)
class PassShape:
    """The sizes that the shared memory of a pass depends on."""

    dtype: str
    n_layer: int
    C: int
    inner: int
    D: int
    V: int
    cache_panels: int


@dataclass(frozen=True)
class PassPlan:
    """A compiled kernel for passes, and the arguments of its launch."""

    most_rows: int  # this and the next two are constants of the kernel
    stage_units: int  # units of a panel in a stage
    tiles: int  # of values in shared memory
    stages: int  # of a ring
    chunk: int  # rows of a matrix whose x is in shared memory at a time
    shared: int  # bytes


@lru_cache(maxsize=256)
def pass_plan(rows: int, shape: PassShape, device: Device) -> PassPlan | None:
    """Return how to compute passes of this many rows; None if shared memory is too small.

    A kernel needs heads of whole 16-byte pieces, and at most 128 numbers.
    """
    if shape.D % 8 or shape.D > 128 or shape.C % 4 or shape.inner % 4:
        return None
    for most_rows in LAYOUTS[shape.dtype].pass_rows:
        if most_rows >= rows:
            return _plan_for(most_rows, rows, shape, device)
    return None


@lru_cache(maxsize=256)
def most_pass_rows(shape: PassShape, device: Device) -> int:
    """Return the most rows that a pass can have; 0 if it can have none."""
    choices = LAYOUTS[shape.dtype].pass_rows
    return max((rows for rows in choices if pass_plan(rows, shape, device)), default=0)


def _plan_for(most_rows: int, rows: int, shape: PassShape, device: Device) -> PassPlan | None:
    """Return the plan with the best division of shared memory that fits and the longest chunk."""
    layout = LAYOUTS[shape.dtype]
    narrow, wide = layout.padded(shape.C), layout.padded(shape.inner)
    places = 4 * PASS_WARPS * PANEL * (1 + most_rows) + 16 * -(-3 * most_rows // 4)
    fixed = 128 + 16 + shape.n_layer * _LAYER_BYTES + 2 * 16 * -(-shape.C // 4) + places
    for tiles, part, fewest in _DIVISIONS:
        stage_units = int(part * round(4096 / layout.unit_bytes))
        stage_bytes = stage_units * layout.unit_bytes + 16  # with its barriers
        for chunk in _chunks(max(narrow, wide), stage_units * layout.unit_rows, shape.dtype):
            rest = _rest(rows, chunk, tiles, narrow, wide, shape)
            stages = min((device.shared - fixed - rest) // (PASS_WARPS * stage_bytes), _MOST_STAGES)
            if stages >= fewest:
                used = fixed + rest + stages * PASS_WARPS * stage_bytes
                return PassPlan(most_rows, stage_units, tiles, stages, chunk, used)
    return None


def _chunks(longest: int, stage_rows: int, dtype: str) -> list[int]:
    """Return the numbers of rows of a matrix whose x may be in shared memory, the largest first."""
    if WEIGHT_TYPES[dtype].has_groups:  # a whole row of x is rounded
        return [longest]
    return [longest, *range(longest // stage_rows * stage_rows, 0, -stage_rows)]


def _rest(rows: int, chunk: int, tiles: int, narrow: int, wide: int, shape: PassShape) -> int:
    """Return the bytes that products, attention or the choice of a token need, one at a time."""
    kind = WEIGHT_TYPES[shape.dtype]
    x = 4 * (rows + 1) * (narrow + _PADDING)
    if kind.has_groups:
        x += rows * (2 * max(narrow, wide) + 4 + 4 * PASS_WARPS)
    else:
        chunks = 1 if chunk >= max(narrow, wide) else 2  # in memory at a time
        x = max(x, 4 * chunks * rows * (chunk + _PADDING))
    attention = 4 * (2 * shape.D + 2 * PASS_WARPS + shape.cache_panels * SLOTS)
    attention += tiles * _TILE_KEYS * shape.D * kind.cache_itemsize
    choice = _ROW_MEMORY + 4 * -(-shape.V // SPAN)
    return max(x, attention, choice)
