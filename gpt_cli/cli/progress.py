"""Progress on standard error: a line that a terminal replaces, or in a log a line now and then."""

import sys
import time
from typing import Self

from gpt_cli.cli.output import note, on_terminal
from gpt_cli.errors import counted
from gpt_cli.jobs import Observer, storage
from gpt_cli.records import Record
from gpt_cli.system.terminal import replace_line

LONG = 2.0  # seconds until commands that are usually short show progress
_LOG_PAUSE = 30.0  # seconds between two lines that are not replaced
_SETTLED = 5.0  # seconds before the time left is estimated


class StatusLine:
    """A line of progress. A terminal replaces it; elsewhere it is written only if `logged`.

    A terminal shows it after `delay` seconds, and a new text after `pause` more.
    """

    def __init__(
        self, *, shown: bool, pause: float = 0.2, delay: float = 0.0, logged: bool = False
    ):
        self._replaced = on_terminal(sys.stderr)
        self._has_shown = False
        self.shown = shown and (self._replaced or logged)
        self._pause = pause if self._replaced else _LOG_PAUSE
        self._delay = delay if self._replaced else _LOG_PAUSE
        self.restart()

    def restart(self) -> None:
        """Measure times from now on."""
        self._start = time.perf_counter()
        self._due = self._start + self._delay

    @property
    def seconds(self) -> float:
        """The time since the start."""
        return max(time.perf_counter() - self._start, 1e-9)

    def rate(self, tokens: int) -> str:
        """Return a number of tokens, and the rate since the start."""
        return f"{counted(tokens, 'token')}, {tokens / self.seconds:,.0f} a second"

    @property
    def is_due(self) -> bool:
        """Return whether `show` would show a text now, since the last one is old enough."""
        return self.shown and time.perf_counter() >= self._due

    def show(self, text: str) -> None:
        """Show a text, if it is due."""
        if not self.is_due:
            return
        self._due = time.perf_counter() + self._pause
        self._has_shown = True
        if self._replaced:
            replace_line(f"gpt-cli: {text}")
        else:
            note(f"gpt-cli: {text}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Erase the line from the terminal, so that something else can be written."""
        self._erase()

    def _erase(self) -> None:
        if self._has_shown and self._replaced:
            replace_line("")


def failure(record: Record) -> str:
    """Return the line about a row that failed, by the record of its error."""
    file = f"{storage.label(record['file'])}, " if "file" in record else ""
    line = record.get("line_number", record.get("line"))
    return f"gpt-cli: {file}line {line}: {record['error']['message']}"


class Progress(StatusLine, Observer):
    """Count the rows and tokens of a job, and show them; the totals are shown at the end.

    Without `totals`, they are shown only if the job takes long.
    """

    def __init__(self, *, shown: bool, notes: bool = True, totals: bool = True):
        super().__init__(shown=shown, delay=0.0 if totals else LONG, logged=True)
        self._notes = notes
        self._totals = totals
        self._total: int | None = None
        self._resumable = False
        self._rows = 0
        self._before = 0  # rows that an earlier run has done
        self._failed = 0
        self._tokens = 0

    def note(self, message: str) -> None:
        if self._notes:
            note(f"gpt-cli: note: {message}")

    def start(self, total: int | None, done: int, failed: int) -> None:
        self._total = total
        self._failed = failed
        self._rows = self._before = done
        self.restart()
        self._renew()

    def advance(self, tokens: int, failed: bool) -> None:
        self._rows += 1
        self._failed += failed
        self._tokens += tokens
        self._renew()

    def _renew(self) -> None:
        if self.is_due:  # a text for each row would cost more than other work for it
            self.show(self._line() + self._left())

    def dropped(self, record: Record) -> None:
        if self._notes:
            self._erase()
            note(failure(record))

    def interrupted(self) -> None:
        self._resumable = True

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Show the totals, unless an error message follows, and where an interrupt was."""
        super().__exit__(kind, error, trace)
        is_interrupt = kind is KeyboardInterrupt
        has_totals = self.shown and (self._totals or self._has_shown)
        if has_totals and self._rows > self._before and (is_interrupt or kind is None):
            note(f"gpt-cli: {self._line()}")
        if is_interrupt and self._notes and (self._rows or self._resumable):
            advice = ": the same command with --resume continues" if self._resumable else ""
            note(f"gpt-cli: interrupted after {counted(self._rows, 'row')}{advice}")

    def _line(self) -> str:
        rows = counted(self._rows, "row")
        if self._total is not None:
            rows = f"{self._rows:,} of {counted(self._total, 'row')}"
        failed = f" ({self._failed:,} failed)" if self._failed else ""
        return f"{rows}{failed}, {self.rate(self._tokens)}"

    def _left(self) -> str:
        """Return the time that is left, once it can be estimated."""
        new = self._rows - self._before
        if not (self._total and 0 < new < self._total - self._before and self.seconds > _SETTLED):
            return ""
        minutes, seconds = divmod(round(self.seconds / new * (self._total - self._rows)), 60)
        hours, minutes = divmod(minutes, 60)
        left = f"{hours}:{minutes:02}" if hours else str(minutes)
        return f", {left}:{seconds:02} left"
