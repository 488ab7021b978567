"""Faults around `gpt-cli serve`: where it listens, who asks, what they send, and its end.

A fault of one request is answered in OpenAI's shape, and the server goes on: after each test, it
says nothing on standard error, nothing runs or waits, and it ends with exit code 0.
"""

import http.client
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from support.answers import choices_of
from support.checkpoints import CONFIG, write_checkpoint
from support.processes import is_quiet, posix
from support.server_process import (
    COMPLETIONS,
    LIMIT,
    WAITS,
    answer_on,
    bytes_on,
    request_bytes,
    serving,
    write_slow_model,
)
from support.world import World

resource = pytest.importorskip("resource")  # not on Windows
pytestmark = posix
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps these limits")

SLOW = pytest.mark.slow
TINY = ("serve", "-m", "tiny")
SHORT = {"prompt": "Once", "max_tokens": 4, "seed": 1}
LONG = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "seed": 1}
ENDLESS = LONG | {"n": 128}  # 10 seconds
FRIEND = "https://friend.example"
ALIVE = "the server, and other requests"


def fault(number, name, code, intact=ALIVE):
    return pytest.mark.fault(number, name, code, intact=intact)


def faults(arguments, number, cases, code, intact=ALIVE):
    """Parametrize a test by faults: their names, each with the values of the arguments."""
    params = [
        pytest.param(*values, id=name, marks=fault(number, name, code, intact))
        for name, values in cases.items()
    ]
    return pytest.mark.parametrize(arguments, params)


@pytest.fixture
def suffer_here(suffer_here, world, monkeypatch):
    """Return the function of this name, which runs commands in the world's working folder."""
    monkeypatch.chdir(world.place)
    return suffer_here


