"""An emulation of the CuPy functions that `cupy_ops` uses: NumPy, and kernels compiled as C++.

The blocks of a kernel run one after another. The threads of a block are coroutines that run in a
fixed order and switch at barriers. Like CuPy's, these arrays refuse implicit conversion to NumPy.
The emulation does not show a GPU's rounding, speed, lack of memory, asynchronous copies or missing
barriers.
"""

import ctypes
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

# The features of CUDA that C++ lacks. Threads are coroutines, so a block runs in one system thread.
_PRELUDE = r"""
#include <cmath>
#include <csetjmp>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#define __global__
#define __device__ static
#define __shared__ static
struct Place { int x; };
static Place threadIdx, blockIdx, blockDim, gridDim;
struct Barrier { int arrived, generation; };
static Barrier block_barrier, warp_barriers[32];
static jmp_buf scheduler, threads[1024];
static bool started[1024], running[1024];
static float exchanged[1024];
static char dynamic_shared[1 << 16];

static void yield()
{
    if (!_setjmp(threads[threadIdx.x]))
        _longjmp(scheduler, 1);
}

static void wait(Barrier& barrier, int threads)
{
    int generation = barrier.generation;
    if (++barrier.arrived == threads) {
        barrier.arrived = 0;
        barrier.generation++;
    } else
        while (barrier.generation == generation)
            yield();
}

static void __syncthreads() { wait(block_barrier, blockDim.x); }

static float __shfl_xor_sync(unsigned mask, float x, int lanes)
{
    Barrier& barrier = warp_barriers[threadIdx.x / 32];
    exchanged[threadIdx.x] = x;
    wait(barrier, 32);
    float other = exchanged[threadIdx.x ^ lanes];
    wait(barrier, 32);
    return other;
}

static float rsqrtf(float x) { return 1 / sqrtf(x); }

static void (*body)();
static void run_thread()
{
    for (;;) {
        body();
        running[threadIdx.x] = false;
        yield();
    }
}

// Run a thread until it yields. A switch by swapcontext would take two system calls.
static void resume(int thread)
{
    static char stacks[1024][32768];
    threadIdx.x = thread;
    if (_setjmp(scheduler))
        return;
    if (started[thread])
        _longjmp(threads[thread], 1);
    started[thread] = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stacks[thread];
    context.uc_stack.ss_size = sizeof stacks[thread];
    makecontext(&context, run_thread, 0);
    setcontext(&context);
}

static void run_blocks(int grid, int block, void (*kernel)())
{
    body = kernel;
    blockDim.x = block;
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) {
        for (int thread = 0; thread < block; thread++)
            running[thread] = true;
        int rounds = 0;
        for (bool some = true; some;) {
            some = false;
            if (++rounds > 1000000)
                abort();  // some threads never reach a barrier
            for (int thread = 0; thread < block; thread++)
                if (running[thread]) {
                    some = true;
                    resume(thread);
                }
        }
    }
}
"""

_HALF = r"""
struct __half { unsigned short bits; };
#ifdef __F16C__
#include <immintrin.h>
static float __half2float(__half x) { return _cvtsh_ss(x.bits); }
static __half __float2half(float x) { return {(unsigned short)_cvtss_sh(x, 0)}; }
#else
static float __half2float(__half x) { __fp16 y; memcpy(&y, &x, 2); return y; }
static __half __float2half(float x) { __fp16 y = x; __half z; memcpy(&z, &y, 2); return z; }
#endif
"""


