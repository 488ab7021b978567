"""The emulation of a GPU's threads, copies and barriers, with which the kernels are tested."""

import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from support import emulated_kernels
from support.emulated_cuda import DeviceArray
from support.emulated_kernels import Card, compile_kernels, read_source

_KERNELS = r"""
struct job { const float *x; float *y; int64_t n; };

KERNEL places(const struct job job)
{
    int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int i = block * (blockDim.x * blockDim.y * blockDim.z) + thread;
    if (i < job.n)
        job.y[i] = i;
}

// Each block reverses its numbers.
KERNEL LAUNCH_BOUNDS(256, 1) reverse(const struct job job, int waits)
{
    float *shared = (float *)shared_memory;
    int i = threadIdx.x;
    shared[i] = job.x[blockIdx.x * blockDim.x + i];
    if (waits)
        sync_block();
    job.y[blockIdx.x * blockDim.x + i] = shared[blockDim.x - 1 - i];
}

KERNEL lanes(const struct job job, int64_t *wide, uint32_t *votes)
{
    int lane = threadIdx.x % WARP;
    float x = job.x[threadIdx.x];
    job.y[threadIdx.x] = exchange(x, 5) + from_lane(x, lane / 2);
    wide[threadIdx.x] = exchange((int64_t)lane << 40, 1) + exchange(lane, 16);
    double half = from_lane(lane * 0.5, 31);
    sync_warp();
    votes[threadIdx.x] = vote(lane % 3 == 0) + (half == 15.5) + count_bits(7);
}

KERNEL copies(const struct job job, int waits)
{
    float4 *shared = (float4 *)shared_memory;
    for (int half = 0; half < 2; half++) {
        copy16(shared + 32 * half + threadIdx.x, (const float4 *)job.x + 32 * half + threadIdx.x);
        commit_copies();
    }
    waits ? wait_for_copies<1>() : wait_for_copies<2>();
    job.y[threadIdx.x] = shared[threadIdx.x].y;
    job.y[32 + threadIdx.x] = shared[32 + threadIdx.x].y;
}

// The first warp copies rows of 64 numbers through a ring of two; the second adds them.
KERNEL ring(const struct job job, int waits)
{
    phase_barrier *full = (phase_barrier *)shared_memory, *empty = full + 2;
    float *rows = (float *)(shared_memory + 128);
    int lane = threadIdx.x % WARP;
    if (threadIdx.x < 2) {
        init_phases(full + threadIdx.x, COPYING_LANES);
        init_phases(empty + threadIdx.x, WARP);
        publish_phases();
    }
    sync_block();
    float sum = 0;
    for (int row = 0; row < job.n; row++) {
        int slot = row % 2, turn = row / 2;
        if (threadIdx.x < WARP) {
            if (lane >= COPYING_LANES)
                continue;
            while (!has_ended(empty + slot, (turn + 1) % 2)) {}
            copy_range(rows + 64 * slot, job.x + 64 * row, 256, full + slot);
        } else {
            while (waits && !has_ended(full + slot, turn % 2)) {}
            sum += rows[64 * slot + lane] + rows[64 * slot + 32 + lane];
            arrive(empty + slot);
        }
    }
    if (threadIdx.x >= WARP)
        job.y[lane] = sum;
}

// Warps pass a number on, each waiting for its neighbours only.
KERNEL relay(const struct job job)
{
    float *shared = (float *)shared_memory;
    int warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    if (warp > 0)
        sync_threads(warp, 2 * WARP);
    shared[threadIdx.x] = warp ? shared[threadIdx.x - WARP] + 1 : job.x[threadIdx.x];
    if (warp + 1 < warps)
        sync_threads(warp + 1, 2 * WARP);
    job.y[threadIdx.x] = shared[threadIdx.x];
}

// Each block reads what the others wrote.
KERNEL grid_barrier(const struct job job, uint32_t *counter, int blocks)
{
    job.y[blockIdx.x] = 1 + blockIdx.x;
    if (threadIdx.x == 0) {
        add_released(counter, 1);
        while (load_acquired(counter) < blocks) {}
    }
    sync_block();
    float sum = 0;
    for (int i = 0; i < gridDim.x; i++)
        sum += load_fresh(job.y + i);
    if (threadIdx.x == 7)
        job.y[gridDim.x + blockIdx.x] = sum;
}

KERNEL mixed(const struct job job)
{
    if (threadIdx.x % 2)
        sync_warp();
    else
        vote(true);
}

KERNEL all_lanes(const struct job job) { sync_warp(); }

// The last thread reads what the first has written, and the first what the last has written.
KERNEL ends_meet(const struct job job)
{
    float *shared = (float *)shared_memory;
    int last = blockDim.x - 1;
    shared[threadIdx.x] = 1;
    job.y[threadIdx.x] = shared[last - threadIdx.x];
}

KERNEL unpublished(const struct job job)
{
    phase_barrier *barrier = (phase_barrier *)shared_memory;
    init_phases(barrier, 1);
    copy_range(shared_memory + 128, job.x, 16, barrier);
}

KERNEL arrives_twice(const struct job job)
{
    phase_barrier *barrier = (phase_barrier *)shared_memory;
    init_phases(barrier, 2);
    for (int i = 0; i < job.n; i++)
        arrive(barrier);
    job.y[0] = has_ended(barrier, 0);
    job.y[1] = has_ended(barrier, 1);
}

KERNEL bad_address(const struct job job) { job.y[threadIdx.x == 3 ? -(1LL << 40) : 0] = 1; }

KERNEL too_far(const struct job job) { shared_memory[blockDim.x] = 1; }

KERNEL numbers(const struct job job, int32_t *y)
{
    y[0] = dot4(0x80ff017f, 0x7f02ff80, 5);
    job.y[0] = multiply_add(job.x[0], job.x[1], job.x[2]);
    job.y[1] = job.x[0] * job.x[1] + job.x[2];
}

KERNEL widen_all(float *y, float *z)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = widen_float16(i);
    z[i] = widen_bfloat16(i);
}

KERNEL narrow_all(const float *x, uint16_t *y)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = narrow_float16(x[i]);
}
"""


