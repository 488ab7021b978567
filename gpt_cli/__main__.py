"""`gpt-cli`, and `python -m gpt_cli`."""

import gc
import os
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line; an interrupt is quiet from its first import on."""
    gc.set_threshold(50_000)  # imported objects stay: to examine them again takes 20 ms
    try:
        from gpt_cli.cli import app

        app.main()
    except KeyboardInterrupt:
        os._exit(130)
    except MemoryError:
        os.write(2, b"gpt-cli: error: not enough memory to start: close other programs\n")
        os._exit(5)


if __name__ == "__main__":
    main()