@pytest.fixture
def serve(world, record_property):
    """Return a function that runs a server in this world."""

    @contextmanager
    def run(*flags, **options):
        with serving(*flags, start=world.start, **options) as server:
            server.tell = lambda message: record_property("message", message)
            yield server

    return run


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Run one server for faults of single requests."""
    world = World(tmp_path_factory.mktemp("shared"))
    allowed = world.place / "allowed"
    allowed.mkdir()
    (allowed / "up").symlink_to(world.place)
    for folder in (world.place, allowed):
        np.save(folder / "v.npy", np.zeros(192))
    flags = ("--max-body", 100_000, "--allow-edits", allowed)
    with serving(*flags, start=world.start) as server:
        server.place = world.place
        yield server


@pytest.fixture
def server(shared, record_property):
    """Return this server, which must go on."""
    shared.tell = lambda message: record_property("message", message)
    yield shared
    assert shared.complete(**SHORT)["choices"][0]["text"]
    shared.wait_until_idle()


@pytest.fixture(scope="session")
def slow_model(tmp_path_factory):
    return write_slow_model(tmp_path_factory.mktemp("slow") / "model")


@pytest.fixture(scope="module")
def slow_shared(tmp_path_factory, slow_model):
    """Run one slow server for clients that leave."""
    world = World(tmp_path_factory.mktemp("slow"))
    with serving(model=slow_model, start=world.start) as server:
        yield server


def refused(server, answer, status, *says):
    """Check an error; record its message."""
    error = answer.error(status)
    assert all(text in error["message"] for text in says), error["message"]
    server.tell(error["message"])
    return error


def is_running(values):
    return values["gpt_cli_texts_running"] > 0


# --- where it listens ----------------------------------------------------------------------------


@fault(73, "a port in use", 5, "the other server")
def test_a_port_in_use_is_told(suffer_here):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        suffer_here(*TINY, "--port", port, code=5, says=f"port {port}: Addr", do="another port")


@linux
@fault(73, "a port without permission", 5, "nothing is begun")
def test_a_port_without_permission_is_told(suffer):
    least = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
    if not shutil.which("setpriv") or int(least.read_text()) <= 80:
        pytest.skip("any user may listen at any port here")
    drop = ["setpriv", "--bounding-set=-net_bind_service", "--inh-caps=-net_bind_service"]
    before = drop if os.geteuid() == 0 else []
    suffer(*TINY, "--port", 80, before=before, code=5, says="ermission", do="another port")


@faults(
    ("flag", "value"),
    73,
    {
        "a host that is none": ("--host", "nowhere.invalid"),
        "a port of 65536": ("--port", "65536"),
        "a port that is text": ("--port", "http"),
    },
    2,
    "nothing is begun",
)
def test_an_address_that_is_not_valid_is_told(flag, value, suffer_here):
    suffer_here(*TINY, flag, value, "--allow-anyone", code=2, says=flag[2:], do=flag)


@fault(73, "a host of another machine", 5, "nothing is begun")
def test_the_address_of_another_machine_is_told(suffer_here):
    flags = ("--host", "192.0.2.1", "--api-key", "x")
    suffer_here(*TINY, *flags, code=5, says="host", do="another host")


@fault(73, "the model is not there, nor the port", 5, "no model is loaded")
def test_the_port_is_taken_before_the_model_is_loaded(world, suffer_here):
    folder = write_checkpoint(world.root / "model", CONFIG)
    (folder / "model.safetensors").write_bytes(b"")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        suffer_here(
            "serve", "-m", folder, "--port", port, code=5, says=str(port), do="another port"
        )


@fault(74, "a stale socket file", 0, "the server")
def test_a_stale_socket_is_replaced(serve, world):
    path = world.place / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with serve("--unix-socket", path) as server:
        assert server.complete(**SHORT)
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


@fault(74, "a server killed, and its socket file", 0, "the next server")
def test_a_socket_of_a_killed_server_is_replaced(serve, world):
    path = world.place / "socket"
    with serve("--unix-socket", path) as server:
        assert server.stop(signal.SIGKILL)[0] == -signal.SIGKILL
    assert path.is_socket()
    with serve("--unix-socket", path) as server:
        assert server.complete(**SHORT)
    assert not path.exists()


@fault(74, "a socket file in use", 5, "the other server")
def test_a_socket_in_use_is_told(serve, world, suffer_here):
    path = world.place / "socket"
    with serve("--unix-socket", path) as server:
        flags = ("--unix-socket", path)
        suffer_here(*TINY, *flags, code=5, says="another server", do="another path")
        assert server.complete(**SHORT)


@faults(
    ("make",),
    74,
    {
        "a file in place of the socket": [lambda path: path.write_bytes(b"precious\n")],
        "a folder in place of the socket": [Path.mkdir],
        "a link in place of the socket": [lambda path: path.symlink_to("precious")],
    },
    2,
    "what is there",
)
def test_what_is_no_socket_is_not_replaced(make, world, suffer_here):
    path = world.place / "socket"
    make(path)
    suffer_here(*TINY, "--unix-socket", path, code=2, says="is not a socket", do="choose another")


@faults(
    ("path",),
    74,
    {"a socket in no folder": ["nowhere/socket"], "a socket path that is too long": ["x" * 200]}
    | ({"a socket without permission": ["/sys/socket"]} if sys.platform == "linux" else {}),
    2,
    "-",
)
def test_a_socket_that_cannot_be_made_is_told(path, suffer_here):
    suffer_here(*TINY, "--unix-socket", path, code=2, says="cannot listen", do="another path")


# --- who asks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
@fault(75, "an open address without a key", 2, "nothing is begun")
def test_an_open_address_needs_a_key(host, suffer_here):
    says, do = "set a key by GPT_CLI_API_KEY", "use --allow-anyone"
    suffer_here(*TINY, "--host", host, code=2, says=says, do=do)


@faults(
    ("headers",),
    75,
    {
        "no key": [{}],
        "a wrong key": [{"Authorization": "Bearer secres"}],
        "an empty key": [{"Authorization": "Bearer "}],
        "a key that is no ASCII": [{"Authorization": "Bearer s\xe9cret"}],
        "a key of another scheme": [{"Authorization": "Basic secret"}],
    },
    "HTTP 401",
)
def test_without_the_key_there_is_no_answer(headers, server_with_key, record_property):
    for path in (COMPLETIONS, "/tokenize", "/v1/models", "/metrics", "/nope"):
        body = SHORT if path in (COMPLETIONS, "/tokenize") else None
        answer = server_with_key.ask(path, body, **headers)
        error = answer.error(401)
        assert error["code"] == "invalid_api_key"
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")
    for path in ("/", "/health"):
        assert server_with_key.ask(path, **headers).status == 200
    assert server_with_key.ask(COMPLETIONS, SHORT, Authorization="Bearer secret").status == 200
    record_property("message", error["message"])


@pytest.fixture(scope="module")
def server_with_key(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("key"))
    flags = ("--cors", FRIEND)
    with serving(*flags, start=world.start, env={"GPT_CLI_API_KEY": "secret"}) as server:
        yield server


@fault(75, "a key on the command line of another", 2, "the key is not shown")
def test_the_key_is_not_shown(world):
    finished = world.run(*TINY, "--api-key", "sec\nret", "--port", "x")
    assert finished.returncode == 2
    assert b"sec" not in finished.stderr


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
@fault(76, "a Host of another name (DNS rebinding)", "HTTP 403")
def test_a_page_that_was_bound_again_has_no_answer(host, server):
    for path in ("/", "/health", COMPLETIONS):
        body = SHORT if path == COMPLETIONS else None
        answer = server.ask(path, body, Host=host)
        assert answer.status in ((403, 400) if host == "" else (403,))
    if host:
        refused(server, answer, 403, "Host")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "[::1]:8000", "LOCALHOST:80"])
@fault(76, "a Host of this machine", "HTTP 200")
def test_names_of_this_machine_have_an_answer(host, server):
    assert server.ask(COMPLETIONS, SHORT, Host=host).status == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "x"])
@fault(76, "a page of another origin", "HTTP 403")
def test_pages_of_others_cannot_use_it(origin, server):
    # What a page may send without asking first.
    simple = {"Origin": origin, "Content-Type": "text/plain"}
    refused(server, server.ask(COMPLETIONS, SHORT, **simple), 403, origin, "cors")
    answer = server.ask(COMPLETIONS, method="OPTIONS", Origin=origin)
    assert "Access-Control-Allow-Origin" not in answer.headers


@fault(76, "a page of an origin that --cors names", "HTTP 200")
def test_pages_of_friends_can(server_with_key, record_property):
    friend = {"Origin": FRIEND, "Authorization": "Bearer secret"}
    answer = server_with_key.ask(COMPLETIONS, SHORT, **friend)
    assert answer.status == 200
    assert answer.headers["Access-Control-Allow-Origin"] == FRIEND
    preflight = server_with_key.ask(
        COMPLETIONS,
        method="OPTIONS",
        Origin=FRIEND,
        Access_Control_Request_Method="POST",
        Access_Control_Request_Headers="content-type,authorization",
    )
    assert preflight.status == 200
    answer = server_with_key.ask(COMPLETIONS, SHORT, **friend | {"Origin": "https://foe.example"})
    record_property("message", answer.error(403)["message"])


# --- what they send ------------------------------------------------------------------------------

LARGE = b'{"prompt": "' + b"x" * 100_000 + b'"}'


@fault(77, "a body too large", "HTTP 413")
def test_a_large_body_is_refused_unread(server):
    with server.connect() as connection:
        head, _, _ = request_bytes(LARGE).partition(b"\r\n\r\n")
        connection.sendall(head + b"\r\n\r\n")  # and none of the body
        answer = answer_on(connection)
    refused(server, answer, 413, "--max-body")


@fault(77, "a body too large, in pieces", "HTTP 413")
def test_a_large_body_in_pieces_is_refused(server):
    with server.connect() as connection:
        head = request_bytes(b"", Transfer_Encoding="chunked")
        connection.sendall(head.replace(b"Content-Length: 0\r\n", b""))
        piece = b"2710\r\n" + b" " * 10_000 + b"\r\n"
        for _ in range(11):
            connection.sendall(piece)
        answer = answer_on(connection)
    refused(server, answer, 413, "--max-body")


@SLOW
@fault(77, "a body that does not come", "HTTP 408")
def test_a_body_that_does_not_come_is_not_waited_for(server):
    with server.connect() as connection:
        connection.sendall(request_bytes(SHORT)[:-1])
        refused(server, answer_on(connection), 408)


@fault(77, "a body a byte at a time", "HTTP 200")
def test_a_body_may_come_a_byte_at_a_time(server):
    with server.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request_bytes(SHORT):
            connection.sendall(bytes([byte]))
        assert answer_on(connection).status == 200


@fault(77, "half a request", "-")
@pytest.mark.parametrize("part", [1, 10, 60, 120, -1])
def test_half_a_request_is_forgotten(part, server):
    with server.connect() as connection:
        connection.sendall(request_bytes(SHORT)[:part])
    with server.connect() as connection:
        connection.sendall(request_bytes(SHORT)[:part])
        connection.shutdown(socket.SHUT_WR)
        assert not bytes_on(connection).startswith(b"HTTP/1.1 200")


GARBAGE = {
    "zeros": bytes(1000),
    "another protocol": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "line ends": b"\r\n" * 100,
    "a request of HTTP/0.9": b"GET /\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "two lengths": request_bytes(SHORT, Content_Length="5").replace(
        b"Host", b"Content-Length: 6\r\nHost"
    ),
    "a length below 0": request_bytes(SHORT, Content_Length="-5"),
    "a length that is text": request_bytes(SHORT, Content_Length="many"),
    "a length and pieces": request_bytes(SHORT, Transfer_Encoding="chunked"),
    "a piece without a length": request_bytes(b"").replace(
        b"Content-Length: 0", b"Transfer-Encoding: chunked"
    )
    + b"zz\r\n{}\r\n0\r\n\r\n",
    "no Host": request_bytes(SHORT).replace(b"Host: 127.0.0.1\r\n", b""),
    "a header that is folded": request_bytes(SHORT, X="a\r\n b"),
    "a path that is no ASCII": "GET /é HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode(),
}


@faults(("data",), 77, {f"garbage: {name}": [data] for name, data in GARBAGE.items()}, "HTTP 400")
def test_garbage_ends_its_connection(data, server):
    with server.connect() as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = bytes_on(connection)
    assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200"))
    assert b"Traceback" not in answer


@fault(77, "a header too long", "HTTP 400")
@pytest.mark.parametrize("where", ["in one header", "in many", "in the path", "without an end"])
def test_a_long_header_is_refused(where, server):
    long = "x" * 1_000_000
    data = {
        "in one header": request_bytes(SHORT, X=long),
        "in many": request_bytes(SHORT, **{f"X{i}": "x" * 1000 for i in range(1000)}),
        "in the path": request_bytes(SHORT, path="/" + long),
        "without an end": b"POST / HTTP/1.1\r\nX: " + long.encode(),
    }[where]
    with server.connect() as connection:
        try:
            connection.sendall(data)
            answer = bytes_on(connection)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""  # the answer is lost where the server does not read what follows
    assert not answer or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431", b"HTTP/1.1 414"))


# Python 3.14 reads as many levels as fit on the stack: other reasons come first.
DEEP = "nested too deeply" if sys.version_info < (3, 14) else ""
BODIES = {
    "JSON nested too deeply": (b'{"prompt": ' + b"[" * 40_000, DEEP),
    "JSON nested too deeply, with ends": (b"[" * 40_000 + b"]" * 40_000, DEEP),
    "objects nested too deeply": (b'{"a":' * 15_000 + b"1" + b"}" * 15_000, DEEP),
    "JSON cut short": (b'{"prompt": "Once', "starting at at character 11"),
    "JSON that is no UTF-8": (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
    "JSON in UTF-16": (json.dumps(SHORT).encode("utf-16-le")[:-1], "not UTF-8"),
    "a number of 50,000 digits": (b'{"seed": ' + b"9" * 50_000 + b"}", "too many digits"),
    "half of a surrogate": (rb'{"prompt": "\ud83d"}', "Unicode"),
    "a prompt too long": ({"prompt": "Once " * 3000}, "511"),
    "an echo too long": ({"prompt": "Once " * 3000, "echo": True, "max_tokens": 0}, "512"),
    "a prompt of 90,000 spaces": ({"prompt": " " * 90_000}, "511"),
    "15,000 prompts": ({"prompt": ["a"] * 15_000}, ""),
    "2,000 prompts with the likeliest tokens": (
        {"prompt": [[1] * 9] * 2000, "logprobs": 100, "echo": True},
        "fewer",
    ),
    "too much for an answer": (ENDLESS | {"logprobs": 100}, "fewer"),
    "10,000 stop strings": (SHORT | {"stop": ["zq"] * 10_000}, "stop"),
    "a million choices": (SHORT | {"n": 10**6}, "n"),
}


@faults(("body", "says"), 78, BODIES, "HTTP 400")
def test_a_body_that_cannot_be_used_is_told(body, says, server):
    refused(server, server.ask(COMPLETIONS, body), 400, says)


FILES = {
    "..": "../v.npy",
    "an absolute name": "{place}/v.npy",
    "a link out": "up/v.npy",
    "an address": "file://{place}/v.npy",
    "a NUL byte": "v.npy\0.npy",
    "a bell": "\a/v.npy",
}


@faults("name", 78, {f"an edit's file: {kind}": [name] for kind, name in FILES.items()}, "HTTP 400")
def test_a_file_of_edits_outside_of_their_folder_is_as_if_missing(name, server):
    def ask(name):
        return server.ask(COMPLETIONS, SHORT | {"edits": [f"hook_embed+={name}"]})

    there = name.format(place=server.place)
    errors = [
        refused(server, ask(file), 400, "is not a file in the folder for edits")
        for file in (there, there.replace("v.npy", "gone.npy"))
    ]
    assert errors[0]["message"].replace("v.npy", "gone.npy") == errors[1]["message"]
    server.tell(errors[1]["message"].replace(str(server.place), "PATH"))
    assert ask("v.npy").status == 200


# --- load ----------------------------------------------------------------------------------------


@fault(79, "a full queue", "HTTP 429", "the requests before it")
def test_a_full_queue_is_told(serve, slow_model):
    with serve("--batch-size", 1, "--max-queue", 1, model=slow_model) as server:
        running = server.begin(**LONG, stream=True)
        server.wait_for(is_running)
        queued = server.begin(**SHORT)
        server.wait_for(lambda values: values["gpt_cli_texts_waiting"] == 1)
        answer = server.ask(COMPLETIONS, SHORT)
        assert refused(server, answer, 429)["code"] == "server_busy"
        assert 1 <= int(answer.headers["Retry-After"]) <= 120
        assert server.ask("/health").status == 200
        running.close()
        with queued:
            assert answer_on(queued).status == 200
        assert server.complete(**SHORT)


@fault(79, "a request of 500 texts", "HTTP 200", "the requests after it")
def test_a_request_of_many_texts_holds_nobody_up(server):
    many = [f"Once, {number}" for number in range(500)]
    large = server.begin(**LONG | {"prompt": many, "max_tokens": 100})
    server.wait_for(is_running)
    for _ in range(3):
        assert server.complete(**SHORT)
    assert server.metrics()["gpt_cli_texts_waiting"] > 0
    large.close()


@SLOW
@fault(79, "a client that leaves while it waits", "-", "the request that runs")
def test_who_leaves_the_queue_frees_its_place(serve, slow_model):
    with serve("--batch-size", 1, model=slow_model) as server:
        running = server.begin(**LONG | {"max_tokens": 300})
        server.wait_for(is_running)
        queued = server.begin(**SHORT)
        server.wait_for(lambda values: values["gpt_cli_texts_waiting"] == 1)
        queued.close()
        assert is_running(server.wait_for(lambda values: values["gpt_cli_texts_waiting"] == 0))
        with running:
            answer = answer_on(running).json()
        assert answer["usage"]["completion_tokens"] == 300
        assert server.wait_until_idle()["gpt_cli_generated_tokens_total"] == 300


@fault(79, "a client that leaves while its prompt is computed", "-")
def test_who_leaves_in_the_prefill_frees_its_place(slow_shared):
    prompts = [f"{seed} " * 300 for seed in range(10, 42)]  # of 900 tokens
    before = slow_shared.metrics()["gpt_cli_generated_tokens_total"]
    gone = slow_shared.begin(prompt=prompts, max_tokens=1)
    slow_shared.wait_for(is_running)
    gone.close()
    after = slow_shared.wait_until_idle()["gpt_cli_generated_tokens_total"]
    assert after - before < len(prompts)
    assert slow_shared.complete(**SHORT)


@fault(79, "a client that leaves in the middle of a stream", "-")
def test_who_leaves_a_stream_frees_its_place(slow_shared):
    before = slow_shared.metrics()["gpt_cli_generated_tokens_total"]
    gone = slow_shared.begin(**LONG, n=2, stream=True)
    assert gone.recv(1000).startswith(b"HTTP/1.1 200")
    gone.close()
    after = slow_shared.wait_until_idle()["gpt_cli_generated_tokens_total"]
    assert after - before < 2 * 900


@fault(79, "50 clients that leave at once", "-")
def test_many_may_leave_at_once(slow_shared):
    expected = slow_shared.complete(**SHORT)["choices"]
    many = [slow_shared.begin(**LONG | {"seed": seed}, stream=seed % 2 > 0) for seed in range(50)]
    slow_shared.wait_for(is_running)
    stays = slow_shared.begin(**SHORT)
    for connection in many:
        connection.close()
    assert answer_on(stays).json()["choices"] == expected
    slow_shared.wait_until_idle()


@linux
@SLOW
@fault(79, "a reader that is slow", "HTTP 200", "other requests, memory, its whole text")
def test_a_slow_reader_holds_nobody_up(serve):
    # The largest answer that may be asked for: 15 MB, of which the system's buffers hold some.
    wide = LONG | {"max_tokens": 300, "n": 16, "logprobs": 100, "stream": True}
    with serve() as server:
        expected = server.complete(**SHORT)["choices"]
        server.complete(**wide | {"stream": False, "logprobs": 0})
        before = memory(server)
        with server.begin(receives=4096, **wide) as slow_reader:
            server.wait_for(is_running)
            for _ in range(20):
                assert server.complete(**SHORT)["choices"] == expected
                time.sleep(0.1)
            server.wait_until_idle()
            assert memory(server) - before < 150 << 20
            chunks = answer_on(slow_reader).events()
        assert sum(len(chunk["choices"][0]["logprobs"]["tokens"]) for chunk in chunks) == 16 * 300


@linux
@fault(79, "60 silent connections and a limit of 40 open files", "-", "the requests before them")
def test_few_files_are_enough(serve):
    with serve(preexec_fn=limit(resource.RLIMIT_NOFILE, 40)) as server:
        stays = server.begin(**LONG | {"max_tokens": 400})
        silent = [server.connect() for _ in range(60)]
        with stays:
            assert answer_on(stays).status == 200
        for connection in silent:
            connection.close()
        assert completes(server)


@fault(79, "200 connections that say nothing", "-", "the requests that come")
def test_silent_connections_hold_nobody_up(server):
    silent = [server.connect() for _ in range(200)]
    assert server.complete(**SHORT)
    for connection in silent:
        connection.close()


def completes(server):
    """Return whether there is an answer at last; connections may be refused until then."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        try:
            return server.complete(**SHORT)
        except OSError:
            time.sleep(0.1)
    return None


