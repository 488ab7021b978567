"""A server compiles a constraint only if another process can, soon and in little memory."""

import subprocess
import threading

import pytest

from gpt_cli.declare import OptionError
from gpt_cli.serve import trial
from gpt_cli.serve.protocol import RequestError, read

pytest.importorskip("llguidance")

ENDLESS = {"type": "integer", "multipleOf": 99_799_811}


def test_a_constraint_without_an_end_of_compiling_leaves_nothing_behind(monkeypatch, tiny):
    monkeypatch.setattr(trial, "SECONDS", 1.5)
    threads = threading.active_count()
    with pytest.raises(RequestError, match=r"^guided_json takes more than 1\.5 seconds") as caught:
        read(tiny, {"prompt": "Once", "guided_json": ENDLESS})
    assert caught.value.field == "guided_json"
    assert threading.active_count() == threads


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
