"""The bar and the lines that show a download."""

import errno
import io
import logging
import sys
import time

import pytest

from gpt_cli.hub import progress as module
from gpt_cli.hub.progress import DownloadProgress


@pytest.fixture
def clock(monkeypatch):
    """Return a list with the time, which stands still."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def gpt2(clock):
    return DownloadProgress("openai-community/gpt2", 548_000_000, quiet=False)


def arrive(progress, clock, size, seconds):
    """Let bytes of a file arrive in some seconds, a part of them in each."""
    progress.begin_file()
    bar = progress.bar_class(total=548_000_000, desc="model.safetensors", unit="B")
    for _ in range(seconds):
        clock[0] += 1
        bar.update(size // seconds)
        progress.line(80)


@pytest.mark.parametrize(
    ("size", "wide", "narrow"),
    [
        (0, f"gpt2:   0% [{'.' * 40}] 0 B of 548 MB", f"gpt2:   0% [{'.' * 12}] 0 B of 548 MB"),
        (
            246_600_000,
            f"gpt2:  45% [{'#' * 14}{'.' * 18}] 247 of 548 MB, 12 MB/s, 24 s left",
            "gpt2: 247 of 548 MB, 12 MB/s, 24 s left",
        ),
        (
            548_000_000,
            f"gpt2: 100% [{'#' * 33}] 548 of 548 MB, 27 MB/s, 0 s left",
            "gpt2: 548 of 548 MB, 27 MB/s, 0 s left",
        ),
    ],
)
def test_a_line_fits_the_terminal(gpt2, clock, size, wide, narrow):
    arrive(gpt2, clock, size, 20)
    if not size:
        gpt2.last_byte = clock[0]
    assert gpt2.line(79) == wide
    assert gpt2.line(39) == narrow
    assert len(wide) == 79 or not size
    assert all(len(gpt2.line(width)) <= width for width in range(1, 120))


def test_a_long_name_gives_way(clock):
    progress = DownloadProgress("an-organization-of-people/gpt", 548_000_000, quiet=False)
    arrive(progress, clock, 246_600_000, 20)
    assert progress.line(39) == "gpt: 247 of 548 MB, 12 MB/s, 24 s left"


def test_the_files_of_a_model_are_one(gpt2, clock):
    arrive(gpt2, clock, 500_000_000, 5)
    gpt2.end_file()
    arrive(gpt2, clock, 24_000_000, 1)
    assert "524 of 548 MB, 24 MB/s, 1 s left" in gpt2.line(80)


def test_a_file_that_begins_again_is_counted_once(gpt2, clock):
    arrive(gpt2, clock, 500_000_000, 5)
    gpt2.begin_file()  # by the other protocol
    bar = gpt2.bar_class(initial=100_000_000)
    assert "100 of 548 MB" in gpt2.line(80)
    bar.update(50_000_000)
    bar.update(-150_000_000)  # the server ignored where it was to begin
    assert "0 B of 548 MB" in gpt2.line(80)


def test_bytes_of_the_network_count_when_they_are_in_the_file(gpt2, clock):
    gpt2.begin_file()
    bar = gpt2.bar_class(total=548_000_000)
    clock[0] += 20
    assert "0 B of 548 MB, no data for 20 s" in gpt2.line(80)
    bar.update_transfer(40_000_000)
    assert gpt2.line(80).endswith("0 B of 548 MB")


def test_the_rate_is_that_of_the_last_seconds(gpt2, clock):
    arrive(gpt2, clock, 300_000_000, 3)
    clock[0] += 4
    (bar,) = gpt2.bars
    for _ in range(20):
        clock[0] += 1
        bar.update(1_000_000)
        gpt2.line(80)
    assert "320 of 548 MB, 1 MB/s, 3:48 min left" in gpt2.line(80)


def test_a_terminal_that_goes_away_is_no_error(monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module, "columns", lambda: 80)
    monkeypatch.setattr(module, "_TICK", 0.01)
    monkeypatch.setattr(sys, "stderr", Gone())
    with DownloadProgress("acme/gpt", 1000, quiet=False) as progress:
        progress.begin_file()
        time.sleep(0.05)
        assert progress._thread.is_alive()


def test_a_log_gets_a_line_every_half_minute(monkeypatch, caplog):
    monkeypatch.setattr(module, "_TICK", 0.01)
    monkeypatch.setattr(module, "_LOG_PAUSE", 0.1)
    caplog.set_level(logging.WARNING, "gpt_cli")
    with DownloadProgress("openai-community/gpt2", 548_000_000, quiet=False) as progress:
        progress.begin_file()
        progress.bar_class().update(100_000_000)
        time.sleep(0.25)
    first, *lines, last = caplog.messages
    assert first == "downloading gpt2 (548 MB)"
    assert 1 <= len(lines) <= 2
    assert all(line.startswith("gpt2: 100 of 548 MB") for line in lines)
    assert last == "gpt2: 548 MB in 0 s"


@pytest.mark.parametrize(("size", "quiet"), [(0, False), (548_000_000, True)])
def test_nothing_to_fetch_and_quiet_show_nothing(caplog, capfd, monkeypatch, size, quiet):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with DownloadProgress("acme/gpt", size, quiet=quiet):
        time.sleep(0.01)
    assert caplog.messages == []
    assert capfd.readouterr() == ("", "")
