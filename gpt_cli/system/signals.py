"""The signals that end the program."""

import signal

HANGUP = getattr(signal, "SIGHUP", None)  # a terminal is closed; Windows has no such signal
ENDING = [number for number in (signal.SIGINT, signal.SIGTERM, HANGUP) if number is not None]
