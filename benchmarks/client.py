"""A small HTTP client in asyncio and processes of servers, for `serve.py` and the soak of a server.

It reads what HTTP/1.1 servers send here: a body with its length, or in chunks. It is small so that
it costs little of the cores that it shares with the server.
"""

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

HOST = "127.0.0.1"
START = 120.0  # seconds that a server may take to start, and to end
EVENT = b"data: "
Pieces: TypeAlias = list[tuple[float, bytes]]  # of a body, with the times when they came


class Connection:
    """A connection to a server, for one request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Self:
        """Return a new connection."""
        return cls(*await asyncio.open_connection(HOST, port))

    def send(self, data: bytes) -> None:
        """Send a request, or a part of one."""
        self.writer.write(data)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Read the status and the headers, with their names in lower case."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = (line.partition(":") for line in lines[1:] if line)
        return int(lines[0].split()[1]), {name.lower(): text.strip() for name, _, text in fields}

    async def body(self, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        """Read the body, in the pieces that were sent."""
        if headers.get("transfer-encoding") != "chunked":
            length = headers.get("content-length")
            yield await (
                self.reader.read() if length is None else self.reader.readexactly(int(length))
            )
            return
        while size := int(await self.reader.readline(), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readline()

    async def exchange(self, data: bytes, pieces: Pieces | None = None) -> "Answer":
        """Send a request; return its answer, and put the pieces of its body into a list."""
        pieces = [] if pieces is None else pieces
        sent = time.perf_counter()
        self.send(data)
        status, headers = await self.head()
        async for piece in self.body(headers):
            pieces.append((time.perf_counter(), piece))
        return Answer(status, headers, sent, pieces)

    def close(self, *, reset: bool = False) -> None:
        """Close the connection; with `reset`, the server sees an error and not an end."""
        if reset:
            now = struct.pack("ii", 1, 0)
            self.writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, now
            )
        self.writer.close()


def request(path: str, body: bytes | None = None, **headers: str) -> bytes:
    """Return the bytes of a POST; without a body, of a GET."""
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1"]
    fields = {"Host": HOST} | headers
    if body is not None:
        fields |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    lines += [f"{name}: {text}" for name, text in fields.items()]
    return "\r\n".join([*lines, "\r\n"]).encode() + (body or b"")


@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    status: int
    headers: dict[str, str]
    sent: float  # time.perf_counter() when the request was sent
    pieces: Pieces  # of the body, with the times when they came

    @property
    def seconds(self) -> float:
        """Return the time from the request to the end of the answer."""
        return self.pieces[-1][0] - self.sent

    @property
    def body(self) -> bytes:
        """Return the whole body."""
        return b"".join(piece for _, piece in self.pieces)

    @property
    def json(self) -> Any:
        """Return the body as JSON."""
        return json.loads(self.body)

    def events(self) -> Iterator[tuple[float, Any]]:
        """Yield the events of a stream but `[DONE]`, and the times when they were whole."""
        rest = b""
        for seconds, piece in self.pieces:
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                if event != EVENT + b"[DONE]":
                    yield seconds, json.loads(event.removeprefix(EVENT))


async def ask(
    port: int,
    fields: Mapping[str, Any] | None = None,
    *,
    path: str = "/v1/completions",
    pieces: Pieces | None = None,
) -> Answer:
    """Return the answer to a POST of JSON; without fields, to a GET.

    Pieces of the answer's body are appended to `pieces` as they come. A task that is cancelled
    closes its connection.
    """
    connection = await Connection.open(port)
    try:
        body = None if fields is None else json.dumps(fields).encode()
        return await connection.exchange(request(path, body), pieces)
    finally:
        connection.close()


class Server:
    """A process that serves on a free port, which replaces `{port}` in its command."""

    def __init__(self, command: Sequence[str], errors: Path, **variables: str):
        with socket.create_server((HOST, 0)) as free:
            self.port: int = free.getsockname()[1]
        self.command = [part.replace("{port}", str(self.port)) for part in command]
        self.errors = errors  # what it writes to standard error
        self._environment = os.environ | variables

    def __enter__(self) -> Self:
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                self.command, env=self._environment, stdout=subprocess.DEVNULL, stderr=errors
            )
        deadline = time.monotonic() + START
        while True:
            try:
                socket.create_connection((HOST, self.port)).close()
                return self
            except ConnectionRefusedError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    text = self.errors.read_text(errors="replace")
                    raise RuntimeError(f"{self.command[:4]} does not serve: {text}") from None
                time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        """End the process; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(START)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def cpu_seconds(self) -> float:
        """Return the CPU time that the process has used (Linux)."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def command(folder: str, *flags: str) -> list[str]:
    """Return the command of gpt-cli's server."""
    return [sys.executable, "-m", "gpt_cli", "serve", "-m", folder, "--port", "{port}", *flags]