@cache
def _compile(source: str, options: tuple[str, ...]) -> ctypes.CDLL:
    """Compile CUDA code as C++, with a launch function for each kernel; skip without a compiler."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    launchers = []
    for name, parameters in re.findall(r"__global__ void (\w+)\(([^)]*)\)", source):
        kinds = [re.sub(r"\w+$", "", part.strip()) for part in parameters.split(",")]
        values = ", ".join(f"*({kind}*)arguments[{i}]" for i, kind in enumerate(kinds))
        sizes = ", ".join(f"sizeof({kind})" for kind in kinds)
        launchers.append(
            f'extern "C" int sizes_{name}[] = {{{sizes}}};\n'
            f"static void** arguments_of_{name};\n"
            f'extern "C" void launch_{name}(int grid, int block, void** arguments)\n'
            f"{{ arguments_of_{name} = arguments;\n"
            f"  run_blocks(grid, block, [] {{ void** arguments = arguments_of_{name};"
            f" {name}({values}); }}); }}\n"
        )
    source = source.replace(
        "extern __shared__ float weights[];", "float* weights = (float*)dynamic_shared;"
    )
    # _FORTIFY_SOURCE would take the jumps between stacks for errors.
    flags = ["-O1", "-shared", "-fPIC", "-w", "-U_FORTIFY_SOURCE"]
    flags += ["-mf16c"] if "f16c" in Path("/proc/cpuinfo").read_text() else []
    with TemporaryDirectory() as folder:
        Path(folder, "cuda_fp16.h").write_text(_HALF)
        Path(folder, "kernels.cpp").write_text(_PRELUDE + source + "".join(launchers))
        command = ["g++", *flags, *options, "-I.", "-o", "kernels.so", "kernels.cpp"]
        subprocess.run(command, cwd=folder, check=True)
        return ctypes.CDLL(f"{folder}/kernels.so")


class DeviceArray:
    """An array that NumPy's functions reject, as they reject CuPy's."""

    __array_ufunc__ = None

    def __init__(self, host: np.ndarray):
        self._host = host

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __getattr__(self, name: str):
        found = getattr(self._host, name)
        return _wrapped(found) if callable(found) else _on_device(found)

    @property
    def data(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=self._host.ctypes.data)

    def set(self, host: np.ndarray) -> None:
        assert isinstance(host, np.ndarray)
        assert host.dtype == self._host.dtype
        assert host.flags.c_contiguous
        self._host[...] = host

    def get(self) -> np.ndarray:
        return self._host.copy()

    def __getitem__(self, index):
        part = self._host[_on_host(index, index=True)]
        if not np.may_share_memory(part, self._host):
            part = np.asarray(part, order="C")  # like a copy by CuPy; NumPy's may be transposed
        return _on_device(part)

    def __setitem__(self, index, value):
        self._host[_on_host(index, index=True)] = _on_host(value)

    def __iter__(self):
        return (_on_device(row) for row in self._host)


def _operator(name: str):
    return lambda self, *others: _on_device(getattr(self._host, name)(*map(_on_host, others)))


for _name in (
    *("add", "sub", "mul", "truediv", "pow", "and", "or", "xor", "matmul", "mod", "floordiv"),
    *("radd", "rsub", "rmul", "rtruediv", "rpow", "rand", "ror", "rmatmul"),
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "invert", "abs", "float", "int", "bool", "len"),
):
    setattr(DeviceArray, f"__{_name}__", _operator(f"__{_name}__"))


def _on_device(result):
    """Wrap arrays and scalars that a function of NumPy has returned."""
    if isinstance(result, np.ndarray | np.generic):
        return DeviceArray(np.asarray(result))
    if isinstance(result, tuple) and any(isinstance(part, np.ndarray) for part in result):
        return tuple(map(_on_device, result))
    return result


def _on_host(value, *, index: bool = False):
    """Unwrap arrays; refuse those of NumPy, except as an index."""
    if isinstance(value, DeviceArray):
        return value._host
    if isinstance(value, tuple | list):
        return type(value)(_on_host(part, index=index) for part in value)
    if isinstance(value, np.ndarray) and not index:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    return value


def _wrapped(function):
    def call(*args, **kwargs):
        kwargs = {name: _on_host(value) for name, value in kwargs.items()}
        return _on_device(function(*map(_on_host, args), **kwargs))

    return call


def _asarray(value, *args, **kwargs):
    host = value._host if isinstance(value, DeviceArray) else np.array(value)
    return DeviceArray(np.asarray(host, *args, **kwargs))


def _empty(shape, dtype=np.float64):
    """Return uninitialized memory filled with NaNs, so that a read of it shows."""
    host = np.empty(shape, dtype)
    host.reshape(-1).view(np.uint8).fill(0xFF)
    return DeviceArray(host)


class _Module(ModuleType):
    """A module with functions of NumPy under CuPy's names."""

    def __getattr__(self, name: str):
        found = getattr(np, name)
        return _wrapped(found) if callable(found) and not isinstance(found, type) else found


