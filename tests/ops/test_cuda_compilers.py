"""The kernels in the compilers of CUDA, which need no GPU: nvcc, and NVRTC, which CuPy uses."""

import ctypes
import inspect
import json
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpt_cli.ops.cuda import compiler as compiler_module
from gpt_cli.ops.cuda import plans
from gpt_cli.ops.cuda.compiler import OPTIONS, kernels, source
from support.compiled import made_once
from support.cuda_kernels import FORMATS
from tools import schedule

COMMON = "device", "arithmetic", "structs"
OPERATIONS = *COMMON, "pack", "products", "rows", "attention", "logits", "sampling", "tokens"
PASS = (
    *COMMON,
    "logits",
    "sampling",
    "pass_memory",
    "pass_weights",
    "pass_rows",
    "pass_chains",
    "pass_products",
    "pass_attention",
    "pass_logits",
    "pass",
)
NVCC = shutil.which("nvcc", path="/usr/local/cuda/bin") or shutil.which("nvcc")
SHOWN = ("-v", "-warn-spills")  # by ptxas, which is the last step of both


# nvcc has included headers of the host, which NVRTC has not: hide what they define.
PRELUDE = """
#undef INFINITY
#undef NAN
#define int64_t kernel_int64_t
#define uint64_t kernel_uint64_t
"""


class Nvcc:
    """The compiler of CUDA's toolkit."""

    def __init__(self):
        if not (NVCC and shutil.which("g++")):
            pytest.skip("needs nvcc, of CUDA's toolkit, and g++")

    def knows(self, architecture):
        listed = subprocess.run([NVCC, "--list-gpu-code"], capture_output=True, text=True)
        return f"sm_{architecture}" in listed.stdout.split()

    def version(self):
        return subprocess.run([NVCC, "--version"], capture_output=True, text=True).stdout

    def compile(self, source, options, folder):
        """Return the exit status and all messages."""
        (folder / "kernels.cu").write_text(PRELUDE + source)
        command = [NVCC, "-cubin", "-Werror=all-warnings", *options, "kernels.cu"]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, cwd=folder, **pipe, text=True)
        return done.returncode, done.stdout


class Nvrtc:
    """The library that `gpt_cli.ops.cuda.compiler` compiles with; it comes in a wheel."""

    def __init__(self):
        spec = find_spec("nvidia")
        folders = [Path(folder) for folder in spec.submodule_search_locations] if spec else []
        libraries = [path for folder in folders for path in folder.glob("*/lib/libnvrtc.so.*")]
        if not libraries:
            pytest.skip("needs nvidia-cuda-nvrtc")
        self.library = ctypes.CDLL(str(libraries[0]))

    def knows(self, architecture):
        count = ctypes.c_int()
        self.library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        architectures = (ctypes.c_int * count.value)()
        self.library.nvrtcGetSupportedArchs(architectures)
        return architecture in architectures

    def version(self):
        return self.library._name, Path(self.library._name).stat().st_mtime_ns

    def compile(self, source, options, folder):
        """Return the exit status and all messages."""
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        create = self.library.nvrtcCreateProgram
        assert create(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None) == 0
        options = [option.encode() for option in options]
        arguments = (ctypes.c_char_p * len(options))(*options)
        status = self.library.nvrtcCompileProgram(program, len(options), arguments)
        self.library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        messages = ctypes.create_string_buffer(size.value)
        self.library.nvrtcGetProgramLog(program, messages)
        self.library.nvrtcDestroyProgram(ctypes.byref(program))
        return status, messages.value.decode()


# Macros of a pass: ROWS, STAGE_UNITS, TILES.
MACROS = "ROWS", "STAGE_UNITS", "TILES"
# Layers, width, heads, vocabulary: of GPT-2 from small to XL.
SIZES = (12, 768, 12, 50257), (24, 1024, 16, 50257), (36, 1280, 20, 50257), (48, 1600, 25, 50257)
# Bytes of shared memory of a block, of the devices with passes.
SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
ARCHITECTURES = 75, *SHARED  # 75 has no asynchronous copies
TUNED = {90}  # passes of others may spill some registers, which costs time and no bits
LARGEST = 8, 2, 2  # the pass of 8 rows of XL in int8, which spills 36 bytes, too
EVERY_FORMAT = {"embed", "layer_norm", "store", "attend_1", "pack", "linear_64x64", "choose"}


