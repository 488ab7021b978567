"""The server without a model: settings, middleware, sockets and signals."""

import asyncio
import errno
import http.client
import json
import os
import queue
import re
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest

import gpt_cli
from gpt_cli.errors import InputError, ResourceError
from gpt_cli.serve import Settings
from gpt_cli.system import signals
from support.in_process import refusal
from support.processes import LimitedProcess, posix
from support.server_process import WAITS, Server, answer_on, bytes_on, request_bytes

pytest.importorskip("uvicorn")
from gpt_cli.serve import server
from gpt_cli.serve.app import application
from gpt_cli.serve.front import guard, sockets, systemd
from gpt_cli.serve.front.keys import Keys
from gpt_cli.serve.front.proxies import Proxies

OF_COMPLETIONS = ["id", "prompt_tokens", "completion_tokens"]  # in the access log
OF_ALL = ["time", "event", "method", "path", "status", "seconds", "bytes"]
OF_REQUESTS = [*OF_ALL, *OF_COMPLETIONS, "model", "code", "key", "client"]
IDLE = 0.3  # seconds, for `IDLE_SECONDS`
HALF = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nabc"


class App:
    """The routes of these tests."""

    def __init__(self):
        self.paths = []  # the paths of requests that came through
        self.left = threading.Event()  # a client has left a stream

    async def __call__(self, scope, receive, send):
        self.paths.append(scope["path"])
        event = await receive()
        assert event["more_body"] is False
        start = {"type": "http.response.start", "status": 200, "headers": []}
        body = {"type": "http.response.body"}
        match scope["path"]:
            case "/bug":
                raise RuntimeError("a mistake")
            case "/late-bug":
                await send(start)
                await send({**body, "body": b"begun", "more_body": True})
                raise RuntimeError("a mistake")
            case "/big":
                await send(start)
                await send({**body, "body": bytes(20_000_000)})
            case "/slow":
                await asyncio.sleep(2 * IDLE)
                await send(start)
                await send({**body, "body": b"done"})
            case "/endless":
                await send(start)
                while not self.left.is_set():
                    for _ in range(50):  # without a pause, so that the transport cannot say it
                        await send({**body, "body": bytes(100), "more_body": True})
                    await asyncio.sleep(0.01)
                await send(body)
            case "/stream":
                await send(start)
                leaving = asyncio.create_task(receive())
                while not leaving.done():
                    await send({**body, "body": bytes(50_000), "more_body": True})
                    await asyncio.sleep(0)
                assert leaving.result()["type"] == "http.disconnect"
                self.left.set()
            case _:
                await send(start)
                await send({**body, "body": event["body"]})


@contextmanager
def serving(app=None, **options):
    """Serve `App` or another in a thread; yield the application and the server for clients."""
    app, addresses = app or App(), queue.Queue()
    settings = Settings(**({} if "unix_socket" in options else {"port": 0}) | options)
    with sockets.bind(settings) as listener:
        keys = Keys(settings.api_key, settings.api_key_file)
        app.count = mock.Mock()
        guarded = guard.guarded(app, settings, keys, app.count)
        running = server.Server(
            guarded, settings.grace, mock.Mock(), addresses.put, mock.Mock(), mock.Mock()
        )
        app.connections = running.server_state.connections
        thread = threading.Thread(target=running.serve_on, args=[listener])
        thread.start()
        clients = Server(None, addresses.get(timeout=10))
        try:
            yield app, clients
        finally:
            for connection in clients.connections:
                connection.close()
            running.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@contextmanager
def serving_model(engine, **options):
    routes, scheduler = application(engine, Settings(**options), Keys(None, None))
    with serving(routes) as (_, clients):
        yield clients
    scheduler.stop()
    scheduler.join()


def ask(clients, method="POST", path="/echo", body=b"hello", **headers):
    return clients.ask(path, body, method, **headers)


def send(clients, data):
    connected = clients.connect()
    connected.sendall(data)
    return connected


def refused(answer, status, code):
    """Check that an answer is a refusal in OpenAI's shape; return its message."""
    error = answer.error(status)
    assert (error["param"], error["code"]) == (None, code)
    return error["message"]


@pytest.fixture(scope="module")
def open_server():
    with serving() as running:
        yield running


# Settings


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"host": ""}, "host must be an address or a name"),
        ({"host": "127.0.0.1:8000"}, "host must be an address or a name, without a port"),
        ({"host": "http://localhost"}, "host must be an address or a name, without a port"),
        ({"port": 65536}, "port must be from 0 to 65535"),
        ({"api_key": ""}, "api_key must be ASCII without spaces"),
        ({"unix_socket_mode": "660"}, "unix_socket_mode is of a Unix socket's file"),
        ({"unix_socket_group": "root"}, "unix_socket_group is of a Unix socket's file"),
        ({"unix_socket": "s", "unix_socket_mode": "0444"}, "unix_socket_mode must be octal"),
        ({"unix_socket": "s", "unix_socket_mode": "6600"}, "unix_socket_mode must be octal"),
        ({"api_key": "k", "api_key_file": "f"}, "api_key cannot be used with a file of keys"),
        ({"trusted_proxy": ["10.0.0.1/8"]}, "trusted_proxy must be addresses, networks such as"),
        ({"trusted_proxy": ["localhost"]}, "trusted_proxy must be addresses, networks such as"),
        ({"api_key": "two words"}, "api_key must be ASCII without spaces"),
        ({"api_key": "schlüssel"}, "api_key must be ASCII without spaces"),
        ({"name": ""}, "name must be printable, and not empty"),
        ({"name": "a\n"}, "name must be printable, and not empty"),
        ({"max_batch": 0}, "max_batch must be from 1 to 10000"),
        ({"max_batch": 10_001}, "max_batch must be from 1 to 10000"),
        *(
            ({"unix_socket": "s", name: value}, f"{name} cannot be used with a Unix socket: leave")
            for name, value in (("host", "::1"), ("port", 0))
        ),
        ({"max_queue": 0}, "max_queue must be 1 or more"),
        ({"max_body": 0}, "max_body must be 1 or more"),
        ({"cors": ["https://example.com/page"]}, "cors must be origins"),
        ({"cors": ["example.com"]}, "cors must be origins"),
        ({"grace": float("nan")}, "grace must be from 0 to 86400"),
        ({"grace": -1}, "grace must be from 0 to 86400"),
    ],
)
def test_settings_out_of_range_are_refused(options, complaint):
    with pytest.raises(InputError, match=re.escape(complaint)):
        Settings(**options)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST"])
