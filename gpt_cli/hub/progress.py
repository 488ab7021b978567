"""The progress of a download: a bar on a terminal, a line now and then in a log."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from gpt_cli.hub.local import is_on, short_name
from gpt_cli.system.machine import format_size
from gpt_cli.system.terminal import columns, replace_line

_TICK = 0.5  # seconds between two looks at the transfer
_LOG_PAUSE = 30.0  # seconds between two lines in a log
_MENTIONED = 5.0  # seconds without a byte that are mentioned
_WINDOW = 15.0  # seconds whose bytes give the rate
_NARROWEST_BAR, _WIDEST_BAR = 5, 40  # columns

_log = logging.getLogger(__name__)


class DownloadProgress:
    """Show the bytes of all files of a model, and notice when none arrive.

    A thread draws, because a silent transfer calls nothing.

    Attributes:
        bar_class: for the Hub's client, which makes one or two bars for each file.
        bars: the bars of the present file.
        last_byte: when the last byte arrived, by `time.monotonic`.
    """

    def __init__(self, repo: str, size: int, *, quiet: bool):
        """Show the transfer of `size` bytes, if there are any."""
        self._name = short_name(repo)
        self._size = size
        self._quiet = quiet
        self._shown = size > 0 and not quiet
        without_bars = is_on(os.getenv("HF_HUB_DISABLE_PROGRESS_BARS"))
        self._on_terminal = self._shown and columns() > 0 and not without_bars
        self._done = 0  # bytes of the files before
        self.bars: list[_Bar] = []  # the client's, for this file
        self._start = time.monotonic()
        self.last_byte = self._last_line = self._start
        self._past = deque([(self._start, 0)])  # times, and the bytes that had arrived
        self._on_tick: Callable[[], None] | None = None
        self._ended = threading.Event()
        self._drawing = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.bar_class = type("Bar", (_Bar,), {"progress": self})

    def __enter__(self) -> Self:
        if self._shown and not self._on_terminal:
            _log.warning("downloading %s (%s)", self._name, format_size(self._size))
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._ended.set()
        self._thread.join()
        seconds = _time(time.monotonic() - self._start)
        if error is None and self._shown:
            self.say("%s: %s in %s", self._name, format_size(self._size), seconds)
        elif self._on_terminal:
            replace_line("")

    def begin_file(self, on_tick: Callable[[], None] | None = None) -> None:
        """Count a file from 0. Call `on_tick` twice a second until the file has arrived."""
        self.bars.clear()
        self.last_byte = time.monotonic()
        self._past = deque([(self.last_byte, self._done)])
        self._on_tick = on_tick

    def end_file(self) -> None:
        """Count a file that has arrived."""
        self._on_tick = None
        self._done = self._arrived
        self.bars.clear()

    def say(self, message: str, *arguments: object) -> None:
        """Write a note in place of the bar, unless this is quiet. It is shown by default."""
        if self._quiet:
            return
        with self._drawing:
            if self._on_terminal:
                replace_line("")
            _log.warning(message, *arguments)

    def _run(self) -> None:
        self._show()
        while not self._ended.wait(_TICK):
            on_tick = self._on_tick  # `end_file` may set it to None in between
            if on_tick:
                on_tick()
            self._show()

    def _show(self) -> None:
        now = time.monotonic()
        if self._on_terminal:
            with self._drawing:
                replace_line(self.line(columns() - 1))
        elif self._shown and now - self._last_line >= _LOG_PAUSE:
            self._last_line = now
            _log.warning("%s: %s", self._name, self._figures())

    def line(self, width: int) -> str:
        """Return the line for a terminal that is `width` columns wide."""
        share = self._arrived / self._size
        figures = self._figures()
        length = min(width - len(f"{self._name}: 100% [] {figures}"), _WIDEST_BAR)
        if length < _NARROWEST_BAR:
            line = f"{self._name}: {figures}"
            if len(line) > width:  # leave the owner out
                line = f"{self._name.rpartition('/')[2]}: {figures}"
            return line[:width]
        full = round(length * share)
        bar = "#" * full + "." * (length - full)
        return f"{self._name}: {share:4.0%} [{bar}] {figures}"

    @property
    def _arrived(self) -> int:
        """The bytes of all files. The client may count the bytes of a file in two bars."""
        of_file = max((bar.n for bar in self.bars.copy()), default=0)
        return min(self._done + of_file, self._size)

    def _figures(self) -> str:
        """Return the bytes, the rate and the time left, in words."""
        now = time.monotonic()
        arrived = self._arrived
        past = self._past  # of this file: `begin_file` makes a new one
        past.append((now, arrived))
        while len(past) > 2 and now - past[1][0] > _WINDOW:
            past.popleft()
        then, before = past[0]
        rate = max(arrived - before, 0) / (now - then) if now > then else 0
        whole = format_size(self._size)
        unit = whole.split()[1]
        part = format_size(arrived).removesuffix(f" {unit}")  # "247 of 548 MB"
        figures = f"{part} of {whole}"
        silent = now - self.last_byte
        if silent >= _MENTIONED:
            return f"{figures}, no data for {silent:.0f} s"
        if not rate:
            return figures
        left = _time((self._size - arrived) / rate)
        return f"{figures}, {format_size(rate)}/s, {left} left"


class _Bar:
    """Count the bytes of a file. This is the part of tqdm's interface that the client uses."""

    progress: DownloadProgress

    def __init__(self, *_: Any, initial: int = 0, total: int | None = None, **__: Any):
        self.n = initial
        self.total = total
        self.progress.bars.append(self)
        self.progress.last_byte = time.monotonic()

    def update(self, n: float | None = 1) -> None:
        """Count bytes of the file: a negative number if the client begins again."""
        self.n += int(n or 0)
        self.update_transfer(n)

    def update_transfer(self, n: float | None = 1) -> None:
        """Note that bytes came from the network. They are counted once they are in the file."""
        if n:  # some clients report 0 many times a second
            self.progress.last_byte = time.monotonic()

    def ignore(self, *_: object, **__: object) -> None:
        """Do nothing: `DownloadProgress` draws."""

    close = ignore
    refresh = ignore
    set_postfix_str = ignore
    set_transfer_postfix_str = ignore

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        pass


def _time(seconds: float) -> str:
    """Return a time for people: `41 s`, `3:07 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min"