def memory(server):
    """Return the bytes of memory that a server holds."""
    pages = Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


# --- the model -----------------------------------------------------------------------------------


@fault(80, "damaged weights", 4, "nothing is begun")
def test_a_damaged_model_is_refused(model, suffer_here):
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    flags = ("serve", "-m", model, "--port", 0)
    suffer_here(*flags, code=4, says="is not safetensors", do="get it again")


@fault(80, "a model that is nowhere", 3, "nothing is begun")
def test_a_model_that_is_nowhere_is_told(suffer_here):
    suffer_here("serve", "-m", "./nowhere", "--port", 0, code=3, says="nowhere", do="give a folder")


@fault(80, "a weight that is nan", "HTTP 500")
def test_damaged_weights_that_load_are_told(serve, model):
    import math

    from support.damaged import poison

    poison(math.nan)(model)
    with serve(model=model) as server:
        for fields in (SHORT, SHORT | {"echo": True, "logprobs": 1, "max_tokens": 0}):
            answer = server.ask(COMPLETIONS, fields)
            refused(server, answer, 500, "not finite", "get the model again")
        answer = server.ask(COMPLETIONS, SHORT | {"stream": True})
        assert b"not finite" in answer.body
        server.wait_until_idle()


def limit(kind, size):
    """Return a function that limits a resource of its process."""
    return lambda: resource.setrlimit(kind, (size, size))


