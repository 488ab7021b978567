"""Processes that get a signal or have little memory."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

resource = pytest.importorskip("resource")  # not on Windows

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps these limits")

TINY = ("-m", "tiny")

MEBIBYTE = 1 << 20


def text_of(finished: "subprocess.CompletedProcess[bytes]") -> bytes:
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def drip(process: "subprocess.Popen[bytes]", data: bytes) -> bytes:
    """Send a process its input a byte at a time; return its output."""
    guard = threading.Timer(60, process.kill)
    guard.start()

    def feed() -> None:
        for place in range(len(data)):
            process.stdin.write(data[place : place + 1])
            process.stdin.flush()
        process.stdin.close()

    with process:
        feeder = threading.Thread(target=feed)
        feeder.start()
        out = process.stdout.read()
        feeder.join()
    guard.cancel()
    return out


def limit_addresses(mebibytes: int) -> Callable[[], None]:
    size = mebibytes * MEBIBYTE
    return lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size))


LONG = ("generate", *TINY, "-s", 1, "-n", 2000, "--ignore-eos", "--overflow", "shift", "Once")

SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143}

ENDS = {signal.SIGKILL: -9, **SIGNALS}


def each_signal(fault, moment, intact, ends=SIGNALS):
    """Run a test with each of these signals as its `number`."""
    params = [
        pytest.param(
            number,
            id=number.name,
            marks=pytest.mark.fault(fault, f"{number.name} {moment}", code, intact=intact),
        )
        for number, code in ends.items()
    ]
    return pytest.mark.parametrize("number", params)


def leave(world, arguments, size, chance):
    """Read the first bytes of a command's output, and close it at some moment.

    Returns:
        The bytes, and whether the command has noticed.
    """
    with world.start(*arguments) as process:
        guard = threading.Timer(60, process.kill)
        guard.start()
        out = os.read(process.stdout.fileno(), size)
        time.sleep(chance.uniform(0, 0.5))
        process.stdout.close()
        errors = process.stderr.read()
        guard.cancel()
    assert process.returncode in (0, 141)
    assert errors == b""
    return out, process.returncode == 141
