"""The memory of arrays, the thread pool, and forks."""

import gc
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_cli.folder.tensors import aligned_empty
from gpt_cli.gpt2.model import forward
from gpt_cli.ops import memory
from gpt_cli.ops.memory import Arena, Workspace, address
from support.models import model_of
from support.native_arrays import assert_same_bits, misaligned
from support.processes import posix

pytestmark = pytest.mark.usefixtures("library")


# --- memory --------------------------------------------------------------------------------------


BYTE = np.dtype("u1")
LARGE = 200_000  # bytes, enough for a workspace to keep


def test_address_is_that_of_the_first_element():
    x = np.arange(60.0).reshape(3, 4, 5)
    views = [x, x[1], x[:, ::-1], x[..., 2], x.T, x[:0], x[1, 2, 3], np.float32(1), misaligned(x)]
    for view in map(np.asarray, views):
        assert address(view) == view.ctypes.data


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (1000, 7)])
def test_aligned_empty_starts_on_a_cache_line(shape):
    x = aligned_empty(shape, np.dtype("f4"))
    assert (x.shape, x.dtype) == (shape, np.float32)
    assert x.size == 0 or address(x) % 64 == 0


@pytest.mark.parametrize("cycle", [False, True])
def test_workspace_reuses_memory_also_from_reference_cycles(cycle):
    workspace = Workspace()
    arrays = [workspace.empty((LARGE,), BYTE)]
    start = address(arrays[0])
    if cycle:
        arrays.append(arrays)
    del arrays
    if cycle:
        gc.collect()
    assert address(workspace.empty((LARGE - 1,), BYTE)) == start


def test_workspace_keeps_memory_in_use_while_a_view_is_alive():
    workspace = Workspace()
    first = workspace.empty((LARGE // 4,), np.dtype("f4"))
    start, view = address(first), first[5:].reshape(-1, 5).T[1:3]
    del first
    second = workspace.empty((LARGE,), BYTE)
    assert address(second) != start
    del view
    assert address(workspace.empty((LARGE,), BYTE)) == start


def test_workspace_keeps_no_more_than_its_peak_use():
    workspace = Workspace()
    for size in range(LARGE, 2 * LARGE, LARGE // 20):
        workspace.empty((size,), BYTE)
    together = [workspace.empty((size,), BYTE) for size in (2 * LARGE, LARGE, 3 * LARGE)]
    del together
    assert workspace.free_bytes() <= 6 * LARGE


@given(steps=st.lists(st.tuples(st.integers(130_000, 140_000), st.integers(0, 5)), max_size=30))
def test_workspace_hands_out_no_memory_twice(steps):
    workspace, used = Workspace(), []
    for step, (size, freed) in enumerate(steps):
        del used[freed : freed + 1]
        used.append((step, workspace.empty((size,), BYTE)))
        used[-1][1][...] = step
    for step, array in used:
        assert (array == step).all()


def test_workspace_hands_out_no_memory_twice_to_concurrent_threads():
    workspaces = [Workspace()]

    def prepare():
        """Make a workspace whose only large enough buffer comes after smaller ones."""
        workspaces[:] = [Workspace()]
        held = [workspaces[0].empty((size,), BYTE) for size in (LARGE - 9, LARGE - 9, LARGE)]
        del held

    together = Barrier(4, prepare)

    def use(thread):
        try:
            for _ in range(700):
                together.wait()
                array = workspaces[0].empty((LARGE,), BYTE)
                array[0] = thread
                time.sleep(0)
                assert array[0] == thread
        except BaseException:
            together.abort()  # release the other threads
            raise

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(use, range(4)))
    finally:
        sys.setswitchinterval(interval)


# --- threads and processes -----------------------------------------------------------------------


@pytest.fixture(scope="module", params=["float32", "int8"])
def model(native, request):
    """Return a model that is large enough to use several threads."""
    return model_of(native(request.param), n_embd=96, n_layer=2)


def texts(count):
    return [np.arange(80)[None] * (text + 3) % 290 for text in range(count)]


def test_several_threads_may_compute_concurrently(model, monkeypatch):
    expected = [forward(model, ids) for ids in texts(6)]
    monkeypatch.setattr(model.ops, "threads", 3)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            logits = pool.map(lambda ids: forward(model, ids), texts(6))
            for one, other in zip(logits, expected, strict=True):
                assert_same_bits(one, other)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_threads_block_all_signals_but_those_of_their_own_instructions(model, monkeypatch):
    monkeypatch.setattr(model.ops, "threads", 3)
    forward(model, *texts(1))
    raised = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"}
    right = 0
    for status in Path("/proc/self/task").glob("*/status"):
        fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
        mask = int(fields["SigBlk"], 16)
        names = {number.name for number in signal.Signals if mask >> (number - 1) & 1}
        right += raised.isdisjoint(names) and names >= {"SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE"}
    assert right >= 2


def in_a_fork(act):
    """Run a function in a fork of this process, which must succeed."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends a fork that hangs
        code = 8
        try:
            act()
            code = 7
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


# Python warns about a fork of a process with several threads.
forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@posix
@forks
@pytest.mark.parametrize("threads", [3, 16, 300])
def test_a_fork_computes_the_same_with_any_number_of_threads(model, monkeypatch, threads):
    (ids,) = texts(1)
    expected = forward(model, ids)
    monkeypatch.setattr(model.ops, "threads", threads)

    def compute():
        for _ in range(3):
            assert_same_bits(forward(model, ids), expected)

    if threads == 3:  # of more, the threads end with the fork
        compute()
    in_a_fork(compute)


@posix
@forks
def test_a_fork_has_its_own_memory():
    workspace = Workspace()
    kept, free = (workspace.empty((LARGE,), BYTE) for _ in range(2))
    kept[...] = 1
    start = address(free)
    del free

    def use():
        kept[...] = 2
        again = workspace.empty((LARGE,), BYTE)
        assert address(again) == start
        again[...] = 2

    ours = workspace.empty((LARGE,), BYTE)
    ours[...] = 3
    del ours
    in_a_fork(use)
    assert (kept == 1).all()
    assert (workspace.empty((LARGE,), BYTE) == 3).all()


@posix
@forks
def test_a_fork_can_allocate_while_another_thread_holds_the_lock():
    workspace, arena = Workspace(), Arena()

    def use():
        workspace.empty((LARGE,), BYTE)[...] = 1
        arena.zeros((LARGE,), BYTE)[...] = 1

    with memory._lock, ThreadPoolExecutor(1) as other:
        # The fork has no thread that could release the lock.
        other.submit(in_a_fork, use).result(timeout=60)
