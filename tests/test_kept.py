"""The promises of docs/stability.md: names, and the files and results of earlier versions."""

import json
import math
import shutil

import pytest

from support.kept import KEPT, answer, content, digests, objects, run, settled
from support.listing import changes, listing
from support.processes import posix

VERSIONS = sorted(path for path in KEPT.iterdir() if path.is_dir())
COMMANDS = {path: json.loads((path / "commands.json").read_bytes()) for path in VERSIONS}
LISTING = json.loads((KEPT / "listing.json").read_bytes())


def for_commands(*kinds):
    """Run a test with each command of some kinds, and the folder of its version."""
    cases = [
        pytest.param(path, kind, name, id=f"{path.name}-{name}")
        for path in VERSIONS
        for kind in kinds
        for name in COMMANDS[path][kind]
    ]
    return pytest.mark.parametrize(("kept", "kind", "name"), cases)


def equal(kept, now):
    """Return whether two values are equal, or both are NaN."""
    return kept == now or (kept != kept and now != now)


def close(kept, now):
    """Return whether two numbers are equal within rounding, or two other values."""
    floats = isinstance(kept, float) and isinstance(now, float)
    return equal(kept, now) or (floats and math.isclose(kept, now, rel_tol=1e-3, abs_tol=1e-3))


@pytest.fixture(scope="module", params=["native", "numpy"])
def copies(request, tmp_path_factory):
    """Return what computes, and a folder with copies of all files."""
    if request.param == "native":
        request.getfixturevalue("library")
    return request.param, shutil.copytree(KEPT, tmp_path_factory.mktemp("copies") / "kept")


@pytest.fixture
def copy(copies, kept, monkeypatch):
    """Change to the copy of a version, and compute there."""
    ops, folder = copies
    monkeypatch.setenv("GPT_CLI_OPS", ops)
    monkeypatch.chdir(folder / kept.name)
    return folder / kept.name


@pytest.fixture
def same(copies):
    """Return how to compare: what the library computes is the same to the last bit."""
    return equal if copies[0] == "native" else close


@pytest.fixture
def original(kept, monkeypatch):
    """Change to the files of a version, which must not be written."""
    monkeypatch.chdir(kept)


@pytest.fixture(scope="module")
def now():
    """Return the names that the program has."""
    for package in ("pyarrow", "uvicorn"):
        pytest.importorskip(package, reason="gpt_cli.ray or gpt_cli.serve needs it")
    return listing()


@pytest.mark.parametrize("part", LISTING)
def test_no_name_disappears_and_no_default_changes(part, now):
    assert [*changes(LISTING[part], now[part], equal)] == []


def test_a_change_is_noticed_and_an_addition_is_fine():
    kept = {"--a": {"default": 1}, "-b": {"required": True}, "c": [1, {"d": "e"}]}
    assert [*changes(kept, {**kept, "--new": {"default": 1}}, equal)] == []
    assert [*changes(kept, {**kept, "-b": {"default": None}}, equal)] == []
    now = {"--a": {"default": 2}, "--new": {"required": True}, "c": [2, {"f": "e"}]}
    assert {*changes(kept, now, equal)} == {
        "/--a/default was 1 and is 2",
        "/-b is missing",
        "/--new is new and required",
        "/c/0 was 1 and is 2",
        "/c/1/d is missing",
    }
    assert [*changes(kept["c"], [1], equal)]


@for_commands("records", "figures")
def test_a_record_has_the_same_fields_with_the_same_values(kept, kind, name, copy, same):
    now = run(COMMANDS[kept][kind][name])
    expected = objects((kept / "records" / f"{name}.jsonl").read_bytes())
    rounded = kind == "figures"  # of sums by NumPy
    assert [*changes(expected, objects(now), close if rounded else same)] == []


@for_commands("printed")
def test_text_in_a_pipe_is_the_same(kept, kind, name, original, library):
    assert run(COMMANDS[kept][kind][name]) == (kept / "printed" / f"{name}.txt").read_bytes()


@for_commands("machine")
def test_a_record_about_the_machine_has_the_same_fields(kept, kind, name, original, request):
    if name == "verify":
        request.getfixturevalue("library")  # of int8 weights
    now = json.loads(run(COMMANDS[kept][kind][name]).splitlines()[0])
    expected = json.loads((kept / "fields.json").read_bytes())[name]
    assert [*changes(expected, settled(now, fields_only=True), equal)] == []


@for_commands("interrupted")
def test_an_interrupted_output_is_continued(kept, kind, name, copy, same):
    if "parquet" in name:
        pytest.importorskip("pyarrow")
    command = COMMANDS[kept][kind][name]
    output = name.partition("/*")[0]
    resume = "-q", "-o", f"half/{name}", "--resume"
    run(command, *resume, code=6)
    whole, half = copy / "whole" / output, copy / "half" / output
    expected = content(kept / "whole" / output)
    assert [*changes(expected, content(half), same)] == []
    # A complete output is left as it is.
    shutil.rmtree(half) if half.is_dir() else half.unlink()
    whole.rename(half)
    run(command, *resume, code=6)
    assert [*changes(expected, content(half), equal)] == []


@for_commands("decompressed")
def test_a_compressed_file_is_decompressed(kept, kind, name, original, library):
    command, file = COMMANDS[kept][kind][name]
    assert run(command) == (kept / file).read_bytes()


@pytest.mark.parametrize("kept", VERSIONS, ids=lambda path: path.name)
def test_a_vector_is_the_same(kept, copy):
    (command,) = (line for line in COMMANDS[kept]["files"] if line.startswith("vector"))
    run(command)
    expected, now = (content(folder / "vector.safetensors") for folder in (kept, copy))
    assert [*changes(expected, now, close)] == []


@pytest.mark.parametrize("kept", VERSIONS, ids=lambda path: path.name)
def test_the_digests_of_tiny_are_the_same(kept, library):
    expected = json.loads((kept / "digests.json").read_bytes())
    assert [*changes(expected, digests(), equal)] == []


@posix
@pytest.mark.parametrize("kept", VERSIONS, ids=lambda path: path.name)
def test_requests_have_the_same_answers(kept, library):
    pytest.importorskip("llguidance")
    serving = pytest.importorskip("support.server_process").serving
    expected = json.loads((kept / "answers.json").read_bytes())
    with serving("--allow-edits", kept) as server:
        answers = {name: answer(server, *r) for name, r in COMMANDS[kept]["requests"].items()}
    assert [*changes(expected, answers, equal)] == []