@linux
@fault(80, "a limit of 300 MiB of address space", 5, "nothing is begun")
def test_too_little_memory_is_known_before(suffer):
    options = {"preexec_fn": limit(resource.RLIMIT_AS, 300 << 20)}
    suffer(*TINY, "--port", 0, code=5, says="MiB of address space", do="ulimit -v", **options)


# 32 texts of 900 tokens, each with 29 MB of keys and values.
MANY = {"prompt": [f"{place} " * 300 for place in range(10, 42)], "max_tokens": 9}


@linux
@SLOW
@fault(80, "texts beyond a limit of memory", "HTTP 200")
def test_texts_that_do_not_fit_the_memory_together_are_computed_one_after_another(
    serve, slow_model
):
    options = {"preexec_fn": limit(resource.RLIMIT_AS, 700 << 20), "model": slow_model}
    with serve("--threads", 1, **options) as server:
        answer = server.ask(COMPLETIONS, MANY)
        assert len(answer.json()["choices"]) == len(MANY["prompt"])
        assert server.complete(**SHORT)
        server.wait_until_idle()


@linux
@SLOW
@fault(80, "limits of address space from 600 to 1500 MiB", "HTTP 503")
def test_any_limit_of_address_space_is_enough_or_told_of_a_server(serve, slow_model, world):
    statuses = []
    for mebibytes in range(600, 1501, 300):
        options = {"preexec_fn": limit(resource.RLIMIT_AS, mebibytes << 20)}
        flags = ("-m", slow_model, "--threads", 1)
        if world.run("generate", *flags, "-n", 1, "Once", **options).returncode:
            continue
        with serve("--threads", 1, model=slow_model, **options) as server:
            answer = server.ask(COMPLETIONS, MANY)
            statuses.append(answer.status)
            if answer.status != 200:
                refused(server, answer, 503, "memory")
            assert server.complete(**SHORT)
    assert len(statuses) > 2
    assert statuses == sorted(statuses, reverse=True), "from one limit on it is always enough"


