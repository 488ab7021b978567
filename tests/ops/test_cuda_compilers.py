"""The kernels in the compilers of CUDA, which need no GPU: nvcc, and NVRTC, which CuPy uses."""

import ctypes
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpt_cli.ops.cuda.compiler import OPTIONS, kernels, source

PARTS = (
    "device",
    "arithmetic",
    "structs",
    "pack",
    "products",
    "rows",
    "attention",
    "sampling",
    "pass",
)
FILES = [f"{name}.cu" for name in PARTS]
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
USUAL = [(90, 0), (90, 3)]
OTHERS = [(sm, kind) for sm in (75, 80, 86, 89, 90, 100, 120) for kind in range(4)]


@pytest.mark.parametrize(
    ("architecture", "number_format"),
    [
        *USUAL,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS if case not in USUAL),
    ],
)
@pytest.mark.parametrize("compiler", [Nvcc, Nvrtc])
def test_the_kernels_compile_without_warnings_or_spills(
    compiler, architecture, number_format, tmp_path
):
    compiler = compiler()
    if not compiler.knows(architecture):
        pytest.skip(f"this compiler is not for sm_{architecture}")
    options = [*OPTIONS, f"-DFORMAT={number_format}", f"-arch=sm_{architecture}"]
    options += [f"--ptxas-options={option}" for option in SHOWN]
    code = source(FILES if architecture >= 80 else FILES[:-1])  # a pass copies asynchronously
    status, messages = compiler.compile(code, options, tmp_path)
    assert status == 0, messages
    assert "warning" not in messages.lower(), messages
    compiled = {*re.findall(rf"entry function '(\w+)' for 'sm_{architecture}'", messages)}
    declared = {*kernels(FILES)}  # some for one format only
    every_format = {"embed", "layer_norm", "store", "attend_1", "pack", "linear_64x64", "choose"}
    assert every_format <= compiled <= declared
    assert ("pass" in compiled) == (architecture >= 80)
