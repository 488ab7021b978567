"""A model is checked on the user's own machine, and each kind of fault is found by its check."""

import hashlib
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from gpt_cli.checks import computed, verify
from gpt_cli.engine import Engine
from gpt_cli.folder.tokenizer import read_tokenizer
from gpt_cli.gpt2 import checkpoint
from gpt_cli.hub import local
from gpt_cli.ops import bindings
from gpt_cli.ops.numpy_ops import NumPyOps
from gpt_cli.texts.loaded import LoadedModel
from support.checkpoints import CONFIG, stored_tensors, write_checkpoint
from support.families import write_family
from support.in_process import records_here, run_here
from support.torch_files import write_torch

TINY = Path(__file__).parents[2] / "weights" / "tiny"
NAMES = [
    "source",
    "files",
    "known texts",
    "cache on = off",
    "batch = single",
    "bits",
    "native = numpy",
    "hooks",
]


def result(name, folder=TINY, model="tiny"):
    """Return a check, and those before it; the checks after it take time."""
    checks = {}
    for check in verify.verify(model, folder):
        checks[check.name] = check
        if check.name == name:
            return check, checks
    raise AssertionError(f"there is no check {name}")


@cache
def limits_of_tiny(dtype, compute=computed.logprobs, limits=verify._limits):
    model, tokenizer = checkpoint.load(TINY, NumPyOps()), read_tokenizer(TINY)
    reference = Engine(LoadedModel(model, tokenizer), "tiny", 0.0)
    return limits(reference, compute(reference), dtype, compute)


@pytest.fixture
def shortened(monkeypatch):
    """Leave out what takes long: known texts and long prompts. Compute limits only once."""
    facts = {"tiny": verify.known()["tiny"] | {"continuations": []}}
    monkeypatch.setattr(verify, "known", lambda: facts)
    monkeypatch.setattr(computed, "PROMPTS", ("Once upon a time", "The fox"))
    monkeypatch.setattr(verify, "_limits", lambda engine, expected, *rest: limits_of_tiny(*rest))


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(TINY, tmp_path / "copy"))


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def checks_of(model, **env):
    """Run the command; return the checks of its JSON by their names."""
    (report,) = records_here("verify", model, "--json", **env)
    assert report["passed"] is True
    return {check["name"]: check for check in report["checks"]}


@pytest.mark.usefixtures("library", "thread_variables")
def test_the_bundled_model_passes_everything_that_can_be_checked_offline():
    checks = checks_of("tiny", GPT_CLI_OPS="native")
    assert list(checks) == [
        *NAMES,
        "bits in float16",
        "cpu in int8 = float32",
        "bits in int8",
        "compress, decompress",
        *(f"cuda in {dtype} = cpu" for dtype in ("float32", "float16", "int8")),
    ]
    assert {checks[name]["passed"] for name in NAMES} == {True}
    assert checks["bits in int8"]["passed"] is True
    assert checks["compress, decompress"]["passed"] is True
    for name in ("cache on = off", "batch = single"):
        assert checks[name]["detail"] == "the same bits"
        assert checks[name]["largest"] == checks[name]["mean"] == 0
    for name in ("native = numpy", "hooks", "cpu in int8 = float32"):
        assert 0 < checks[name]["mean"] <= checks[name]["largest"] < 1
    digests = {name: check["digest"] for name, check in checks.items() if check["digest"]}
    known = verify.known()["tiny"]["digests"]
    float32, int8 = known["float32"], known["int8"]
    assert digests == {"bits": float32, "bits in float16": float32, "bits in int8": int8}


@pytest.mark.usefixtures("thread_variables")
def test_numpy_passes_too_and_has_no_bits_to_compare():
    checks = checks_of("tiny", GPT_CLI_OPS="numpy")
    assert list(checks)[:8] == NAMES
    assert [checks[name]["passed"] for name in NAMES] == [True] * 5 + [None] * 2 + [True]
    assert "only the compiled library" in checks["bits"]["detail"]
    assert {check["digest"] for check in checks.values()} == {None}
    for name in ("cache on = off", "batch = single"):
        assert 0 <= checks[name]["mean"] <= checks[name]["largest"] < 1e-3


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("case", ["saved", "bf16"])
def test_a_model_of_a_user_always_has_the_same_digest(case_folder, case):
    first, again = (checks_of(case_folder(case)) for _ in range(2))
    for name in ("bits", "bits in int8"):
        assert len(first[name]["digest"]) == 64
        assert first[name]["digest"] == again[name]["digest"]


def test_tiny_is_known_by_its_weights_in_any_folder_and_its_files_by_their_names(copy):
    assert result("known texts", copy, str(copy))[0].passed is True
    (copy / "merges.txt").unlink()
    check, _ = result("files", copy)
    assert (check.passed, check.detail) == (False, "missing: merges.txt")


