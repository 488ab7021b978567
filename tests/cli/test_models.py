"""`gpt-cli download`, `models` and `info`, with a Hub on this machine."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.checkpoints import (
    CASES,
    CONFIG,
    END_ID,
    Stored,
    safetensors_bytes,
    stored_tensors,
    write_checkpoint,
    write_tokenizer,
)
from support.families import tokenizer_folder, write_family
from support.in_process import records_here, refusal, run_here, terminal_here
from support.loopback_hub import model_files
from support.processes import COMMAND, LimitedProcess, posix, run_on_terminal

REPO = "acme/gpt"


# --- download ---


def test_download_prints_the_folder_and_two_lines_of_progress(hub, cache, tmp_path):
    result = subprocess.run([*COMMAND, "download", REPO], capture_output=True, text=True)
    lines = ["gpt-cli: downloading acme/gpt (4 kB)", "gpt-cli: acme/gpt: 4 kB in 0 s"]
    assert result.stderr.splitlines() == lines
    folder = Path(result.stdout.removesuffix("\n"))
    assert folder == cache / "models--acme--gpt" / "snapshots" / hub.commit(REPO)
    assert (folder / "config.json").is_file()
    assert str(hub.requests[0]) == "GET /api/models/acme/gpt/revision/main"  # no telemetry before
    to = tmp_path / "model"
    shown = run_here("download", REPO, "--quiet", "--revision", "v1", "--to", to)
    assert shown == (f"{to}\n".encode(), "")


@posix
def test_a_terminal_sees_one_bar_and_a_quiet_one_does_not(hub):
    shown = terminal_here("download", REPO, "-q")[1]
    assert len(shown.splitlines()) == 1
    hub.add(REPO, model_files(size=8000))
    shown = run_on_terminal("download", REPO, columns=80)[1]
    bar, *empty, last, folder = re.split(r"[\r\n]+", shown.strip())
    assert bar == f"acme/gpt:   0% [{'.' * 40}] 0 B of 8 kB".ljust(79)
    assert not "".join(empty).strip()
    assert last == "gpt-cli: acme/gpt: 8 kB in 0 s"
    assert folder.endswith(hub.commit(REPO))
    hub.add(REPO, model_files(size=12000))
    shown = run_on_terminal("download", REPO, HF_HUB_DISABLE_PROGRESS_BARS="1")[1]
    assert "%" not in shown


@pytest.mark.parametrize(
    ("arguments", "fault", "code", "says"),
    [
        (["acme/none"], "", 3, "no folder and no model on the Hub is named acme/none"),
        ([REPO, "--revision", "v9"], "", 3, "acme/gpt has no revision v9"),
        ([REPO], "403-gated", 3, "acme/gpt is gated: accept its terms"),
        (["acme/tf"], "", 4, "use a model that has model.safetensors or pytorch_model.bin"),
        (["tiny"], "", 2, "tiny is bundled"),
        (["."], "", 2, ". is a folder"),
        ([REPO, "--to", "."], "", 2, "is not an empty folder"),
    ],
)
def test_each_failure_is_one_line_and_an_exit_code(hub, arguments, fault, code, says):
    others = {"model.safetensors": None, "pytorch_model.bin": None, "tf_model.h5": b"others"}
    hub.add("acme/tf", model_files(**others))
    if fault:
        hub.fail(fault)
    assert says in refusal("download", *arguments, code=code)


@posix
def test_an_interrupt_ends_the_download_quietly(hub, cache):
    hub.fail("stall-half", on="/cdn/", times=1)
    process = LimitedProcess(
        [*COMMAND, "download", REPO], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert hub.half_sent.wait(20)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    assert process.returncode == 130
    assert output == ""
    assert "Traceback" not in errors
    assert not list(cache.rglob("*.incomplete"))
    run_here("download", REPO)


# --- models ---


def test_models_are_lines_with_tabs_or_of_json_in_a_pipe(hub):
    before = {"name", "origin", "size", "folder"}
    assert [before] == [model.keys() for model in records_here("models", "--json")]  # no cache yet
    folder = run_here("download", REPO, "-q")[0].decode().strip()
    hub.requests.clear()
    out, errors = run_here("models")
    assert errors == ""
    rows = [line.split("\t") for line in out.decode().splitlines()]
    assert [REPO, "cached", "4063", folder] in rows
    assert all(len(row) == 4 for row in rows)
    record = {"name": REPO, "origin": "cached", "size": 4063, "folder": folder}
    assert record in records_here("models", "--json")
    assert hub.requests == []


def test_models_are_a_table_on_a_terminal(hub):
    run_here("download", REPO, "-q")
    shown = terminal_here("models")[1]
    assert "origin" in shown
    assert "acme/gpt" in shown
    assert "4 kB" in shown
    assert "\x1b[3" not in terminal_here("models", NO_COLOR="1")[1]  # no colour


# --- info ---


def test_an_endpoint_must_be_an_address(hub):
    assert "must begin with http" in refusal("info", "acme/none", HF_ENDPOINT="mirror")


def test_info_fetches_no_more_than_the_configuration_and_leaves_nothing_in_the_cache(hub, cache):
    (facts,) = records_here("info", REPO, "--json")
    assert facts["folder"] is None
    assert facts["parameters"] > 0
    assert hub.fetched() == ["config.json"]
    assert not list(cache.glob("models--*"))


def test_info_of_a_local_model_needs_no_network(hub, case_folder):
    hub.add("acme/new", {path.name: path.read_bytes() for path in case_folder("saved").iterdir()})
    folder = run_here("download", "acme/new", "-q")[0].decode().strip()
    hub.requests.clear()
    (facts,) = records_here("info", "acme/new", "--json")
    assert facts["folder"] == folder
    assert hub.requests == []


def test_info_says_before_a_download_which_weights_are_taken(hub, case_folder):
    saved = {path.name: path.read_bytes() for path in case_folder("saved").iterdir()}
    others = {name: data for name, data in saved.items() if name != "model.safetensors"}
    hub.add("acme/old", others | {"pytorch_model.bin": b""})
    (facts,) = records_here("info", "acme/old", "--json")
    assert (facts["folder"], facts["weights"]) == (None, "pytorch_model.bin")
    hub.add("acme/code", saved | {"config.json": b'{"model_type": "gpt_bigcode"}'})
    code = refusal("info", "acme/code", code=4)
    assert (
        "acme/code/config.json: model_type is 'gpt_bigcode', not gpt2: gpt-cli computes GPT-2 only"
        in code
    )
    hub.add("acme/flax", others | {"flax_model.msgpack": b""})
    assert "weights only in flax_model.msgpack" in refusal("info", "acme/flax", code=4)


NEEDED = {  # the file that counts, and what is said without the package
    "german": ("vocab.json, merges.txt", None),
    "digits": ("tokenizer.json", None),
    "goldfish": ("tokenizer.json", "tokenizer.json needs the package tokenizers, unless it is of"),
    "uer": ("vocab.txt", "vocab.txt needs the package tokenizers (import of"),
}


@pytest.mark.parametrize("family", NEEDED)
def test_info_says_before_a_download_which_package_is_missing(hub, monkeypatch, family):
    files = {path.name: path.read_bytes() for path in tokenizer_folder(family).iterdir()}
    hub.add("acme/kind", files | {"pytorch_model.bin": b""})
    names, problem = NEEDED[family]
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (facts,) = records_here("info", "acme/kind", "--json", code=4 if problem else 0)
    assert (facts["tokenizer"], bool(facts["problem"])) == (names, bool(problem))
    if problem:
        assert facts["problem"].startswith(problem)
        assert facts["problem"].endswith(": pip install tokenizers")
    monkeypatch.setitem(sys.modules, "tokenizers", ModuleType("tokenizers"))
    assert records_here("info", "acme/kind", "--json")[0]["problem"] is None
    assert "end token" not in run_here("info", "acme/kind")[0].decode()  # not read yet
    assert set(hub.fetched()) == {"config.json"}


@pytest.mark.parametrize(
    ("family", "kind", "start", "end"),
    [
        (
            "german",
            "GPT-2's own (vocab.json, merges.txt)",
            "0 '<|endoftext|>'",
            "0 '<|endoftext|>'",
        ),
        ("goldfish", "Unigram (tokenizer.json)", "2 '[CLS]'", "3 '[SEP]'"),
        ("uer", "WordPiece (vocab.txt)", "none", "none"),
        ("xlm", "Unigram (sentencepiece.bpe.model)", "0 '<s>'", "none"),
    ],
)
def test_info_shows_the_tokenizer_and_the_tokens_that_are_used(tmp_path, family, kind, start, end):
    pytest.importorskip("tokenizers")
    shown = run_here("info", write_family(tmp_path, family))[0].decode()
    rows = dict(line.split(maxsplit=1) for line in shown.replace(" token ", "_token ").splitlines())
    named = [rows[name] for name in ("works", "tokenizer", "start_token", "end_token")]
    assert named == ["yes", kind, start, end]


def test_info_shows_settings_unlike_those_of_gpt2_and_ids_without_tokens(tmp_path):
    config = CONFIG | {"vocab_size": END_ID + 9, "eos_token_id": END_ID + 5, "n_inner": 48}
    shown = run_here("info", write_checkpoint(tmp_path, config))[0].decode()
    assert "unlike GPT-2               n_inner 48\n" in shown
    assert f"end token                  {END_ID + 5}\n" in shown
    write_checkpoint(tmp_path, config | {"n_inner": 4 * CONFIG["n_embd"]})
    assert "unlike" not in run_here("info", tmp_path)[0].decode()


def test_info_names_what_a_folder_lacks(tmp_path):
    folder = CASES["saved"].write(tmp_path)
    (folder / "model.safetensors").unlink()
    (facts,) = records_here("info", folder, "--json", code=4)
    assert (facts["weights"], facts["tokenizer"]) == (None, "vocab.json, merges.txt")
    assert f"no: {folder} has no weights: add" in run_here("info", folder, code=4)[0].decode()
    write_checkpoint(folder, CONFIG)
    (folder / "vocab.json").unlink()
    (facts,) = records_here("info", folder, "--json", code=4)
    assert f"{folder} has no tokenizer" in facts["problem"]


def test_info_of_a_vocabulary_that_is_larger_than_the_model(tmp_path):
    write_checkpoint(tmp_path, CONFIG | {"vocab_size": 100, "bos_token_id": 50256})
    shown = run_here("info", tmp_path, code=4)[0].decode()
    assert "works                      no: " in shown
    assert "and the model has 100 (vocab_size)" in shown
    assert "start token                50256\n" in shown


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_shards_without_their_index_are_told(tmp_path, weights):
    folder = CASES["saved"].write(tmp_path)
    (folder / "model.safetensors").rename(folder / weights.replace(".", "-00001-of-00002."))
    error = refusal("generate", "-m", folder, "the", code=4)
    assert f"shards without their index: add {weights}.index.json" in error


@pytest.mark.parametrize("flags", [(), ("-q",), ("-q", "-v")])
def test_quiet_silences_notes_about_tensors(tmp_path, caplog, flags):
    weights = CASES["saved"].write(tmp_path) / "model.safetensors"
    beside = {"score.weight": Stored("I64", (), bytes(8))}
    weights.write_bytes(safetensors_bytes(stored_tensors(CONFIG) | beside))
    run_here("info", tmp_path, *flags)
    assert bool(caplog.messages) == (not flags)


@pytest.mark.parametrize("content", ["version https://git-lfs.github.com/spec/v1", "\n<html>"])
def test_a_vocabulary_that_is_another_file_is_told(tmp_path, content):
    path = CASES["saved"].write(tmp_path) / "vocab.json"
    path.write_text(content)
    kind = "a Git LFS pointer" if content[0] == "v" else "a web page"
    assert f"{path} is not JSON: {kind}" in refusal("tokenize", "-m", tmp_path, "the", code=4)


def test_info_of_damaged_weights_is_exit_code_4(tmp_path):
    weights = CASES["saved"].write(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert f"{weights} is not safetensors" in refusal("info", tmp_path, code=4)


# --- tokenize and detokenize ---


def test_tokens_need_no_weights_and_leave_nothing_in_the_cache(hub, cache):
    (hub.root / REPO / "tokenizer.json").unlink()
    write_tokenizer(hub.root / REPO)
    out, told = run_here("tokenize", "-v", "-m", REPO, "the the")
    assert out == b"83 257 262\n"
    assert "`gpt-cli download acme/gpt` keeps the model" in told
    assert run_here("detokenize", "-m", REPO, "-q", "83 257 262") == (b"the the", "")
    assert sorted(hub.fetched()) == [*2 * ["config.json"], *2 * ["merges.txt"], *2 * ["vocab.json"]]
    assert not list(cache.glob("models--*"))
    run_here("download", REPO, "-q")
    assert run_here("tokenize", "-v", "-m", REPO, "the the") == (b"83 257 262\n", "")


@pytest.mark.parametrize("arguments", [["tokenize", "1"], ["detokenize", "1"], ["info"]])
def test_an_unknown_model_is_exit_code_3(hub, arguments):
    assert "check the name" in refusal(*arguments, "-m", "acme/none", code=3)
