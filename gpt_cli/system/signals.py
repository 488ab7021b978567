"""The signals that end the program."""

import signal
from types import FrameType
from typing import NoReturn

HANGUP = getattr(signal, "SIGHUP", None)  # a terminal is closed; Windows has no such signal
_BREAK = getattr(signal, "SIGBREAK", None)  # on Windows: Ctrl+Break, or the terminal is closed
ENDING = [
    number for number in (signal.SIGINT, signal.SIGTERM, HANGUP, _BREAK) if number is not None
]
received: list[int] = []  # by `interrupt`, which only the command line installs


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt at a signal, so that partial results are written."""
    received.append(number)
    raise KeyboardInterrupt(number)


def raise_swallowed() -> None:
    """Raise the interrupt again if an import has ignored it, before something long begins.

    Modules in Cython, such as numpy.random's, ignore all errors in a part of their import.
    """
    if received:
        raise KeyboardInterrupt(received[-1])
