"""A model is checked on the user's own machine, and each kind of fault is found by its check."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from gpt_cli.checks import verify
from gpt_cli.cli import app
from gpt_cli.engine import Engine
from gpt_cli.generation.loaded import LoadedModel
from gpt_cli.gpt2 import checkpoint
from gpt_cli.hub import local
from gpt_cli.ops import bindings
from gpt_cli.ops.numpy_ops import NumPyOps

TINY = Path(__file__).parents[2] / "weights" / "tiny"
NAMES = ["files", "known texts", "cache on = off", "batch = single", "bits", "native = numpy"]


def results(name, folder, last):
    """The checks up to one of them: those after it take time."""
    found = {}
    for check in verify.verify(name, folder):
        found[check.name] = check
        if check.name == last:
            return found
    raise AssertionError(f"there is no check {last}")


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(TINY, tmp_path / "copy"))


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def told_of(capfd, *arguments):
    """What the command says in JSON, and its checks by their names."""
    assert app.run(["verify", *arguments, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["passed"] is True
    return {check["name"]: check for check in told["checks"]}


@pytest.mark.usefixtures("library", "thread_variables")
def test_the_bundled_model_passes_everything_that_can_be_checked_offline(capfd, monkeypatch):
    monkeypatch.setenv("GPT_CLI_OPS", "native")
    checks = told_of(capfd, "tiny")
    assert list(checks)[:8] == [*NAMES, "cpu in int8 = float32", "bits in int8"]
    assert {checks[name]["passed"] for name in NAMES} == {True}
    assert checks["bits in int8"]["passed"] is True
    assert list(checks)[-1] == "compress, decompress"
    assert checks["compress, decompress"]["passed"] is True
    for name in ("cache on = off", "batch = single"):
        assert checks[name]["detail"] == "the same bits"
        assert checks[name]["largest"] == checks[name]["mean"] == 0
    for name in ("native = numpy", "cpu in int8 = float32"):
        assert 0 < checks[name]["mean"] <= checks[name]["largest"] < 1
    digests = {name: check["digest"] for name, check in checks.items() if check["digest"]}
    known = verify.known()["tiny"]["digests"]
    assert digests == {"bits": known["float32"], "bits in int8": known["int8"]}


@pytest.mark.usefixtures("thread_variables")
def test_numpy_passes_too_and_has_no_bits_to_compare(capfd, monkeypatch):
    monkeypatch.setenv("GPT_CLI_OPS", "numpy")
    checks = told_of(capfd, "tiny")
    assert list(checks)[:6] == NAMES
    assert [checks[name]["passed"] for name in NAMES] == [True] * 4 + [None] * 2
    assert "only the compiled library" in checks["bits"]["detail"]
    assert {check["digest"] for check in checks.values()} == {None}
    for name in ("cache on = off", "batch = single"):
        assert 0 <= checks[name]["mean"] <= checks[name]["largest"] < 1e-3


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("case", ["saved", "bf16"])
def test_a_model_of_ones_own_has_a_digest_that_is_the_same_each_time(case_folder, capfd, case):
    folder = str(case_folder(case))
    first, again = (told_of(capfd, folder) for _ in range(2))
    for name in ("bits", "bits in int8"):
        assert len(first[name]["digest"]) == 64
        assert first[name]["digest"] == again[name]["digest"]


def test_tiny_is_known_by_its_weights_in_any_folder_and_its_files_by_their_names(copy):
    assert results(str(copy), copy, "known texts")["known texts"].passed is True
    (copy / "merges.txt").unlink()
    check = next(verify.verify("tiny", copy))
    assert (check.passed, check.detail) == (False, "missing: merges.txt")


def test_a_bit_that_is_flipped_in_the_bundled_model_is_exit_code_4(copy, monkeypatch, capfd):
    flip_a_bit(copy / "model.safetensors")
    monkeypatch.setenv("GPT_CLI_OPS", "numpy")
    monkeypatch.setattr(local, "_bundled_folders", lambda name: [copy])
    assert app.run(["verify", "tiny"]) == 4
    out, err = capfd.readouterr()
    assert "FAILED       files" in out
    assert "not as published: model.safetensors" in out
    assert err.startswith("gpt-cli: error: tiny failed 1 of ")
    assert err.count("\n") == 1
    assert err.endswith(
        "checks (files): get its files again, and report it if that does not help\n"
    )


@pytest.mark.parametrize("damaged", [None, "model.safetensors", "config.json"])
def test_files_of_the_cache_have_the_hashes_that_name_them(case_folder, damaged, tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "x", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in case_folder("saved").iterdir():
        data = file.read_bytes()
        name = hashlib.sha256(data).hexdigest()
        if file.suffix != ".safetensors":
            name = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        (blobs / name).write_bytes(data)
        (snapshot / file.name).symlink_to(blobs / name)
    if damaged:
        flip_a_bit((snapshot / damaged).resolve())
    check = next(verify.verify("acme/gpt", snapshot))
    assert check.passed is (damaged is None)
    assert damaged is None or check.detail == f"not as published: {damaged}"


def test_any_model_can_be_checked_and_what_cannot_says_why(case_folder):
    found = results(
        "x", case_folder("saved"), "batch = single"
    )  # its context is shorter than the prompts
    assert found["files"].passed is None
    assert found["known texts"].passed is None
    assert found["cache on = off"].passed is True
    assert found["batch = single"].passed is True


class Wrong(NumPyOps):
    """Attention that is wrong, by a factor, where a test says so."""

    name = "wrong"

    def __init__(self, when, factor=1.1):
        super().__init__()
        self.when, self.factor = when, np.float32(factor)

    def attend(self, q, keys, values, scale, visible):
        right = super().attend(q, keys, values, scale, visible)
        return right * self.factor if self.when(q, keys) else right


@pytest.mark.parametrize("factor", [1.1, 1.0002])
@pytest.mark.parametrize(
    ("when", "fails"),
    [
        (lambda q, keys: q.shape[2] == 1 and keys.shape[2] > 8, "cache on = off"),
        (lambda q, keys: q.shape[0] > 1, "batch = single"),
        (lambda q, keys: True, "wrong = numpy"),
    ],
    ids=["decoding", "batches", "always"],
)
def test_operations_that_are_wrong_fail_the_check_that_is_for_them(
    when, fails, factor, monkeypatch
):
    usual = verify.get_ops

    def get_ops(device, dtype):
        return Wrong(when, factor) if dtype == "float32" else usual(device, dtype)

    monkeypatch.setattr(verify, "get_ops", get_ops)
    found = results("tiny", TINY, fails)
    assert found["files"].passed is True
    assert found[fails].passed is False


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("factor", [0.7, 1.5])
def test_int8_operations_that_are_wrong_are_found(monkeypatch, factor):
    usual = verify.get_ops

    def get_ops(device, dtype):
        return Wrong(lambda q, keys: True, factor) if dtype == "int8" else usual(device, dtype)

    monkeypatch.setattr(verify, "get_ops", get_ops)
    name = "cpu in int8 = float32"
    assert results("tiny", TINY, name)[name].passed is False


@pytest.mark.usefixtures("library")
def test_the_limits_of_the_bundled_model_are_narrow(tiny):
    model = checkpoint.load(TINY, NumPyOps())
    reference = Engine(LoadedModel(model, tiny.tokenizer), "tiny", 0.0)
    expected = verify._logprobs(reference)
    for dtype, (largest, mean) in {"float32": (4e-4, 6e-5), "int8": (2.5, 0.5)}.items():
        limits = verify._limits(reference, expected, dtype)
        assert limits[0] < largest
        assert limits[1] < mean


def wrong_bits(when):
    """Native operations whose attention is a little off where `when` says so."""
    from gpt_cli.ops.native_ops import NativeOps

    class WrongBits(NativeOps):
        layers = None  # which would not ask `attend`

        def attend(self, q, keys, values, scale, visible):
            right = super().attend(q, keys, values, scale, visible)
            return np.nextafter(right, np.float32(np.inf)) if when(self, q) else right

    return WrongBits()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("when", "fails"),
    [
        (lambda ops, q: q.shape[2] == 1, "cache on = off"),
        (lambda ops, q: q.shape[0] > 1, "batch = single"),
        (lambda ops, q: ops.threads > 1, "bits"),
    ],
    ids=["decoding", "batches", "threads"],
)
def test_bits_that_differ_fail_the_check_that_is_for_them(when, fails, monkeypatch):
    monkeypatch.setattr(verify, "get_ops", lambda device, dtype: wrong_bits(when))
    monkeypatch.setenv("GPT_CLI_THREADS", "1")
    check = results("tiny", TINY, fails)[fails]
    assert check.passed is False
    assert "differ" in check.detail
    if fails != "bits":
        assert check.detail.startswith("different bits: ")
        assert check.largest < 1e-4


@pytest.mark.usefixtures("library")
def test_bits_that_differ_between_levels_are_found(monkeypatch):
    used = []
    monkeypatch.setattr(bindings, "levels", lambda: ["avx512", "avx2"])
    monkeypatch.setattr(bindings, "use_level", used.append)
    monkeypatch.setattr(bindings, "choose_level", lambda: used.append("chosen"))
    ops = wrong_bits(lambda ops, q: used[-1:] == ["avx2"])
    monkeypatch.setattr(verify, "get_ops", lambda device, dtype: ops)
    check = results("tiny", TINY, "bits")["bits"]
    assert check.passed is False
    assert "at avx512, avx2" in check.detail
    assert used[-8::2] == ["avx512", "avx512", "avx2", "avx2"]
    assert used[-7::2] == ["chosen"] * 4


@pytest.fixture
def large_logits(tmp_path):
    """Return a function that writes a random model, whose matrices have this scale."""

    def write(scale):
        folder = Path(shutil.copytree(TINY, tmp_path / "large"))
        random = np.random.default_rng(1)
        weights = {}
        for name, tensor in checkpoint.read(TINY)[1].items():
            center = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
            spread = scale if len(tensor.shape) == 2 else 0.1
            weights[name] = random.normal(center, spread, tensor.shape).astype(np.float32)
        save_file(weights, folder / "model.safetensors")
        return folder

    return write


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("scale", [1, 3])
def test_a_random_model_with_large_logits_is_not_called_damaged(large_logits, monkeypatch, scale):
    monkeypatch.delenv("GPT_CLI_OPS", raising=False)
    checks = results("large", large_logits(scale), "cpu in int8 = float32")
    assert [name for name, check in checks.items() if check.passed is False] == []
    assert checks["native = numpy"].largest > 1e-3  # the limit for GPT-2's logits
    assert checks["cpu in int8 = float32"].largest > 3


@pytest.mark.usefixtures("library")
def test_wrong_operations_are_found_in_a_model_with_large_logits(large_logits, monkeypatch):
    monkeypatch.setattr(verify, "get_ops", lambda device, dtype: Wrong(lambda q, keys: True))
    folder = large_logits(3)
    assert results("large", folder, "wrong = numpy")["wrong = numpy"].passed is False


@pytest.mark.usefixtures("library")
def test_a_model_that_cannot_compress_is_not_checked(tiny):
    model = replace(tiny.model, config=replace(tiny.model.config, bos_token_id=None))
    check = verify._check_round_trip(Engine(LoadedModel(model, tiny.tokenizer), "tiny", 0.0))
    assert check.passed is None
    assert "start token" in check.detail


@pytest.mark.usefixtures("library")
def test_a_level_that_cannot_read_what_another_writes_is_found(monkeypatch, tiny):
    used = ["avx512"]
    monkeypatch.setattr(bindings, "levels", lambda: ["avx512", "avx2"])
    monkeypatch.setattr(bindings, "use_level", used.append)
    monkeypatch.setattr(bindings, "choose_level", lambda: used.append("chosen"))
    right = verify._check_round_trip(tiny)
    assert right.passed is True
    counts = tiny.model.ops.cumulative_counts
    monkeypatch.setattr(
        tiny.model.ops,
        "cumulative_counts",
        lambda logits: counts(logits) + (used[-1] == "avx2"),
        raising=False,
    )
    wrong = verify._check_round_trip(tiny)
    assert (wrong.passed, wrong.detail) == (False, "what avx512 writes, avx2 cannot read")


@pytest.mark.usefixtures("library")
def test_bits_that_are_not_the_known_ones_are_found(monkeypatch):
    monkeypatch.delenv("GPT_CLI_OPS", raising=False)
    facts = json.loads(json.dumps(verify.known()))
    right, facts["tiny"]["digests"]["float32"] = facts["tiny"]["digests"]["float32"], "0" * 64
    monkeypatch.setattr(verify, "known", lambda: facts)
    check = results("tiny", TINY, "bits")["bits"]
    assert "report it" in verify.cure(["bits"])
    assert "files" not in verify.cure(["bits"])
    assert (check.passed, check.digest) == (False, right)
    assert check.detail == f"{right}, expected {'0' * 64}"


def test_texts_that_are_not_as_published_are_found(monkeypatch):
    facts = json.loads(json.dumps(verify.known()))
    facts["tiny"]["continuations"][1]["text"] += "!"
    monkeypatch.setattr(verify, "known", lambda: facts)
    check = results("tiny", TINY, "known texts")["known texts"]
    assert check.passed is False
    assert check.detail.startswith("'One day, a fox' continues with")


def test_what_is_known_of_the_published_model_is_well_formed():
    facts = verify.known()["openai-community/gpt2"]
    assert {len(digest) for digest in facts["sha256"].values()} == {64}
    assert all(fact["tokens"] > 0 and fact["text"] for fact in facts["continuations"])