def test_loopback_needs_no_key(host):
    assert Settings(host=host).api_key is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.com", "127.1", "0"])
def test_another_address_needs_a_key_or_consent(host, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: [])  # a test has no network
    with pytest.raises(
        InputError,
        match=f"^host {host}: .*GPT_CLI_API_KEY or --api-key-file, or use --allow-anyone$",
    ):
        Settings(host=host)
    Settings(host=host, api_key="k")
    Settings(host=host, api_key_file="f")
    Settings(host=host, allow_anyone=True)


@pytest.mark.parametrize("origin", ["*", "null"])
def test_pages_of_anyone_need_a_key_or_consent(origin):
    with pytest.raises(InputError, match=r"^cors must not .*any page .* use --allow-anyone$"):
        Settings(cors=["https://example.com", origin])
    Settings(cors=[origin], api_key="k")
    Settings(cors=[origin], allow_anyone=True)


def test_the_key_is_not_shown():
    assert "secret" not in repr(Settings(api_key="secret"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0: other machines may reach this address"),
        (
            ["--host", "nosuchhost.invalid"],
            "name an address of this machine, such as 127.0.0.1",
        ),
        (["--port", "70000"], "--port must be from 0 to 65535"),
        (["--api-key", "a b"], "--api-key must be ASCII without spaces"),
        (["--cors", "example.com"], "--cors must be origins"),
        (
            ["--cors", "https://example.com", "--cors", "*"],
            "--cors must not be * or null without a key: any page",
        ),
    ],
)
def test_the_command_names_the_flag_before_any_work(flags, message):
    assert message in refusal("serve", "-m", "no-such-model", *flags)


def test_the_command_reads_the_key_from_its_variable():
    arguments = ["serve", "-m", "no-such-model", "--host", "0.0.0.0", "--port", "0", "--offline"]
    assert "no-such-model" in refusal(*arguments, code=3, GPT_CLI_API_KEY="k")


def test_the_command_says_what_is_not_installed():
    code = textwrap.dedent("""
        import sys
        from gpt_cli.cli import app
        for missing in ("uvicorn", "starlette", "prometheus_client"):
            sys.modules[missing] = None
            assert app.run(["serve", "-m", "tiny", "--port", "0"]) == 5
            del sys.modules[missing]
    """)
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    start = "gpt-cli: error: serve needs a web server ("
    end = "): pip install uvicorn starlette prometheus-client"
    lines = finished.stderr.splitlines()
    assert [(line[: len(start)], line[-len(end) :]) for line in lines] == [(start, end)] * 3


def test_help_imports_neither_the_web_server_nor_numpy():
    code = (
        "import sys; from gpt_cli.cli import app; app.run(['serve', '--help']);"
        "assert not {'uvicorn', 'starlette', 'prometheus_client', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


# Host, against DNS rebinding


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:8000",
        "localhost:1",
        "LocalHost",
        "[::1]",
        "[::1]:8000",
        "10.0.0.1:80",
    ],
)
def test_addresses_and_localhost_are_known(open_server, host):
    assert ask(open_server[1], Host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.com",
        "evil.com:8000",
        "localhost.evil.com",
        "127.0.0.1.evil.com",
        "[::1",
        "evil@127.0.0.1",
        "127.0.0.1:80:80",
        "",
    ],
)
def test_another_name_is_refused(open_server, host):
    app, clients = open_server
    app.paths.clear()
    message = refused(ask(clients, Host=host), 403, "unknown_host")
    assert repr(host) in message
    assert "localhost" in message
    assert "--api-key" in message
    assert app.paths == []


def test_a_request_without_a_host_is_told_so(open_server):
    answer = answer_on(send(open_server[1], b"GET / HTTP/1.0\r\n\r\n"))
    assert "the request has no header Host" in refused(answer, 403, "unknown_host")


def test_the_name_that_the_server_was_given_is_known():
    with serving(host="localhost") as (_, clients):
        assert ask(clients, Host="localhost:80")[0] == 200
        assert ask(clients, Host="example.com")[0] == 403
    headers = guard.Headers({"host": "my-machine.LOCAL:8000"})
    guard._check_host("My-Machine.local", headers)


def test_with_a_key_any_name_is_known():
    with serving(api_key="k") as (_, clients):
        assert ask(clients, Host="example.com", Authorization="Bearer k")[0] == 200


# Origin, against foreign pages


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_pages_of_the_server_and_programs_are_answered(open_server, scheme):
    assert ask(open_server[1], Host="localhost:80", Origin=f"{scheme}://LOCALHOST:80")[0] == 200
    assert ask(open_server[1])[0] == 200


@pytest.mark.parametrize(
    "origin",
    ["https://evil.com", "http://localhost:3000", "http://localhost", "null", "", "localhost:80"],
)
@pytest.mark.parametrize("method", ["POST", "GET", "OPTIONS"])
def test_foreign_pages_are_refused(open_server, origin, method):
    app, clients = open_server
    app.paths.clear()
    answer = ask(clients, method, Host="localhost:80", Origin=origin)
    assert "cors" in refused(answer, 403, "unknown_origin")
    assert not any(name.lower().startswith("access-control") for name in answer[1])
    assert app.paths == []


def test_pages_that_are_allowed_can_read_every_answer():
    page = "https://example.com:8443"
    with serving(cors=[page], api_key="k") as (app, clients):
        preflight = {
            "Access_Control_Request_Method": "POST",
            "Access_Control_Request_Headers": "authorization,content-type,x-stainless-lang",
        }
        status, headers, _ = ask(clients, "OPTIONS", Origin=page, **preflight)
        assert status == 200
        assert headers["access-control-allow-origin"] == page
        assert (
            headers["access-control-allow-headers"] == preflight["Access_Control_Request_Headers"]
        )
        assert app.paths == []
        status, headers, body = ask(clients, Origin=page, Authorization="Bearer k")
        assert (status, body) == (200, b"hello")
        assert headers["access-control-allow-origin"] == page
        assert headers["access-control-expose-headers"] == "Retry-After"
        answer = ask(clients, Origin=page)
        refused(answer, 401, "invalid_api_key")
        assert answer[1]["access-control-allow-origin"] == page
        refused(
            ask(clients, "OPTIONS", Origin="https://evil.com", **preflight), 403, "unknown_origin"
        )


