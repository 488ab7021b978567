"""A small Hub on 127.0.0.1 for the real client, which can inject faults.

It serves a folder of repositories (`root/owner/name/file`), each with one commit, and records the
requests. Large files are LFS files as on the Hub: they are redirected to another origin
(`localhost` instead of `127.0.0.1`). With `xet`, the client gets them from a storage that speaks
Xet, at `/cas` and `/xorb` of that origin.

    hub.add("owner/name", model_files())
    hub.fail("503", on="GET /api/", times=2)     # the first two such requests only
"""

import hashlib
import json
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from support import xet

LFS = (".safetensors", ".bin")

# Faults:
#   STATUS      an answer with this status, such as 503; "403-gated" also has an X-Error-Code
#   401-token   with the Hub's message for a bad token
#   429-wait    with a Retry-After of a day
#   stall       accept the request and send nothing
#   drop        close the connection without an answer
#   {}          JSON that says nothing
#   html        a web page, as from a captive portal
#   no-headers  an answer without the Hub's own headers
#   drop-half   close the connection after half of the body
#   stall-half  stop sending after half of the body
#   wrong-bytes a body of the right length with one bit flipped
#   too-short   a body without its last byte; too-long: with one more; both with their own length
#   trickle     a body in 20 pieces, with pauses
#   416-resume  close the connection after half of the body, and refuse to resume
ERROR_CODES = {
    "403-gated": "GatedRepo",
    "404-entry": "EntryNotFound",
    "404-repo": "RepoNotFound",
    "404-revision": "RevisionNotFound",
}
CUT = ("drop-half", "stall-half", "416-resume", "trickle")


