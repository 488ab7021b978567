"""The kernels in the compilers of CUDA, which need no GPU: nvcc, and NVRTC, which CuPy calls."""

import ctypes
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest

from gpt_cli.ops import get_ops
from support import emulated_cuda

NVCC = shutil.which("nvcc", path="/usr/local/cuda/bin") or shutil.which("nvcc")
SHOWN = ("-v", "-warn-spills", "-warn-lmem-usage")  # by ptxas, which is the last step of both


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
        (folder / "kernels.cu").write_text(source)
        command = [NVCC, "-cubin", "-Werror=all-warnings", *options, "kernels.cu"]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, cwd=folder, **pipe, text=True)
        return done.returncode, done.stdout


class Nvrtc:
    """The library that compiles for CuPy; it and the headers come in NVIDIA's wheels."""

    def __init__(self):
        spec = find_spec("nvidia")
        folders = [Path(folder) for folder in spec.submodule_search_locations] if spec else []
        libraries = [path for folder in folders for path in folder.glob("*/lib/libnvrtc.so.*")]
        headers = [path for folder in folders for path in folder.glob("*/include/cuda_fp16.h")]
        if not (libraries and headers):
            pytest.skip("needs nvidia-cuda-nvrtc and nvidia-cuda-runtime")
        self.library = ctypes.CDLL(str(libraries[0]))
        # CuPy 14 adds these to the options of a module.
        self.options = "-ftz=true", "--device-as-default-execution-space", f"-I{headers[0].parent}"

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
        options = [option.encode() for option in (*options, *self.options)]
        arguments = (ctypes.c_char_p * len(options))(*options)
        status = self.library.nvrtcCompileProgram(program, len(options), arguments)
        self.library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        messages = ctypes.create_string_buffer(size.value)
        self.library.nvrtcGetProgramLog(program, messages)
        self.library.nvrtcDestroyProgram(ctypes.byref(program))
        return status, messages.value.decode()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    "architecture",
    [90, *(pytest.param(sm, marks=pytest.mark.slow) for sm in (75, 80, 86, 89, 100, 120))],
)
@pytest.mark.parametrize("compiler", [Nvcc, Nvrtc])
def test_the_kernels_compile_without_warnings_or_spills(
    compiler, architecture, dtype, tmp_path, monkeypatch
):
    compiler = compiler()
    if not compiler.knows(architecture):
        pytest.skip(f"this compiler is not for sm_{architecture}")
    emulated_cuda.install(monkeypatch)
    module = Mock()  # records what CuPy would compile, and the kernels that are used
    monkeypatch.setattr(sys.modules["cupy"], "RawModule", module)
    get_ops("cuda", dtype)
    options = [f"-arch=sm_{architecture}", *module.call_args.kwargs["options"]]
    options += [f"--ptxas-options={option}" for option in SHOWN]

    status, messages = compiler.compile(module.call_args.kwargs["code"], options, tmp_path)
    assert status == 0, messages
    assert "warning" not in messages.lower(), messages
    used = [call.args[0] for call in module.return_value.get_function.call_args_list]
    compiled = re.findall(rf"entry function '(\w+)' for 'sm_{architecture}'", messages)
    assert sorted(compiled) == sorted(used)