def test_any_page_may_be_allowed():
    with serving(cors=["*"], allow_anyone=True) as (_, clients):
        for origin in ("https://example.com", "null"):
            status, headers, _ = ask(clients, Origin=origin)
            assert (status, headers["access-control-allow-origin"]) == (200, "*")


# The key


@pytest.fixture(scope="module")
def locked_server():
    with serving(api_key="right-key") as running:
        yield running


@pytest.mark.parametrize("header", ["Bearer right-key", "bearer right-key", "Bearer  right-key"])
def test_the_key_opens(locked_server, header):
    assert ask(locked_server[1], Authorization=header)[0] == 200


@pytest.mark.parametrize(
    "header",
    [
        "Bearer right-ke",
        "Bearer right-key2",
        "Bearer RIGHT-KEY",
        "Basic right-key",
        "right-key",
        "Bearer",
        "Bearer \xfc",
        "",
    ],
)
def test_another_key_is_refused(locked_server, header):
    app, clients = locked_server
    app.paths.clear()
    answer = ask(clients, Authorization=header)
    message = refused(answer, 401, "invalid_api_key")
    assert answer[1]["www-authenticate"] == "Bearer"
    assert "right-key" not in message
    assert app.paths == []


def test_without_a_key_only_the_page_and_health_are_answered(locked_server):
    for path in ("/", "/health", "/health?x=1"):
        assert ask(locked_server[1], "GET", path)[0] == 200
    for path in ("/v1/models", "/metrics", "/health/", "//", "/Health", "/x/../health"):
        message = refused(ask(locked_server[1], "GET", path), 401, "invalid_api_key")
        assert "Authorization: Bearer KEY" in message


KEYS = """
# the keys of this server
sesame-ann ann
sesame-bob\tbob # until May
sesame2-ann  ann\r
"""


@pytest.fixture
def write_keys(tmp_path):
    def write(text, mode=0o600):
        path = tmp_path / "keys"
        path.unlink(missing_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(mode)
        return path

    return write


def test_each_key_of_a_file_opens_and_the_log_and_the_metrics_have_its_name(write_keys, capfd):
    path = write_keys(KEYS, 0o640)
    with serving(api_key_file=path, access_log=True) as (app, clients):
        for key in ("sesame-ann", "sesame-bob", "sesame2-ann"):
            assert ask(clients, Host="any.name", Authorization=f"Bearer {key}")[0] == 200
        for key in ("ann", "sesame-ann ann", "#", ""):
            refused(ask(clients, Authorization=f"Bearer {key}"), 401, "invalid_api_key")
    errors = capfd.readouterr().err
    names = ["ann", "bob", "ann"]
    assert [json.loads(line)["key"] for line in errors.splitlines()] == names + 4 * [None]
    counted = [mock.call("/echo", 200, name) for name in names]
    assert app.count.mock_calls == counted + 4 * [mock.call("/echo", 401, "")]
    assert "sesame" not in errors


@pytest.mark.parametrize(
    ("text", "mode", "complaint"),
    [
        (KEYS, 0o644, "others can read or change it: run `chmod 600` on it, or 640"),
        (KEYS, 0o604, "others can read or change it: run `chmod 600` on it, or 640"),
        (KEYS, 0o660, "others can read or change it: run `chmod 600` on it, or 640"),
        ("", 0o600, "has no keys: write KEY NAME in a line of it"),
        ("# sesame-ann ann\n\n", 0o600, "has no keys: write KEY NAME in a line of it"),
        ("sesame-ann ann\nsesame-bob\n", 0o600, "line 2 must be KEY NAME: a key in ASCII, and"),
        ("sesame-ann ann b", 0o600, "line 1 must be KEY NAME: a key in ASCII, and a name of"),
        ("sesame-änn ann", 0o600, "line 1 must be KEY NAME: a key in ASCII, and a name of"),
        ("sesame-ann a\u0308", 0o600, "line 1 must be KEY NAME: a key in ASCII, and a name of"),
        ("sesame-ann ann\nsesame-ann bob", 0o600, "line 2 has the key of an earlier one"),
        (b"sesame-ann \xff", 0o600, "it is not text in UTF-8"),
    ],
)
@posix
def test_a_file_of_keys_that_is_not_safe_or_not_valid_is_refused(text, mode, complaint, write_keys):
    path = write_keys(text, mode)
    message = refusal("serve", "-m", "no-such-model", "--api-key-file", path)
    assert f"--api-key-file {path}: " in message or f"--api-key-file {path} has" in message
    assert complaint in message
    assert "sesame" not in message


@posix
def test_what_is_no_file_of_keys_is_refused(tmp_path, write_keys, monkeypatch):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, complaint in {
        "missing": "cannot be read: No such file",
        "pipe": "cannot be read: it is not a regular file",
    }.items():
        message = refusal("serve", "-m", "tiny", "--api-key-file", tmp_path / name)
        assert f"--api-key-file {tmp_path / name}: {complaint}" in message
    flags = ("--api-key-file", write_keys(KEYS))
    message = refusal("serve", "-m", "tiny", *flags, GPT_CLI_API_KEY="k")
    assert "GPT_CLI_API_KEY cannot be used with a file of keys" in message
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if flags[1].stat().st_uid:
        assert "belongs to another user" in refusal("serve", "-m", "tiny", *flags)


# Proxies

TRUSTED = ["127.0.0.1", "10.0.0.0/8", "2001:db8::/32"]


@pytest.mark.parametrize(
    ("trusted", "peer", "forwarded", "client"),
    [
        ([], "127.0.0.1", ["1.2.3.4"], "127.0.0.1"),
        (TRUSTED, "127.0.0.1", [], "127.0.0.1"),
        (TRUSTED, "127.0.0.1", ["1.2.3.4"], "1.2.3.4"),
        (TRUSTED, "127.0.0.1", ["6.6.6.6, 1.2.3.4"], "1.2.3.4"),  # the client lies
        (TRUSTED, "127.0.0.1", ["6.6.6.6, 1.2.3.4,10.1.1.1"], "1.2.3.4"),
        (TRUSTED, "127.0.0.1", ["6.6.6.6", "1.2.3.4", "10.1.1.1"], "1.2.3.4"),
        (TRUSTED, "127.0.0.1", ["10.2.2.2, 10.1.1.1"], "10.2.2.2"),
        (TRUSTED, "8.8.8.8", ["1.2.3.4"], "8.8.8.8"),  # not a proxy
        (TRUSTED, "::ffff:10.0.0.1", ["2001:db8::1, ::1"], "::1"),
        (TRUSTED, "127.0.0.1", ["1.2.3.4, <script>"], "127.0.0.1"),  # the proxy lies
        (TRUSTED, "127.0.0.1", ["1.2.3.4, , 10.1.1.1"], "10.1.1.1"),
        (TRUSTED, None, ["1.2.3.4"], "unix"),
        (["unix"], None, ["1.2.3.4"], "1.2.3.4"),
        (["unix"], None, [], "unix"),
        (["unix"], "127.0.0.1", ["1.2.3.4"], "127.0.0.1"),
    ],
)
def test_only_a_trusted_proxy_is_believed(trusted, peer, forwarded, client):
    headers = [(b"x-forwarded-for", value.encode()) for value in forwarded]
    scope = {"type": "http", "headers": headers, "client": peer and (peer, 1234)}
    assert Proxies(trusted).client_of(scope) == client


# Bodies


def test_a_body_comes_whole_in_one_event(open_server):
    clients, body = open_server[1], os.urandom(3_000_000)
    client = clients.client()
    assert clients.ask("/echo", body, client=client)[::2] == (200, body)
    pieces = (body[i : i + 1000] for i in range(0, len(body), 1000))
    assert clients.ask("/echo", pieces, client=client)[::2] == (200, body)
    assert clients.ask("/echo", client=client)[::2] == (200, b"")


def test_a_body_may_have_the_size_and_no_byte_more():
    with serving(max_body=1000) as (app, clients):
        assert ask(clients, body=bytes(1000))[0] == 200
        assert ask(clients, body=iter([bytes(500), bytes(500)]))[0] == 200
        app.paths.clear()
        assert "1000 bytes (--max-body)" in refused(
            ask(clients, body=bytes(1001)), 413, "body_too_long"
        )
        refused(ask(clients, body=iter([bytes(500), bytes(501)])), 413, "body_too_long")
        assert app.paths == []


def test_a_body_that_is_declared_too_long_is_refused_before_it_comes(open_server):
    head = request_bytes(b"", "/echo", Content_Length="9" * 20, Expect="100-continue")
    refused(answer_on(send(open_server[1], head)), 413, "body_too_long")


def test_after_a_body_that_is_too_long_the_connection_goes_on():
    with serving(max_body=1000) as (_, clients):
        client = clients.client()
        for body in (bytes(300_000), iter([bytes(1000)] * 300)):
            refused(clients.ask("/echo", body, client=client), 413, "body_too_long")
            assert clients.ask("/echo", b"next", client=client)[::2] == (200, b"next")


def test_a_body_that_does_not_come_is_not_waited_for(open_server, monkeypatch):
    app, clients = open_server
    app.paths.clear()
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.2)
    connected = send(clients, HALF)
    refused(answer_on(connected), 408, "body_too_slow")
    assert bytes_on(connected) == b""
    assert app.paths == []


