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


class Progress:
    """Shows the bytes of all files of a model, and notices when none arrive.

    A thread looks at them, as a transfer that is silent calls nobody.

    Attributes:
        bar_class: for the Hub's client, which makes one or two bars for each file.
        bars: those of this file.
        last_byte: the time when one arrived, by `time.monotonic`.
    """

    def __init__(self, repo: str, size: int, *, quiet: bool):
        """Show the transfer of `size` bytes, if there are any."""
        self._name = short_name(repo)
        self._size = size
        self._quiet = quiet
        self._shown = size > 0 and not quiet
        self._on_terminal = self._shown and columns() > 0 and not _bars_are_off()
        self._done = 0  # bytes of the files before
        self.bars: list[_Bar] = []  # the client's, for this file
        self._start = self.last_byte = self._last_line = time.monotonic()
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
        """Count a file from 0. Call `on_tick` now and then, until it has arrived."""
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
        """Write a note, shown by default, in place of the bar; not if this is quiet."""
        if self._quiet:
            return
        with self._drawing:
            if self._on_terminal:
                replace_line("")
            _log.warning(message, *arguments)

    def _run(self) -> None:
        self._show()
        while not self._ended.wait(_TICK):
            if (on_tick := self._on_tick) is not None:
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
        """Return what a terminal of so many columns shows."""
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
        """The bytes of all files. The client may count those of a file in two bars."""
        return min(self._done + max((bar.n for bar in [*self.bars]), default=0), self._size)

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
        (part, unit), whole = format_size(arrived).split(), format_size(self._size)
        figures = f"{part if whole.endswith(f' {unit}') else f'{part} {unit}'} of {whole}"
        if (silent := now - self.last_byte) >= _MENTIONED:
            return f"{figures}, no data for {silent:.0f} s"
        if not rate:
            return figures
        left = _time((self._size - arrived) / rate)
        return f"{figures}, {format_size(rate)}/s, {left} left"


class _Bar:
    """Counts the bytes of a file for the client: the part of tqdm's interface that it uses."""

    progress: Progress

    def __init__(self, *_: Any, initial: int = 0, total: int | None = None, **__: Any):
        self.n = initial
        self.total = total
        self.progress.bars.append(self)
        self.progress.last_byte = time.monotonic()

    def update(self, n: float | None = 1) -> None:
        """Count bytes of the file. They are negative if the client begins again."""
        self.n += int(n or 0)
        self.update_transfer(n)

    def update_transfer(self, n: float | None = 1) -> None:
        """Note bytes from the network, which are counted once they are in the file."""
        if n:  # some clients report 0 many times a second
            self.progress.last_byte = time.monotonic()

    def ignore(self, *_: object, **__: object) -> None:
        """Do nothing: `Progress` draws."""

    close = ignore
    refresh = ignore
    set_postfix_str = ignore
    set_transfer_postfix_str = ignore

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        pass


def _bars_are_off() -> bool:
    """Return whether the environment switches bars off."""
    return is_on(os.getenv("HF_HUB_DISABLE_PROGRESS_BARS"))


def _time(seconds: float) -> str:
    """Return a time for people: `41 s`, `3:07 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min"
