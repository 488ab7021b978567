"""How far a long job is: a line that renews itself on a terminal, else a line now and then."""

import shutil
import sys
import time
from types import TracebackType

from gpt_cli.cli.text import note, on_terminal, tell

_SETTLED = 5.0  # seconds, before which a rate tells little about the time that is left


def renew(line: str) -> None:
    """Write over the line that a terminal shows on standard error."""
    width = shutil.get_terminal_size().columns - 1
    tell(f"\r{line[:width].ljust(width)}\r")


class Progress:
    """Counts rows and tokens, and tells on standard error how far they are."""

    def __init__(self, total: int | None, done: int, failed: int, *, shown: bool):
        self.rows = done  # also those of an earlier run
        self.failed = failed  # of them
        self.tokens = 0
        self._before = done
        self._total = total
        self._shown = shown
        self._renews = on_terminal(sys.stderr)
        self._pause = 0.2 if self._renews else 30.0  # seconds between two lines
        self._start = self._last = time.perf_counter()

    def add(self, tokens: int, *, failed: bool) -> None:
        """Count a row that is done."""
        self.rows += 1
        self.failed += failed
        self.tokens += tokens
        now = time.perf_counter()
        if not self._shown or now - self._last < self._pause:
            return
        self._last = now
        if self._renews:
            renew(self._line(now))
        else:
            note(f"gpt-cli: {self._line(now)}")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Tell the whole, unless an error does."""
        if not self._shown or self.rows == self._before:
            return
        if self._renews:
            renew("")
        if kind is None or kind is KeyboardInterrupt:
            note(f"gpt-cli: {self._line(time.perf_counter())}")

    def _line(self, now: float) -> str:
        seconds = max(now - self._start, 1e-9)
        of = "" if self._total is None else f" of {self._total:,}"
        rows = "row" if (self._total or self.rows) == 1 else "rows"
        rate = self.tokens / seconds
        failed = f" ({self.failed:,} failed)" if self.failed else ""
        line = f"{self.rows:,}{of} {rows}{failed}, {self.tokens:,} tokens, {rate:,.0f} a second"
        new = self.rows - self._before
        if self._total is not None and self.rows < self._total and seconds > _SETTLED:
            left = seconds / new * (self._total - self.rows)
            line += f", {_duration(left)} left"
        return line


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