def test_a_client_that_leaves_in_its_body_asks_nothing(open_server):
    app, clients = open_server
    app.paths.clear()
    connected = send(clients, HALF)
    connected.close()
    assert ask(clients)[0] == 200
    assert app.paths == ["/echo"]


# The name of the model


@pytest.mark.parametrize("name", [None, "a story"])
def test_a_model_has_its_name_or_that_of_its_folder(name, case_folder):
    folder = case_folder("saved")
    shown = name or folder.name
    with serving_model(gpt_cli.load(str(folder)), name=name) as clients:
        (model,) = clients.ask("/v1/models").json()["data"]
        assert model["id"] == shown
        for known in (shown, str(folder)):
            assert clients.complete(model=known, prompt=[1], max_tokens=1)["model"] == shown
        answer = clients.ask("/v1/completions", {"model": "other", "prompt": [1]})
        assert f"no model 'other', only '{shown}'" in answer.error(404)["message"]


# The log, and bugs


def test_the_access_log_has_one_line_for_each_request_and_no_secrets(capfd):
    with serving(access_log=True, api_key="k", max_body=100) as (_, clients):
        ask(clients, path="/echo?secret=1", Authorization="Bearer k")
        ask(clients, path="/m%C3%BCll%0A", Authorization="Bearer secret")
        ask(clients, body=b"secret" * 100, Authorization="Bearer k")
        connected = send(clients, HALF.replace(b"Host: ", b"Authorization: Bearer k\r\nHost: "))
        connected.close()
    errors = capfd.readouterr().err
    assert "secret" not in errors
    lines = [json.loads(line) for line in errors.splitlines()]
    assert [list(line) for line in lines] == [OF_REQUESTS] * 4
    assert {(line["event"], line["key"], line["client"]) for line in lines} == {
        ("request", None, "127.0.0.1")
    }
    codes = [None, "invalid_api_key", "body_too_long", None]
    assert [line["code"] for line in lines] == codes
    assert [line["status"] for line in lines] == [200, 401, 413, 499]
    assert [line["path"] for line in lines] == ["/echo", "/müll\n", "/echo", "/echo"]
    assert {line["method"] for line in lines} == {"POST"}
    assert lines[0]["bytes"] == 5
    assert 0 < lines[0]["seconds"] < 10
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", lines[0]["time"])


def test_the_access_log_has_the_id_and_the_tokens_of_completions(tiny, capfd):
    body = {"prompt": "Once upon a time", "max_tokens": 3, "ignore_eos": True}
    with serving_model(tiny, access_log=True) as clients:
        whole = clients.complete(**body, n=2)
        chunk, *_ = clients.ask("/v1/completions", body | {"stream": True}).events()
        with clients.begin(**body | {"max_tokens": 500}, stream=True) as leaves:
            received = b""
            while b"data: " not in received:
                received += leaves.recv(1000)
        clients.ask("/v1/embeddings", {"input": ["Once upon a time"] * 2})
        clients.ask("/v1/models")
        beams = {"prompt": "Once", "use_beam_search": True, "best_of": 99}
        clients.ask("/v1/completions", beams).error(400)
    *lines, failed = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert (failed["status"], failed["model"]) == (400, None)
    assert [line["model"] for line in lines if line["prompt_tokens"]] == ["tiny"] * 4
    values = [tuple(line[name] for name in OF_COMPLETIONS) for line in lines]
    left = next(value for value in values if value[0] not in (whole["id"], chunk["id"], None))
    assert [line["status"] for line in lines if line["id"] == left[0]] == [499]
    assert left[1] == 4
    assert 0 < left[2] < 500
    values.remove(left)
    assert values == [(whole["id"], 4, 6), (chunk["id"], 4, 3), (None, 8, None), (None, None, None)]


