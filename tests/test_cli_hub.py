import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import CASES, write_tokenizer
from loopback_hub import cache_fixture, hub_fixture, model_files  # noqa: F401 (fixtures)
from processes import COMMAND, posix, run_on_terminal

REPO = "acme/gpt"


def run(*arguments: object, **env: str) -> "subprocess.CompletedProcess[str]":
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})


def failed(result: "subprocess.CompletedProcess[str]", exit_code: int) -> str:
    """The one line of a failed command."""
    assert result.returncode == exit_code, result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("gpt-cli: error: ")
    return lines[0]


# --- download ---


def test_download_prints_the_folder_and_one_line_of_progress(hub, cache):
    result = run("download", REPO)
    assert result.stderr == "downloading acme/gpt (4 kB)\n"
    folder = Path(result.stdout.removesuffix("\n"))
    assert folder == cache / "models--acme--gpt" / "snapshots" / hub.commit(REPO)
    assert (folder / "config.json").is_file()
    assert str(hub.requests[0]) == "GET /api/models/acme/gpt/revision/main"  # no telemetry before


def test_quiet_shows_no_progress(hub):
    result = run("download", REPO, "--quiet", "--revision", "v1")
    assert (result.returncode, result.stderr) == (0, "")


@posix
def test_a_terminal_sees_bars_and_a_quiet_one_does_not(hub):
    shown = run_on_terminal("download", REPO, "-q")[1]
    assert len(shown.splitlines()) == 1
    hub.add(REPO, model_files(size=8000))
    shown = run_on_terminal("download", REPO)[1]
    assert "100%|" in shown
    assert "downloading acme/gpt" not in shown
    assert "Log in!" not in shown
    hub.add(REPO, model_files(size=12000))
    shown = run_on_terminal("download", REPO, HF_HUB_DISABLE_PROGRESS_BARS="1")[1]
    assert "%" not in shown


def test_download_to_a_folder_gives_a_model_for_every_command(hub, tmp_path):
    result = run("download", REPO, "--to", tmp_path / "model")
    assert result.stdout == f"{tmp_path / 'model'}\n"
    assert not any(path.is_symlink() for path in (tmp_path / "model").iterdir())


@pytest.mark.parametrize(
    ("arguments", "fault", "exit_code", "says"),
    [
        (["acme/none"], "", 3, "no folder and no model on the Hub is named acme/none"),
        ([REPO, "--revision", "v9"], "", 3, "acme/gpt has no revision v9"),
        ([REPO], "403-gated", 3, "acme/gpt is gated: accept its terms"),
        ([REPO], "401", 3, "set HF_TOKEN"),
        ([REPO], "drop", 3, "run the command again"),
        (["acme/pickle"], "", 4, "use a model that has safetensors"),
        (["a/b/c"], "", 3, "give a folder, OWNER/NAME on the Hub"),
        (["tiny"], "", 2, "tiny is bundled"),
        (["."], "", 2, ". is a folder"),
        ([REPO, "--to", "."], "", 2, "is not an empty folder"),
        ([REPO, "--revision", ".."], "", 2, "is not valid: give a branch"),
    ],
)
def test_each_failure_is_one_line_and_an_exit_code(hub, arguments, fault, exit_code, says):
    hub.add("acme/pickle", model_files(**{"model.safetensors": None}))
    if fault:
        hub.fail(fault)
    assert says in failed(run("download", *arguments), exit_code)