def _argument(value):
    if isinstance(value, DeviceArray):
        assert value._host.flags.c_contiguous or value._host.strides[-1] == value._host.itemsize
        return ctypes.c_void_p(value._host.ctypes.data)
    return np.ctypeslib.as_ctypes_type(np.dtype(type(value)))(value)


class RawModule:
    def __init__(self, code: str, options: tuple[str, ...] = ()):
        self._library = _compile(code, options)

    def get_function(self, name: str):
        def launch(grid, block, arguments, shared_mem=0):
            (blocks,), (threads,) = grid, block
            assert shared_mem <= 48 * 1024 - 256
            assert blocks > 0
            values = list(map(_argument, arguments))
            sizes = (ctypes.c_int * len(values)).in_dll(self._library, f"sizes_{name}")
            assert list(sizes) == list(map(ctypes.sizeof, values))
            pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
            self._library[f"launch_{name}"](blocks, threads, pointers)

        return launch


_KINDS = {0: np.float32, 2: np.float16}  # CUDA_R_32F, CUDA_R_16F


def _matrix(array: int, start: int, kind: int, rows: int, columns: int, ld: int) -> np.ndarray:
    """Return the transpose of a column-major matrix, whose leading dimension is `ld`.

    It starts at this number of the array at an address.
    """
    item = np.dtype(_KINDS[kind]).itemsize
    size = item * ((columns - 1) * ld + rows)
    buffer = (ctypes.c_char * size).from_address(array + start * item)
    return np.ndarray((columns, rows), _KINDS[kind], buffer, strides=(ld * item, item))


def _gemm_strided_batched_ex(
    handle, transa, transb, m, n, k, alpha, a, a_kind, lda, a_step, b, b_kind, ldb, b_step,
    beta, c, c_kind, ldc, c_step, count, compute, algorithm,
):  # fmt: skip
    """Emulate the product of cuBLAS, for the arguments that are used here."""
    assert (transb, compute) == (0, 68)
    assert [ctypes.c_float.from_address(factor).value for factor in (alpha, beta)] == [1, 0]
    for i in range(count):
        left = _matrix(a, i * a_step, a_kind, *((k, m) if transa else (m, k)), lda)  # transposed
        left = left.T if transa else left
        right = _matrix(b, i * b_step, b_kind, k, n, ldb)
        result = _matrix(c, i * c_step, c_kind, m, n, ldc)
        result[...] = right.astype(np.float32) @ left.astype(np.float32)


def modules() -> dict[str, object]:
    """Return what to put into sys.modules."""
    cupy = _Module("cupy")
    cupy.__spec__ = ModuleSpec("cupy", None)
    cupy.asarray, cupy.empty, cupy.asnumpy = _asarray, _empty, DeviceArray.get
    cupy.ndarray = DeviceArray
    cupy.RawModule = RawModule
    cupy.get_default_memory_pool = lambda: SimpleNamespace(free_bytes=lambda: 0)
    cupy.cuda = SimpleNamespace(
        device=SimpleNamespace(get_cublas_handle=lambda: 1),
        runtime=SimpleNamespace(CUDA_R_32F=0, CUDA_R_16F=2, memGetInfo=lambda: (1 << 33, 1 << 34)),
        get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
    )
    cublas = SimpleNamespace(
        CUBLAS_OP_N=0,
        CUBLAS_OP_T=1,
        CUBLAS_COMPUTE_32F=68,
        CUBLAS_GEMM_DEFAULT=-1,
        gemmStridedBatchedEx=_gemm_strided_batched_ex,
    )
    return {
        "cupy": cupy,
        "cupyx": SimpleNamespace(empty_pinned=np.empty),
        "cupy.cuda": cupy.cuda,
        "cupy.cuda.runtime": cupy.cuda.runtime,
        "cupy_backends.cuda.libs": SimpleNamespace(cublas=cublas),
    }


def install(patch) -> None:
    """Make `import cupy` find this emulation and a GPU seem present, until the patch is undone."""
    for name, module in modules().items():
        patch.setitem(sys.modules, name, module)
    # Import it anew, and drop it afterwards, because it keeps references to these modules.
    patch.setitem(sys.modules, "gpt_cli.ops.cupy_ops", None)
    patch.delitem(sys.modules, "gpt_cli.ops.cupy_ops")
    patch.setattr("gpt_cli.system.gpu.problem", lambda: None)
    patch.setattr("gpt_cli.system.gpu.load_driver", lambda: None)