def test_without_the_flag_nothing_is_written(capfd):
    with serving() as (_, clients):
        ask(clients)
        refused(ask(clients, Host="evil.com"), 403, "unknown_host")
        connected = send(clients, b"garbage\r\n\r\n")
        assert bytes_on(connected).startswith(b"HTTP/1.1 400 ")
        connected = send(clients, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000)
        assert bytes_on(connected).startswith(b"HTTP/1.1 400 ")
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
        assert ask(clients, "GET", body=None, **upgrade)[0] == 200
    assert capfd.readouterr() == ("", "")


def test_a_client_that_leaves_is_not_written_down(capfd):
    with serving() as (app, clients):
        for _ in range(20):
            connected = send(clients, b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
            connected.recv(100)
            linger = struct.pack("ii", 1, 0)  # close at once
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connected.close()
        time.sleep(0.1)  # until the server notices
        app.left.set()
    assert capfd.readouterr() == ("", "")


def test_a_closed_standard_error_does_not_stop_the_server(monkeypatch):
    with serving(access_log=True) as (_, clients):
        for stderr in (None, os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")):
            monkeypatch.setattr(sys, "stderr", stderr)
            assert ask(clients)[0] == 200
        with suppress(OSError):
            stderr.close()


def test_a_bug_is_answered_and_its_traceback_is_written(open_server, caplog):
    answer = ask(open_server[1], path="/bug")
    assert "mistake" not in refused(answer, 500, "bug")
    assert "RuntimeError: a mistake" in caplog.text
    connected = send(open_server[1], b"GET /late-bug HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert bytes_on(connected).endswith(b"begun\r\n")
    assert len(caplog.records) == 2


def test_a_bug_in_a_route_is_answered_like_any_error(tiny, monkeypatch, caplog):
    def read(engine, body, folder):
        raise RuntimeError("a mistake")

    monkeypatch.setattr("gpt_cli.serve.app.read_completions", read)
    with serving_model(tiny) as clients:
        answer = ask(clients, path="/v1/completions", body=b"{}")
    assert "mistake" not in refused(answer, 500, "bug")
    assert answer[1]["content-type"] == "application/json"
    assert "RuntimeError: a mistake" in caplog.text


def test_a_refusal_waits_for_no_thread(tiny):
    with serving_model(tiny) as clients:
        assert [ask(clients, path=path)[0] for path in ("/nope", "/tokenize")] == [404, 400]
        assert not [thread for thread in threading.enumerate() if "AnyIO" in thread.name]


def test_no_answer_names_the_software(open_server):
    assert "server" not in ask(open_server[1])[1]


# Clients that sleep


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(server, "IDLE_SECONDS", IDLE)
    with serving() as running:
        yield running


def test_clients_that_send_no_request_are_not_waited_for(hasty):
    beginnings = [b"", b"GET / HTTP", b"GET / HTTP/1.1\r\nHost: localhost\r\n"]
    connections = [send(hasty[1], begin) for begin in beginnings]
    answered = send(hasty[1], b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer_on(answered).status == 200
    for _ in range(3):  # single bytes do not help
        time.sleep(IDLE / 5)
        for connected in connections[1:]:
            with suppress(OSError):  # this machine is busy, and it is closed by now
                connected.send(b"x")
    assert [bytes_on(connected) for connected in (*connections, answered)] == [b""] * 4


def test_clients_that_take_nothing_of_an_answer_are_not_waited_for(hasty):
    app, clients = hasty
    connections = [
        send(clients, b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)
        for path in (b"stream", b"big")
    ]
    assert app.left.wait(10)
    while "/big" not in app.paths or app.connections:
        time.sleep(0.01)
    assert len(bytes_on(connections[1])) < 20_000_000


def test_a_slow_client_and_a_slow_answer_are_waited_for(hasty):
    big = b"GET /big HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    received = 0
    with send(hasty[1], big) as connected:
        while piece := connected.recv(500_000):
            received += len(piece)
            time.sleep(IDLE / 20)  # more than twice the limit in all
    assert received > 20_000_000
    assert ask(hasty[1], path="/slow")[2] == b"done"


def test_connections_are_limited(monkeypatch):
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 3)
    with serving() as (_, clients):
        connections = [clients.connect() for _ in range(3)]
        assert bytes_on(clients.connect()) == b""
        connections.pop().close()
        assert ask(clients)[0] == 200
        for connection in connections:
            connection.close()


# Sockets


def test_an_address_in_use_is_an_error():
    with sockets.bind(Settings(port=0)) as listener:
        port = listener.socket.getsockname()[1]
        message = f"cannot listen on 127.0.0.1 port {port}: {os.strerror(errno.EADDRINUSE)}"
        with pytest.raises(ResourceError, match=re.escape(message)):
            sockets.bind(Settings(port=port)).__enter__()
        # Before the model is looked for.
        assert message in refusal("serve", "-m", "no-such", "--port", port, code=5)
    with sockets.bind(Settings(port=port)):  # at once, although it was in use
        pass


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70, "..", "x\0y"])
def test_a_name_without_an_address_is_an_error(host):
    with pytest.raises(InputError, match=r"^host "):
        sockets.bind(Settings(host=host, api_key="k")).__enter__()


def test_an_address_of_another_machine_is_an_error():
    with pytest.raises(ResourceError, match=r"cannot listen on 192\.0\.2\.1 port 8000"):
        sockets.bind(Settings(host="192.0.2.1", api_key="k")).__enter__()


@pytest.mark.parametrize(
    ("host", "start"),
    [
        ("127.0.0.1", "http://127.0.0.1:"),
        ("localhost", "http://127.0.0.1:"),
        ("::1", "http://[::1]:"),
    ],
)
def test_the_address_is_that_of_a_client(host, start):
    try:
        with sockets.bind(Settings(host=host, port=0)) as listener:
            port = listener.socket.getsockname()[1]
            assert listener.address == f"{start}{port}"
    except ResourceError:
        pytest.skip(f"this machine has no {host}")


def test_ipv6_is_answered():
    try:
        with serving(host="::1") as (_, clients):
            assert ask(clients, Host="[::1]:80", Origin="http://[::1]:80")[0] == 200
    except ResourceError:
        pytest.skip("this machine has no IPv6")


def test_all_addresses_are_those_of_ipv4_too():
    try:
        with sockets.bind(Settings(host="::", port=0, api_key="k")) as listener:
            socket.create_connection(("127.0.0.1", listener.socket.getsockname()[1])).close()
    except ResourceError:
        pytest.skip("this machine has no IPv6")


@posix
def test_a_unix_socket_is_only_for_this_user_and_is_removed(tmp_path):
    path = tmp_path / "s.sock"
    mask = os.umask(0)
    try:
        with serving(unix_socket=path) as (_, clients):
            assert path.stat().st_mode & 0o777 == 0o600
            assert ask(clients, Host="any.name")[0] == 200
    finally:
        assert os.umask(mask) == 0  # it is as before
    assert not path.exists()


@pytest.fixture
def inherit(monkeypatch):
    """Return a function that hands a socket to this process, as systemd does."""

    def hand_on(listening, count="1", process=None):
        monkeypatch.setattr(systemd, "_FIRST", os.dup(listening.fileno()))
        monkeypatch.setenv("LISTEN_PID", str(process or os.getpid()))
        monkeypatch.setenv("LISTEN_FDS", count)

    return hand_on


@posix
@pytest.mark.parametrize("name", ["AF_INET", "AF_UNIX"])
def test_at_the_end_a_queue_is_answered_or_left_to_the_next_server(name, tmp_path, inherit):
    family = getattr(socket, name)
    path = tmp_path / "s.sock"
    settings = Settings(unix_socket=path) if family == socket.AF_UNIX else Settings(port=0)
    clients = []

    def connect(listening):
        clients.append(socket.socket(family))
        clients[-1].connect(listening.getsockname())

    with sockets.bind(settings) as listener:
        for _ in range(3):
            connect(listener.socket)
        waiting = listener.end()
        assert len(waiting) == 3
        assert not path.exists()
        assert listener.end() == []
    with socket.socket(family) as listening:
        listening.bind(str(path) if family == socket.AF_UNIX else ("127.0.0.1", 0))
        listening.listen()
        inherit(listening)
        with sockets.bind(Settings()) as listener:
            assert not {"LISTEN_PID", "LISTEN_FDS"} & os.environ.keys()
            described = listener.described(Settings())
            connect(listening)
            assert listener.end() == []
        connect(listening)
        waiting += [listening.accept()[0] for _ in range(2)]
    if family == socket.AF_UNIX:
        assert (listener.is_inherited, described.unix_socket) == (True, path)
        assert path.is_socket()
    for connection in clients + waiting:
        connection.close()


@posix
def test_what_is_handed_on_is_one_socket_that_listens(inherit, tmp_path):
    with socket.socket(socket.AF_UNIX) as plain, (tmp_path / "file").open("w") as file:
        for what, complaint in {
            plain: "the socket of LISTEN_FDS does not listen: use ListenStream=",
            file: "LISTEN_FDS: there is no socket",
        }.items():
            inherit(what)
            with pytest.raises(ResourceError, match=complaint), sockets.bind(Settings()):
                pass
        inherit(plain, "2")
        with pytest.raises(ResourceError, match="LISTEN_FDS is 2: give one socket"):
            sockets.bind(Settings()).__enter__()
        inherit(plain, process=1)  # it was for another process
        with sockets.bind(Settings(port=0)) as listener:
            assert not listener.is_inherited
        for name, value in {"host": "::1", "port": 1, "unix_socket": tmp_path / "s"}.items():
            inherit(plain)
            with pytest.raises(InputError, match=f"^{name} cannot be used with a socket of sys"):
                sockets.bind(Settings(**{name: value})).__enter__()


@posix
@pytest.mark.parametrize("name", ["{tmp_path}/notify", "@gpt-cli-{pid}"])
def test_a_supervisor_is_told_when_the_server_is_ready_and_when_it_stops(
    name, tmp_path, monkeypatch
):
    name = name.format(tmp_path=tmp_path, pid=os.getpid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(name.replace("@", "\0"))
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        supervisor.settimeout(10)
        with serving():
            assert supervisor.recv(100) == b"READY=1"
        assert supervisor.recv(100) == b"STOPPING=1"
    with serving():  # it is gone, which is no trouble
        pass


@posix
def test_a_unix_socket_has_the_group_and_the_mode_that_it_is_given(tmp_path):
    path, group = tmp_path / "s.sock", os.getegid()
    flags = {"unix_socket": path, "unix_socket_mode": "0660", "unix_socket_group": str(group)}
    with sockets.bind(Settings(**flags)):
        about = path.stat()
        assert (about.st_mode & 0o777, about.st_gid) == (0o660, group)
    arguments = ["serve", "-m", "tiny", "--unix-socket", path, "--unix-socket-group"]
    assert "no-such: there is no such group" in refusal(*arguments, "no-such")
    assert f"{1 << 40}: this user cannot give" in refusal(*arguments, 1 << 40)
    assert not path.exists()


@posix
def test_the_file_of_a_unix_socket_is_never_open_to_others(tmp_path, monkeypatch):
    modes, bind = [], socket.socket.bind

    def watched(self, name):
        bind(self, name)
        modes.append(Path(name).stat().st_mode & 0o777)

    monkeypatch.setattr(socket.socket, "bind", watched)
    with sockets.bind(Settings(unix_socket=tmp_path / "s.sock")) as listener:
        assert listener.address == f"unix:{tmp_path / 's.sock'}"
    assert modes == [0o600]


@posix
def test_the_socket_of_a_killed_server_is_replaced(tmp_path):
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with serving(unix_socket=path) as (_, clients):
        assert ask(clients)[0] == 200


@posix
def test_of_two_starts_at_one_moment_one_listens(tmp_path, monkeypatch):
    path, answers, met = tmp_path / "s.sock", sockets._answers, threading.Barrier(2)
    outcomes, checked = queue.Queue(), threading.Event()
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))

    def slow_answers(path):
        answer = answers(path)
        with suppress(threading.BrokenBarrierError):
            met.wait(0.2)  # both have looked at the socket of the killed server
        return answer

    def start():
        try:
            with sockets.bind(Settings(unix_socket=path)):
                outcomes.put("listens")
                checked.wait(10)
        except (ResourceError, OSError) as error:
            outcomes.put(str(error))

    monkeypatch.setattr(sockets, "_answers", slow_answers)
    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    first, second = sorted(outcomes.get(timeout=10) for _ in threads)
    assert first == "listens"
    assert second.startswith(f"unix_socket {path}: another server listens there")
    assert answers(path)
    checked.set()
    for thread in threads:
        thread.join()
    assert not path.exists()


