"""The signals that end the program."""

import signal
from types import FrameType
from typing import NoReturn

HANGUP = getattr(signal, "SIGHUP", None)  # a terminal is closed; Windows has no such signal
ENDING = [number for number in (signal.SIGINT, signal.SIGTERM, HANGUP) if number is not None]
received: list[int] = []  # by `interrupt`


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt at a signal, so that partial results are written."""
    received.append(number)
    raise KeyboardInterrupt(number)


def raise_swallowed() -> None:
    """Raise the interrupt again if code that it came upon has ignored it.

    Cython's modules, such as those of numpy.random, ignore all errors in a part of their import.
    """
    if received:
        raise KeyboardInterrupt(received[-1])
