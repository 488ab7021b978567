"""Detect an edit of the model's source, whose layers the compiled library also computes."""

import hashlib
import logging
from contextlib import suppress
from functools import cache
from pathlib import Path

# SHA-256 of model.py and run_state.py, whose layers native/layers.c computes in one call. A test
# compares it: change layers.c with them, then this.
_SHA256 = "21acf4b37e6014129e9aea829eae31adc082ee291f64f96df928f245e43153ac"
MODEL = Path(__file__).with_name("model.py")
_RUN_STATE = Path(__file__).with_name("run_state.py")

_log = logging.getLogger(__name__)


@cache
def is_edited() -> bool:
    """Return whether the model was edited; if so, warn once that its layers run in Python."""
    with suppress(OSError):  # without its source, as in a bundled program, nobody edited it
        text = MODEL.read_text("utf-8") + _RUN_STATE.read_text("utf-8")  # with \n as line ends
        if hashlib.sha256(text.encode()).hexdigest() != _SHA256:
            _log.warning("%s was edited: its layers run in Python, not in one call of C", MODEL)
            return True
    return False