@posix
def test_the_socket_of_a_running_server_and_other_files_stay(tmp_path):
    path = tmp_path / "s.sock"
    with sockets.bind(Settings(unix_socket=path)):
        assert f"--unix-socket {path}: another server listens there" in refusal(
            "serve", "-m", "tiny", "--unix-socket", path, code=5
        )
        assert path.is_socket()
    path.write_text("mine")
    assert "is not a socket" in refusal("serve", "-m", "tiny", "--unix-socket", path)
    assert path.read_text() == "mine"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    assert "is not a socket" in refusal("serve", "-m", "tiny", "--unix-socket", link)


@posix
def test_the_socket_of_a_later_server_is_not_removed(tmp_path):
    path = tmp_path / "s.sock"
    with sockets.bind(Settings(unix_socket=path)):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"


@posix
@pytest.mark.parametrize("name", ["missing/s.sock", "s" * 120, "\0"])
def test_a_path_that_cannot_be_a_socket_is_an_error(tmp_path, name):
    with pytest.raises(InputError, match=r"^unix_socket "):
        sockets.bind(Settings(unix_socket=tmp_path / name)).__enter__()


def test_a_model_that_cannot_be_loaded_leaves_no_socket(tmp_path):
    path = tmp_path / "s.sock"
    refusal("serve", "-m", "no-such", "--offline", "--unix-socket", path, code=3)
    assert not path.exists()


