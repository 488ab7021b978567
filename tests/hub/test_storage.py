"""The Hub's storage of large files, which speaks Xet: the real client against a server like it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from huggingface_hub import HfApi, close_session, constants

from gpt_cli import hub as product
from gpt_cli.errors import CheckpointError, ModelNotFoundError
from gpt_cli.hub import local, messages, storage
from support.loopback_hub import model_files
from support.processes import COMMAND, LimitedProcess, posix

pytest.importorskip("hf_xet")  # the client does without on some processors

REPO = "acme/gpt"
WEIGHTS = os.urandom(3_000_000)  # several pieces
HINT = "fetching acme/gpt over HTTP (HF_HUB_DISABLE_XET=1 does so from the start)"


@pytest.fixture
def xet(hub):
    """Return a Hub whose weights are in its storage."""
    hub.add(REPO, model_files(**{"model.safetensors": WEIGHTS}))
    hub.xet = True
    return hub


def requests(hub, text):
    return [request for request in hub.requests if text in str(request)]


def test_weights_come_from_the_storage(xet, cache, caplog):
    folder = product.resolve(REPO)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert caplog.messages[0] == "downloading acme/gpt (3 MB)"
    assert caplog.messages[1].startswith("acme/gpt: 3 MB in ")
    assert len(requests(xet, "GET /xorb/")) > 1
    assert not requests(xet, "/cdn/")
    assert not any("xet-token" in str(r.headers) for r in xet.requests if "/cas/" not in r.path)


FAULTS = [
    ("401", "/xet-read-token/", "the Hub gave no access to the storage (401)"),
    ("500", "/xet-read-token/", "the Hub gave no access to the storage (500)"),
    ("drop", "/xet-read-token/", "the Hub gave no access to the storage"),
    ("401", "/cas/", "the storage localhost:PORT answers 401"),
    ("403", "/cas/", "the storage localhost:PORT answers 403"),
    ("429", "/cas/", "the storage localhost:PORT answers 429"),
    ("500", "/cas/", "the storage localhost:PORT answers 500"),
    ("html", "/cas/v1/", "the connection to the storage broke"),
    ("drop", "/cas/", "the storage localhost:PORT cannot be reached"),
    ("stall", "/cas/", "the storage sent nothing for 0 s"),
    ("403", "/xorb/", "the storage localhost:PORT answers 403"),
    ("404", "/xorb/", "the storage localhost:PORT answers 404"),
    ("416", "/xorb/", "the storage localhost:PORT answers 416"),
    ("500", "/xorb/", "the storage localhost:PORT answers 500"),
    ("drop", "/xorb/", "the storage localhost:PORT cannot be reached"),
    ("drop-half", "/xorb/", "the connection to the storage broke"),
    ("too-short", "/xorb/", "the connection to the storage broke"),
    ("too-long", "/xorb/", "the connection to the storage broke"),
    ("stall", "/xorb/", "the storage sent nothing for 0 s"),
    ("stall-half", "/xorb/", "the storage sent nothing for 0 s"),
]


@pytest.mark.parametrize(("fault", "on", "reason"), FAULTS)
def test_weights_come_over_http_where_the_storage_fails(
    xet, cache, caplog, monkeypatch, fault, on, reason
):
    if "stall" in fault:
        monkeypatch.setattr(storage, "_PATIENCE", 0.4)
    xet.fail(fault, on=on)
    folder = product.resolve(REPO)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    note = f"{reason}: {HINT}".replace("PORT", str(xet.port))
    assert caplog.messages[1] == note
    assert len(caplog.messages) == 3
    assert len(requests(xet, "GET /cdn/")) == 1


def test_an_error_of_an_unknown_kind_is_named():
    reasons = [messages.of_storage(RuntimeError(text), silent=None) for text in ("Cancelled\n", "")]
    assert reasons == ["the storage failed (Cancelled)", "the storage failed (RuntimeError)"]


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://no-such-host.invalid"])
def test_a_storage_out_of_reach_is_left_for_http(xet, cache, caplog, address):
    xet.storage = address
    folder = product.resolve(REPO)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    host = address.removeprefix("http://")
    assert caplog.messages[1] == f"the storage {host} cannot be reached: {HINT}"


def test_a_storage_that_has_failed_is_not_asked_again(xet, caplog, tmp_path):
    shards = {f"model-0000{i}-of-00002.safetensors": os.urandom(100_000) for i in (1, 2)}
    index = b'{"weight_map": {"a": "%s", "b": "%s"}}' % tuple(name.encode() for name in shards)
    others = {"model.safetensors": None, "model.safetensors.index.json": index}
    xet.add("acme/shards", model_files(**others, **shards))
    xet.fail("403", on="/xorb/")
    folder = product.download("acme/shards", to=tmp_path / "model")
    assert {name: (folder / name).read_bytes() for name in shards} == shards
    assert sum("over HTTP" in message for message in caplog.messages) == 1
    assert len({request.path for request in requests(xet, "GET /cas/v1/")}) == 1


def test_a_storage_that_fails_once_is_asked_again(xet, caplog):
    xet.fail("drop-half", on="/xorb/", times=1)
    assert (product.resolve(REPO) / "model.safetensors").read_bytes() == WEIGHTS
    assert len(caplog.messages) == 2
    assert not requests(xet, "/cdn/")


def test_a_token_that_expires_on_the_way_is_renewed(xet, caplog):
    xet.token_seconds = 1
    assert (product.resolve(REPO) / "model.safetensors").read_bytes() == WEIGHTS
    assert len(requests(xet, "/xet-read-token/")) > 1
    assert not requests(xet, "/cdn/")


def test_errors_are_those_of_http_if_that_fails_too(xet, cache):
    with xet_and_http_fail(xet), pytest.raises(ModelNotFoundError) as caught:
        product.resolve(REPO)
    assert str(caught.value).startswith("the Hub answers 503 for acme/gpt: try again later")
    assert not list(cache.rglob("*.incomplete"))


@contextmanager
def xet_and_http_fail(hub):
    hub.storage = "http://127.0.0.1:1"
    hub.fail("503", on="/cdn/")
    yield
    hub.heal()


def test_a_quiet_download_says_nothing(xet, caplog):
    xet.fail("403", on="/cas/")
    product.resolve(REPO, quiet=True)
    assert caplog.messages == []


def test_settings_of_the_user_win(xet, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "7")
    product.resolve(REPO)
    assert os.environ["HF_XET_CLIENT_RETRY_MAX_ATTEMPTS"] == "7"
    code = f"from gpt_cli import hub\nprint(hub.download({REPO!r}, to=hub.Path('model')))"
    environment = os.environ | {"HF_HUB_DISABLE_XET": "1"}
    xet.requests.clear()
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == WEIGHTS
    assert not requests(xet, "xet-read-token")


def test_threads_download_at_once(xet, caplog):
    repos = [f"acme/{number}" for number in range(6)]
    weights = {repo: os.urandom(200_000) for repo in repos}
    for repo in repos:
        xet.add(repo, model_files(**{"model.safetensors": weights[repo]}))
    with ThreadPoolExecutor(len(repos)) as pool:
        folders = dict(zip(repos, pool.map(product.resolve, repos), strict=True))
    found = {repo: (folders[repo] / "model.safetensors").read_bytes() for repo in repos}
    assert found == weights
    assert not requests(xet, "/cdn/")
    assert not constants.HF_HUB_DISABLE_XET


def test_a_storage_is_left_after_the_client_has_begun_a_new_session(xet, caplog, monkeypatch):
    fetch = HfApi.hf_hub_download

    def fetch_anew(*arguments, **options):
        close_session()  # as the client does after an error of the connection
        return fetch(*arguments, **options)

    monkeypatch.setattr(HfApi, "hf_hub_download", fetch_anew)
    xet.fail("403", on="/xorb/")
    assert (product.resolve(REPO) / "model.safetensors").read_bytes() == WEIGHTS
    assert HINT in caplog.messages[1]


# --- the cache, with a store of blobs that repositories share ---


def links_of(path):
    """Return a file of a snapshot and all that it leads to."""
    links = [path]
    while links[-1].is_symlink():
        links.append(links[-1].parent / links[-1].readlink())
    return links


def test_a_damaged_file_is_deleted_with_its_links(xet, cache):
    xet.fail("wrong-bytes", on="/xorb/")
    with pytest.raises(CheckpointError, match=r"model.safetensors is damaged: its sha256 is"):
        product.resolve(REPO)
    kept = [path for path in cache.rglob("*") if path.is_symlink() or path.stat().st_size > 2e6]
    assert kept == []
    xet.heal()
    assert (product.resolve(REPO) / "model.safetensors").read_bytes() == WEIGHTS


def test_repositories_share_weights(xet, cache):
    pytest.importorskip("huggingface_hub.utils._shared_blobs")  # since the client's version 2
    first = product.resolve(REPO)
    xet.add("acme/copy", model_files(**{"model.safetensors": WEIGHTS, "README.md": b"a copy"}))
    xet.requests.clear()
    second = product.resolve("acme/copy")
    assert not requests(xet, "GET /xorb/")
    blobs = [links_of(folder / "model.safetensors") for folder in (first, second)]
    assert len(blobs[0]) == 3
    assert blobs[0][-1].resolve() == blobs[1][-1].resolve()
    assert [model.size for model in local.list_models() if model.origin == "cached"] == [
        sum(path.stat().st_size for path in folder.iterdir()) for folder in (second, first)
    ]


def test_a_copy_of_the_cache_with_its_links_is_whole(xet, cache, tmp_path, monkeypatch):
    folder = product.resolve(REPO)
    shutil.copytree(cache, tmp_path / "moved", symlinks=True)
    shutil.rmtree(cache)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "moved"))
    moved = product.resolve(REPO, offline=True)
    assert moved.relative_to(tmp_path / "moved") == folder.relative_to(cache)
    assert (moved / "model.safetensors").read_bytes() == WEIGHTS


def test_a_cache_without_links_works(xet, cache):
    code = f"from gpt_cli import hub\nprint(hub.resolve({REPO!r}))"
    environment = os.environ | {"HF_HUB_DISABLE_SYMLINKS": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    folder = product.resolve(REPO, offline=True)
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert [model.size for model in local.list_models()][1:] == [
        sum(path.stat().st_size for path in folder.iterdir())
    ]


# --- interruptions ---


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_transfer_leaves_nothing_that_is_trusted(xet, cache, number):
    xet.fail("stall-half", on="/xorb/")
    command = [*COMMAND, "download", REPO]
    with LimitedProcess(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert xet.half_sent.wait(20)
        begun = time.monotonic()
        process.send_signal(number)
        _, errors = process.communicate()
    assert time.monotonic() - begun < 5  # 0.1 on an idle machine
    assert process.returncode == (130 if number == signal.SIGINT else -9)
    assert b"Traceback" not in errors
    with pytest.raises(ModelNotFoundError):
        product.resolve(REPO, offline=True)
    xet.heal()
    assert (product.resolve(REPO) / "model.safetensors").read_bytes() == WEIGHTS