# --- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "stream"),
    [
        pytest.param(number, stream, id=number.name, marks=[*marks, fault(
            81, f"{number.name} while a text runs", 0, "the text"
        )])
        for number, stream, *marks in ((signal.SIGTERM, True), (signal.SIGINT, False, SLOW))
    ],
)  # fmt: skip
def test_what_runs_is_finished(number, stream, serve):
    with serve() as server:
        body = LONG | {"n": 4, "max_tokens": 500}
        expected = server.complete(**body)["choices"]
        running = server.begin(**body, stream=stream)
        server.wait_for(is_running)
        server.process.send_signal(number)
        server.wait_until_refused()
        assert choices_of(answer_on(running)) == expected
        assert server.wait() == (0, WAITS)


@fault(81, "SIGTERM while requests wait", 0, "their texts")
def test_what_waits_is_finished(serve):
    with serve("--batch-size", 1) as server:
        expected = server.complete(**SHORT)["choices"]
        running = server.begin(**LONG | {"n": 2, "max_tokens": 400})
        count = server.wait_for(is_running)["gpt_cli_texts_waiting"]
        waiting = server.begin(**SHORT)
        server.wait_for(lambda values: values["gpt_cli_texts_waiting"] != count)
        server.process.send_signal(signal.SIGTERM)
        assert answer_on(running).status == 200
        assert answer_on(waiting).json()["choices"] == expected
        code, notes = server.wait()
        # The second may come to the queue while the note is written.
        assert (code, notes.replace("2 requests", "1 request")) == (0, WAITS)