def test_the_scheduler_is_stopped_whatever_happens(monkeypatch):
    order = mock.Mock()
    order.application.return_value = App(), order.scheduler
    monkeypatch.setitem(sys.modules, "gpt_cli.serve.app", order)
    order.ready.side_effect = ZeroDivisionError

    def load():
        with pytest.raises(ResourceError, match="cannot listen"):
            sockets.bind(settings).__enter__()  # the address is ours before the model is loaded
        return order.engine

    with sockets.bind(Settings(port=0)) as listener:
        settings = Settings(port=listener.socket.getsockname()[1])
    with pytest.raises(ZeroDivisionError):
        server.run(load, settings, order.ready)
    assert order.mock_calls == [
        mock.call.application(order.engine, settings, mock.ANY),
        mock.call.ready(f"http://127.0.0.1:{settings.port}"),
        mock.call.scheduler.stop(),
        mock.call.scheduler.join(),
    ]


def test_an_interrupt_that_an_import_swallowed_ends_the_server(monkeypatch):
    module = mock.Mock(application=lambda *_: (App(), mock.Mock()))
    monkeypatch.setitem(sys.modules, "gpt_cli.serve.app", module)
    monkeypatch.setattr(signals, "received", [signal.SIGTERM])
    with pytest.raises(KeyboardInterrupt):
        server.run(mock.Mock(spec=gpt_cli.Engine), Settings(port=0), pytest.fail)


# Signals

PROGRAM = """
import asyncio, sys, types
from gpt_cli.serve import server
from gpt_cli.serve.front.guard import guarded

server.LAST_SECONDS = 1.0  # uvicorn knows whole seconds
stopping = asyncio.Event()

class Scheduler:
    def stop(self):
        if "stubborn" not in sys.argv[0]:
            stopping.set()

    def join(self):
        pass

async def app(scope, receive, send):
    await receive()
    seconds = float(scope["path"][1:])
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"begun ", "more_body": True})
    try:
        await asyncio.wait_for(stopping.wait(), seconds)
    except TimeoutError:
        pass
    end = b"stopped" if stopping.is_set() else b"done"
    await send({"type": "http.response.body", "body": end})

scheduler = Scheduler()
routes = types.ModuleType("gpt_cli.serve.app")
def application(engine, settings, keys):
    return guarded(app, settings, keys, lambda *_: None), scheduler

routes.application = application
sys.modules[routes.__name__] = routes

from gpt_cli.__main__ import main
sys.argv = [sys.argv[1], "serve", "-m", "tiny", "--unix-socket", "s.sock", *sys.argv[2:]]
main()
"""


class Process(Server):
    """The real command with the routes of `PROGRAM`."""

    def __init__(self, folder, kind, *flags, files=200, **options):
        self.path = folder / "s.sock"
        limited = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh"]
        arguments = [*limited, sys.executable, "-c", PROGRAM, kind, *flags]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = LimitedProcess(arguments, **pipes, cwd=folder, **options)
        super().__init__(process, f"unix:{self.path}")
        line = self.process.stderr.readline()
        if "--access-log" in flags:
            assert lines_of(line) == [{"event": "listening", "address": "unix:s.sock"}]
        else:
            assert line == b"gpt-cli: listening on unix:s.sock\n"

    def begin(self, seconds):
        """Ask for an answer that takes a few seconds; return it once it has begun."""
        client = self.client()
        client.request("GET", f"/{seconds}", headers=self.headers)
        answer = client.getresponse()
        assert answer.read(6) == b"begun "
        return answer

    def end(self, *said):
        """Wait for the end; return the exit code. One of these texts was written."""
        code, errors = self.wait()
        assert errors in said
        assert not self.path.exists()
        return code


@pytest.fixture
def start(tmp_path):
    started = []

    def run(*arguments, **options):
        started.append(Process(tmp_path, *arguments, **options))
        return started[-1]

    yield run
    for running in started:
        running.process.kill()
        running.process.communicate()
        for connection in running.connections:
            connection.close()


