"""Try a client's constraint in another process, before the server compiles it.

A schema of 60 characters, such as one with a "multipleOf" of eight digits, may take years and all
memory to compile. llguidance limits neither, and a thread cannot be stopped.
"""

import json
import os
import subprocess
import sys
from functools import lru_cache
from typing import Any

from gpt_cli.options.constraint import SECONDS, import_llguidance, with_stack
from gpt_cli.options.declare import OptionError
from gpt_cli.options.request import Options

_BYTES = 2 << 30  # of address space; the largest constraints take 0.5 GB of memory
_REMEMBERED = 64  # constraints that were compiled, so that they are not tried again


def check(option: str, value: Any) -> None:
    """Raise OptionError if a valid constraint takes too much time or memory to compile."""
    import_llguidance()
    if option != "choices":  # these are quick, and every request may have another list
        _check(option, json.dumps(value))


@lru_cache(_REMEMBERED)
def _check(option: str, value: str) -> None:
    """Raise OptionError if a process cannot compile a constraint; its value is JSON."""
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(  # noqa: S603 (a fixed command)
            [sys.executable, "-P", "-m", __name__, option, str(_BYTES)],
            input=value.encode(),
            env=os.environ | paths,
            capture_output=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        complaint = f"takes more than {SECONDS} seconds to compile: make it simpler"
        raise OptionError(option, complaint) from None
    if done.returncode:
        raise OptionError(option, "takes too much memory to compile: make it simpler")


def _main(option: str, most_bytes: int) -> None:
    """Compile the constraint on standard input; one that is not valid fails soon."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    try:
        options = Options(**{option: json.load(sys.stdin)})
        options.validate()
    except OptionError:
        return
    constraint = options.constraint
    if constraint:
        llguidance = import_llguidance()
        grammar = constraint.grammar
        tokens = llguidance.LLTokenizer("byte")
        with_stack(constraint.kind, lambda: llguidance.LLMatcher(tokens, grammar, log_level=0))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