@pytest.fixture(scope="module", params=[90, 80])
def module(request):
    return compile_kernels(_KERNELS, (), Card(request.param))


def _job(x: np.ndarray, size: int, n: int = 0):
    y = DeviceArray(np.full(size, np.nan, np.float32))
    device = DeviceArray(np.asarray(x, np.float32))
    job = np.zeros((), [("x", "u8"), ("y", "u8"), ("n", "i8")])
    job["x"], job["y"], job["n"] = device.data.ptr, y.data.ptr, n
    return job, y, device


def _zeros(size: int, dtype):
    return DeviceArray(np.zeros(size, dtype))


def test_grid_and_block_have_three_dimensions(module):
    job, y, _ = _job([0], 480, 470)
    module.get_function("places")((2, 3, 2), (5, 2, 4), (job,))
    assert np.array_equal(y.get()[:470], np.arange(470))
    assert np.isnan(y.get()[470:]).all()


def test_block_barrier(module):
    x = np.arange(512)
    job, y, _ = _job(x, 512)
    kernel = module.get_function("reverse")
    kernel((2,), (256,), (job, np.int32(1)), shared_mem=1024)
    assert np.array_equal(y.get(), x.reshape(2, 256)[:, ::-1].ravel())
    kernel((2,), (256,), (job, np.int32(0)), shared_mem=1024)
    assert np.isnan(y.get()[:128]).all()
    assert kernel.max_threads_per_block == 256
    with pytest.raises(RuntimeError, match="512 threads"):
        kernel((1,), (512,), (job, np.int32(0)), shared_mem=2048)