@fault(81, "a text that takes longer than --grace", 0, "the client is told")
def test_what_takes_too_long_is_ended(serve):
    with serve("--grace", 0.3) as server:
        running = [server.begin(**ENDLESS, stream=stream) for stream in (True, False)]
        server.wait_for(lambda values: values["gpt_cli_texts_waiting"] > 128)
        began = time.monotonic()
        waits = WAITS.replace("1 request", "2 requests").replace("30", "0.3")
        assert server.stop() == (0, f"{waits}gpt-cli: 2 requests were cut off\n")
        assert time.monotonic() - began < 10
        streamed, whole = map(bytes_on, running)
    message = b"the server has stopped before the answer was complete: try again"
    assert message in streamed
    assert streamed.startswith(b"HTTP/1.1 200")
    assert message in whole
    assert whole.startswith(b"HTTP/1.1 503")


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(number, code, id=number.name, marks=[*marks, fault(
            81, f"a second {number.name}", code, "no error is said"
        )])
        for number, code, *marks in ((signal.SIGTERM, 143), (signal.SIGINT, 130, SLOW))
    ],
)  # fmt: skip
def test_a_second_signal_ends_it_at_once(number, code, serve):
    with serve() as server:
        running = server.begin(**ENDLESS, stream=True)
        server.wait_for(is_running)
        server.process.send_signal(number)
        server.wait_until_refused()
        began = time.monotonic()
        assert server.stop(number) == (code, WAITS)
        assert time.monotonic() - began < 10
        running.close()


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=number.name, marks=[*marks, fault(
            81, f"{number.name} while the model is loaded", 128 + number, "nothing is said"
        )])
        for number, *marks in ((signal.SIGTERM, SLOW), (signal.SIGINT,))
    ],
)  # fmt: skip
def test_a_signal_while_it_starts_is_quiet(number, world):
    for wait in (0.2, 0.3, 0.4, 0.5):
        with world.start(*TINY, "--port", 0) as process:
            time.sleep(wait)
            process.send_signal(number)
            out, errors = process.communicate(timeout=LIMIT)
        # 1 is Python's status of an interrupt before our first line, on a busy machine.
        before = b"Traceback" in errors and number == signal.SIGINT
        assert process.returncode in (0, 128 + number, -number, *([1] if before else []))
        assert out == b""
        assert is_quiet(errors)
        if b"Traceback" not in errors:
            assert errors == b"" or errors.startswith(b"gpt-cli: listening on ")
            assert errors.count(b"\n") <= 1


