"""The Hub's client for one use: muted, with bounded waits, and its errors in our words."""

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gpt_cli.errors import GPTCLIError, InputError, ModelNotFoundError
from gpt_cli.hub import messages
from gpt_cli.hub.local import is_on
from gpt_cli.hub.messages import endpoint

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo

# Limits of waits, in seconds.
_FIRST_CONNECTION = 2.5  # with the start of Python and of the client, 3 on a dead network
_CONNECTION = 3.0  # later ones, to each address of a server
_ANSWER = 10.0  # for a request that brings no file; the client would wait for 6 times 60
_PAUSES = (1.0, 2.0)  # before the first request is repeated to an overloaded Hub
_OVERLOADED = (429, 500, 502, 503, 504)
_PIECE = 1_000_000  # bytes that are read at a time over HTTP: the client's 10 MB look like silence
_LONGEST_WAIT = 20  # of Retry-After; the client would wait silently for any time
_TOKEN = "/xet-read-token/"  # noqa: S105 (in the address of requests for one)

# The client's session, settings and log are one for all threads.
_one_use = threading.RLock()


class Exchange:
    """The requests of one use of the client: limit their waits, and note where the file is."""

    in_xet = False  # whether the file is in a storage that speaks Xet
    _token_requests = 0  # for this storage

    def before_request(self, request: Any) -> None:
        """Limit the waits of a request; raise ConnectionError if it asks for a token again."""
        timeouts = request.extensions.setdefault("timeout", {})
        _limit(timeouts, "connect", _CONNECTION)
        brings_file = request.method == "GET" and "/api/" not in request.url.path
        if not brings_file:
            for kind in ("read", "write", "pool"):
                _limit(timeouts, kind, _ANSWER)
        if _TOKEN in request.url.path:
            self._token_requests += 1
            if self._token_requests > 1:  # the client would try 6 times; HTTP needs no token
                raise ConnectionError("the Hub gave no token")

    def after_response(self, response: Any) -> None:
        """Note where a file is. Raise the client's HfHubHTTPError instead of a long wait."""
        from huggingface_hub.errors import HfHubHTTPError

        status = response.status_code
        if _TOKEN in response.url.path and status >= 400:
            raise HfHubHTTPError("no token for the storage", response=response)
        if status in _OVERLOADED and messages.wait_of(response) > _LONGEST_WAIT:
            raise HfHubHTTPError("the server asks for a long wait", response=response)
        if "X-Xet-Hash" in response.headers:
            self.in_xet = True


def switched_off() -> bool:
    """Return whether the environment switches the Hub off, as its client reads it."""
    return is_on(os.getenv("HF_HUB_OFFLINE") or os.getenv("TRANSFORMERS_OFFLINE"))


def problem() -> str | None:
    """Return the reason why the Hub cannot be used, or None if it answers a small request."""
    if switched_off():
        return "switched off by HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE"
    try:
        with client(messages.of_small_request):
            from huggingface_hub import get_session

            from gpt_cli.hub.network import reach  # imports socket

            reach(endpoint(), _patience(_FIRST_CONNECTION))
            url = f"{endpoint()}/api/models?limit=1"
            answer = get_session().get(url, timeout=_patience(_ANSWER))
            if answer.status_code >= 500:
                raise ValueError(f"status {answer.status_code}")
    except (InputError, ModelNotFoundError) as error:
        return str(error)
    return None


def ask(api: "HfApi", repo: str, revision: str) -> "ModelInfo":
    """Return the description of a revision; ask an overloaded Hub again."""
    from huggingface_hub.errors import HfHubHTTPError

    from gpt_cli.hub.network import reach  # imports socket

    reach(endpoint(), _patience(_FIRST_CONNECTION))
    timeout = _patience(_ANSWER)
    request = partial(api.model_info, repo, revision=revision, timeout=timeout, files_metadata=True)
    for pause in _PAUSES:
        try:
            return request()
        except HfHubHTTPError as error:
            if error.response.status_code not in _OVERLOADED:
                raise
        time.sleep(pause)
    return request()


def _patience(seconds: float) -> float:
    """Return the seconds to wait for a server: those of the environment, or else `seconds`."""
    return float(os.getenv("HF_HUB_ETAG_TIMEOUT") or seconds)


@contextmanager
def client(explain: Callable[[Exception], str]) -> Iterator[Exchange]:
    """Mute the Hub's client and translate its errors for one use of it, by one thread at a time.

    Errors of the disk stay OSErrors. Raise InputError if the client cannot start, and
    ModelNotFoundError with the message of `explain` for any other error.
    """
    if not endpoint().startswith(("http://", "https://")):
        raise InputError("HF_ENDPOINT must begin with http:// or https://")
    with _one_use, warnings.catch_warnings(action="ignore"):
        hooks = _start()
        try:
            with _settings(hooks) as exchange:
                yield exchange
        except GPTCLIError:
            raise
        except Exception as error:
            disk = messages.disk_error(error)
            if disk is error:
                raise
            if disk:
                raise disk from error
            raise ModelNotFoundError(explain(error)) from error


def _start() -> dict[str, list[Callable[..., Any]]]:
    """Import the client and start its session; return the hooks of the session."""
    _set_defaults()
    try:
        # Names of the package print the errors of their imports, so modules are imported first.
        import huggingface_hub.constants
        import huggingface_hub.utils.logging

        _ = urlsplit(endpoint()).port  # ValueError; older clients accept any port
        return huggingface_hub.get_session().event_hooks
    except Exception as error:  # the HTTP library has types of its own for wrong variables
        raise InputError(
            f"the Hub's client cannot start ({messages.first_line(error)}): check the "
            "environment variables HF_*, SSL_* and *_PROXY"
        ) from error


@contextmanager
def _settings(hooks: dict[str, list[Callable[..., Any]]]) -> Iterator[Exchange]:
    """Mute the client, and watch its requests."""
    from huggingface_hub import constants
    from huggingface_hub.utils import logging as client_log

    exchange = Exchange()
    verbosity = client_log.get_verbosity()
    piece = constants.DOWNLOAD_CHUNK_SIZE
    client_log.set_verbosity(logging.CRITICAL)
    constants.DOWNLOAD_CHUNK_SIZE = _PIECE
    hooks["request"].append(exchange.before_request)
    hooks["response"].append(exchange.after_response)
    try:
        yield exchange
    finally:
        hooks["request"].remove(exchange.before_request)
        hooks["response"].remove(exchange.after_response)
        client_log.set_verbosity(verbosity)
        constants.DOWNLOAD_CHUNK_SIZE = piece


def _set_defaults() -> None:
    """Set what the client reads at import, and hf_xet when it starts; settings of the user win."""
    # Else the client first sends another request, which takes 3 seconds on a dead network.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_XET_CLIENT_RETRY_MAX_ATTEMPTS", "2")  # else up to 5 minutes
    # Half a gigabyte arrived as fast as without, in 0.2 GB of memory instead of 0.2 to 0.6.
    buffers = {
        "HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_SIZE": "64mb",
        "HF_XET_RECONSTRUCTION_DOWNLOAD_BUFFER_LIMIT": "128mb",
    }
    if not any(name in os.environ for name in (*buffers, "HF_XET_HIGH_PERFORMANCE")):
        os.environ.update(buffers)


def _limit(timeouts: dict[str, float | None], kind: str, seconds: float) -> None:
    """Set a timeout to `seconds`, or to those of the environment, unless it is shorter."""
    most = _patience(seconds)
    timeouts[kind] = min(timeouts.get(kind) or most, most)
