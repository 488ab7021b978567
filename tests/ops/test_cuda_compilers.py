"""The kernels in the compilers of CUDA, which need no GPU: nvcc, and NVRTC, which CuPy uses."""

import ctypes
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpt_cli.ops.cuda import compiler as compiler_module
from gpt_cli.ops.cuda import plans
from gpt_cli.ops.cuda.compiler import OPTIONS, kernels, source
from support.cuda_kernels import FORMATS
from tools import schedule

COMMON = "device", "arithmetic", "structs"
OPERATIONS = *COMMON, "pack", "products", "rows", "attention", "sampling", "tokens"
PASS = (
    *COMMON,
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


# A module takes several seconds to compile: the default is one GPU, in float32 and int8.
ARCHITECTURES = 75, 80, 86, 89, 90, 100, 120
USUAL = [(90, 0, None), (90, 3, None), (90, 0, 4), (90, 3, 1)]
EVERY_FORMAT = {"embed", "layer_norm", "store", "attend_1", "pack", "linear_64x64", "choose"}


def rows_of(number_format):
    """Return the rows for which a pass is compiled."""
    return plans._PASS_ROWS.get(FORMATS[number_format], plans._FLOAT_PASS_ROWS)


def cases():
    """Yield architectures, formats, and the rows of a pass, or None for the operations."""
    for architecture in ARCHITECTURES:
        for number_format in range(len(FORMATS)):
            yield architecture, number_format, None
            if architecture >= 80:  # a pass copies asynchronously
                for rows in rows_of(number_format):
                    yield architecture, number_format, rows


@pytest.mark.parametrize(
    ("architecture", "number_format", "rows"),
    [pytest.param(*case, marks=[] if case in USUAL else pytest.mark.slow) for case in cases()],
)
@pytest.mark.parametrize("compiler", [Nvcc, Nvrtc])
def test_the_kernels_compile_without_warnings_or_spills(
    compiler, architecture, number_format, rows, tmp_path
):
    compiler = compiler()
    if not compiler.knows(architecture):
        pytest.skip(f"this compiler is not for sm_{architecture}")
    options = [*OPTIONS, f"-DFORMAT={number_format}", f"-arch=sm_{architecture}"]
    options += [f"--ptxas-options={option}" for option in SHOWN]
    options += [f"-DROWS={rows}"] if rows else []
    files = [f"{name}.cu" for name in (PASS if rows else OPERATIONS)]
    status, messages = compiler.compile(source(files), options, tmp_path)
    assert status == 0, messages
    assert "warning" not in messages.lower(), messages
    assert "bytes spill" in messages
    assert not re.search(r"[1-9]\d* bytes spill", messages), messages
    compiled = {*re.findall(rf"entry function '(\w+)' for 'sm_{architecture}'", messages)}
    assert ({"pass"} if rows else EVERY_FORMAT) <= compiled <= {*kernels(files)}


def test_every_file_is_compiled():
    names = {path.stem for path in Path(compiler_module.__file__).parent.glob("*.cu")}
    assert names == {*OPERATIONS, *PASS}


# --- the schedule of the products of a pass ------------------------------------------------------

MOST_CYCLES = 4.3  # of a multiply-add that waits for the one before: 4 at least


@pytest.mark.slow
@pytest.mark.parametrize(("number_format", "rows"), [(0, 4), (0, 8), (2, 4)])
def test_little_stands_between_two_multiply_adds_of_a_chain(number_format, rows, tmp_path):
    if not schedule.disassembler():
        pytest.skip("needs nvidia-cuda-nvdisasm")
    options = [*OPTIONS, f"-DFORMAT={number_format}", f"-DROWS={rows}", "-arch=sm_90"]
    files = [f"{name}.cu" for name in PASS]
    status, messages = Nvcc().compile(source(files), options, tmp_path)
    assert status == 0, messages
    loop = schedule.longest_loop(tmp_path / "kernels.cubin", "pass")
    assert loop.cycles / loop.chained <= MOST_CYCLES, loop