@pytest.mark.usefixtures("shortened")
def test_a_flipped_bit_in_the_bundled_model_is_exit_code_4(copy, monkeypatch):
    flip_a_bit(copy / "model.safetensors")
    monkeypatch.setattr(local, "_bundled_folders", lambda name: [copy])
    out, error = run_here("verify", "tiny", GPT_CLI_OPS="numpy", code=4)
    assert b"FAILED       files" in out
    assert b"not as published: model.safetensors" in out
    ran = out.count(b"ok    ") + 1
    assert b"not checked" in out
    assert error.startswith(f"gpt-cli: error: tiny failed 1 of {ran} checks")
    assert error.count("\n") == 1
    assert error.endswith(
        "checks (files): get its files again, and report it if that does not help\n"
    )


def test_an_edited_transformer_is_named_with_its_cure(monkeypatch):
    monkeypatch.setattr(verify, "is_modified", lambda: True)
    check, _ = result("source")
    assert (check.passed, check.detail) == (False, f"{verify.MODEL} was modified")
    assert verify.cure(["source", "files"]).startswith(f"undo the changes in {verify.MODEL}")


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
    check, _ = result("files", snapshot, "acme/gpt")
    assert check.passed is (damaged is None)
    assert damaged is None or check.detail == f"not as published: {damaged}"


def test_any_model_can_be_checked_without_known_files_and_texts(case_folder):
    # The context of this one is shorter than the prompts.
    _, checks = result("batch = single", case_folder("saved"), "x")
    assert [checks[name].passed for name in NAMES[:5]] == [True, None, None, True, True]


@pytest.mark.usefixtures("library", "shortened")
@pytest.mark.parametrize("kind", ["older", "uer", "goldfish", "gpt_sw3"])
def test_models_of_other_files_and_tokenizers_pass(tmp_path, kind):
    if kind == "older":
        write_torch(write_checkpoint(tmp_path, CONFIG), stored_tensors(CONFIG), older=True)
    else:
        pytest.importorskip("tokenizers")
        write_family(tmp_path, kind)
    checks = {check.name: check.passed for check in verify.verify("x", tmp_path)}
    assert False not in checks.values()
    assert checks["native = numpy"] is True
    assert checks["compress, decompress"] is (None if kind in ("uer", "goldfish") else True)


class Wrong(NumPyOps):
    """Attention that is wrong, by a factor, where a test says so."""

    name = "wrong"

    def __init__(self, when, factor):
        super().__init__()
        self.when, self.factor = when, np.float32(factor)

    def attend(self, q, keys, values, *rest):
        right = super().attend(q, keys, values, *rest)
        return right * self.factor if self.when(q, keys) else right


def always(q, keys):
    return True


@pytest.fixture
def compute_wrongly(monkeypatch):
    """Return a function that makes the operations of a dtype `Wrong`."""
    usual = verify.get_ops

    def make_wrong(when, factor, dtype="float32"):
        def get_ops(device, other):
            return Wrong(when, factor) if other == dtype else usual(device, other)

        monkeypatch.setattr(verify, "get_ops", get_ops)

    return make_wrong


@pytest.mark.usefixtures("shortened")
@pytest.mark.parametrize("factor", [1.1, 1.0002])
@pytest.mark.parametrize(
    ("when", "fails"),
    [
        (lambda q, keys: q.shape[2] == 1 and keys.shape[2] > 8, "cache on = off"),
        (lambda q, keys: q.shape[0] > 1, "batch = single"),
        (always, "wrong = numpy"),
        (always, "hooks"),
    ],
    ids=["decoding", "batches", "always", "hooks"],
)
def test_wrong_operations_fail_the_check_that_is_for_them(when, fails, factor, compute_wrongly):
    compute_wrongly(when, factor)
    check, checks = result(fails)
    assert checks["files"].passed is True
    assert check.passed is False


@pytest.mark.usefixtures("library", "shortened")
@pytest.mark.parametrize("factor", [0.7, 1.5])
def test_wrong_int8_operations_are_found(compute_wrongly, factor):
    compute_wrongly(always, factor, "int8")
    assert result("cpu in int8 = float32")[0].passed is False


@pytest.mark.parametrize(("dtype", "bounds"), [("float32", (4e-4, 6e-5)), ("int8", (2.5, 0.5))])
def test_the_limits_of_the_bundled_model_are_narrow(dtype, bounds):
    assert (limits_of_tiny(dtype) < bounds).all()


def wrong_bits(when):
    """Native operations whose attention is a little off where `when` says so."""
    from gpt_cli.ops.native_ops import NativeOps

    class WrongBits(NativeOps):
        layers = None  # which would not ask `attend`

        def attend(self, q, keys, values, *rest):
            right = super().attend(q, keys, values, *rest)
            return np.nextafter(right, np.float32(np.inf)) if when(self, q) else right

    return WrongBits()


