"""Detect a change of the model's source, whose layers the compiled library also computes."""

import hashlib
import logging
from contextlib import suppress
from functools import cache
from pathlib import Path

# SHA-256 of model.py and run_state.py, whose layers native/layers.c computes in one call. A test
# compares it: change layers.c with them, then this.
_SHA256 = "71ed10085bfcd30807b21eb2e6782eb9bf784e78a3b3787c6b131856bb11d828"
MODEL = Path(__file__).with_name("model.py")
_RUN_STATE = Path(__file__).with_name("run_state.py")

_log = logging.getLogger(__name__)


@cache
def is_modified() -> bool:
    """Return whether the source was modified; if so, warn once that its layers run in Python."""
    with suppress(OSError):  # without its source, as in a bundled program, nobody modified it
        text = MODEL.read_text("utf-8") + _RUN_STATE.read_text("utf-8")  # with \n as line ends
        if hashlib.sha256(text.encode()).hexdigest() != _SHA256:
            _log.warning("%s was modified: its layers run in Python, not in one call of C", MODEL)
            return True
    return False
