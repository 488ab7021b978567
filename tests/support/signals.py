"""Processes that get a signal, lose their reader, or have few resources."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from support.world import World, check_failure, fault_row

resource = pytest.importorskip("resource")  # not on Windows

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps these limits")

TINY = ("-m", "tiny")
LONG = ("generate", *TINY, "-s", 1, "-n", 2000, "--ignore-eos", "--overflow", "shift", "Once")
SLOWLY = ("--no-cache", "--threads", 1)  # the same text, slowly on any machine

SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143}
ENDS = {signal.SIGKILL: -9, **SIGNALS}


def limits(**amounts: int) -> Callable[[], None]:
    """Return a `preexec_fn` that sets limits, such as `NOFILE=12`."""

    def limit() -> None:
        for name, amount in amounts.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (amount, amount))

    return limit


def limit_addresses(mebibytes: int) -> Callable[[], None]:
    return limits(AS=mebibytes << 20)


def at_each_limit(
    world: World, *arguments: object
) -> "Iterator[subprocess.CompletedProcess[bytes]]":
    """Run a command with ever more address space: it fails as it should until it has enough."""
    codes = []
    for mebibytes in range(50, 1601, 50):
        finished = world.run(*arguments, preexec_fn=limit_addresses(mebibytes))
        codes.append(finished.returncode)
        if finished.returncode:
            check_failure(finished, 5)
        yield finished
    assert codes == sorted(codes, reverse=True), "from one limit on it is always enough"
    assert codes[-1] == 0


def each_signal(number, moment, intact, ends=SIGNALS):
    """Run a test with each of these signals."""
    params = [
        fault_row(number, f"{end.name} {moment}", code, end, intact=intact)
        for end, code in ends.items()
    ]
    return pytest.mark.parametrize("number", params)


def drip(world: World, *arguments: object, stdin: bytes) -> bytes:
    """Send a command its input a byte at a time; return its output."""

    def feed() -> None:
        with process.stdin:
            for byte in stdin:
                process.stdin.write(bytes([byte]))

    with world.start(*arguments, bufsize=0) as process:
        feeder = threading.Thread(target=feed)
        feeder.start()
        out = process.stdout.read()
        feeder.join()
    return out


def leave(
    world: World, *arguments: object, size: int, wait: float = 0, **options: object
) -> tuple[bytes, int]:
    """Read the first bytes of a command's output and close it after a while.

    The command must not say anything. Return the bytes and its exit code.
    """
    with world.start(*arguments, **options) as process:
        out = process.stdout.read(size)
        time.sleep(wait)
        process.stdout.close()
        assert process.stderr.read() == b""
    return out, process.returncode


def interrupt(
    world: World,
    number: signal.Signals,
    *arguments: object,
    size: int = 0,
    until: Callable[[], object] = lambda: None,
    **options: object,
) -> tuple[int, bytes, bytes]:
    """Send a signal to a command after its first bytes of output, and after `until` has returned.

    Return its exit code, and all that is on its standard output and error.
    """
    with world.start(*arguments, **options) as process:
        out = process.stdout.read(size)
        until()
        process.send_signal(number)
        out += process.stdout.read()
        errors = process.stderr.read()
    assert b"Traceback" not in errors
    return process.returncode, out, errors
