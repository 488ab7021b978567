"""A model is checked on the user's own machine, and each kind of fault is found by its check."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from gpt_cli import verify
from gpt_cli.cli import app
from gpt_cli.hub import local
from gpt_cli.ops.numpy_ops import NumPyOps

TINY = Path(__file__).parent.parent / "weights" / "tiny"
NAMES = ["files", "known texts", "cache on = off", "batch = single", "numba = numpy"]


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


@pytest.mark.parametrize("ops", ["numpy", "numba"])
def test_the_bundled_model_passes_everything_that_can_be_checked_offline(ops, capfd, monkeypatch):
    pytest.importorskip(ops)
    monkeypatch.setenv("GPT_CLI_OPS", ops)
    assert app.run(["verify", "tiny", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["passed"] is True
    assert [check["name"] for check in told["checks"]][:5] == NAMES
    assert [check["passed"] for check in told["checks"]][:4] == [True] * 4
    assert told["checks"][4]["passed"] is (None if ops == "numpy" else True)
    for check in told["checks"][2 : 4 if ops == "numpy" else 5]:
        assert 0 <= check["mean"] <= check["largest"] < 1e-3


def test_what_is_known_of_tiny_is_found_by_its_weights_in_any_folder(copy):
    assert results(str(copy), copy, "known texts")["known texts"].passed is True


def test_a_bit_that_is_flipped_in_the_bundled_model_is_exit_code_4(copy, monkeypatch, capfd):
    flip_a_bit(copy / "model.safetensors")
    monkeypatch.setattr(local, "_bundled_places", lambda name: [copy])
    assert app.run(["verify", "tiny"]) == 4
    out, err = capfd.readouterr()
    assert "FAILED       files" in out
    assert "model.safetensors differ from what was published" in out
    assert err.startswith("gpt-cli: error: tiny has failed 1 of ")
    assert err.count("\n") == 1


def test_a_file_that_should_be_there_is_missed(copy):
    (copy / "merges.txt").unlink()
    check = next(verify.verify("tiny", copy))
    assert (check.passed, check.detail) == (False, "merges.txt should be there, and is not")


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
    assert damaged is None or check.detail == f"{damaged} differ from what was published"


def test_any_model_can_be_checked_and_what_cannot_says_why(case_folder):
    found = results(
        "x", case_folder("saved"), "batch = single"
    )  # its context is shorter than the prompts
    assert found["files"].passed is None
    assert found["known texts"].passed is None
    assert found["cache on = off"].passed is True
    assert found["batch = single"].passed is True


class Wrong(NumPyOps):
    """Attention that is wrong where a test says so."""

    name = "wrong"

    def __init__(self, when):
        super().__init__()
        self.when = when

    def attend(self, q, keys, values, scale, visible):
        right = super().attend(q, keys, values, scale, visible)
        return right * np.float32(1.1) if self.when(q, keys) else right


@pytest.mark.parametrize(
    ("when", "fails"),
    [
        (lambda q, keys: q.shape[2] == 1 and keys.shape[2] > 8, "cache on = off"),
        (lambda q, keys: q.shape[0] > 1, "batch = single"),
        (lambda q, keys: True, "wrong = numpy"),
    ],
    ids=["decoding", "batches", "always"],
)
def test_operations_that_are_wrong_fail_the_check_that_is_for_them(when, fails, monkeypatch):
    usual = verify.get_ops

    def get_ops(device, dtype):
        return Wrong(when) if dtype == "float32" else usual(device, dtype)

    monkeypatch.setattr(verify, "get_ops", get_ops)
    found = results("tiny", TINY, fails)
    assert found["files"].passed is True
    assert found[fails].passed is False


def test_texts_that_are_not_as_published_are_found(monkeypatch):
    facts = json.loads(json.dumps(verify.known()))
    facts["tiny"]["continuations"][1]["text"] += "!"
    monkeypatch.setattr(verify, "known", lambda: facts)
    check = results("tiny", TINY, "known texts")["known texts"]
    assert check.passed is False
    assert check.detail.startswith("'One day, a fox' goes on with")


def test_what_is_known_of_the_published_model_is_well_formed():
    facts = verify.known()["openai-community/gpt2"]
    assert {len(digest) for digest in facts["sha256"].values()} == {64}
    assert all(fact["tokens"] > 0 and fact["text"] for fact in facts["continuations"])