class Request(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class LoopbackHub:
    def __init__(self, root: Path, certificate: Path | None = None) -> None:
        """Serve a folder; with a file of a certificate and its key, by HTTPS."""
        self.root = root
        self.revisions = {"main", "v1"}  # names of each repository's only commit
        self.requests: list[Request] = []
        self.hashes = True  # whether the list of files has them
        self.xet = False  # whether large files are in a storage that speaks Xet
        self.storage = ""  # its address, if it is not this server
        self.token_seconds = 3600  # how long a token for it is valid
        self.cdn = "localhost"  # the host to which large files are redirected
        self.allowed: set[str] | None = None  # hosts that this server reaches as a proxy; None: all
        self.delay = ("", 0.0)  # requests that contain this text wait for these seconds
        self.half_sent = threading.Event()  # set once a `stall-half` has sent its half
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._fault: tuple[str, str] | None = None
        self._times = 0
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self.scheme = "https" if certificate else "http"
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            # Each thread does its own handshake, so that one that fails stops no other.
            options = {"server_side": True, "do_handshake_on_connect": False}
            self._server.socket = context.wrap_socket(self._server.socket, **options)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> "LoopbackHub":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def endpoint(self) -> str:
        return self.at_host("127.0.0.1")

    def at_host(self, host: str) -> str:
        """Return the address of this server under a name, which a proxy may have for it."""
        return f"{self.scheme}://{host}:{self.port}"

    def add(self, repo: str, files: dict[str, bytes]) -> str:
        """Make a repository of these files; return its commit."""
        for name, content in files.items():
            path = self.root / repo / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return self.commit(repo)

    def commit(self, repo: str) -> str:
        digest = hashlib.sha1()
        for path in self.files(repo):
            digest.update(path.name.encode() + _sha256(_content(path)).encode())
        return digest.hexdigest()

    def files(self, repo: str) -> list[Path]:
        return sorted(path for path in (self.root / repo).rglob("*") if path.is_file())

    def fail(self, fault: str, *, on: str = "", times: int = 1_000_000) -> None:
        """Answer the next `times` requests whose `METHOD /path` contains `on` with a fault."""
        self._fault, self._times = (fault, on), times

    def heal(self) -> None:
        self._fault = None

    def fetched(self) -> list[str]:
        """Return the names of the files whose content was sent."""
        paths = [request.path for request in self.requests if request.method == "GET"]
        large = [path for path in paths if path.startswith("/cdn/")]
        small = [path for path in paths if "/resolve/" in path and not path.endswith(LFS)]
        return [path.rsplit("/", 1)[1] for path in large + small]

    def _take(self, request: Request) -> str:
        """Record the request; return the fault to inject, or ""."""
        with self._lock:
            self.requests.append(request)
            if self._fault is None or self._times < 1 or self._fault[1] not in str(request):
                return ""
            self._times -= 1
            return self._fault[0]


class _Server(ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that leave in the middle."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet, or each answer waits 40 ms for the next ACK

    def do_GET(self) -> None:
        hub: LoopbackHub = self.server.hub
        url = urlsplit(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        path = self.path if self.command == "CONNECT" else unquote(url.path)
        request = Request(self.command, path, headers)
        self.fault = hub._take(request)
        if hub.delay[0] in str(request):
            time.sleep(hub.delay[1])
        if self.fault == "stall":
            hub._closing.wait()
        if self.fault in ("stall", "drop"):
            self.close_connection = True
        elif hub.allowed is not None and url.hostname not in hub.allowed:
            self.error(403, None)
        elif self.fault[:3].isdigit() and self.fault not in CUT:
            self.error(int(self.fault[:3]), ERROR_CODES.get(self.fault))
        elif self.command == "CONNECT":
            self.tunnel()
        elif self.fault == "{}":
            self.json({})
        elif self.fault == "html":
            self.answer(200, b"<html>Please log in</html>", {"Content-Type": "text/html"})
        elif "/xet-read-token/" in url.path:
            self.xet_token()
        elif url.path.startswith(("/cas/", "/xorb/")):
            self.xet_storage(url.path)
        elif url.path.startswith("/api/models/"):
            self.model_info(url.path.removeprefix("/api/models/"), parse_qs(url.query))
        elif url.path.startswith("/cdn/"):
            self.content(_content(hub.root / unquote(url.path.removeprefix("/cdn/"))), {})
        else:
            repo, _, rest = url.path.strip("/").partition("/resolve/")
            revision, _, name = rest.partition("/")
            self.resolve(repo, unquote(revision), unquote(name))

    do_HEAD = do_POST = do_CONNECT = do_GET  # noqa: N815

    def tunnel(self) -> None:
        """Pass bytes on to and from a server, as a proxy does for HTTPS."""
        host, port = self.path.split(":")
        with socket.create_connection((host, int(port))) as there:
            self.answer(200, b"", {})
            self.wfile.flush()
            ends = {self.connection: there, there: self.connection}
            while ready := select.select(ends, [], [], 30)[0]:
                for end in ready:
                    piece = end.recv(1 << 16)
                    if not piece:
                        return
                    ends[end].sendall(piece)

    def model_info(self, path: str, query: dict[str, list[str]]) -> None:
        hub: LoopbackHub = self.server.hub
        repo, _, revision = path.partition("/revision/")
        if not self.known(repo, unquote(revision) or "main"):
            return
        siblings = []
        for file in hub.files(repo):
            content = _content(file)
            entry = {"rfilename": file.relative_to(hub.root / repo).as_posix()}
            if "blobs" in query and hub.hashes:
                entry |= {"size": len(content), "blobId": _git_hash(content)}
                if file.suffix in LFS:
                    entry["lfs"] = {
                        "sha256": _sha256(content),
                        "size": len(content),
                        "pointerSize": 134,
                    }
            siblings.append(entry)
        info = {"id": repo, "sha": hub.commit(repo), "siblings": siblings}
        # The Hub's warnings are for its own tools; the second header is what a client would log.
        headers = {"Content-Type": "application/json", "X-HF-Warning": "unauthenticated; Log in!"}
        self.answer(200, json.dumps(info).encode(), headers)

    def xet_token(self) -> None:
        """Answer with the address of the storage and a token for it."""
        hub: LoopbackHub = self.server.hub
        url, end = (
            hub.storage or f"{hub.at_host('localhost')}/cas",
            time.time() + hub.token_seconds,
        )
        answer = {"casUrl": url, "accessToken": "xet-token", "exp": int(end)}
        names = ("X-Xet-Cas-Url", "X-Xet-Access-Token", "X-Xet-Token-Expiration")
        headers = dict(zip(names, map(str, answer.values()), strict=True))
        self.answer(200, json.dumps(answer).encode(), headers)  # hf_xet reads the body, to renew it

    def xet_storage(self, path: str) -> None:
        """Answer how to put a file together, or with chunks of it."""
        hub: LoopbackHub = self.server.hub
        name = path.rsplit("/", 1)[1]
        files = (file for file in hub.root.rglob("*") if file.suffix in LFS)
        contents = map(_content, files)
        content = next((data for data in contents if xet.file_hash(data) == name), None)
        if content is None or path.startswith("/cas/v2/"):  # the client then asks the first version
            self.error(404, None)
        elif path.startswith("/xorb/"):
            self.content(xet.stored(content), {})
        else:
            start, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            url = f"{hub.at_host('localhost')}/xorb/{name}"
            answer = xet.reconstruction(content, start, end, url)
            if answer is None:
                self.error(416, None)
            else:
                self.answer(200, answer, {"Content-Type": "application/json"})

    def json(self, value: object) -> None:
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def resolve(self, repo: str, revision: str, name: str) -> None:
        hub: LoopbackHub = self.server.hub
        if not self.known(repo, revision):
            return
        file = hub.root / repo / name
        if not file.is_file():
            self.error(404, "EntryNotFound")
            return
        content = _content(file)
        headers = {"X-Repo-Commit": hub.commit(repo), "ETag": f'"{_git_hash(content)}"'}
        if self.fault == "no-headers":
            headers = {}
        if file.suffix not in LFS:
            self.content(content, headers)
            return
        headers |= {
            "Location": f"{hub.at_host(hub.cdn)}/cdn/{repo}/{name}",
            "X-Linked-Size": str(len(content)),
            "X-Linked-Etag": f'"{_sha256(content)}"',
        }
        if hub.xet:
            here = f"{hub.scheme}://{self.headers['Host']}"
            route = f"{here}/api/models/{repo}/xet-read-token/{hub.commit(repo)}"
            headers |= {
                "X-Xet-Hash": xet.file_hash(content),
                "Link": f'<{route}>; rel="xet-auth"',
            }
        self.answer(302, b"", headers)

    def known(self, repo: str, revision: str) -> bool:
        """Return whether there is this revision; if not, answer that."""
        hub: LoopbackHub = self.server.hub
        if not (hub.root / repo).is_dir():
            self.error(404, "RepoNotFound")
        elif not (revision in hub.revisions or hub.commit(repo).startswith(revision)):
            self.error(404, "RevisionNotFound")
        else:
            return True
        return False

    def content(self, body: bytes, headers: dict[str, str]) -> None:
        hub: LoopbackHub = self.server.hub
        start, status = 0, 200
        if range_ := self.headers.get("Range"):
            first, _, last = range_.removeprefix("bytes=").partition("-")
            start, end, status = int(first), int(last or len(body) - 1) + 1, 206
            headers = headers | {"Content-Range": f"bytes {start}-{end - 1}/{len(body)}"}
        else:
            end = len(body)
        if self.fault == "wrong-bytes":
            body = body[:-1] + bytes([body[-1] ^ 1])
        body = body[start:end]
        body = {"too-short": body[:-1], "too-long": body + b"\0"}.get(self.fault, body)
        if self.command == "HEAD" or self.fault not in CUT:
            self.answer(status, body, headers)
        elif self.fault == "trickle":
            self.answer(status, body, headers, send=0)
            step = len(body) // 20 + 1
            for start in range(0, len(body), step):
                self.wfile.write(body[start : start + step])
                self.wfile.flush()
                time.sleep(0.05)
        elif self.fault == "416-resume" and range_:
            self.error(416, None)
        else:
            self.answer(status, body, headers, send=len(body) // 2)
            if self.fault == "stall-half":
                self.wfile.flush()
                hub.half_sent.set()
                hub._closing.wait()
            self.close_connection = True

    def error(self, status: int, code: str | None) -> None:
        headers = {
            "X-Error-Code": code,
            "X-Error-Message": self.fault == "401-token"
            and "Invalid credentials in Authorization header",
            "Retry-After": self.fault == "429-wait" and "86400",
        }
        body = b'{"error": "two\\nlines"}'
        self.answer(status, body, {name: value for name, value in headers.items() if value})

    def answer(
        self, status: int, body: bytes, headers: dict[str, str], send: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:send])

    def log_message(self, *args: object) -> None:
        pass


def _content(path: Path) -> bytes:
    return _content_at(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=32)
def _content_at(path: Path, time: int) -> bytes:
    """Return what a file had at a time: the same object, whose hashes are known."""
    return path.read_bytes()


@lru_cache(maxsize=32)
def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@lru_cache(maxsize=32)
def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def model_files(size: int = 4000, **changes: bytes | None) -> dict[str, bytes]:
    """Return the files of a published model; `changes` are by name, None removes a file."""
    files = {
        "README.md": b"# a model\n",
        "config.json": b'{"model_type": "gpt2"}\n',
        "generation_config.json": b"{}\n",
        "merges.txt": b"#version: 0.2\n",
        "model.safetensors": bytes(range(250)) * (size // 250),
        "onnx/model.safetensors": b"another one",
        "pytorch_model.bin": b"a pickle",
        "tokenizer.json": b'{"model": {}}\n',
        "vocab.json": b'{"a": 0}\n',
    }
    return {name: data for name, data in {**files, **changes}.items() if data is not None}


def use_hub(endpoint: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Point this process and its children to a Hub and to a separate cache."""
    for name in ("HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    # hf_xet reads it when it starts, once in a process.
    monkeypatch.setenv("HF_XET_CLIENT_RETRY_BASE_DELAY", "10ms")


@pytest.fixture(name="cache")
def cache_fixture(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(name="hub")
def hub_fixture(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LoopbackHub]:
    """Yield a Hub that has `acme/gpt`; the cache is empty."""
    with LoopbackHub(tmp_path / "hub") as server:
        server.add("acme/gpt", model_files())
        use_hub(server.endpoint, cache, monkeypatch)
        yield server
