"""No two threads of a kernel access a byte without a barrier between, one of them to write.

`compute-sanitizer --tool racecheck` looks for such races on a GPU. This looks for them without one,
and knows asynchronous copies, the barriers of their phases, and barriers between blocks.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from gpt_cli.ops import get_ops
from support import emulated_cuda, gpu_model
from support.emulated_kernels import Card, compile_kernels, read_source
from support.models import DTYPES

WATCHED = {capability: Card(capability, watches_races=True) for capability in (75, 80, 90)}
# Chains and copies of the two kinds; the others take several seconds each.
USUAL = [("float32", 80, True), ("int8", 90, False)]


@pytest.mark.parametrize(
    ("dtype", "capability", "backwards"),
    [
        pytest.param(*case, marks=[] if case in USUAL else pytest.mark.slow)
        for case in product(DTYPES, WATCHED, (False, True))
    ],
)
def test_a_model_has_no_races(monkeypatch, dtype, capability, backwards):
    emulated_cuda.install(monkeypatch, replace(WATCHED[capability], backwards=backwards))
    gpu_model.compute(get_ops("cuda", dtype))


def test_the_pass_needs_its_barriers(monkeypatch):
    def without_a_barrier(names):
        source = read_source(names)
        assert source.count(BARRIER) == ("pass.cu" in names)
        return source.replace(BARRIER, "")

    monkeypatch.setattr("support.emulated_cuda.read_source", without_a_barrier)
    emulated_cuda.install(monkeypatch, WATCHED[80])
    with pytest.raises(RuntimeError, match=r"pass: read, then written: pass_chains\.cu:\d+ "):
        gpu_model.compute(get_ops("cuda", "float32"))


BARRIER = "sync_warp(); // each lane knows that a stage of its own is free: now all know of all\n"

KERNELS = r"""
// Threads write numbers, and read those of others behind a barrier, or none.
KERNEL neighbours(float *y, int waits)
{
    float *shared = (float *)shared_memory;
    shared[threadIdx.x] = threadIdx.x;
    if (waits)
        sync_block();
    y[threadIdx.x] = shared[threadIdx.x ^ 1];
}

// Each reads a number before all write others.
KERNEL readers(float *y, int waits)
{
    float *shared = (float *)shared_memory;
    shared[threadIdx.x] = 1;
    sync_block();
    float number = shared[threadIdx.x ^ 33];
    if (waits)
        sync_block();
    shared[threadIdx.x] = number;
}

// Lanes meet at a barrier of the warp, or in a vote, which orders no memory.
KERNEL lanes(float *y, int waits)
{
    float *shared = (float *)shared_memory;
    shared[threadIdx.x] = threadIdx.x;
    waits ? sync_warp() : (void)vote(true);
    y[threadIdx.x] = shared[threadIdx.x ^ 1];
}

// A warp copies a range. The other one reads it when its phase has ended, or does not wait.
KERNEL ranges(float *y, int waits)
{
    phase_barrier *full = (phase_barrier *)shared_memory;
    float *numbers = (float *)(shared_memory + 128);
    if (threadIdx.x == 0) {
        init_phases(full, 1);
        publish_phases();
    }
    sync_block();
    if (threadIdx.x == 0)
        copy_range(numbers, y, 128, full);
    else if (threadIdx.x >= WARP) {
        while (waits && !has_ended(full, 0)) {}
        y[threadIdx.x] = numbers[threadIdx.x - WARP];
    } else
        while (!has_ended(full, 0)) {}
}

// Blocks read what others wrote behind a barrier of the grid, which only one thread of each passes.
KERNEL blocks(float *y, int waits)
{
    uint32_t *counter = (uint32_t *)(y + 64);
    if (threadIdx.x == 0)
        y[blockIdx.x] = 1;
    if (waits)
        sync_block();
    if (threadIdx.x == 1) {
        add_released(counter, 1);
        while (load_acquired(counter) < gridDim.x) {}
    }
    sync_block();
    if (threadIdx.x == 2)
        y[2 + blockIdx.x] = y[1 - blockIdx.x];
}

// All blocks write the same number.
KERNEL writers(float *y, int waits)
{
    if (threadIdx.x == 0)
        y[waits ? blockIdx.x : 0] = 1;
}
"""


@pytest.mark.parametrize(
    ("name", "race"),
    [
        ("neighbours", "written, then read"),
        ("readers", "read, then written"),
        ("lanes", "written, then read"),
        ("ranges", "written, then read"),
        ("blocks", "written, then read"),
        ("writers", "written twice"),
    ],
)
def test_a_missing_barrier_is_found(name, race):
    kernel = compile_kernels(KERNELS, (), WATCHED[90]).get_function(name)
    grid = (1 if name in ("neighbours", "readers", "lanes", "ranges") else 2,)
    together = {"enable_cooperative_groups": name == "blocks"}

    def launch(waits):
        y = np.zeros(65, np.float32)
        arguments = emulated_cuda.DeviceArray(y), np.int32(waits)
        kernel(grid, (64,), arguments, shared_mem=256, **together)

    launch(waits=1)
    with pytest.raises(RuntimeError, match=f"(?m)^({name}: )?{race}: "):
        launch(waits=0)
