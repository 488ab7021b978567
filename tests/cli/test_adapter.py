"""`--adapter` of every command that reads the weights of a model."""

from dataclasses import replace
from pathlib import Path

import pytest

import gpt_cli
from gpt_cli.checks import verify
from gpt_cli.gpt2.digests import logits_digest
from gpt_cli.jobs import Scoring, cluster
from support.adapters import ADAPTERS
from support.in_process import records_here, refusal, run_here

TEXT = "The sand and the ring"


@pytest.fixture
def model(case_folder) -> Path:
    return case_folder("saved")


@pytest.fixture
def folder(tmp_path) -> Path:
    return ADAPTERS["plain"].write(tmp_path / "adapter")


@pytest.mark.parametrize(
    "arguments",
    [
        *(["generate", "--json", "-n", 5, TEXT], ["score", "--json", "-f", "text"]),
        *(["batch", "-q", "-n", 5, "text"], ["score", "-q", "--format", "lines", "text"]),
        ["rank", "--json", "--choices", "a,b", TEXT],
        *(["show", view, "--json", TEXT] for view in ("attention", "lens", "surprise", "tree")),
        ["bench", "--json", "-q", "-p", 3, "-n", 3, "-r", 1, "--cache"],
        ["info", "--json"],
    ],
    ids=lambda arguments: " ".join(map(str, arguments[:2])),
)
def test_records_name_the_adapter(arguments, model, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text(TEXT)
    (plain, *_), (adapted, *_) = (
        records_here(*arguments, "-m", model, *flags) for flags in ([], ["--adapter", folder])
    )
    assert (plain["adapter"], adapted["adapter"]) == (None, str(folder))
    volatile = ("adapter", "timing", "load_s", "peak_bytes", "cache_on")
    same = all(plain[name] == adapted[name] for name in plain if name not in volatile)
    assert same == (arguments[0] == "info")


def test_the_likeliest_tokens_are_those_of_the_library(model, folder):
    tokens = records_here("next", "--json", "-m", model, "--adapter", folder, TEXT)
    engine = gpt_cli.load(str(model), adapter=str(folder))
    assert [token["id"] for token in tokens] == [id for id, _ in engine.next_tokens(TEXT)]


def test_statistics_name_the_adapter(model, folder):
    flags = ["-m", model, "--adapter", folder, "--stats", "-q", "-n", 3]
    assert f"{model} with {folder} in float32: " in run_here("generate", *flags, TEXT)[1]


def test_a_compressed_file_needs_the_adapter(model, folder, library):
    adapted = ["-m", model, "--adapter", folder]
    packed, _ = run_here("compress", *adapted, input=TEXT.encode())
    assert run_here("decompress", *adapted, input=packed)[0] == TEXT.encode()
    refusal("decompress", "-m", model, input=packed, code=2)


def test_an_int8_model_is_made_with_the_adapter_and_takes_no_other(
    model, folder, tmp_path, library
):
    int8 = tmp_path / "int8"
    run_here("quantize", model, "--adapter", folder, "-o", int8)
    expected = ["-m", model, "--adapter", folder, "--dtype", "int8"]
    flags = ["generate", "-n", 20, "-s", 1, TEXT]
    assert run_here(*flags, "-m", int8)[0] == run_here(*flags, *expected)[0]
    message = refusal("generate", "-m", int8, "--adapter", folder, TEXT)
    assert f"--adapter {folder} cannot change int8 weights: quantize the model with" in message


def test_verify_checks_the_merged_model(model, folder, monkeypatch, library):
    monkeypatch.setattr(verify, "_facts", None)  # are those of a model without an adapter
    (result,) = records_here("verify", "--json", "-m", model, "--adapter", folder)
    assert (result["adapter"], result["passed"]) == (str(folder), True)
    engine = gpt_cli.load(str(model), adapter=str(folder), device="cpu")
    digest = logits_digest(engine.model, engine.tokenizer)
    assert digest in {check["digest"] for check in result["checks"]}


def test_a_worker_of_a_cluster_finds_the_folder(model, folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert cluster._absolute("owner/name") == "owner/name"
    sent = cluster.Model.of(str(model), {"adapter": folder.name}, gpus=0)
    assert sent.loading == {"adapter": str(folder), "edits": [], "device": "cpu"}
    assert cluster.Model.of("tiny", {}, gpus=0).loading["adapter"] is None
    worker = cluster._Worker(Scoring(), None, replace(sent, name="model"))
    assert (worker._engine.name, worker._engine.adapter) == ("model", folder.name)


@pytest.mark.parametrize("name", ["./nothing", "no\nname", "", "in/a.file"])
def test_what_is_no_adapter_is_refused(name, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    Path("in/a.file").touch()
    message = refusal("generate", "-m", model, "--adapter", name, TEXT, code=3)
    assert f"no adapter {name!r}: give the folder of an adapter, or OWNER/NAME" in message


def test_a_model_is_no_adapter_and_an_adapter_no_model(model, folder):
    message = refusal("info", "-m", model, "--adapter", model, code=4)
    assert "has no adapter_model.safetensors and no adapter_config.json" in message
    message = refusal("generate", "-m", folder, TEXT, code=3)
    assert f"{folder} is an adapter: load its model, with this folder as the option" in message


def test_an_adapter_is_fetched_from_the_hub_once(hub, model, folder):
    hub.add("acme/lora", {path.name: path.read_bytes() for path in folder.iterdir()} | {"x": b""})
    command = ["generate", "-m", model, "--json", "-n", 3, "--adapter", "acme/lora", TEXT]
    assert "cannot fetch acme/lora: the Hub is switched off" in refusal(
        *command, "--offline", code=3
    )
    (record,) = records_here(*command)
    assert record["adapter"] == "acme/lora"
    assert sorted(hub.fetched()) == ["adapter_config.json", "adapter_model.safetensors"]
    hub.requests.clear()
    assert run_here(*command, "--offline")[1] == ""
    assert hub.requests == []
    hub.add("acme/none", {"config.json": b"{}"})
    message = refusal("info", "-m", model, "--adapter", "acme/none", code=4)
    assert "acme/none has no adapter_model.safetensors and no adapter_config.json" in message
