"""Lines of JSON on standard error, for `--access-log`."""

import json
import logging
import sys
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any


def write_event(event: str, **fields: Any) -> None:
    """Write what has happened, and when."""
    line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields}
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # it is closed, or its disk is full
            print(json.dumps(line), file=sys.stderr, flush=True)


class JsonFormatter(logging.Formatter):
    """Formats messages of the logging module as the same lines of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a line with the level as its event, the message and a traceback, if any."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "event": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)
