"""The rules of launches: what they choose fits every GPU."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_cli.ops.cuda import plans
from support.cuda_kernels import FORMATS

# Multiprocessors, and bytes of shared memory of a block.
DEVICES = {
    "2018": plans.Device(40, 65_536),
    "A100": plans.Device(108, 166_912),
    "RTX 4090": plans.Device(128, 101_376),
    "H100": plans.Device(132, 232_448),
}
# Layers, width, heads, vocabulary.
PUBLISHED = {
    "tiny": (4, 128, 4, 2048),
    "distilgpt2": (6, 768, 12, 50257),
    "gpt2": (12, 768, 12, 50257),
    "gpt2-medium": (24, 1024, 16, 50257),
    "gpt2-large": (36, 1280, 20, 50257),
    "gpt2-xl": (48, 1600, 25, 50257),
}
devices, dtypes = st.sampled_from([*DEVICES.values()]), st.sampled_from(FORMATS)


def shape_of(dtype, n_layer, C, heads, V, inner=None, slots=1024):
    return plans.PassShape(dtype, n_layer, C, inner or 4 * C, C // heads, V, -(-slots // 32))


def least_memory(rows, shape, plan):
    """Return the bytes that a pass needs in any case; see `divide` in pass_memory.cu."""
    stage = plan.stage_units * plans.LAYOUTS[shape.dtype].unit_bytes
    rings = plans.PASS_WARPS * plan.stages * (stage + 16)
    results = 4 * plans.PASS_WARPS * plans.PANEL * (1 + plan.most_rows)  # biases and residuals
    fixed = rings + shape.n_layer * plans._LAYER_BYTES + 2 * 4 * shape.C + results
    is_int8 = shape.dtype == "int8"
    x = 2 * rows * shape.inner if is_int8 else 4 * rows * plan.chunk
    values = plan.tiles * plans._TILE_KEYS * shape.D * (2 if is_int8 else 4)
    attention = values + 4 * (shape.D + plans.SLOTS * shape.cache_panels)
    return fixed + max(x, attention, 4 * -(-shape.V // plans.SPAN))


def check_pass(rows, shape, device):
    """Check the plan of a pass, if there is one, and return it."""
    plan = plans.pass_plan(rows, shape, device)
    if plan is None:
        return None
    assert rows <= plan.most_rows <= 8
    assert plan.stage_units >= 1
    assert plan.tiles >= 2
    assert 3 <= plan.stages <= 8
    assert least_memory(rows, shape, plan) <= plan.shared <= device.shared
    longest = max(plans.LAYOUTS[shape.dtype].padded(n) for n in (shape.C, shape.inner))
    if plan.chunk != longest:  # a chunk ends where a stage does
        assert shape.dtype != "int8"
        assert plan.chunk % (plan.stage_units * plans.LAYOUTS[shape.dtype].unit_rows) == 0
        assert 0 < plan.chunk < longest
    return plan


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("size", PUBLISHED)
def test_passes_of_published_models_fit(size, dtype):
    shape = shape_of(dtype, *PUBLISHED[size])
    for device in DEVICES.values():
        most = plans.most_pass_rows(shape, device)
        fitting = [rows for rows in range(1, 41) if check_pass(rows, shape, device)]
        assert fitting[:most] == [*range(1, most + 1)]
    assert plans.most_pass_rows(shape, DEVICES["H100"]) == 8


@pytest.mark.parametrize("dtype", FORMATS)
def test_gpt2_has_passes_on_every_device(dtype):
    shape = shape_of(dtype, *PUBLISHED["gpt2"])
    most = [plans.most_pass_rows(shape, device) for device in DEVICES.values()]
    assert most == ([1, 8, 4, 8] if dtype == "int8" else [8, 8, 8, 8])


@pytest.mark.parametrize("dtype", FORMATS)
def test_more_shared_memory_holds_longer_stages_and_more_tiles(dtype):
    shape = shape_of(dtype, *PUBLISHED["gpt2"])
    devices = sorted(DEVICES.values(), key=lambda device: device.shared)
    chosen = [plans.pass_plan(1, shape, device) for device in devices]
    for less, more in pairwise(chosen):
        assert less.stage_units <= more.stage_units
        assert less.tiles <= more.tiles
        assert less.chunk <= more.chunk


@given(
    n_layer=st.integers(1, 48), heads=st.integers(1, 32), D=st.integers(1, 160),
    inner=st.integers(1, 9000), V=st.integers(1, 300_000), slots=st.integers(1, 9000),
    rows=st.integers(1, 40), dtype=dtypes, device=devices,
)  # fmt: skip
def test_passes_of_any_model_fit(n_layer, heads, D, inner, V, slots, rows, dtype, device):
    shape = shape_of(dtype, n_layer, heads * D, heads, V, inner, slots)
    plan = check_pass(rows, shape, device)
    if D % 8 or D > 128 or heads * D % 4 or inner % 4:
        assert plan is None
    if rows <= plans.most_pass_rows(shape, device):
        assert plan


def check_launch(launch, device):
    assert launch.shared <= device.shared
    assert 1 <= launch.threads <= 1024
    assert launch.threads % 32 == 0
    assert 1 <= launch.grid[0] < 1 << 31
    assert all(1 <= size < 1 << 16 for size in launch.grid[1:])


@given(
    rows=st.integers(1, 70_000), n_in=st.integers(1, 9000), n_out=st.integers(1, 300_000),
    dtype=dtypes, device=devices,
)  # fmt: skip
def test_products_of_any_size_can_be_launched(rows, n_in, n_out, dtype, device):
    check_launch(plans.linear(rows, n_in, n_out, dtype, device), device)
    check_launch(plans.round_rows(rows), device)
    check_launch(plans.layer_norm(rows, n_in), device)
    check_launch(plans.embed(rows), device)
    check_launch(plans.pack(rows, n_in, device), device)
    check_launch(plans.elementwise("activations", rows * n_out, device), device)


@given(
    heads=st.integers(1, 3000), T=st.integers(1, 2000), D=st.integers(1, 320),
    more=st.integers(0, 100_000), device=devices,
)  # fmt: skip
def test_attention_of_any_size_can_be_launched(heads, T, D, more, device):
    launch = plans.attend(heads, T, D, T + more, device)
    check_launch(launch, device)
    assert bool(plans.attend_scratch(launch, T + more)) == (launch.kernel == "attend_long")
    check_launch(plans.store(heads, T), device)


@given(rows=st.integers(1, 5000), n=st.integers(1, 300_000), device=devices)
def test_rows_of_logits_can_be_chosen_from(rows, n, device):
    check_launch(plans.of_rows("choose", rows, n), device)
