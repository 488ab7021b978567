"""Commands that run long, and what they print."""

import subprocess

from support.in_process import run_here
from support.processes import COMMAND

GENERATE = ["generate", "--model", "tiny"]

TINY = [*COMMAND, *GENERATE]


def generate(*arguments):
    """Return the arguments of a command that generates with tiny, or the model that they name."""
    return [*(GENERATE[:1] if {"-m", "--model"} & {*arguments} else GENERATE), *arguments]


def generated(*arguments, **options):
    """Return the text, and what is on standard error."""
    out, errors = run_here(*generate(*arguments), **options)
    return out.decode(), errors


def text_of(*arguments, **options):
    return generated(*arguments, **options)[0]


LONG = ["Once upon a time", "-n", "400", "--ignore-eos", "--seed", "1"]

# Generates until it is stopped, as the last of two --max-tokens counts.
ENDLESS = [*TINY, *LONG, "-n", "1000000", "--overflow", "shift", "--stats"]

PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
