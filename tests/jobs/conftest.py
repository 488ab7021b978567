"""Fixtures that several modules of tests of jobs share."""

import io

import pytest


@pytest.fixture
def stdin(monkeypatch):
    """Return a function that lets standard input have these bytes."""

    def set_stdin(data):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))

    return set_stdin


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Be in a new folder, and return it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
