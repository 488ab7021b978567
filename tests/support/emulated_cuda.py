"""An emulation of the CuPy functions that `cupy_ops` uses: NumPy, and kernels compiled as C++.

The blocks of a kernel run one after another. The threads of a block are coroutines that run in a
fixed order and switch at barriers. Like CuPy's, these arrays refuse implicit conversion to NumPy.
The emulation does not show a GPU's rounding, speed, lack of memory, asynchronous copies or missing
barriers.
"""

import ctypes
import re
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

# The features of CUDA that C++ lacks. Threads are coroutines, so a block runs in one system thread.
_PRELUDE = r"""
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>
#include <ucontext.h>
#define __global__
#define __device__ static
#define __shared__ static
struct Place { int x; };
static Place threadIdx, blockIdx, blockDim, gridDim;
struct Barrier { int arrived, generation; };
static Barrier block_barrier, warp_barriers[32];
static ucontext_t scheduler, contexts[1024];
static bool running[1024];
static float exchanged[1024];
static char dynamic_shared[1 << 16];

static void yield()
{
    int thread = threadIdx.x;
    swapcontext(&contexts[thread], &scheduler);
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
    body();
    running[threadIdx.x] = false;
}

static void run_blocks(int grid, int block, void (*kernel)())
{
    static std::vector<char> stacks(1024 * 32768);
    body = kernel;
    blockDim.x = block;
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) {
        for (int thread = 0; thread < block; thread++) {
            getcontext(&contexts[thread]);
            contexts[thread].uc_stack.ss_sp = &stacks[thread * 32768];
            contexts[thread].uc_stack.ss_size = 32768;
            contexts[thread].uc_link = &scheduler;
            makecontext(&contexts[thread], run_thread, 0);
            running[thread] = true;
        }
        int rounds = 0;
        for (bool some = true; some;) {
            some = false;
            if (++rounds > 1000000)
                abort();  // some threads never reach a barrier
            for (int thread = 0; thread < block; thread++)
                if (running[thread]) {
                    some = true;
                    threadIdx.x = thread;
                    swapcontext(&scheduler, &contexts[thread]);
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


def _compile(source: str, options: tuple[str, ...], folder: Path) -> ctypes.CDLL:
    """Compile CUDA code as C++, with a launch function for each kernel."""
    launchers = []
    for name, parameters in re.findall(r"__global__ void (\w+)\(([^)]*)\)", source):
        kinds = [re.sub(r"\w+$", "", part.strip()) for part in parameters.split(",")]
        given = ", ".join(f"*({kind}*)arguments[{i}]" for i, kind in enumerate(kinds))
        sizes = ", ".join(f"sizeof({kind})" for kind in kinds)
        launchers.append(
            f'extern "C" int sizes_{name}[] = {{{sizes}}};\n'
            f"static void** arguments_of_{name};\n"
            f'extern "C" void launch_{name}(int grid, int block, void** given)\n'
            f"{{ arguments_of_{name} = given;\n"
            f"  run_blocks(grid, block, [] {{ void** arguments = arguments_of_{name};"
            f" {name}({given}); }}); }}\n"
        )
    source = source.replace(
        "extern __shared__ float weights[];", "float* weights = (float*)dynamic_shared;"
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cuda_fp16.h").write_text(_HALF)
    (folder / "kernels.cpp").write_text(_PRELUDE + source + "".join(launchers))
    library = folder / f"kernels{''.join(options)}.so"
    native = ["-mf16c"] if "f16c" in Path("/proc/cpuinfo").read_text() else []
    files = ["-I", str(folder), "-o", str(library), str(folder / "kernels.cpp")]
    command = ["g++", "-O1", "-shared", "-fPIC", "-w", *native, *options, *files]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


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

    def __getitem__(self, place):
        found = self._host[_on_host(place, index=True)]
        if not np.may_share_memory(found, self._host):
            found = np.asarray(found, order="C")  # like a copy by CuPy; NumPy's may be transposed
        return _on_device(found)

    def __setitem__(self, place, value):
        self._host[_on_host(place, index=True)] = _on_host(value)

    def __iter__(self):
        return (_on_device(row) for row in self._host)

    def __len__(self) -> int:
        return len(self._host)

    def __float__(self) -> float:
        return float(self._host)

    def __int__(self) -> int:
        return int(self._host)

    def __bool__(self) -> bool:
        return bool(self._host)


def _operator(name: str):
    return lambda self, *others: _on_device(
        getattr(self._host, name)(*(_on_host(other) for other in others))
    )


for _name in (
    *("add", "sub", "mul", "truediv", "pow", "and", "or", "xor", "matmul", "mod", "floordiv"),
    *("radd", "rsub", "rmul", "rtruediv", "rpow", "rand", "ror", "rmatmul"),
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "invert", "abs"),
):
    setattr(DeviceArray, f"__{_name}__", _operator(f"__{_name}__"))


def _on_device(found):
    """Wrap arrays and scalars that a function of NumPy has returned."""
    if isinstance(found, np.ndarray | np.generic):
        return DeviceArray(np.asarray(found))
    if isinstance(found, tuple) and any(isinstance(part, np.ndarray) for part in found):
        return tuple(map(_on_device, found))
    return found


def _on_host(given, *, index: bool = False):
    if isinstance(given, DeviceArray):
        return given._host
    if isinstance(given, tuple | list):
        return type(given)(_on_host(part, index=index) for part in given)
    if isinstance(given, np.ndarray) and not index:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    return given


def _wrapped(function):
    def call(*args, **kwargs):
        kwargs = {name: _on_host(value) for name, value in kwargs.items()}
        return _on_device(function(*map(_on_host, args), **kwargs))

    return call


def _asarray(given, *args, **kwargs):
    host = given._host if isinstance(given, DeviceArray) else np.array(given)
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


def _argument(given):
    if isinstance(given, DeviceArray):
        assert given._host.flags.c_contiguous or given._host.strides[-1] == given._host.itemsize
        return ctypes.c_void_p(given._host.ctypes.data)
    return np.ctypeslib.as_ctypes_type(np.dtype(type(given)))(given)


def _raw_module(folder: Path):
    class RawModule:
        def __init__(self, code: str, options: tuple[str, ...] = ()):
            self._library = _compile(code, options, folder)

        def get_function(self, name: str):
            def launch(grid, block, given, shared_mem=0):
                (blocks,), (threads,) = grid, block
                assert shared_mem <= 48 * 1024 - 256
                assert blocks > 0
                values = [_argument(x) for x in given]
                sizes = (ctypes.c_int * len(values)).in_dll(self._library, f"sizes_{name}")
                assert list(sizes) == [ctypes.sizeof(value) for value in values]
                pointers = (ctypes.c_void_p * len(values))(
                    *(ctypes.addressof(value) for value in values)
                )
                self._library[f"launch_{name}"](blocks, threads, pointers)

            return launch

    return RawModule


_KINDS = {0: np.float32, 2: np.float16}  # CUDA_R_32F, CUDA_R_16F


def _matrix(address: int, kind: int, rows: int, columns: int, ld: int) -> np.ndarray:
    """Return the transpose of a column-major matrix with leading dimension `ld`."""
    count = (columns - 1) * ld + rows
    size = np.dtype(_KINDS[kind]).itemsize * count
    numbers = np.frombuffer((ctypes.c_char * size).from_address(address), _KINDS[kind])
    item = numbers.itemsize
    return np.lib.stride_tricks.as_strided(numbers, (columns, rows), (ld * item, item))


def _gemm_strided_batched_ex(
    handle, transa, transb, m, n, k, alpha, a, a_kind, lda, a_step, b, b_kind, ldb, b_step,
    beta, c, c_kind, ldc, c_step, count, compute, algorithm,
):  # fmt: skip
    """Emulate the product of cuBLAS, for the arguments that are used here."""
    assert (transb, compute) == (0, 68)
    assert [ctypes.c_float.from_address(factor).value for factor in (alpha, beta)] == [1, 0]
    sizes = [np.dtype(_KINDS[kind]).itemsize for kind in (a_kind, b_kind, c_kind)]
    for i in range(count):
        at, bt, ct = (
            start + i * step * size
            for start, step, size in zip((a, b, c), (a_step, b_step, c_step), sizes, strict=True)
        )
        left = _matrix(at, a_kind, *((k, m) if transa else (m, k)), lda)  # transposed
        left = left.T if transa else left
        right = _matrix(bt, b_kind, k, n, ldb)
        result = _matrix(ct, c_kind, m, n, ldc)
        result[...] = right.astype(np.float32) @ left.astype(np.float32)


def modules(folder: Path) -> dict[str, ModuleType]:
    """Return modules for sys.modules; kernels are compiled in the folder."""
    cupy, cupyx = _Module("cupy"), ModuleType("cupyx")
    cuda, device = ModuleType("cupy.cuda"), ModuleType("cupy.cuda.device")
    runtime, cublas = ModuleType("cupy.cuda.runtime"), ModuleType("cublas")
    cupy.__spec__ = ModuleSpec("cupy", None)
    cupy.asarray = _asarray
    cupy.empty = _empty
    cupy.asnumpy = lambda array: array.get()
    cupy.ndarray = DeviceArray
    cupy.RawModule = _raw_module(folder)
    cupy.get_default_memory_pool = lambda: SimpleNamespace(free_bytes=lambda: 0)
    cupy.cuda, cuda.device, cuda.runtime = cuda, device, runtime
    cuda.get_current_stream = lambda: SimpleNamespace(synchronize=lambda: None)
    device.get_cublas_handle = lambda: 1
    runtime.CUDA_R_32F, runtime.CUDA_R_16F = 0, 2
    runtime.memGetInfo = lambda: (1 << 33, 1 << 34)
    cupyx.empty_pinned = np.empty
    cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_T = 0, 1
    cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT = 68, -1
    cublas.gemmStridedBatchedEx = _gemm_strided_batched_ex
    backends, inner, libs = (
        ModuleType(name) for name in ("cupy_backends", "cupy_backends.cuda", "cupy_backends.libs")
    )
    backends.cuda, inner.libs, libs.cublas = inner, libs, cublas
    return {
        "cupy": cupy,
        "cupyx": cupyx,
        "cupy.cuda": cuda,
        "cupy.cuda.runtime": runtime,
        "cupy_backends": backends,
        "cupy_backends.cuda": inner,
        "cupy_backends.cuda.libs": libs,
        "cupy_backends.cuda.libs.cublas": cublas,
    }


def install(patch, folder: Path) -> None:
    """Make `import cupy` find this emulation and a GPU seem present, until the patch is undone."""
    for name, module in modules(folder).items():
        patch.setitem(sys.modules, name, module)
    # Import it anew, and drop it afterwards, because it keeps references to these modules.
    patch.setitem(sys.modules, "gpt_cli.ops.cupy_ops", None)
    patch.delitem(sys.modules, "gpt_cli.ops.cupy_ops")
    patch.setattr("gpt_cli.system.gpu.problem", lambda: None)
    patch.setattr("gpt_cli.system.gpu.load_driver", lambda: None)
