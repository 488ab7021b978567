"""The page of `gpt-cli serve`, in a browser (`make test-browser`), with a server that only pretends."""

import base64
import hashlib
import json
import math
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import gpt_cli
from test_page import _CONTRASTS, HOSTILE, Parts

PAGE = (Path(gpt_cli.__file__).parent / "serve" / "page.html").read_text(encoding="utf-8")
WORDS = [" the", " old", " fox", " saw", " a", " red", " moon", ",", " and", " ran", "."]


def policy() -> str:
    """Return the strictest policy that the page runs under."""
    parts = Parts(PAGE).texts
    style, script = (
        base64.b64encode(hashlib.sha256(parts[name][0].encode()).digest()).decode()
        for name in ("style", "script")
    )
    return (
        f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'"
    )


def text_of(seed, index, count):
    """Return the tokens that the server makes up."""
    return [WORDS[(seed + 3 * index + 5 * place) % len(WORDS)] for place in range(count)]


def logprobs(tokens):
    """Return the token and four others, all of other probabilities."""
    tops = [
        {word: -1.0 - 0.5 * place for place, word in enumerate(dict.fromkeys([token, *WORDS[:4]]))}
        for token in tokens
    ]
    chosen = [top[token] for top, token in zip(tops, tokens, strict=True)]
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": []}


class Handler(BaseHTTPRequestHandler):
    """Speak as much of the protocol as the page needs."""

    def log_message(self, *_):
        pass

    def do_GET(self):  # noqa: N802
        if self.path == "/":
            self.reply(200, PAGE.encode(), "text/html", ("Content-Security-Policy", policy()))
        elif self.refused():
            pass
        elif self.path == "/v1/models":
            self.reply(200, {"data": [{"id": "tiny", "max_model_len": 64}]})
        else:
            self.reply(404, b"")

    def do_POST(self):  # noqa: N802
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        if self.refused():
            return
        if self.path == "/tokenize":
            ids = list(range(len(body["prompt"].split())))
            self.reply(200, {"tokens": ids, "count": len(ids), "max_model_len": 64})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            self.stream(body)
        except OSError:
            self.server.left.set()

    def stream(self, body):
        scripted = self.server.scripted
        texts = scripted or [
            [[word] for word in text_of(body["seed"], index, body["max_tokens"])]
            for index in range(body["n"])
        ]
        for step in range(max(map(len, texts))):
            for index, text in enumerate(texts):
                if step < len(text):
                    token, *shown = text[step]
                    last = step == len(text) - 1
                    self.event(
                        choices=[
                            {
                                "index": index,
                                "text": shown[0] if shown else token,
                                "logprobs": logprobs([token]),
                                "finish_reason": "length" if last else None,
                            }
                        ]
                    )
            if step == self.server.steps:
                if self.server.breaks:
                    return
                if self.server.error:
                    self.event(error={"message": self.server.error})
                    return
                while not self.server.gate.wait(0.02):
                    self.wfile.write(b": wait\n\n")  # fails once the page has left
        self.wfile.write(b"data: [DONE]\n\n")

    def event(self, **found):
        self.wfile.write(b"data: " + json.dumps(found).encode() + b"\n\n")

    def refused(self):
        """Answer as the test says, or with 401 without the key."""
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self.reply(401, {"error": {"message": "the API key is missing or wrong"}})
            return True
        if not self.server.refusals or self.command == "GET":
            return False
        status, message, field, *headers = self.server.refusals.pop(0)
        self.reply(status, {"error": {"message": message, "param": field}}, "x", *headers)
        return True

    def reply(self, status, body, kind="application/json", *headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        found = [("Content-Type", kind), ("Content-Length", str(len(data))), *headers]
        for name, value in found:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def server():
    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.asked, found.refusals, found.scripted, found.key = [], [], None, ""
    found.steps, found.breaks, found.error = 2, False, ""
    found.gate, found.left = threading.Event(), threading.Event()
    found.gate.set()
    found.daemon_threads = True
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    found.address = f"http://127.0.0.1:{found.server_port}/"
    yield found
    found.gate.set()
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture
def look(window, server):
    """Open the page; it must not fail, exceed the window's width, or ask anybody else."""
    said, asked, opened = [], [], []
    window.set_default_timeout(5000)

    def look(expected=()):
        tab = window.new_page()
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("request", lambda request: asked.append(request.url))
        tab.expected = list(expected)
        opened.append(tab)
        tab.goto(server.address)
        return tab

    yield look
    expected = [text for tab in opened for text in tab.expected]
    assert [text for text in said if not any(part in text for part in expected)] == []
    assert all(url.startswith((server.address, "blob:", "data:")) for url in asked)
    for tab in opened:
        assert tab.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
