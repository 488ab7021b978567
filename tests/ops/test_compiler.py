"""The source that is compiled for a GPU, and the cache of the result, without a GPU or NVRTC."""

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpt_cli.ops.cuda import compiler
from support.processes import posix

FILES = ("device.cu", "arithmetic.cu")
FOLDER = Path(compiler.__file__).parent
CONSTANTS = FOLDER.parent / "constants.inc"


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Return a list of what was compiled; the machine code is a number."""
    calls = []

    def compile(code, options, capability):
        calls.append((code, options, capability))
        return b"machine code %d" % len(calls)

    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_compile", compile)
    monkeypatch.setattr(compiler, "_capability", lambda: 90)
    monkeypatch.setattr(compiler, "_module", lambda binary: ("module", binary))
    return calls


def test_the_source_is_the_files_in_order_with_the_constants():
    source = compiler.source(FILES)
    device, arithmetic = ((FOLDER / name).read_text("utf-8") for name in FILES)
    assert source.startswith(f'#line 1 "device.cu"\n{device}#line 1 "arithmetic.cu"\n')
    before, after = arithmetic.split('#include "constants.inc"\n')
    line = before.count("\n") + 2
    constants = f'#line 1 "constants.inc"\n{CONSTANTS.read_text("utf-8")}'
    assert source.endswith(f'{before}{constants}\n#line {line} "arithmetic.cu"\n{after}')
    assert "#include" not in source


def test_the_files_of_kernels_include_nothing_but_the_constants():
    for file in FOLDER.glob("*.cu"):
        lines = file.read_text("utf-8").splitlines()
        included = [line for line in lines if "#include" in line]
        assert included == (['#include "constants.inc"'] if file.name == "arithmetic.cu" else [])


def test_no_option_lets_a_compiler_change_bits(compiled):
    compiler.load(FILES, ("-DFORMAT=1",))
    [(code, options, capability)] = compiled
    assert (code, capability) == (compiler.source(FILES), 90)
    assert options[-1] == "-DFORMAT=1"
    assert {"--fmad=false", "-ftz=false", "--prec-div=true", "--prec-sqrt=true"} < set(options)


def test_a_module_is_compiled_once_for_each_source_option_and_device(compiled, monkeypatch):
    module = compiler.load(FILES, ("-DFORMAT=0",))
    assert module == ("module", b"machine code 1")
    assert compiler.load(FILES, ("-DFORMAT=0",)) == module
    assert len(compiled) == 1
    assert compiler.load(FILES, ("-DFORMAT=1",)) == ("module", b"machine code 2")
    assert compiler.load(FILES[:1], ("-DFORMAT=0",)) == ("module", b"machine code 3")
    monkeypatch.setattr(compiler, "_capability", lambda: 75)
    assert compiler.load(FILES, ("-DFORMAT=0",)) == ("module", b"machine code 4")


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data + b"x", lambda _: b""]
)
def test_a_damaged_file_is_compiled_again(compiled, tmp_path, damage):
    compiler.load(FILES, ())
    [file] = (tmp_path / "cache").iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert compiler.load(FILES, ()) == ("module", b"machine code 2")
    assert file.read_bytes() != damage(whole)
    assert compiler.load(FILES, ()) == ("module", b"machine code 2")
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_what_the_driver_refuses_is_compiled_again_but_not_kept(compiled, tmp_path, monkeypatch):
    compiler.load(FILES, ())

    def refuse(binary):
        raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")

    monkeypatch.setattr(compiler, "_module", refuse)
    [file] = (tmp_path / "cache").iterdir()
    kept = file.read_bytes()
    with pytest.raises(RuntimeError, match="NO_BINARY"):
        compiler.load(FILES, ())
    assert len(compiled) == 2
    assert file.read_bytes() == kept


def test_a_folder_that_cannot_be_written_is_no_error(compiled, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert compiler.load(FILES, ()) == ("module", b"machine code 1")
    assert compiler.load(FILES, ()) == ("module", b"machine code 2")


@posix
def test_a_full_disk_leaves_nothing(compiled, tmp_path, monkeypatch):
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))  # Python ignores SIGXFSZ
    try:
        assert compiler.load(FILES, ()) == ("module", b"machine code 1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_a_cache_on_disk_nothing_is_kept(compiled, tmp_path, monkeypatch):
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    compiler.load(FILES, ())
    compiler.load(FILES, ())
    assert len(compiled) == 2
    assert not (tmp_path / "cache").exists()


def test_modules_are_compiled_at_the_same_time_on_the_current_device(compiled, monkeypatch):
    together, devices = threading.Barrier(2, timeout=30), []
    runtime = SimpleNamespace(getDevice=lambda: 5, setDevice=devices.append)
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    sys.modules["cupy.cuda"].runtime = runtime

    def compile(code, options, capability):
        together.wait()
        return code.encode()

    monkeypatch.setattr(compiler, "_compile", compile)
    monkeypatch.setattr(compiler, "_module", lambda binary: binary)
    groups = [(*FILES, "rows.cu"), (*FILES, "attention.cu")]
    loading = compiler.load_all(groups, ("-DFORMAT=2",))
    modules = {kernel: module.result() for kernel, module in loading.items()}
    assert devices == [5, 5]
    rows, attention = (compiler.source(names).encode() for names in groups)
    assert (modules["layer_norm"], modules["store"], modules["attend_1"]) == (
        *(rows, attention, attention),
    )
    assert {*modules.values()} == {rows, attention}


PROCESS = """
import sys, time
from gpt_cli.ops.cuda import compiler