@posix
def test_a_disk_that_fills_up_leaves_one_line(hub):
    hub.add(REPO, model_files(size=300_000))
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
    code = limit + "import runpy; runpy.run_module('gpt_cli', run_name='__main__')"
    command = [sys.executable, "-c", code, "download", REPO, "-q"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert "File too large" in failed(result, 5)


@posix
def test_an_interrupt_ends_the_download_quietly(hub, cache):
    hub.fail("stall-half", on="/cdn/", times=1)
    process = subprocess.Popen(
        [*COMMAND, "download", REPO], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert hub.half_sent.wait(20)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate()
    assert process.returncode == 130
    assert output == ""
    assert "Traceback" not in errors
    assert not list(cache.rglob("*.incomplete"))
    assert run("download", REPO).returncode == 0


# --- models ---


def test_models_are_lines_with_tabs_or_of_json_in_a_pipe(hub):
    folder = run("download", REPO, "-q").stdout.strip()
    hub.requests.clear()
    result = run("models")
    assert result.stderr == ""
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert [REPO, "cached", "4049", folder] in rows
    assert all(len(row) == 4 for row in rows)
    rows = [json.loads(line) for line in run("models", "--json").stdout.splitlines()]
    assert {"name": REPO, "origin": "cached", "size": 4049, "folder": folder} in rows
    assert hub.requests == []


@posix
def test_models_are_a_table_on_a_terminal(hub):
    run("download", REPO, "-q")
    shown = run_on_terminal("models")[1]
    assert "origin" in shown
    assert "acme/gpt" in shown
    assert "4 kB" in shown
    assert "\x1b[3" not in run_on_terminal("models", NO_COLOR="1")[1]  # no colour


def test_models_need_no_cache(cache):
    result = run("models", HF_HUB_CACHE=str(cache))
    assert (result.returncode, result.stderr) == (0, "")


# --- info ---


def test_an_endpoint_that_is_no_address_is_called_so(hub):
    result = run("info", "acme/none", HF_ENDPOINT="mirror")
    assert "must begin with http" in failed(result, 2)


def test_info_fetches_no_more_than_the_configuration_and_leaves_nothing_in_the_cache(hub, cache):
    result = run("info", "acme/gpt", "--json")
    assert json.loads(result.stdout)["folder"] is None
    assert json.loads(result.stdout)["parameters"] > 0
    assert hub.fetched() == ["config.json"]
    assert not list(cache.glob("models--*"))


def test_info_of_a_model_that_is_here_asks_nobody(hub, tmp_path):
    folder = CASES["saved"].write(tmp_path / "published")
    hub.add(REPO, {path.name: path.read_bytes() for path in folder.iterdir()})
    folder = run("download", REPO).stdout.strip()
    hub.requests.clear()
    result = run("info", REPO, "--json")
    assert json.loads(result.stdout)["folder"] == folder
    assert hub.requests == []


def test_info_of_damaged_weights_is_exit_code_4(tmp_path):
    folder = CASES["saved"].write(tmp_path / "model")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1])
    assert f"{folder / 'model.safetensors'} is not safetensors" in failed(run("info", folder), 4)


# --- tokenize and detokenize ---


def test_tokens_need_no_weights_and_leave_nothing_in_the_cache(hub, cache):
    write_tokenizer(hub.root / REPO)
    result = run("tokenize", "-v", "-m", REPO, "the the")
    assert (result.returncode, result.stdout) == (0, "83 257 262\n")
    assert "`gpt-cli download acme/gpt` keeps the model" in result.stderr
    result = run("detokenize", "-m", REPO, "-q", "83 257 262")
    assert (result.returncode, result.stdout, result.stderr) == (0, "the the", "")
    assert sorted(hub.fetched()) == ["merges.txt", "merges.txt", "vocab.json", "vocab.json"]
    assert not list(cache.glob("models--*"))


def test_tokens_of_a_model_that_is_here_ask_nobody(hub):
    write_tokenizer(hub.root / REPO)
    run("download", REPO, "-q")
    hub.requests.clear()
    result = run("tokenize", "-v", "-m", REPO, "the the")
    assert (result.returncode, result.stdout, result.stderr) == (0, "83 257 262\n", "")
    assert hub.requests == []


@pytest.mark.parametrize("arguments", [["tokenize", "1"], ["detokenize", "1"], ["info"]])
def test_an_unknown_model_is_exit_code_3(hub, arguments):
    assert "check the name" in failed(run(*arguments, "-m", "acme/none"), 3)
