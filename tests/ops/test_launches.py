"""Launches of kernels: their structs, the calls of the driver, and the tiles of products."""

import ctypes
import sys
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from gpt_cli.errors import ResourceError
from gpt_cli.ops.cuda import compiler, plans, structs
from gpt_cli.ops.cuda.compiler import Kernel
from gpt_cli.ops.cuda.launcher import Launcher
from support.cuda_kernels import struct_of

H100 = plans.Device(132, 232_448)
# The products of a layer of 768 columns, and the head: n_in, n_out.
PRODUCTS = {
    "c_attn": (768, 2304), "c_proj": (768, 768), "c_fc": (768, 3072), "mlp": (3072, 768),
    "head": (768, 50257),
}  # fmt: skip
# Microseconds on an H100, by the tile: where the times of tiles differ.
MEASURED = {
    "float32": {
        (64, "head"): {"64x96": 135, "64x64": 139, "32x48": 160},
        (128, "c_attn"): {"16x24": 44, "32x48": 28, "64x64": 33},
        (128, "c_proj"): {"16x24": 20, "32x48": 28},
        (128, "c_fc"): {"32x48": 29, "64x64": 38},
        (128, "mlp"): {"32x48": 53, "16x24": 55},
        (128, "head"): {"64x96": 243, "64x64": 257},
        (896, "c_attn"): {"64x96": 93, "64x64": 93, "32x48": 112},
        (896, "c_proj"): {"64x96": 43, "32x48": 45, "64x64": 54},
        (896, "c_fc"): {"64x96": 143, "64x64": 144, "32x48": 146},
        (896, "mlp"): {"64x96": 152, "32x48": 159, "64x64": 196},
        (896, "head"): {"64x96": 1628, "64x64": 1715, "32x48": 2092},
        (1024, "c_attn"): {"64x96": 94, "64x64": 114, "32x48": 121},
        (1024, "c_proj"): {"64x96": 43, "32x48": 44},
        (1024, "c_fc"): {"64x96": 144, "64x64": 145, "32x48": 166},
        (1024, "mlp"): {"64x96": 153, "32x48": 157},
        (1920, "c_attn"): {"64x96": 189, "64x64": 206},
        (1920, "c_proj"): {"64x96": 72, "64x64": 72, "32x48": 85},
        (1920, "c_fc"): {"64x64": 252, "64x96": 267},
        (1920, "mlp"): {"64x96": 262, "64x64": 262, "32x48": 309},
        (1920, "head"): {"64x96": 3472, "64x64": 3711},
    },
    "int8": {
        (896, "c_attn"): {"64x64": 68, "32x48": 71},
        (896, "c_proj"): {"32x48": 31},
        (896, "c_fc"): {"32x48": 92, "64x64": 107},
        (896, "mlp"): {"32x48": 100},
        (896, "head"): {"64x64": 1229, "32x48": 1252},
        (1920, "c_attn"): {"32x48": 135, "64x64": 143},
        (1920, "c_fc"): {"32x48": 186, "64x64": 187},
        (1920, "mlp"): {"64x64": 185, "32x48": 187},
        (1920, "head"): {"64x64": 2603},
    },
}


@pytest.mark.parametrize(
    ("dtype", "rows", "product"),
    [(dtype, *where) for dtype, times in MEASURED.items() for where in times],
)
def test_the_tile_is_about_as_fast_as_the_fastest(dtype, rows, product):
    times = MEASURED[dtype][rows, product]
    kernel = plans.linear(rows, *PRODUCTS[product], dtype, H100).kernel
    assert times[kernel.removeprefix("linear_")] <= 1.03 * min(times.values())


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_few_rows_take_small_tiles(dtype):
    assert plans.linear(1, 768, 768, dtype, H100).kernel == "linear_16x24"


@pytest.mark.parametrize("name", structs.types())
def test_structs_are_those_of_numpy(name):
    kind = structs.types()[name]
    parts, values = {}, {}
    for number, field in enumerate(kind.names, 1):
        part = kind[field]
        if part.names:
            values[field] = struct_of(field if field in structs.types() else _name_of(part))
            parts[field] = values[field].tobytes()
        else:
            values[field] = parts[field] = number * 3
    expected = struct_of(name, **values)
    assert structs.pack(name, **parts) == expected.tobytes()
    assert structs.pack(name) == bytes(kind.itemsize)


def _name_of(kind):
    return next(name for name, known in structs.types().items() if known == kind)


def test_arrays_of_a_struct_become_their_addresses():
    array = SimpleNamespace(data=SimpleNamespace(ptr=77))
    job = np.frombuffer(
        structs.pack("choose", logits=array, ids=None, top_p=0.5, n=9), structs.types()["choose"]
    )[0]
    assert (job["logits"], job["ids"], job["top_p"], job["n"]) == (77, 0, 0.5, 9)


def test_an_unknown_field_is_an_error():
    with pytest.raises(Exception, match="pack expected"):
        structs.pack("norm", epsilom=1)


class Driver:
    """Stands in for CuPy's driver functions; it keeps what a launch passes."""

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    def __init__(self):
        self.calls = []

    def funcSetAttribute(self, function, attribute, value):  # noqa: N802
        self.calls.append((function, attribute, value))

    def launchKernel(self, *arguments):  # noqa: N802
        *numbers, parameters, extra = arguments
        address = ctypes.c_void_p.from_address(parameters).value
        self.calls.append((*numbers, ctypes.string_at(address, 5), extra))

    def launchCooperativeKernel(self, *arguments):  # noqa: N802
        self.calls.append(arguments)


@pytest.fixture
def driver(monkeypatch):
    replaced = Driver()
    for name in ("cupy", "cupy.cuda", "cupy_backends", "cupy_backends.cuda"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    api = SimpleNamespace(driver=replaced)
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.api", api)
    sys.modules["cupy.cuda"].get_current_stream = lambda: SimpleNamespace(ptr=11)
    sys.modules["cupy.cuda"].runtime = SimpleNamespace(
        memcpyHostToDevice=1, memcpyAsync=lambda *arguments: replaced.calls.append(arguments)
    )
    return replaced


def test_a_launch_passes_the_address_of_the_struct(driver):
    module = SimpleNamespace(get_function=lambda name: SimpleNamespace(ptr=len(name)))
    kernel = Kernel(module, "linear", 1000)
    kernel.launch((7, 2), 128, 640, b"a\0b\0c")
    kernel.launch_together(9, 384, 10)
    assert driver.calls == [
        (6, 8, 1000),
        (6, 7, 2, 1, 128, 1, 1, 640, 11, b"a\0b\0c", 0),
        (6, 9, 1, 1, 384, 1, 1, 10, 11, 0),
    ]


def test_a_constant_is_copied_on_the_current_stream(driver):
    module = SimpleNamespace(get_global_var=len)
    compiler.set_constant(module, "job", b"a\0b")
    [(address, _, size, kind, stream)] = driver.calls
    assert (address, size, kind, stream) == (3, 3, 1, 11)


def test_a_module_that_cannot_be_loaded_is_told():
    module = Future()
    module.set_exception(RuntimeError("CUDA_ERROR_OUT_OF_MEMORY:\nout of memory"))
    launcher = Launcher({"add": module}, H100)
    reason = "the kernel add .RuntimeError: CUDA_ERROR_OUT_OF_MEMORY: out of memory.: free"
    with pytest.raises(ResourceError, match=reason):
        launcher(plans.elementwise("add", 10, H100), b"")
