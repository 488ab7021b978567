"""A real `gpt-cli serve` in another process, and a plain client that shows what it answers."""

import http.client
import json
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from support.checkpoints import CONFIG, write_checkpoint
from support.processes import COMMAND, LIMIT, LimitedProcess

pytest.importorskip("uvicorn", reason="the extra serve is not installed")

from prometheus_client.parser import text_string_to_metric_families

COMPLETIONS = "/v1/completions"
READY = "gpt-cli: listening on "
# After a signal while one request runs.
WAITS = (
    "gpt-cli: draining: waiting for 1 request, up to 30 s; a second signal or Ctrl+C ends "
    "the server at once\n"
)


class Answer(NamedTuple):
    """A whole answer."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[dict[str, Any]]:
        """Return the chunks of a stream, which must be complete."""
        *events, done, rest = self.body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert all(event.startswith("data: {") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def error(self, status: int) -> dict[str, Any]:
        """Return the error, which must have this status and the shape of OpenAI's."""
        assert self.status == status, self.body
        assert self.headers["Content-Type"] == "application/json"
        body = self.json()
        assert body.keys() == {"error"}
        assert [*body["error"]] == ["message", "type", "param", "code"]
        assert body["error"]["message"].isprintable()
        overloaded = status == 429 or status >= 500
        kind = "server_error" if overloaded else "invalid_request_error"
        assert body["error"]["type"] == kind
        return body["error"]


class Server:
    """A server that is ready.

    Attributes:
        process: None for a server in this process.
        address: `http://HOST:PORT`, or `unix:PATH`.
        headers: of every request.
    """

    def __init__(self, process: "subprocess.Popen[bytes] | None", address: str):
        self.process, self.address = process, address
        self.headers: dict[str, str] = {}
        self.connections: list[socket.socket] = []

    def connect(self, receives: int | None = None) -> socket.socket:
        """Return a new connection, whose buffer may be small."""
        if self.address.startswith("unix:"):
            family, name = socket.AF_UNIX, self.address.removeprefix("unix:")
        else:
            url = urlsplit(self.address)
            family = socket.AF_INET6 if ":" in url.hostname else socket.AF_INET
            name = url.hostname, url.port
        plain = socket.socket(family)
        self.connections.append(plain)
        plain.settimeout(LIMIT)
        if receives is not None:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        plain.connect(name)
        return plain

    def client(self) -> http.client.HTTPConnection:
        """Return a client for several requests on a new connection."""
        client = http.client.HTTPConnection("127.0.0.1", timeout=LIMIT)
        client.sock = self.connect()
        return client

    def ask(
        self,
        path: str,
        body: Any = None,
        method: str = "",
        client: http.client.HTTPConnection | None = None,
        **headers: str,
    ) -> Answer:
        """Send a request, with a body of JSON, of bytes, or of an iterator over bytes, in chunks.

        Return the whole answer. Without a client, the request has its own connection.
        """
        is_raw = body is None or isinstance(body, bytes | Iterator)
        data = body if is_raw else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if data is not None:
            named = {"Content-Type": "application/json"} | named
        connection = client or self.client()
        try:
            method = method or ("GET" if data is None else "POST")
            connection.request(method, path, data, self.headers | named)
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            if not client:
                connection.close()

    def complete(self, **fields: Any) -> dict[str, Any]:
        """Return the completions of a request."""
        answer = self.ask(COMPLETIONS, fields)
        assert answer.status == 200, answer.body
        return answer.json()

    def begin(self, receives: int | None = None, **fields: Any) -> socket.socket:
        """Send a request for completions; return its connection."""
        connection = self.connect(receives)
        connection.sendall(request_bytes(fields, **self.headers))
        return connection

    def metrics(self) -> dict[str, float]:
        """Return the metrics, summed over models, by their names with other labels in braces.

        Labels that are empty are left out.
        """
        answer = self.ask("/metrics")
        assert answer.status == 200
        values: Counter[str] = Counter()
        for family in text_string_to_metric_families(answer.body.decode()):
            for sample in family.samples:
                labels = sample.labels.items()
                pairs = [f"{name}={x}" for name, x in labels if x and name != "model"]
                braces = f"{{{','.join(pairs)}}}" if pairs else ""
                values[sample.name + braces] += sample.value
        return values

    def wait_for(self, reached: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """Wait until the metrics are so; return them."""
        end = time.monotonic() + LIMIT
        while not reached(values := self.metrics()):
            assert time.monotonic() < end, values
            time.sleep(0.01)
        return values

    def wait_until_refused(self) -> None:
        """Wait until no more connections are accepted."""
        end = time.monotonic() + LIMIT
        with suppress(OSError):
            while True:
                self.connect().close()
                assert time.monotonic() < end
                time.sleep(0.01)

    def wait_until_idle(self) -> dict[str, float]:
        """Wait until no text runs or waits; return the metrics."""
        return self.wait_for(
            lambda values: values["gpt_cli_texts_running"] == values["gpt_cli_texts_waiting"] == 0
        )

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal; return the exit code and what standard error had after the first line."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """Wait for the end; return the same."""
        out, errors = self.process.communicate(timeout=LIMIT)
        assert out == b""
        return self.process.returncode, errors.decode()


def answer_on(connection: socket.socket) -> Answer:
    """Read one answer."""
    response = http.client.HTTPResponse(connection, method="POST")
    response.begin()
    return Answer(response.status, response.headers, response.read())


def bytes_on(connection: socket.socket) -> bytes:
    """Return all bytes that come until a connection ends, and close it."""
    data = b""
    with connection, suppress(ConnectionResetError):
        while piece := connection.recv(1 << 20):
            data += piece
    return data


def request_bytes(body: Any, path: str = COMPLETIONS, **headers: str) -> bytes:
    """Return a request as it is sent."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {
        "Host": "127.0.0.1",
        "Content-Type": "application/json",
        "Content-Length": str(len(data)),
    } | {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + data


def write_slow_model(folder: Path) -> Path:
    """Write a model that takes a few milliseconds for a token."""
    size = {"n_embd": 512, "n_head": 8, "n_layer": 8, "n_positions": 1024}
    return write_checkpoint(folder, CONFIG | size)


def start(*arguments: object, **options: Any) -> LimitedProcess:
    """Start a command."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return LimitedProcess([*COMMAND, *map(str, arguments)], **pipes | options)


@contextmanager
def serving(
    *flags: object,
    model: object = "tiny",
    start: Callable[..., LimitedProcess] = start,
    **options: Any,
) -> Iterator[Server]:
    """Run a server until SIGTERM; it must say nothing but that it is ready, and exit with 0.

    Args:
        flags: of `gpt-cli serve`, which takes a free port if they do not say where it listens.
        model: its name or folder.
        start: what starts a command.
        options: for `start`.
    """
    where = () if {"--port", "--unix-socket"} & {*flags} else ("--port", 0)
    # Without buffers in this process: `communicate` would not see what they hold.
    with start("serve", "-m", model, *where, *flags, bufsize=0, **options) as process:
        server = None
        try:
            line = process.stderr.readline().decode()
            process.guard.cancel()  # the requests and the end have limits of their own
            if line.startswith("{"):  # with --access-log
                address = json.loads(line)["address"]
            else:
                assert line.startswith(READY), line + process.stderr.read().decode()
                address = line.removeprefix(READY).rstrip("\n")
            server = Server(process, address)
            yield server
            if process.returncode is None:
                ended = server.stop()
                assert ended == (0, ""), (ended[0], ended[1][:2000])
        finally:
            process.kill()
            for connection in server.connections if server else ():
                connection.close()
