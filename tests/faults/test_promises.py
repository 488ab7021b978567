"""The promises of SECURITY.md, tested by watching what a process opens, runs and connects to."""

import json
import struct
from pathlib import Path

import pytest

from support.loopback_hub import LoopbackHub
from support.processes import posix
from support.signals import limit_addresses

pytestmark = posix

TINY = ("-m", "tiny")
# The only files of a model's folder that are opened.
READ = {"config.json", "model.safetensors", "vocab.json", "merges.txt", "tokenizer_config.json"}

# Python runs this when it starts. It records what an attacker would have to do.
WATCH = """
import json, os, sys
log = os.open(os.environ["WATCH"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
watched = ("open", "pickle.find_class", "socket.", "subprocess.Popen", "os.system")
def watch(event, arguments):
    if event.startswith(watched):
        about = arguments[0] if event == "open" else arguments[-1]
        os.write(log, json.dumps([event, str(about)]).encode() + b"\\n")
sys.addaudithook(watch)
"""


@pytest.fixture
def watched(world):
    """Return a function that runs a command and returns its audit events with their arguments."""
    site, log = world.root / "site", world.root / "log"
    site.mkdir()
    (site / "sitecustomize.py").write_text(WATCH)
    world.env |= {"PYTHONPATH": str(site), "WATCH": str(log)}

    def run(*arguments: object, code: int = 0, **options: object) -> list[tuple[str, str]]:
        log.unlink(missing_ok=True)
        finished = world.run(*arguments, **options)
        assert finished.returncode == code, finished.stderr
        return [tuple(json.loads(line)) for line in log.read_bytes().splitlines()]

    return run


@pytest.mark.fault(69, "a folder full of code", 0, intact="none of it is opened")
def test_no_code_of_a_checkpoint_is_run_or_opened(model, world, watched):
    mark = world.root / "pwned"
    code = f"open({str(mark)!r}, 'w')"
    for name in ("modeling_gpt2.py", "tokenizer.py", "__init__.py", "sitecustomize.py", "numpy.py"):
        (model / name).write_text(code)
    pickle = f"cbuiltins\nexec\n(S{code!r}\ntR.".encode()
    (model / "tiktoken").mkdir()
    (model / "tiktoken" / "__init__.py").write_text(code)
    for name in ("pytorch_model.bin", "model.pt", "optimizer.pkl", "merges.npy"):
        (model / name).write_bytes(pickle)
    config = json.loads((model / "config.json").read_bytes())
    config |= {
        "auto_map": {"AutoModelForCausalLM": "modeling_gpt2.Model"},
        "trust_remote_code": True,
        "_name_or_path": "/etc",
        "custom_pipelines": {"x": {"impl": "modeling_gpt2.Model"}},
    }
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "tokenizer.Tokenizer"}')
    for command in ("generate", "score", "next", "tokenize"):
        did = watched(command, "-m", model, stdin=b"Once upon a time", cwd=model)
        opened = {Path(what).name for kind, what in did if what.startswith(str(model))}
        assert opened <= READ
        assert opened == READ or command == "tokenize"
        assert not [what for kind, what in did if kind == "pickle.find_class"]
        assert not [what for kind, what in did if kind in ("subprocess.Popen", "os.system")]
    assert not mark.exists()


@pytest.mark.fault(70, "commands that have their model here", 0, intact="no network is touched")
@pytest.mark.parametrize(
    "command",
    ["generate", "score", "models"]
    + [pytest.param(command, marks=pytest.mark.slow) for command in ("batch", "next", "tokenize")],
)
def test_nothing_is_sent_anywhere(command, watched):
    arguments = () if command == "models" else TINY
    did = watched(command, *arguments, stdin=b"Once upon a time")
    assert len(did) > 10, "the watch does not work"
    assert [event for event in did if event[0].startswith("socket.")] == []


@pytest.mark.fault(70, "a download", 0, intact="only the Hub that was asked for is asked")
def test_only_the_hub_is_asked_and_only_for_the_model(model, world, watched):
    with LoopbackHub(world.root / "hub") as hub:
        hub.add("acme/gpt", {path.name: path.read_bytes() for path in model.iterdir()})
        world.env |= {"HF_ENDPOINT": hub.endpoint, "NO_PROXY": "127.0.0.1,localhost"}
        did = watched("download", "acme/gpt", "-q")
        connected = [what for kind, what in did if kind == "socket.connect"]
        assert connected
        assert all(str(hub.port) in address for address in connected)
        sent = {request.path for request in hub.requests}
    files = {path.name for path in model.iterdir()}
    expected = {f"/acme/gpt/resolve/{hub.commit('acme/gpt')}/{name}" for name in files}
    expected |= {"/acme/gpt/resolve/main/config.json", "/cdn/acme/gpt/model.safetensors"}
    assert sent <= expected | {"/api/models/acme/gpt/revision/main"}


@pytest.mark.fault(55, "a header of the largest size, in 1200 MiB", 4, intact="memory is bounded")
def test_the_memory_for_a_header_is_bounded(model, suffer):
    entry = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = b"{" + b",".join(entry % i for i in range(170_000)) + b"}"
    assert 9_000_000 < len(header) < 10_000_000
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    options = {"preexec_fn": limit_addresses(1200), "code": 4}
    suffer("generate", "-m", model, "Once", says="is missing", do="of the same GPT-2", **options)
