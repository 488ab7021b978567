"""`gpt-cli`, and `python -m gpt_cli`."""

import gc
import os
import signal
import sys
from threading import Timer
from typing import Any, NoReturn


def main() -> NoReturn:
    """Run the command line. An interrupt prints nothing, even during the imports."""
    gc.set_threshold(50_000)  # imported objects stay: examining them repeatedly takes 20 ms
    sys.unraisablehook = _raise_again
    try:
        from gpt_cli.cli import app

        app.main()
    except KeyboardInterrupt as interrupt:  # also before and after a command, or in its error
        os._exit(128 + _signal_of(interrupt))
    except RuntimeError as error:  # Python 3.11, while a class is created
        if isinstance(error.__cause__, KeyboardInterrupt):
            os._exit(130)
        raise
    except MemoryError:
        os.write(2, b"gpt-cli: error: not enough memory to start: close other programs\n")
        os._exit(5)


def _raise_again(unraisable: Any) -> None:
    """Send an interrupt again if Python could not raise it, such as in a weakref callback."""
    if unraisable.exc_type is KeyboardInterrupt:
        number = _signal_of(unraisable.exc_value)
        # Later, even on a busy machine, than this hook returns: within it, it would be lost again.
        Timer(0.2, _send, (number,)).start()
    else:
        sys.__unraisablehook__(unraisable)


def _send(number: int) -> None:
    """Send a signal to this process, to any of its threads."""
    if sys.platform == "win32":  # there, os.kill would end it
        signal.raise_signal(number)
    else:
        os.kill(os.getpid(), number)


def _signal_of(interrupt: BaseException) -> int:
    """Return the signal of an interrupt; only our handler names it, and Python's is of SIGINT."""
    return interrupt.args[0] if interrupt.args else signal.SIGINT


if __name__ == "__main__":
    main()
