"""Detect an edit of model.py, whose layers the compiled library also computes."""

import hashlib
import logging
from contextlib import suppress
from functools import cache
from pathlib import Path

# SHA-256 of model.py, whose layers native/layers.c computes in one call. A test compares it: change
# layers.c with model.py, then this.
_SHA256 = "eda0a8092229ab26d76aeb27e369514f33fb7d728c875d7399e33fae54f8ccc5"
MODEL = Path(__file__).with_name("model.py")

_log = logging.getLogger(__name__)


@cache
def is_edited() -> bool:
    """Return whether model.py was edited; if so, warn once that its layers run in Python."""
    with suppress(OSError):  # without its source, as in a bundled program, nobody edited it
        text = MODEL.read_text("utf-8")  # with \n at the ends of lines
        if hashlib.sha256(text.encode()).hexdigest() != _SHA256:
            _log.warning("%s was edited: its layers run in Python, not in one call of C", MODEL)
            return True
    return False