@SLOW
@pytest.mark.parametrize("grace", [0, 0.3, 30])
@fault(81, "SIGTERM at 10 moments of 12 clients", 0, "no answer is cut without an error")
def test_a_signal_at_any_moment_is_told(grace, serve):
    chance = random.Random(grace)
    bodies = [
        SHORT,
        LONG | {"n": 3},
        LONG | {"n": 2, "stream": True, "max_tokens": 100},
        {"prompt": "Once " * 200, "echo": True, "logprobs": 2, "max_tokens": 3, "stream": True},
    ]

    def ask(server, place, told):
        """Ask until the server has gone; add the status of each answer."""
        try:
            while True:
                answer = server.ask(COMPLETIONS, bodies[place % len(bodies)])
                told.add(answer.status)
                assert answer.status == 200 or answer.error(503)
                if place % len(bodies) > 1 and answer.status == 200:
                    failed = any("error" in event for event in answer.events())
                    assert not failed or grace < 30
        except (OSError, http.client.HTTPException) as error:
            # After the grace, connections are closed unanswered; before, the port is closed.
            assert isinstance(error, ConnectionRefusedError) or grace < 30
            assert not isinstance(error, http.client.IncompleteRead) or grace == 0

    for _ in range(10):
        told = set()
        with serve("--grace", grace) as server, ThreadPoolExecutor(12) as pool:
            asking = [pool.submit(ask, server, place, told) for place in range(12)]
            time.sleep(chance.uniform(0.1, 1.5))
            assert server.stop()[0] == 0
            for each in asking:
                each.result()
        assert 200 in told
        assert told <= ({200} if grace == 30 else {200, 503})


@fault(81, "an idle connection at the end", 0, "nothing waits for it")
def test_an_idle_connection_holds_nothing_up(serve):
    with serve("--grace", 30) as server, server.connect() as idle, server.connect() as half:
        idle.sendall(request_bytes(SHORT))
        assert answer_on(idle).status == 200
        half.sendall(request_bytes(SHORT)[:50])
        time.sleep(0.2)
        began = time.monotonic()
        assert server.stop() == (0, "")
        assert time.monotonic() - began < 10


@fault(81, "standard error is closed", 0, "the answers")
def test_nobody_needs_to_read_standard_error(serve):
    with serve("--access-log") as server:
        server.process.stderr.close()
        for _ in range(3):
            assert server.complete(**SHORT)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LIMIT) == 0
