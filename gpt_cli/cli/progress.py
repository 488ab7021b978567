"""Progress on standard error: a line that is renewed on a terminal, else a line now and then."""

import shutil
import sys
import time
from typing import Self

from gpt_cli.cli.layout import counted
from gpt_cli.cli.streams import note, on_terminal, remark, write_error
from gpt_cli.jobs import Observer

LONG = 2.0  # seconds until progress is shown
_SETTLED = 5.0  # seconds before the time left is estimated


def renew(line: str) -> None:
    """Replace the line that a terminal shows on standard error."""
    width = shutil.get_terminal_size().columns - 1
    write_error(f"\r{line[:width].ljust(width)}\r")


class Progress(Observer):
    """Count rows and tokens, and show them while it is entered.

    The totals are shown at the end. Without `totals`, progress is shown only if it takes long.
    """

    def __init__(self, *, shown: bool, notes: bool = True, totals: bool = True):
        self._shown = shown
        self._notes = notes
        self._totals = totals
        self._renews = on_terminal(sys.stderr)
        self._pause = 0.2 if self._renews else 30.0  # seconds between two lines
        self._total: int | None = None
        self._rows = self._before = self._failed = self._tokens = 0
        self._start = self._last = time.perf_counter()

    def note(self, message: str) -> None:
        """Show a note."""
        if self._notes:
            remark(message)

    def start(self, total: int | None, done: int, failed: int) -> None:
        """Begin with the rows of an earlier run."""
        self._total = total
        self._rows = self._before = done
        self._failed = failed
        self._start = time.perf_counter()
        self._last = self._start if self._totals else self._start + LONG
        if self._shown and self._renews and self._totals:
            renew(self._line(self._start))

    def advance(self, tokens: int, failed: bool) -> None:
        """Count a row."""
        self._rows += 1
        self._failed += failed
        self._tokens += tokens
        now = time.perf_counter()
        if not self._shown or now - self._last < self._pause:
            return
        self._last = now
        (renew if self._renews else note)(self._line(now))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Show the totals, unless an error message follows."""
        if self._shown and self._renews:
            renew("")
        done = self._rows > self._before
        if self._shown and self._totals and done and kind in (None, KeyboardInterrupt):
            note(self._line(time.perf_counter()))

    def _line(self, now: float) -> str:
        seconds = max(now - self._start, 1e-9)
        of = "" if self._total is None else f" of {self._total:,}"
        rows = "row" if (self._total or self._rows) == 1 else "rows"
        failed = f" ({self._failed:,} failed)" if self._failed else ""
        line = f"gpt-cli: {self._rows:,}{of} {rows}{failed}, {counted(self._tokens, 'token')}"
        line += f", {self._tokens / seconds:,.0f} a second"
        new = self._rows - self._before
        if self._total is not None and 0 < new < self._total - self._before and seconds > _SETTLED:
            left = seconds / new * (self._total - self._rows)
            line += f", {_duration(left)} left"
        return line


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
