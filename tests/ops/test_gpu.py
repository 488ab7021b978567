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

    def __init__(self, devices: int, version: int = 12_080, error: int = 0):
        self.devices, self.version, self.error = devices, version, error

    def cuInit(self, flags):  # noqa: N802
        return self.error

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = self.devices
        return 0

    def cuDriverGetVersion(self, version):  # noqa: N802
        version._obj.value = self.version
        return 0


@pytest.mark.parametrize(
    ("driver", "cupy", "problem"),
    [
        (None, True, "no NVIDIA driver is installed"),
        (None, False, "no NVIDIA driver is installed"),
        (Driver(0), True, "the NVIDIA driver finds no GPU"),
        (Driver(1, error=100), True, "the NVIDIA driver finds no GPU"),
        (Driver(1), False, "CuPy is not installed: pip install 'cupy-cuda12x[ctk]'"),
        (Driver(1, 13_000), False, "CuPy is not installed: pip install 'cupy-cuda13x[ctk]'"),
        (Driver(1), True, None),
    ],
)
def test_the_problem_names_the_missing_part(monkeypatch, driver, cupy, problem):
    monkeypatch.setattr(gpu, "load_driver", lambda: driver)
    monkeypatch.setattr(gpu, "find_spec", lambda name: name if cupy else None)
    assert gpu.problem() == problem


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
    no_gpu.setattr("gpt_cli.ops.native_library", lambda: tmp_path)
    check_available("auto", dtype)
    no_gpu.setattr("gpt_cli.ops.native_library", lambda: None)
    with pytest.raises(InputError, match=f"dtype {dtype} needs the compiled library"):
        check_available("auto", dtype)


def test_auto_prefers_a_gpu(emulated):
    assert get_ops("auto", "float32").name == "cupy"
    assert get_ops("auto", "float16").name == "cupy"
    emulated.setenv("GPT_CLI_OPS", "numpy")
    assert get_ops("auto", "float32").name == "numpy"


def test_missing_libraries_of_cuda_are_reported(emulated, caplog):
    def broken(**arguments):
        raise RuntimeError("no libnvrtc.so.12")

    emulated.setattr(sys.modules["cupy"], "RawModule", broken)
    message = r"no libnvrtc.so.12.*pip install 'cupy-cuda12x\[ctk\]'"
    with pytest.raises(ResourceError, match=message):
        get_ops("cuda", "float32")
    caplog.set_level(logging.INFO, "gpt_cli")
    assert get_ops("auto", "float32").name in ("native", "numpy")
    assert caplog.messages[0] == "cupy cannot be used: RuntimeError: no libnvrtc.so.12"


def test_weights_that_do_not_fit_are_refused_before_they_are_read(emulated):
    emulated.setattr(sys.modules["cupy.cuda.runtime"], "memGetInfo", lambda: (1_000_000, 0))
    with pytest.raises(ResourceError, match="the weights of tiny in float32 take 9 MB of memory"):
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
