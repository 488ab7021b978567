"""The choice between a GPU and the CPU, and messages without a GPU."""

import logging
import sys

import numpy as np
import pytest

import gpt_cli
from gpt_cli.cli.app import run
from gpt_cli.errors import InputError, ResourceError
from gpt_cli.ops import check_available, get_ops
from gpt_cli.system import gpu
from support import emulated_cuda


class Driver:
    """A driver that reports a number of devices."""

    def __init__(self, devices=1, version=12_080, error=0, capability=(9, 0)):
        self.devices, self.version, self.error = devices, version, error
        self.attributes = dict(zip((75, 76), capability, strict=True))

    def cuInit(self, flags):  # noqa: N802
        return self.error

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = self.devices
        return 0

    def cuDriverGetVersion(self, version):  # noqa: N802
        version._obj.value = self.version
        return 0

    def cuDeviceGet(self, device, index):  # noqa: N802
        device._obj.value = 7 + index
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):  # noqa: N802
        assert device.value == 7
        value._obj.value = self.attributes[attribute]
        return 0

    def cuDeviceGetName(self, text, size, device):  # noqa: N802
        assert device.value == 7
        text.value = b"NVIDIA Abacus"
        return 0


INSTALL_12 = "pip install 'cupy-cuda12x>=14' 'cuda-toolkit[cudart,nvrtc]==12.*'"
INSTALL_13 = "pip install 'cupy-cuda13x>=14' 'cuda-toolkit[cudart,nvrtc]==13.*'"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that installs a driver, packages of CuPy, and parts of CUDA."""

    def install(driver=None, packages=(), without=()):
        monkeypatch.setattr(gpu, "load_driver", lambda: driver)
        monkeypatch.setattr(gpu, "find_spec", lambda name: name if packages else None)
        monkeypatch.setattr(
            "importlib.metadata.distributions", lambda name: [name] if name in packages else []
        )
        monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setitem(sys.modules, "cuda", type(sys)("cuda"))
        sys.modules["cuda"].pathfinder = Pathfinder(without)

    return install


class Pathfinder:
    """Stands in for cuda.pathfinder, which finds the parts of CUDA for CuPy."""

    class DynamicLibNotFoundError(RuntimeError):
        pass

    def __init__(self, without):
        self.without = without

    def load_nvidia_dynamic_lib(self, name):
        if name in self.without:
            raise self.DynamicLibNotFoundError(f"Failure finding {name}\n  in many\n  folders")

    def find_nvidia_header_directory(self, name):
        return None if name in self.without else f"/{name}"


@pytest.mark.parametrize(
    ("driver", "packages", "problem"),
    [
        (None, ["cupy-cuda12x"], "no NVIDIA driver is installed"),
        (None, [], "no NVIDIA driver is installed"),
        (Driver(0), ["cupy-cuda12x"], "the NVIDIA driver finds no GPU"),
        (Driver(0), [], "the NVIDIA driver finds no GPU"),
        (Driver(error=100), ["cupy-cuda12x"], "the NVIDIA driver finds no GPU"),
        (
            Driver(capability=(6, 1)),
            ["cupy-cuda12x"],
            "the GPU has compute capability 6.1, and 7.5 is needed",
        ),
        (Driver(), [], f"CuPy is not installed: {INSTALL_12}"),
        (Driver(version=13_000), [], f"CuPy is not installed: {INSTALL_13}"),
        (Driver(capability=(7, 5)), ["cupy-cuda12x"], None),
        (Driver(capability=(12, 0)), ["cupy-cuda12x"], None),
    ],
)
def test_the_problem_names_the_missing_part(machine, driver, packages, problem):
    machine(driver, packages)
    assert gpu.problem() == problem


NO_NVRTC = "CuPy does not find NVRTC, the library that compiles kernels"


@pytest.mark.parametrize(
    ("version", "packages", "without", "text", "cure"),
    [
        (12_080, ["cupy-cuda12x"], ["nvrtc"], NO_NVRTC, INSTALL_12),
        (13_000, ["cupy-cuda13x"], ["nvrtc", "cudart"], NO_NVRTC, INSTALL_13),
        (13_000, ["cupy-cuda12x"], ["nvrtc"], NO_NVRTC, INSTALL_12),  # it works with this driver
        (
            12_080,
            ["cupy-cuda12x"],
            ["cudart"],
            "CuPy does not find cuda_fp16.h, which its own kernels include",
            INSTALL_12,
        ),
        (
            12_080,
            ["cupy-cuda13x"],
            [],
            "cupy-cuda13x is too new for the driver, which is for CUDA 12.8",
            f"pip uninstall --yes cupy-cuda13x && {INSTALL_12}",
        ),
        (
            13_020,
            ["cupy-cuda12x", "cupy-cuda13x"],
            [],
            "more than one CuPy is installed: cupy-cuda12x, cupy-cuda13x",
            f"pip uninstall --yes cupy-cuda12x cupy-cuda13x && {INSTALL_13}",
        ),
    ],
)
def test_the_fault_of_an_installed_cupy_has_a_cure(machine, version, packages, without, text, cure):
    machine(Driver(version=version), packages, without)
    assert gpu.problem() is None
    assert gpu.fault() == (text, cure)


@pytest.mark.parametrize("package", ["cupy", "cupy-cuda12x", "cupy-cuda13x"])
def test_a_whole_installation_has_no_fault(machine, tmp_path, package):
    machine(Driver(version=13_000), [package])
    assert gpu.fault() is None
    assert (tmp_path / "cache").is_dir()
    assert gpu.name() == "NVIDIA Abacus"


def test_an_old_cupy_is_a_fault(machine, monkeypatch):
    machine(Driver(), ["cupy-cuda12x"])
    monkeypatch.setitem(sys.modules, "cuda", None)
    assert gpu.fault() == ("CuPy is older than version 14", INSTALL_12)


def test_a_folder_that_cupy_cannot_create_is_a_fault(machine, tmp_path, monkeypatch):
    machine(Driver(), ["cupy-cuda12x"])
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    text, cure = gpu.fault()
    assert text.startswith(f"CuPy cannot create its folder {tmp_path / 'file' / 'cache'}: ")
    assert cure == "set CUPY_CACHE_DIR to a folder that can be written"


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(gpu, "problem", lambda: "the GPU is on holiday")
    return monkeypatch


@pytest.fixture
def emulated(monkeypatch):
    emulated_cuda.install(monkeypatch)
    monkeypatch.delenv("GPT_CLI_OPS", raising=False)
    return monkeypatch


def test_cuda_is_never_replaced_by_the_cpu(no_gpu, capsys):
    for dtype in ("float32", "float16"):
        with pytest.raises(ResourceError, match="the GPU is on holiday"):
            gpt_cli.load("no/such-model", device="cuda", dtype=dtype)
    assert run(["generate", "-m", "tiny", "--device", "cuda", "Once"]) == 5
    expected = "gpt-cli: error: --device cuda: the GPU is on holiday\n"
    assert capsys.readouterr().err == expected


def test_the_log_has_the_reason_for_the_cpu(no_gpu, caplog):
    caplog.set_level(logging.INFO, "gpt_cli")
    assert gpt_cli.load("tiny").generate(["Once"], max_tokens=1)
    assert caplog.messages[0] == "computing on the CPU: the GPU is on holiday"


@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_without_a_gpu_small_weights_need_the_library(no_gpu, tmp_path, dtype):
    no_gpu.delenv("GPT_CLI_OPS", raising=False)
    no_gpu.setattr("gpt_cli.ops.select.native_library", lambda: tmp_path)
    check_available("auto", dtype)
    no_gpu.setattr("gpt_cli.ops.select.native_library", lambda: None)
    with pytest.raises(InputError, match=f"dtype {dtype} needs the compiled library"):
        check_available("auto", dtype)


def test_auto_prefers_a_gpu(emulated):
    assert get_ops("auto", "float32").name == "cupy"
    assert get_ops("auto", "float16").name == "cupy"
    emulated.setenv("GPT_CLI_OPS", "numpy")
    assert get_ops("auto", "float32").name == "numpy"


def test_missing_libraries_of_cuda_are_reported(emulated, caplog):
    def broken(groups, options):
        raise RuntimeError("no libnvrtc.so.12\n  in many\n  folders")

    emulated.setattr("gpt_cli.ops.cuda.compiler.load_all", broken)
    emulated.setattr(gpu, "fault", lambda: gpu.Fault("CuPy has no NVRTC", "pip install it"))
    with pytest.raises(ResourceError, match=r"device cuda: CuPy has no NVRTC: pip install it$"):
        get_ops("cuda", "float32")
    emulated.setattr(gpu, "fault", lambda: None)
    reason = "RuntimeError: no libnvrtc.so.12 in many folders"
    with pytest.raises(ResourceError, match=f"device cuda: CuPy does not work: {reason}$"):
        get_ops("cuda", "float32")
    caplog.set_level(logging.INFO, "gpt_cli")
    assert get_ops("auto", "float32").name in ("native", "numpy")
    assert caplog.messages[0] == f"cupy cannot be used: {reason}"


def test_weights_that_do_not_fit_are_refused_before_they_are_read(emulated):
    emulated.setattr(sys.modules["cupy.cuda.runtime"], "memGetInfo", lambda: (1_000_000, 0))
    with pytest.raises(ResourceError, match="the weights of tiny in float16 take 5 MB of memory"):
        gpt_cli.load("tiny", device="cuda")


def test_the_bundled_model_writes_the_same_on_a_gpu(emulated):
    cpu, cuda = (gpt_cli.load("tiny", device=device) for device in ("cpu", "cuda"))
    how = {"max_tokens": 5, "seed": 5}
    assert cuda.generate(["Once upon"], **how)[0].text == cpu.generate(["Once upon"], **how)[0].text
    ids = [[1, 2, 3, 4]]
    np.testing.assert_allclose(cuda.logits(ids), cpu.logits(ids), rtol=1e-3, atol=1e-3)
    text = "There was a dog."
    assert cuda.score(text).total_logprob == pytest.approx(cpu.score(text).total_logprob, rel=1e-4)
    ranked, expected = (engine.rank(text, [" It", " was"]) for engine in (cuda, cpu))
    assert [choice.text for choice in ranked] == [choice.text for choice in expected]
    assert [id for id, _ in cuda.next_tokens(text, 3)] == [id for id, _ in cpu.next_tokens(text, 3)]
