"""Reports of the progress of a job."""


class Observer:
    """Receives the progress of a job; this one ignores it."""

    def note(self, message: str) -> None:
        """Receive a message for the user."""

    def start(self, total: int | None, done: int, failed: int) -> None:
        """Receive the number of rows, if known, and those of an earlier run."""

    def advance(self, tokens: int, failed: bool) -> None:
        """Receive the tokens of one more record, and whether it is an error."""