@posix
@pytest.mark.parametrize(
    ("name", "code"),
    [("SIGTERM", 0), ("SIGHUP", 129), pytest.param("SIGINT", 0, marks=pytest.mark.slow)],
)
def test_a_signal_lets_running_requests_finish(start, name, code):
    running = start("obedient")
    idle, answer = running.connect(), running.begin(0.7)
    running.process.send_signal(getattr(signal, name))
    assert answer.read() == b"done"
    assert bytes_on(idle) == b""
    assert running.end(WAITS) == code


@posix
def test_at_the_end_who_has_connected_is_answered_and_the_place_is_free(
    start,
):
    running = start("obedient")
    running.begin(0.7)
    kept, connected = running.client(), running.connect()
    for client in (kept, kept):  # it is kept open until the signal
        client.request("GET", "/0")
        answer = client.getresponse()
        assert (answer.read(), answer.headers["Connection"]) == (b"begun done", None)
    running.process.send_signal(signal.SIGSTOP)
    late = running.connect()  # waits in the queue of the socket
    running.process.send_signal(signal.SIGTERM)
    running.process.send_signal(signal.SIGCONT)
    running.wait_until_refused()
    with sockets.bind(Settings(unix_socket=running.path)):
        for client in (late, connected):
            client.sendall(b"GET /0 HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = answer_on(client)
            assert (answer.body, answer.headers["Connection"]) == (b"begun done", "close")
        kept.request("GET", "/0")
        answer = kept.getresponse()
        assert (answer.read(), answer.headers["Connection"]) == (b"begun done", "close")
        assert running.wait() == (0, WAITS)


def lines_of(text):
    """Return the lines of JSON without their times."""
    lines = [json.loads(line) for line in text.splitlines()]
    assert all(line.pop("time") for line in lines)
    return lines


@posix
def test_sighup_reads_the_keys_again_and_ends_nothing(start, write_keys):
    path = write_keys(KEYS)
    running = start("obedient", "--api-key-file", path, "--access-log", bufsize=0)
    running.headers = {"Authorization": "Bearer sesame-ann"}
    answer = running.begin(2)
    lines = []
    contents = ("sesame-cay cay\n", 0o600), ("sesame-dee", 0o600), ("sesame-dee dee", 0o644)
    for text, mode in contents:
        write_keys(text, mode)
        running.process.send_signal(signal.SIGHUP)
        lines += lines_of(running.process.stderr.readline())
    refused(running.ask("/0"), 401, "invalid_api_key")
    running.headers = {"Authorization": "Bearer sesame-cay"}
    assert running.ask("/0").body == b"begun done"
    assert answer.read() == b"done"
    code, errors = running.stop()
    assert code == 0
    start, end = f"api_key_file {path}: ", "; the keys are as before"
    complaints = [line.pop("message") for line in lines[1:]]
    assert complaints[0].startswith(f"{start}line 1 must be KEY NAME: ")
    assert (
        complaints[1] == f"{start}others can read or change it: run `chmod 600` on it, or 640{end}"
    )
    assert lines == [{"event": "keys", "keys": 1}, {"event": "error"}, {"event": "error"}]
    lines = [line for line in lines_of(errors) if line["event"] != "request"]
    assert lines == [{"event": "draining", "requests": 0}, {"event": "stopped"}]
    assert "sesame" not in errors + "".join(complaints)


@posix
def test_with_the_log_each_line_is_json(start):
    running = start("stubborn", "--access-log", "--grace", "0.1")
    running.begin(60)
    running.ask("/bug")
    _, errors = running.stop()
    bug, request, draining, cut, _, stopped = lines_of(errors)
    assert bug["message"].startswith("a bug in the answer to GET '/bug'")
    assert "ValueError" in bug["traceback"]
    assert (request["event"], request["status"], request["code"]) == ("request", 500, "bug")
    assert request["client"] == "unix"
    assert draining == {"event": "draining", "requests": 1}
    assert cut == {"event": "cut_off", "requests": 1}
    assert stopped == {"event": "stopped"}


@posix
def test_an_ignored_signal_does_not_end_the_server(start):
    ignored = signal.SIGHUP, signal.SIGINT
    running = start(
        "obedient", preexec_fn=lambda: [signal.signal(n, signal.SIG_IGN) for n in ignored]
    )
    for number in ignored:
        running.process.send_signal(number)
    assert running.begin(0.1).read() == b"done"
    assert running.stop() == (0, "")


CUT_OFF = WAITS.replace("30", "0.1") + "gpt-cli: 1 request was cut off\n"


@posix
def test_after_the_grace_running_requests_are_stopped(start):
    running = start("obedient", "--grace", "0.1")
    answer = running.begin(60)
    running.process.send_signal(signal.SIGTERM)
    assert answer.read() == b"stopped"
    assert running.end(CUT_OFF) == 0


@posix
def test_soon_after_the_grace_the_server_ends_anyway(start):
    running = start("stubborn", "--grace", "0.1")
    answer = running.begin(60)
    running.process.send_signal(signal.SIGTERM)
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        answer.read()
    assert running.end(CUT_OFF) == 0


@posix
@pytest.mark.parametrize(
    ("first", "second", "code"),
    [(signal.SIGTERM, signal.SIGINT, 130), (signal.SIGINT, signal.SIGTERM, 143)],
)
def test_a_second_signal_ends_at_once(start, first, second, code):
    running = start("stubborn")
    answer = running.begin(60)
    running.process.send_signal(first)
    running.wait_until_refused()
    begun = time.monotonic()
    running.process.send_signal(second)
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        answer.read()
    assert running.end(WAITS) == code
    assert time.monotonic() - begun < 10


@posix
def test_two_signals_at_the_same_time_end_it(start):
    running = start("stubborn")
    running.begin(60)
    running.process.send_signal(signal.SIGTERM)
    running.process.send_signal(signal.SIGHUP)
    assert running.end("", WAITS) in (129, 143)


@posix
@pytest.mark.parametrize("files", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_more_connections_than_the_system_allows_are_no_trouble(start, files):
    running = start("obedient", files=files)
    connections = []
    for _ in range(2 * files):
        with suppress(OSError):
            connections.append(running.connect())
    assert len(connections) > files / 2
    for connection in connections:
        connection.close()
    assert running.begin(0.1).read() == b"done"
    assert running.stop() == (0, "")
    assert not running.path.exists()
