"""A server compiles a constraint only if another process can, soon and in little memory."""

import asyncio
import json
import subprocess
import sys
import threading
from unittest.mock import Mock

import pytest

from gpt_cli.options.declare import OptionError
from gpt_cli.serve import trial

pytest.importorskip("llguidance")
pytest.importorskip("uvicorn")
from starlette.requests import Request

from gpt_cli.serve import app
from gpt_cli.serve.protocol import read_completions
from gpt_cli.serve.refusals import RequestError

ENDLESS = {"type": "integer", "multipleOf": 99_799_811}


def test_a_constraint_without_an_end_of_compiling_leaves_nothing_behind(monkeypatch, tiny):
    monkeypatch.setattr(trial, "SECONDS", 0.5)
    threads = set(threading.enumerate())  # those of other tests may end
    with pytest.raises(RequestError, match=r"^guided_json takes more than 0\.5 seconds") as caught:
        read_completions(tiny, {"prompt": "Once", "guided_json": ENDLESS})
    assert caught.value.field == "guided_json"
    assert threads.issuperset(threading.enumerate())


def test_without_llguidance_the_field_is_named(monkeypatch, tiny):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="pip install llguidance") as caught:
        read_completions(tiny, {"prompt": "Once", "structured_outputs": {"regex": "a"}})
    assert (caught.value.status, caught.value.field) == (501, "structured_outputs.regex")


def test_constraints_that_take_long_leave_threads_for_others(monkeypatch):
    ready = threading.Event()

    def read_completions(engine, body, folder):
        assert "guided_regex" not in body or ready.wait(60)
        raise RequestError("it was read")

    async def ask(body):
        async def receive():
            return {"type": "http.request", "body": json.dumps(body).encode()}

        with pytest.raises(RequestError, match="it was read"):
            await routes.completions(Request({"type": "http"}, receive))

    async def ask_all():
        slow = [asyncio.create_task(ask({"guided_regex": "a"})) for _ in range(50)]
        await asyncio.sleep(0.1)
        try:
            await asyncio.wait_for(ask({"prompt": "Once"}), 20)
        finally:
            ready.set()
        await asyncio.gather(*slow)

    monkeypatch.setattr(app, "read_completions", read_completions)
    routes = app._Handlers(Mock())
    asyncio.run(ask_all())


def test_a_process_without_memory_is_an_error(monkeypatch):
    monkeypatch.setattr(trial, "SECONDS", 60)
    monkeypatch.setattr(trial, "_BYTES", 1 << 20)
    with pytest.raises(OptionError, match="regex takes too much memory"):
        trial.check("regex", "too much")


@pytest.mark.parametrize("value", ["a+b", "a+b", "a(b", 3, "\ud800", ""])
def test_what_is_quick_passes_and_is_tried_once(monkeypatch, value):
    trial.check("regex", value)
    monkeypatch.setattr(subprocess, "run", None)
    trial.check("regex", value)
    trial.check("choices", [value])
