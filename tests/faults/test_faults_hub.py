"""Faults of the Hub and the network: afterwards, the cache has a complete model or none."""

import json
import signal
import socket
import time
from pathlib import Path

import pytest

from support.checkpoints import CASES
from support.in_process import finished, records_here, run_here
from support.loopback_hub import LoopbackHub
from support.processes import posix
from support.world import check_failure

resource = pytest.importorskip("resource")  # not on Windows
pytestmark = posix

REPO = "acme/gpt"
NONE = "no model in the cache; the next download is whole"
AGAIN = "run the command again"
LATER = "try again later"
NETWORK = "check the network and the proxy"
SLOW = pytest.mark.slow


@pytest.fixture
def files(world) -> dict[str, bytes]:
    """Return the folder of a model that computes."""
    folder = CASES["saved"].write(world.root / "published")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(world, files):
    """Yield a Hub that has it; the world's commands use this Hub."""
    with LoopbackHub(world.root / "hub") as hub:
        hub.add(REPO, files)
        world.env |= {"HF_ENDPOINT": hub.endpoint, "NO_PROXY": "127.0.0.1,localhost"}
        yield hub


@pytest.fixture(autouse=True)
def separate_cache(monkeypatch):
    """Keep this process, which checks what commands leave, from caches outside of the world."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def check_files(downloaded: bytes, files) -> None:
    """Check the files in the folder that `download` has printed."""
    folder = Path(downloaded.decode().strip())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def whole(world, files) -> None:
    """Check that a download now succeeds, equals the published files, and computes."""
    out, _ = run_here("download", REPO, "-q", **world.env)
    check_files(out, files)
    run_here("generate", "-m", REPO, "--offline", "-n", 3, "Once", **world.env)


def nothing_is_trusted(world) -> None:
    """Check that nothing in the cache counts as a model."""
    listed = records_here("models", "--json", **world.env)
    assert [model["name"] for model in listed] == ["tiny"]
    run_here("generate", "-m", REPO, "--offline", "Once", code=3, **world.env)


# Those that `make test` runs; hub/test_client.py has most of the others, without processes.
QUICK = ("404, no such repository", "a byte too few", "a flipped bit in the weights")


def row(number, name, fault, on, says, do, *, code=3, **env):
    marks = [pytest.mark.fault(number, name, code, intact=NONE)]
    marks += [] if name in QUICK else [SLOW]
    return pytest.param(False, fault, on, says, do, code, env, id=name, marks=marks)


def in_storage(row):
    """Return the same fault where the weights are in a storage that speaks Xet.

    Faults of the weights are then those of the storage. If it fails, HTTP brings them.
    """
    _, fault, on, says, do, code, env = row.values
    number, name = row.marks[0].args[0], f"{row.id}, by Xet"
    if on == "/cdn/":
        on, code = "/xorb/", code if fault == "wrong-bytes" else 0
    marks = [pytest.mark.fault(number, name, code, intact=NONE if code else "the model")]
    return pytest.param(True, fault, on, says, do, code, env, id=name, marks=[*marks, SLOW])


# fmt: off
FAULTS = [
    row(24, "404, no such repository", "404-repo", "/api/", "is named acme/gpt", "check the name"),
    row(25, "404, no such revision", "404-revision", "/api/", "no revision main", "give one"),
    row(26, "403, gated", "403-gated", "/api/", "is gated", "accept its terms"),
    row(26, "403, gated in the middle", "403-gated", "HEAD", "is gated", "accept its terms"),
    row(28, "429 to every question", "429", "/api/", "too many requests", "wait some minutes"),
    row(28, "500 to every question", "500", "/api/", "answers 500", LATER),
    row(28, "503 to every question", "503", "/api/", "answers 503", LATER),
    row(28, "503 to every file", "503", "/cdn/", "answers 503", LATER),
    row(29, "the connection drops at half", "drop-half", "/cdn/", "broke before", AGAIN),
    row(30, "no answer", "stall", "/api/", "does not answer", NETWORK),
    row(30, "no answer for a file", "stall", "vocab.json", "does not answer", NETWORK,
        HF_HUB_ETAG_TIMEOUT="1"),
    row(30, "silence after half of a file", "stall-half", "/cdn/", "does not answer", NETWORK,
        HF_HUB_DOWNLOAD_TIMEOUT="1"),
    row(58, "401", "401", "/api/", "denies access to acme/gpt", "set HF_TOKEN"),
    row(58, "401, a bad token", "401-token", "/api/", "acme/gpt (401)", "set HF_TOKEN"),
    row(58, "403", "403", "/api/", "acme/gpt (403)", "set HF_TOKEN"),
    row(58, "404 that is no Hub's", "404-bare", "/api/", "(404)", "check the name"),
    row(58, "404 of a file that is listed", "404-entry", "vocab.json", "no file", "vocab.json"),
    row(58, "416", "416", "/cdn/", "answers 416", LATER),
    row(58, "418", "418", "/api/", "answers 418", LATER),
    row(58, "429, and a day to wait", "429-wait", "/api/", "(429)", "wait 86,400 seconds"),
    row(58, "429, and a day to wait for a file", "429-wait", "/cdn/", "(429)",
        "wait 86,400 seconds"),
    row(58, "a page of a hotel's network", "html", "/api/", "like a Hub",
        "check HF_ENDPOINT and the proxy"),
    row(58, "answers without a Hub's headers", "no-headers", "vocab.json", "like a Hub",
        "check HF_ENDPOINT and the proxy"),
    row(58, "no answer, and a closed connection", "drop", "/api/", "broke before", AGAIN),
    row(59, "a byte too few", "too-short", "/cdn/", "broke before", AGAIN),
    row(59, "a byte too many", "too-long", "/cdn/", "broke before", AGAIN),
    row(23, "a flipped bit in the weights", "wrong-bytes", "/cdn/", "its sha256 is", AGAIN, code=4),
    row(23, "a flipped bit in the vocabulary", "wrong-bytes", "vocab.json", "its git hash is",
        AGAIN, code=4),
    row(23, "a flipped bit in config.json", "wrong-bytes", "config.json", "its git hash is",
        AGAIN, code=4),
]
# fmt: on


@pytest.mark.parametrize(
    ("xet", "fault", "on", "says", "do", "code", "env"), [*FAULTS, *map(in_storage, FAULTS)]
)
def test_a_download_that_fails_leaves_nothing_that_is_trusted(
    xet, fault, on, says, do, code, env, hub, world, files, suffer
):
    hub.xet = xet
    hub.fail(fault, on=on)
    if code:
        flags = {"env": env, "changes": True, "limit": 120}
        suffer("download", REPO, "-q", code=code, says=says, do=do, **flags)
        hub.heal()
        nothing_is_trusted(world)
    else:
        out, _ = run_here("download", REPO, "-q", **world.env)
        check_files(out, files)
        assert hub.fetched()[0] == "model.safetensors"  # over HTTP
        hub.heal()
    whole(world, files)


@SLOW
@pytest.mark.fault(58, "416 when it goes on after half", 3, intact=NONE)
def test_a_rest_that_is_refused_is_told(hub, world, files, suffer):
    hub.add(REPO, {"model.safetensors": bytes(24_000_000)})  # the client writes pieces of 10 MiB
    hub.fail("416-resume", on="/cdn/")
    suffer("download", REPO, "-q", code=3, says="answers 416", do=LATER, changes=True)
    assert any("range" in request.headers for request in hub.requests)
    nothing_is_trusted(world)
    hub.heal()
    hub.add(REPO, files)
    whole(world, files)


@pytest.mark.fault(58, "a slow trickle", 0, intact="the model")
def test_a_slow_network_is_waited_for(hub, world, files):
    hub.fail("trickle", on="/cdn/")
    whole(world, files)


SHARDED = {"model-00001-of-00002.safetensors": b"1", "model-00002-of-00002.safetensors": b"2"}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(hub, files) -> None:
    """Publish the model in shards."""
    weight_map = dict(zip("ab", SHARDED, strict=True))
    index = json.dumps({"weight_map": weight_map}).encode()
    del files["model.safetensors"]
    files |= {**SHARDED, INDEX: index}
    hub.add("acme/shards", files)


@pytest.mark.fault(23, "a flipped bit in the index of shards", 4, intact=NONE)
def test_a_damaged_index_is_not_kept(hub, world, files, sharded, suffer):
    hub.fail("wrong-bytes", on=INDEX)
    suffer("download", "acme/shards", code=4, says="its git hash is", do=AGAIN, changes=True)
    hub.heal()
    out, _ = run_here("download", "acme/shards", "-q", **world.env)
    check_files(out, files)


@pytest.mark.fault(59, "an index of shards of 65 MB", 4, intact=NONE)
def test_an_index_beyond_all_is_refused(hub, world, files, sharded, suffer):
    hub.add("acme/shards", {INDEX: b" " * 65_000_000})
    arguments = ("download", "acme/shards", "-q")
    suffer(*arguments, code=4, says=INDEX, do="get it again", changes=True)


@pytest.mark.fault(23, "a flipped bit in a vocabulary that only tokenize needs", 4, intact=NONE)
@pytest.mark.parametrize(("command", "file"), [("tokenize", "merges.txt"), ("info", "config.json")])
def test_a_damaged_small_file_is_not_used(command, file, hub, world, suffer):
    hub.fail("wrong-bytes", on=file)
    arguments = ("info", REPO) if command == "info" else ("tokenize", "-m", REPO, "Once")
    suffer(*arguments, code=4, says=f"{file} is damaged: its git hash", do=AGAIN)


@pytest.mark.fault(23, "a bit flipped in the cache", 4, intact=NONE)
def test_a_damaged_file_in_the_cache_is_found_by_the_next_download(hub, world, files, suffer):
    out, _ = run_here("download", REPO, "-q", **world.env)
    folder = Path(out.decode().strip())
    weights = bytearray(files["model.safetensors"])
    weights[-9] ^= 4
    (folder / "model.safetensors").write_bytes(weights)
    suffer("download", REPO, "-q", code=4, says="its sha256 is", do=AGAIN, changes=True)
    nothing_is_trusted(world)
    whole(world, files)


@pytest.mark.fault(27, "no network, and nothing in the cache", 3, intact=NONE)
@pytest.mark.parametrize("flags", [["--offline"], []], ids=["offline", "refused"])
def test_without_a_network_it_is_said_at_once(flags, world, suffer):
    with socket.create_server(("127.0.0.1", 0)) as server:
        world.env |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.getsockname()[1]}"}
    begun = time.monotonic()
    arguments = ("generate", "-m", REPO, *flags, "Once")
    suffer(*arguments, code=3, says=REPO, do="such as `tiny`", changes=not flags)
    assert time.monotonic() - begun < 10  # 1 on an idle machine


@pytest.mark.fault(27, "no network, and the model in the cache", 0, intact="the text")
def test_without_a_network_a_cached_model_works(hub, world, files):
    whole(world, files)
    world.env |= {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert world.run("generate", "-m", REPO, "-n", 3, "Once").returncode == 0


@pytest.mark.fault(60, "a proxy that is dead", 3, intact=NONE)
def test_a_dead_proxy_is_told(hub, world, suffer):
    world.env |= {"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": ""}
    suffer("download", REPO, code=3, says="cannot be reached", do="the proxy", changes=True)
    assert hub.requests == []


VARIABLES = {
    "HF_ENDPOINT=hub": "must begin with http",
    "HF_ENDPOINT=http://[": "Invalid IPv6 URL",
    "HF_ENDPOINT=http://127.0.0.1:99999": "Port out of range",
    "HF_HUB_ETAG_TIMEOUT=soon": "'soon'",
    "ALL_PROXY=tube://127.0.0.1:1": "Unknown scheme for proxy",
    "SSL_CERT_FILE=/nowhere": "cannot start",
}


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        pytest.param(setting, says, marks=pytest.mark.fault(60, setting, 2, intact=NONE))
        for setting, says in VARIABLES.items()
    ],
)
def test_a_variable_that_cannot_be_used_is_told(setting, says, hub, world, suffer):
    variable, _, value = setting.partition("=")
    env = {variable: value, "NO_PROXY": ""}
    suffer("download", REPO, code=2, says=says, do="HF_", env=env)
    assert hub.requests == []


@pytest.mark.fault(60, "a proxy on the way", 0, intact="the model")
def test_a_proxy_is_used(hub, world, files):
    world.env |= {"HF_ENDPOINT": "http://hub.invalid", "HTTP_PROXY": hub.endpoint, "NO_PROXY": ""}
    finished = world.run("download", REPO, "-q")
    assert finished.returncode == 0, finished.stderr
    check_files(finished.stdout, files)
    assert all(request.headers["host"] != hub.endpoint for request in hub.requests)


@pytest.mark.fault(31, "two downloads at once", 0, intact="the model")
def test_two_downloads_at_once_both_succeed(hub, world, files):
    hub.delay = ("GET /cdn/", 0.5)  # so that the downloads overlap
    processes = [world.start("download", REPO, "-q") for _ in range(2)]
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0]
    whole(world, files)


@SLOW
@pytest.mark.fault(61, "20 processes at once on one empty cache", 0, intact="the model, each text")
def test_many_processes_share_a_cache(hub, world, files):
    command = ("generate", "-m", REPO, "-n", 5, "-s", 1, "Once")
    processes = [world.start(*command) for _ in range(20)]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0] * 20, outputs
    assert len({text for text, _ in outputs}) == 1
    whole(world, files)
    assert not list((world.root / "huggingface").rglob("*.incomplete"))


@pytest.mark.fault(32, "kill -9 in the middle of a download", -9, intact=NONE)
def test_a_killed_download_is_not_trusted(hub, world, files, survive):
    hub.fail("stall-half", on="/cdn/", times=1)
    with world.start("download", REPO) as process:
        assert hub.half_sent.wait(60)
        process.send_signal(signal.SIGKILL)
    survive(1)
    nothing_is_trusted(world)
    whole(world, files)


@SLOW
@pytest.mark.fault(32, "kill -9 at 25 moments of a download", -9, intact=NONE)
def test_a_download_killed_at_any_moment_is_whole_or_not_there(hub, world, files, survive):
    hub.delay = ("/resolve/", 0.05)
    killed = 0
    for moment in range(25):
        with world.start("download", REPO, "-q") as process:
            time.sleep(0.1 + 0.06 * moment)
            process.kill()
        killed += process.returncode != 0
        tried = finished("generate", "-m", REPO, "--offline", "-n", 3, "Once", **world.env)
        assert tried.returncode in (0, 3), tried.stderr
    survive(killed)
    hub.delay = ("", 0.0)
    whole(world, files)


@pytest.mark.fault(33, "a limit on the size of files, as a full disk", 5, intact=NONE)
@pytest.mark.parametrize(
    ("xet", "to"),
    [
        pytest.param(False, (), id="cache-HTTP"),
        pytest.param(True, ("--to", "new"), id="folder-Xet"),
        pytest.param(True, (), id="cache-Xet", marks=SLOW),
        pytest.param(False, ("--to", "new"), id="folder-HTTP", marks=SLOW),
    ],
)
def test_a_file_that_finds_no_room_is_told(xet, to, hub, world, files, suffer):
    hub.xet = xet

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    arguments = ("download", REPO, "-q", *to)
    options = {"changes": True, "preexec_fn": small_files}
    suffer(*arguments, code=5, says="File too large", do="another", **options)
    assert list(world.place.iterdir()) == []
    nothing_is_trusted(world)
    whole(world, files)


@pytest.mark.fault(34, "a cache that cannot be written", 5, intact=NONE)
def test_a_cache_that_cannot_be_written_is_told(hub, world, suffer):
    (world.root / "file").touch()
    env = {"HF_HUB_CACHE": str(world.root / "file" / "cache")}
    suffer("download", REPO, "-q", code=5, says="cannot use", do="HF_HOME", env=env)


@pytest.mark.fault(34, "a cache that is mounted read-only", 5, intact="what is in the cache")
def test_a_read_only_cache_is_read_and_not_written(hub, world, files):
    whole(world, files)
    hub.add("acme/other", files)
    cache = world.root / "huggingface"
    frozen = f"mount --bind {cache} {cache} && mount -o remount,ro,bind {cache}"
    finished = world.run_in_namespace(frozen, "generate", "-m", REPO, "-n", 3, "Once")
    assert finished.returncode == 0, finished.stderr
    finished = world.run_in_namespace(frozen, "download", "acme/other", "-q")
    assert "Read-only file system; set HF_HOME to another place" in check_failure(finished, 5)
    whole(world, files)