def test_lanes_exchange_values(module):
    x = np.random.default_rng(0).random(64).astype(np.float32)
    job, y, _ = _job(x, 64)
    wide, votes = _zeros(64, np.int64), _zeros(64, np.uint32)
    module.get_function("lanes")((1,), (64,), (job, wide, votes))
    i = np.arange(64)
    assert np.array_equal(y.get(), x[i ^ 5] + x[i // 32 * 32 + i % 32 // 2])
    assert np.array_equal(wide.get(), ((i % 32 ^ 1) << 40) + (i % 32 ^ 16))
    assert set(votes.get()) == {sum(1 << lane for lane in range(0, 32, 3)) + 1 + 3}


def test_copy_is_made_when_it_is_waited_for(module):
    x = np.arange(256)
    job, y, _ = _job(x, 64)
    kernel = module.get_function("copies")
    kernel((1,), (32,), (job, np.int32(1)), shared_mem=1024)
    assert np.array_equal(y.get()[:32], x[1:128:4])
    assert np.isnan(y.get()[32:]).all()
    kernel((1,), (32,), (job, np.int32(0)), shared_mem=1024)
    assert np.isnan(y.get()).all()


def test_ranges_are_copied_in_phases(module):
    x = np.random.default_rng(0).integers(0, 9, (7, 64))
    job, y, _ = _job(x, 32, 7)
    kernel = module.get_function("ring")
    kernel((1,), (64,), (job, np.int32(1)), shared_mem=640)
    assert np.array_equal(y.get(), x.sum(0).reshape(2, 32).sum(0))
    job, y, _ = _job(x, 32, 2)
    with pytest.raises(RuntimeError, match="ends with ranges under way"):
        kernel((1,), (64,), (job, np.int32(0)), shared_mem=640)
    assert np.isnan(y.get()).all()


def test_named_barriers(module):
    job, y, _ = _job(np.arange(32), 128)
    kernel = module.get_function("relay")
    kernel((1,), (128,), (job,), shared_mem=512)
    assert np.array_equal(y.get(), (np.arange(32) + np.arange(4)[:, None]).ravel())


def test_grid_barrier(module):
    for blocks in (1, 2, 4):
        job, y, _ = _job([0], 2 * blocks)
        counter = _zeros(1, np.uint32)
        arguments = job, counter, np.int32(blocks)
        kernel = module.get_function("grid_barrier")
        kernel((blocks,), (64,), arguments, shared_mem=1 << 12, enable_cooperative_groups=True)
        assert set(y.get()[blocks:]) == {blocks * (blocks + 1) / 2}


def test_deadlock_is_an_error(module):
    job, *_ = _job([0], 4)
    counter = _zeros(1, np.uint32)
    kernel = module.get_function("grid_barrier")
    for together in (False, True):  # one block after the other, or not enough blocks
        with pytest.raises(RuntimeError, match=r"(?s)deadlock.*63 threads .* in sync_block"):
            kernel((2,), (64,), (job, counter, np.int32(5)), enable_cooperative_groups=together)
    test_named_barriers(module)
    with pytest.raises(RuntimeError, match="COOPERATIVE_LAUNCH_TOO_LARGE"):
        kernel((5,), (1024,), (job, counter, np.int32(5)), enable_cooperative_groups=True)


def test_lanes_that_do_not_take_part(module):
    job, *_ = _job([0], 1)
    with pytest.raises(RuntimeError, match="a lane is in sync_warp, another in vote"):
        module.get_function("mixed")((1,), (32,), (job,))
    with pytest.raises(RuntimeError, match="16 threads of block 0 0 0 in sync_warp"):
        module.get_function("all_lanes")((1,), (16,), (job,))


def test_shared_memory_has_an_end(module):
    job, *_ = _job([0], 1)
    kernel = module.get_function("too_far")
    kernel((1,), (32,), (job,), shared_mem=33)
    with pytest.raises(RuntimeError, match="beyond its shared memory"):
        kernel((1,), (32,), (job,), shared_mem=32)
    with pytest.raises(RuntimeError, match="bytes shared"):
        kernel((1,), (32,), (job,), shared_mem=100_000)
    kernel.max_dynamic_shared_size_bytes = 100_000
    kernel((1,), (32,), (job,), shared_mem=100_000)
    with pytest.raises(RuntimeError, match="shared memory"):
        kernel.max_dynamic_shared_size_bytes = 300_000


def test_threads_start_backwards():
    for backwards in (False, True):
        module = compile_kernels(_KERNELS, (), Card(backwards=backwards))
        job, y, _ = _job([0], 64)
        module.get_function("ends_meet")((1,), (64,), (job,), shared_mem=256)
        assert np.array_equal(np.isnan(y.get()), (np.arange(64) < 32) ^ backwards)


def test_arrivals_are_counted(module):
    kernel = module.get_function("arrives_twice")
    for arrivals, ended in {0: (0, 1), 1: (0, 1), 2: (1, 0), 3: (1, 0), 4: (0, 1)}.items():
        job, y, _ = _job([0], 2, arrivals)
        kernel((1,), (1,), (job,), shared_mem=16)
        assert tuple(y.get()) == ended


def test_errors_name_the_thread(module):
    job, *_ = _job([0], 1)
    with pytest.raises(RuntimeError, match="block 0 0 0, thread 3 0 0: bad address"):
        module.get_function("bad_address")((1,), (32,), (job,))
    test_block_barrier(module)


def test_misuse_of_copies_is_an_error(module):
    job, *_ = _job(np.zeros(4), 1)
    kernel = module.get_function("unpublished")
    match = "does not see this barrier" if module.card.capability == 90 else "ranges under way"
    with pytest.raises(RuntimeError, match=match):
        kernel((1,), (1,), (job,), shared_mem=256)
    job["x"] += 4
    with pytest.raises(RuntimeError, match="multiples of 16 bytes"):
        kernel((1,), (1,), (job,), shared_mem=256)


def test_card_without_asynchronous_copies():
    module = compile_kernels(_KERNELS.split("// The first warp copies")[0], (), Card(75))
    job, y, _ = _job(np.arange(256), 64)
    module.get_function("copies")((1,), (32,), (job, np.int32(0)), shared_mem=1024)
    assert np.array_equal(y.get(), np.arange(1, 256, 4))


def test_all_of_the_device_is_emulated():
    """Compare the names in device.cu with those in device.h."""
    source = files("gpt_cli.ops.cuda").joinpath("device.cu").read_text()
    names = re.findall(
        r"#define (\w+)|enum { (\w+)|^(?:template <.*> )?DEVICE .*?(\w+)\(", source, re.M
    )
    names = {"".join(name) for name in names} - {"shared_address"}
    assert len(names) > 30
    emulated = (Path(emulated_kernels.__file__).parent / "cuda" / "device.h").read_text()
    missing = names - set(re.findall(r"\w+", emulated))
    assert not missing


def test_numbers_are_rounded_as_on_a_gpu(module):
    x = np.float32([1 + 2**-13, 1 - 2**-13, -1])
    job, y, _ = _job(x, 2)
    integers = _zeros(1, np.int32)
    module.get_function("numbers")((1,), (1,), (job, integers))
    assert list(y.get()) == [-(2.0**-26), 0]
    assert integers.get()[0] == 5 + 127 * -128 + 1 * -1 + -1 * 2 + -128 * 127


def test_float16(module):
    bits = np.arange(1 << 16, dtype=np.uint16)
    y, z = _zeros(1 << 16, np.float32), _zeros(1 << 16, np.float32)
    module.get_function("widen_all")((256,), (256,), (y, z))
    assert np.array_equal(y.get(), bits.view(np.float16).astype(np.float32), equal_nan=True)
    assert np.array_equal(z.get().view(np.uint32), bits.astype(np.uint32) << 16)
    numbers = y.get()[np.isfinite(y.get())]
    between = np.concatenate([(numbers[1:] + numbers[:-1]) / 2, [65520, 1e9, -np.inf, np.nan]])
    near = [np.nextafter(between, np.float32(to), dtype=np.float32) for to in (-9e9, 9e9)]
    x = np.concatenate([numbers, between.astype(np.float32), *near]).astype(np.float32)
    x = np.resize(x, -(-len(x) // 256) * 256)
    result = _zeros(len(x), np.uint16)
    module.get_function("narrow_all")((len(x) // 256,), (256,), (DeviceArray(x), result))
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    narrow = result.get().view(np.float16)
    assert np.array_equal(narrow, expected, equal_nan=True)
    assert np.array_equal(np.signbit(narrow[~np.isnan(narrow)]), np.signbit(x[~np.isnan(x)]))


def test_sources_of_the_project():
    source = read_source(["device.cu", "arithmetic.cu", "structs.cu"])
    for number in range(4):
        compile_kernels(
            source + "KERNEL e(const float *x, float *y) { *y = exp_of(*x); }",
            (f"-DFORMAT={number}", "--std=c++17"),
            Card(75),
        )