def macros_of(dtype, shared, sizes=SIZES):
    """Return the macros of the passes that models of published sizes have on a device."""
    device, chosen = plans.Device(132, shared), set()
    for n_layer, C, heads, V in sizes:
        shape = plans.PassShape(dtype, n_layer, C, 4 * C, C // heads, V, 1024 // plans.SLOTS)
        for rows in range(1, plans.most_pass_rows(shape, device) + 1):
            plan = plans.pass_plan(rows, shape, device)
            chosen.add((plan.most_rows, plan.stage_units, plan.tiles))
    return sorted(chosen)


def defined(macros):
    return [f"-D{name}={value}" for name, value in zip(MACROS, macros, strict=True)]


def cases():
    """Yield architectures, formats, and the macros of a pass, or None for the operations."""
    for architecture in ARCHITECTURES:
        for number_format, dtype in enumerate(FORMATS):
            yield architecture, number_format, None
            if architecture in SHARED:
                for macros in macros_of(dtype, SHARED[architecture]):
                    yield architecture, number_format, macros


# A module takes several seconds to compile: the default is one GPU, with the operations in float32
# and the passes of one row of the smallest model in float32 and int8.
USUAL = [(90, 0, None)]
USUAL += [(90, i, macros_of(FORMATS[i], SHARED[90], SIZES[:1])[0]) for i in (0, 3)]


@pytest.mark.parametrize(
    ("architecture", "number_format", "macros"),
    [pytest.param(*case, marks=[] if case in USUAL else pytest.mark.slow) for case in cases()],
)
@pytest.mark.parametrize("compiler", [Nvcc, Nvrtc])
def test_the_kernels_compile_without_warnings_or_spills(
    compiler, architecture, number_format, macros, tmp_path
):
    compiler = compiler()
    if not compiler.knows(architecture):
        pytest.skip(f"this compiler is not for sm_{architecture}")
    options = [*OPTIONS, f"-DFORMAT={number_format}", f"-arch=sm_{architecture}"]
    may_spill = architecture not in TUNED or macros == LARGEST
    shown = SHOWN[:1] if may_spill else SHOWN
    options += [f"--ptxas-options={option}" for option in shown]
    options += defined(macros) if macros else []
    files = [f"{name}.cu" for name in (PASS if macros else OPERATIONS)]
    arguments = source(files), options

    def compile_to(path):
        path.write_text(json.dumps(compiler.compile(*arguments, tmp_path)))

    of_compiler = compiler.version(), PRELUDE, inspect.getsource(type(compiler))
    result = made_once((of_compiler, arguments), ".json", compile_to)
    status, messages = json.loads(result.read_text())
    assert status == 0, messages
    assert "warning" not in messages.lower(), messages
    assert "bytes spill" in messages  # or "0 bytes spill" would not be shown, either
    assert may_spill or not re.search(r"[1-9]\d* bytes spill", messages), messages
    compiled = {*re.findall(rf"entry function '(\w+)' for 'sm_{architecture}'", messages)}
    assert ({"pass"} if macros else EVERY_FORMAT) <= compiled <= {*kernels(files)}


def test_every_file_is_compiled():
    names = {path.stem for path in Path(compiler_module.__file__).parent.glob("*.cu")}
    assert names == {*OPERATIONS, *PASS}


# --- the schedule of the products of a pass ------------------------------------------------------

MOST_CYCLES = 4.3  # of a multiply-add that waits for the one before: 4 at least


@pytest.mark.slow
@pytest.mark.parametrize(("number_format", "macros"), [(0, (4, 4, 6)), (0, (4, 4, 3))])
def test_little_stands_between_two_multiply_adds_of_a_chain(number_format, macros, tmp_path):
    if not schedule.disassembler():
        pytest.skip("needs nvidia-cuda-nvdisasm")
    options = [*OPTIONS, f"-DFORMAT={number_format}", *defined(macros), "-arch=sm_90"]
    files = [f"{name}.cu" for name in PASS]
    status, messages = Nvcc().compile(source(files), options, tmp_path)
    assert status == 0, messages
    loop = schedule.longest_loop(tmp_path / "kernels.cubin", "pass")
    assert loop.cycles / loop.chained <= MOST_CYCLES, loop