@pytest.mark.usefixtures("library", "shortened")
@pytest.mark.parametrize(
    ("when", "fails"),
    [
        (lambda ops, q: q.shape[2] == 1, "cache on = off"),
        (lambda ops, q: q.shape[0] > 1, "batch = single"),
        (lambda ops, q: ops.threads > 1, "bits"),
        (lambda ops, q: q.shape[0] > 1, "hooks"),
    ],
    ids=["decoding", "batches", "threads", "hooks"],
)
def test_bits_that_differ_fail_the_check_that_is_for_them(when, fails, monkeypatch):
    monkeypatch.setattr(verify, "get_ops", lambda device, dtype: wrong_bits(when))
    monkeypatch.setenv("GPT_CLI_THREADS", "1")
    check, _ = result(fails)
    assert check.passed is False
    assert "differ" in check.detail
    if fails in ("cache on = off", "batch = single"):
        assert check.detail.startswith("different bits: ")
        assert check.largest < 1e-4


@pytest.fixture
def used(monkeypatch, library):
    """Imagine two levels; return a list of those that are used."""
    used = ["avx512"]
    monkeypatch.setattr(bindings, "levels", lambda: ["avx512", "avx2"])
    monkeypatch.setattr(bindings, "use_level", used.append)
    monkeypatch.setattr(bindings, "choose_level", lambda: used.append("chosen"))
    return used


@pytest.mark.usefixtures("shortened")
def test_bits_that_differ_between_levels_are_found(monkeypatch, used):
    ops = wrong_bits(lambda ops, q: used[-1] == "avx2")
    monkeypatch.setattr(verify, "get_ops", lambda device, dtype: ops)
    check, _ = result("bits")
    assert check.passed is False
    assert "at avx512, avx2" in check.detail
    assert used[-8::2] == ["avx512", "avx512", "avx2", "avx2"]
    assert used[-7::2] == ["chosen"] * 4


@pytest.fixture
def large_logits(tmp_path, monkeypatch):
    """Return a function that writes a random model, whose matrices have this scale."""
    monkeypatch.setattr(computed, "PROMPTS", ("The fox",))  # long ones take time

    def write(scale):
        folder = Path(shutil.copytree(TINY, tmp_path / "large"))
        random = np.random.default_rng(1)
        weights = {}
        for name, tensor in checkpoint.open_checkpoint(TINY).tensors.items():
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
    in_int8, checks = result("cpu in int8 = float32", large_logits(scale), "large")
    assert [name for name, check in checks.items() if check.passed is False] == []
    assert checks["native = numpy"].largest > 1e-3  # the limit for GPT-2's logits
    assert in_int8.largest > 3


@pytest.mark.usefixtures("library")
def test_wrong_operations_are_found_in_a_model_with_large_logits(large_logits, compute_wrongly):
    compute_wrongly(always, 1.1)
    assert result("wrong = numpy", large_logits(3), "large")[0].passed is False


@pytest.mark.usefixtures("library")
def test_a_model_that_cannot_compress_is_not_checked(tiny):
    model = replace(tiny.model, config=replace(tiny.model.config, bos_token_id=None))
    check = verify._check_round_trip(Engine(LoadedModel(model, tiny.tokenizer), "tiny", 0.0))
    assert check.passed is None
    assert "start token" in check.detail


def test_a_level_that_cannot_read_what_another_writes_is_found(monkeypatch, tiny, used):
    assert verify._check_round_trip(tiny).passed is True
    ops, counts = tiny.model.ops, tiny.model.ops.cumulative_counts

    def wrong_counts(logits):
        return counts(logits) + (used[-1] == "avx2")

    monkeypatch.setattr(ops, "cumulative_counts", wrong_counts, raising=False)
    wrong = verify._check_round_trip(tiny)
    assert (wrong.passed, wrong.detail) == (False, "what avx512 writes, avx2 cannot read")


@pytest.mark.usefixtures("library", "shortened")
def test_bits_that_are_not_the_known_ones_are_found(monkeypatch):
    monkeypatch.delenv("GPT_CLI_OPS", raising=False)
    facts, right = verify.known()["tiny"], verify.known()["tiny"]["digests"]["float32"]
    monkeypatch.setitem(facts, "digests", {"float32": "0" * 64})
    check, _ = result("bits")
    assert "report it" in verify.cure(["bits"])
    assert "files" not in verify.cure(["bits"])
    assert (check.passed, check.digest) == (False, right)
    assert check.detail == f"{right}, expected {'0' * 64}"


def test_texts_that_are_not_as_published_are_found(monkeypatch):
    monkeypatch.setitem(verify.known()["tiny"]["continuations"][1], "text", "!")
    check, _ = result("known texts")
    assert check.passed is False
    assert check.detail.startswith("'One day, a fox' continues with '")
    assert check.detail.endswith("…'")


def test_what_is_known_of_the_published_model_is_well_formed():
    facts = verify.known()["openai-community/gpt2"]
    assert {len(digest) for digest in facts["sha256"].values()} == {64}
    assert all(fact["tokens"] > 0 and fact["text"] for fact in facts["continuations"])
