import compileall
import ctypes
import functools
import gc
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import settings

import gpt_cli
from gpt_cli.folder.config import GPT2Config
from gpt_cli.folder.tokenizer import Tokenizer, read_tokenizer
from gpt_cli.gpt2 import assembly, checkpoint
from gpt_cli.gpt2.model import GPT2
from gpt_cli.ops import Array, Ops, bindings, get_ops
from gpt_cli.system.library import native_library
from gpt_cli.system.signals import ENDING
from gpt_cli.system.startup import THREAD_VARIABLES
from support.checkpoints import CASES, CONFIG, make_weights
from support.loopback_hub import cache_fixture, hub_fixture  # noqa: F401 (fixtures)
from support.prepared import prepared
from support.processes import COMMAND

os.environ.pop("PYTHONUNBUFFERED", None)  # commands buffer their output, as they do for users
gc.set_threshold(10_000)  # by default, a tenth of the time of the tests would be spent in it
# Now, since a process whose files may not grow would leave a half-written module for all others.
compileall.compile_dir(Path(gpt_cli.__file__).parent, quiet=1)

GOLDEN = Path(__file__).parent / "golden"

settings.register_profile("reproducible", derandomize=True, deadline=None, max_examples=12)
settings.register_profile("thorough", derandomize=True, deadline=None, max_examples=200)
settings.load_profile("reproducible")


def pytest_collection_finish() -> None:
    """Keep modules and tests, which stay, from being examined for garbage again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def default_signals() -> None:
    """Let processes of tests handle signals that are ignored here, such as SIGHUP under nohup."""
    for number in ENDING:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # unlike SIG_IGN, no process inherits it


@pytest.fixture
def thread_variables(monkeypatch):
    """Set the variables that `--threads` changes, and restore them afterwards."""
    for name in THREAD_VARIABLES:
        monkeypatch.setenv(name, "7")
    return monkeypatch


@pytest.fixture
def memory(monkeypatch):
    """Return the file system memory://, made to behave more like s3://."""
    fs = fsspec.filesystem("memory")
    kind = type(fs)
    read, make = kind.cat_file, kind.mkdir

    def cat_file(self, path, version_id=None, start=None, end=None):
        assert version_id is None
        return read(self, path, start, end)

    def mkdir(self, path, create_parents=True):
        _, bucket, *key = self._strip_protocol(path).split("/")
        if key and not create_parents and not self.exists(bucket):
            raise FileNotFoundError(bucket)
        make(self, path, create_parents)

    monkeypatch.setattr(kind, "cat_file", cat_file)
    monkeypatch.setattr(kind, "mkdir", mkdir)
    fs.mkdir("/bucket")
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.fixture(scope="session")
def prepared_command(tmp_path_factory) -> Iterator[list[str]]:
    """Return a command that runs `gpt-cli` sooner where a real process proves nothing more."""
    if sys.platform == "linux":
        with prepared(tmp_path_factory.mktemp("prepared") / "socket") as command:
            yield command
    else:
        yield COMMAND


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium
        if program is None and not Path(chromium.executable_path).exists():
            pytest.exit("nothing was tested: install Chromium or Google Chrome", returncode=1)
        # Many containers do not support its sandbox, and the pages are trusted.
        launched = chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(params=["phone-light", "phone-dark", "desktop-light", "desktop-dark"])
def window(request, browser):
    size, scheme = request.param.split("-")
    phone = size == "phone"
    viewport = {"width": 375, "height": 812} if phone else {"width": 1280, "height": 800}
    context = browser.new_context(
        viewport=viewport, color_scheme=scheme, has_touch=phone, is_mobile=phone
    )
    yield context
    context.close()


@pytest.fixture(scope="session")
def golden():
    """Return a function that reads a file of tests/golden."""

    @functools.cache
    def read(name: str):
        if name.endswith(".npz"):
            with np.load(GOLDEN / name, allow_pickle=False) as arrays:
                return dict(arrays)
        return json.loads((GOLDEN / name).read_bytes())

    return read


@pytest.fixture(scope="session")
def case_folder(tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that writes one of `checkpoints.CASES`, once, and returns its folder."""
    return functools.cache(lambda case: CASES[case].write(tmp_path_factory.mktemp(case)))


@pytest.fixture(scope="session")
def library() -> ctypes.CDLL:
    """Return the compiled library; skip the test without one."""
    if native_library() is None:
        pytest.skip("gpt-cli was installed without the compiled library")
    return bindings.library()


@functools.cache
def ops_named(name: str, dtype: str) -> Ops:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPT_CLI_OPS", name)
        return get_ops("cpu", dtype)


@pytest.fixture(scope="session", params=["numpy", "native"])
def ops(request) -> Ops:
    """Return each implementation of the operations."""
    if request.param == "native":
        request.getfixturevalue("library")
    return ops_named(request.param, "float32")


@pytest.fixture(scope="session", params=["numpy", "native"])
def int8_ops(request) -> Ops:
    """Return each implementation with int8 weights."""
    if request.param == "native":
        request.getfixturevalue("library")
    return ops_named(request.param, "int8")


@pytest.fixture(scope="session")
def native(library) -> Callable[[str], Ops]:
    """Return a function that returns the compiled operations for a dtype."""
    return functools.partial(ops_named, "native")


@pytest.fixture(scope="session")
def cached() -> Callable[..., list[Array]]:
    """Return a function that stores keys and values (B, H, S, D) in two steps: `past`, the rest."""

    def store(ops: Ops, keys: Array, values: Array, past: int = 0) -> list[Array]:
        B, H, S, D = keys.shape
        layer = [layers[0] for layers in ops.new_cache(1, B, H, S, D)]
        for start, end in ((0, past), (past, S)):
            new = keys[:, :, start:end], values[:, :, start:end]
            ops.store(*new, *layer, np.full(B, start), np.full(B, end - start))
        return layer

    return store


@pytest.fixture(scope="module", params=bindings.levels() if native_library() else [])
def level(request) -> Iterator[str]:
    """Run the test at each level that this processor supports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPT_CLI_LEVEL", request.param)
        yield bindings.choose_level()
    bindings.choose_level()


@pytest.fixture(scope="session")
def load_case(case_folder, ops) -> Callable[[str], GPT2]:
    """Return a function that loads one of `checkpoints.CASES`, once."""
    return functools.cache(lambda case: checkpoint.load(case_folder(case), ops))


@pytest.fixture(scope="session")
def make_model(ops) -> Callable[..., GPT2]:
    """Return a function that makes a model of `checkpoints.CONFIG` with changes, in memory."""

    def make(seed: int = 0, **changes: object) -> GPT2:
        config = CONFIG | changes
        weights = make_weights(config, seed=seed)
        return assembly.assemble(GPT2Config.from_dict(config), ops, weights)

    return make


@pytest.fixture(scope="session")
def tokenizer(case_folder) -> Tokenizer:
    """Return the tokenizer of every checkpoint of `checkpoints`."""
    return read_tokenizer(case_folder("hub"))


@pytest.fixture(scope="session")
def engine(case_folder) -> gpt_cli.Engine:
    return gpt_cli.load(str(case_folder("saved")))


@pytest.fixture(scope="session")
def tiny() -> gpt_cli.Engine:
    """Return the bundled model."""
    return gpt_cli.load("tiny")
