"""The Hub's storage of large files, which speaks Xet, and when to leave it for plain HTTP."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpt_cli.hub import messages
from gpt_cli.hub.connection import Exchange
from gpt_cli.hub.progress import DownloadProgress

_PATIENCE = 25.0  # seconds without a byte


class Storage:
    """The storage during one request for a file, which may not be in it."""

    def __init__(self, exchange: Exchange, progress: DownloadProgress):
        self._exchange = exchange
        self.progress = progress
        self._was_silent = False

    def leave_if_silent(self) -> None:
        """End a transfer that has been silent for a while; its call then raises an error."""
        silent = time.monotonic() - self.progress.last_byte
        if self.progress.bars and silent > _PATIENCE:
            self._was_silent = True
            self.leave()

    def leave(self) -> None:
        """End all transfers. The next one begins a new session."""
        from huggingface_hub.utils._xet import abort_xet_session

        abort_xet_session()  # type: ignore[no-untyped-call]

    def has_failed(self, error: Exception) -> bool:
        """Return whether an error comes from the storage, so that HTTP may work."""
        from huggingface_hub.utils._runtime import is_xet_available

        if not is_xet_available() or messages.disk_error(error):
            return False
        return self._exchange.in_xet or type(error) is RuntimeError  # which hf_xet raises

    def reason(self, error: Exception) -> str:
        """Return why the storage failed."""
        return messages.of_storage(error, silent=_PATIENCE if self._was_silent else None)


@contextmanager
def without_xet() -> Iterator[None]:
    """Let the client fetch files over HTTP, as with HF_HUB_DISABLE_XET=1."""
    from huggingface_hub import constants

    before = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before