compiler._compile = lambda *arguments: time.sleep(0.2) or bytes(1_000_000)
compiler._capability = lambda: 90
compiler._module = len
print("ready", flush=True)
sys.stdin.readline()
print(compiler.load(["device.cu"], []), flush=True)
compiler._compile = None
print(compiler.load(["device.cu"], []))
"""


def test_processes_may_compile_the_same_at_once(compiled, tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", PROCESS], **pipes) for _ in range(2)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate()[0] for process in processes] == ["1000000\n1000000\n"] * 2
    assert len(list((tmp_path / "cache").iterdir())) == 1


class Nvrtc:
    """Stands in for cupy.cuda.nvrtc; programs that contain "?" do not compile."""

    class NVRTCError(RuntimeError):
        pass

    def __init__(self):
        self.alive, self.options = [], ()

    def getVersion(self):  # noqa: N802
        return 12, 6

    def getSupportedArchs(self):  # noqa: N802
        return 70, 75, 80, 86, 89, 90

    def createProgram(self, code, name, headers, names):  # noqa: N802
        self.alive.append(code)
        return len(self.alive) - 1

    def compileProgram(self, program, options):  # noqa: N802
        self.options = options
        if "?" in self.alive[program]:
            raise self.NVRTCError("NVRTC_ERROR_COMPILATION (6)")

    def getProgramLog(self, program):  # noqa: N802
        return 'device.cu(7): error: expected ";"\n  more\n'

    def getCUBIN(self, program):  # noqa: N802
        return self.alive[program].encode()

    def destroyProgram(self, program):  # noqa: N802
        self.alive.pop(program)


@pytest.fixture
def nvrtc(monkeypatch):
    replaced = Nvrtc()
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    sys.modules["cupy.cuda"].nvrtc = replaced
    return replaced


@pytest.mark.parametrize(("capability", "target"), [(90, 90), (87, 86), (75, 75), (88, 86)])
def test_code_is_for_the_device_or_an_earlier_one_that_it_can_replace(nvrtc, capability, target):
    assert compiler._compile("code", ["-x"], capability) == b"code"
    assert nvrtc.options == ("-x", f"-arch=sm_{target}")
    assert nvrtc.alive == []


def test_errors_are_one_line_and_free_the_program(nvrtc):
    with pytest.raises(RuntimeError, match=r"NVRTC 12\.6 does not know .* capability 120$"):
        compiler._compile("code", (), 120)
    with pytest.raises(RuntimeError, match=r'\(6\): device.cu\(7\): error: expected ";"$'):
        compiler._compile("?", (), 90)
    assert nvrtc.alive == []
