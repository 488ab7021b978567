"""Messages for errors of the Hub: who was asked, what it answered, and what to do now."""

import errno
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpt_cli.errors import MALFORMED, counted
from gpt_cli.hub.local import nearest

AGAIN = "run the command again"
WAY_OUT = "or use a local model (`gpt-cli models` lists them), such as `tiny`"
_NO_HUB = "does not answer like a Hub: check HF_ENDPOINT and the proxy"
_SYSTEM_CODE = re.compile(r"\(os error (\d+)\)")  # in messages of hf_xet, also about networks
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG)
_PROXY_DENIES = (
    "the proxy asks for a name and a password (407): put them into the variable, such as "
    "HTTPS_PROXY=http://NAME:WORD@HOST:PORT"
)


class UnreachableError(Exception):
    """No connection to the Hub. `is_slow` tells whether more patience might help."""

    def __init__(self, message: str, *, is_slow: bool = False):
        super().__init__(message)
        self.is_slow = is_slow


def endpoint() -> str:
    """Return the address of the Hub."""
    return os.getenv("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def without_password(address: str) -> str:
    """Return an address without its name and password."""
    return re.sub(r"//[^/@]*@", "//", address)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), "")[:150]


def disk_error(error: Exception) -> OSError | None:
    """Return an error of a download as an error of the disk; None if it is another error."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    code = _SYSTEM_CODE.search(str(error))
    if code and int(code[1]) in _DISK:  # of hf_xet, which names no file
        return OSError(int(code[1]), os.strerror(int(code[1])))
    return None


def of_small_request(error: Exception) -> str:
    """Return the message for an error of a request that only tests whether the Hub answers."""
    if isinstance(error, UnreachableError):
        return str(error)
    reason = first_line(error) or type(error).__name__
    return f"{without_password(endpoint())} does not answer ({reason})"


def of_storage(error: Exception, *, silent: float | None) -> str:
    """Return why a file did not come from the storage that speaks Xet.

    `silent` is the number of seconds without a byte if the storage was left for that reason.
    """
    if silent is not None:
        return f"the storage sent nothing for {silent:.0f} s"
    text = str(error)
    response = getattr(error, "response", None)
    status = re.search(r"HTTP status \w+ error \((\d+)", text)
    code: str | None = None
    if response is not None:
        code = str(response.status_code)
    elif status:
        code = status[1]
    host = re.search(r"\w+://([^/\s)]+)", text)
    if response is not None or "oken" in text or "Timeout" in type(error).__name__:
        answer = f" ({code})" if code else ""
        return f"the Hub gave no access to the storage{answer}"
    storage = f"the storage {host[1]}" if host else "the storage"
    if code:
        return f"{storage} answers {code}"
    if "error sending request" in text:
        return f"{storage} cannot be reached"
    if "decoding" in text or "unexpected end" in text or "Format error" in text:
        return "the connection to the storage broke"
    return f"the storage failed ({first_line(error) or type(error).__name__})"


def of_download(repo: str, revision: str, error: BaseException) -> str:
    """Return the message for an error of the client while it asks for a model or fetches it."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
        error = error.__cause__  # the outer error only adds that the file is not cached
    server = without_password(endpoint())
    reason = first_line(error)
    match error:
        case errors.GatedRepoError():
            terms = f"accept its terms at {server}/{repo}"
            return f"{repo} is gated: {terms}, then set HF_TOKEN or run `hf auth login`"
        case errors.RepositoryNotFoundError():
            unknown = f"no folder and no model on the Hub is named {repo}{nearest(repo)}"
            return f"{unknown}: check the name; a private model needs HF_TOKEN or `hf auth login`"
        case errors.RevisionNotFoundError():
            return f"{repo} has no revision {revision}: give one of its branches, tags or commits"
        case errors.RemoteEntryNotFoundError():
            return f"{repo} has no file {Path(error.response.url.path).name} at {revision}"
        case errors.HfHubHTTPError():
            return _of_status(repo, error.response)
        case errors.HFValidationError():
            return f"{repo} cannot be a name on the Hub: {reason}"
        case errors.FileMetadataError():
            return f"{server} {_NO_HUB}"
        case UnreachableError():
            more = " (HF_HUB_ETAG_TIMEOUT=30 waits longer)" if error.is_slow else ""
            return _of_network(repo, f"{error}{more}")
    return _of_connection(repo, error)


def _of_connection(repo: str, error: BaseException) -> str:
    """Return the message for an error of the HTTP library or of Python."""
    server = _server_of(error)
    reason = first_line(error)
    kind = type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        cure = "set SSL_CERT_FILE to a file with the certificates of your network"
        return f"the certificate of {server} is not trusted: {cure}"
    if kind == "ProxyError" and "407" in reason:
        return _PROXY_DENIES
    if kind in ("ConnectError", "ProxyError"):  # of httpx, or httpx2 since the client's version 2
        return _of_network(repo, f"{server} cannot be reached ({reason})")
    if "Timeout" in kind:
        return _of_network(repo, f"{server} does not answer (HF_HUB_ETAG_TIMEOUT=30 waits longer)")
    if isinstance(error, UnicodeEncodeError) or "Illegal header" in reason:
        cure = "set HF_TOKEN, or run `hf auth login`, with the token alone"
        return f"the token for the Hub has a character that no token has: {cure}"
    broken = ("RemoteProtocolError", "ReadError", "WriteError")
    if kind in broken or "Consistency" in reason:
        return f"the connection to {server} broke before all of {repo} was here: {AGAIN}"
    if isinstance(error, MALFORMED):
        return f"{server} {_NO_HUB}"
    return f"the download of {repo} failed ({reason}): {AGAIN}"


def _server_of(error: BaseException) -> str:
    """Return the address of the server that an error of the HTTP library is about."""
    try:
        url = urlsplit(str(error.request.url))  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):  # an error without a request
        return without_password(endpoint())
    return without_password(f"{url.scheme}://{url.netloc}")


def _of_network(repo: str, failure: str) -> str:
    cure = f"check the network and the proxy, {WAY_OUT}"
    return f"{failure}, and {repo} is not local{nearest(repo)}: {cure}"


def _of_status(repo: str, response: Any) -> str:
    host = response.url.host
    match response.status_code:
        case 401 | 403 | 404 as status if host != urlsplit(endpoint()).hostname:
            return _of_network(repo, f"{host}, which has files of the Hub, answers {status}")
        case 401 | 403 as status:
            cure = "set HF_TOKEN to a token that has access, or run `hf auth login`"
            return f"the Hub denies access to {repo} ({status}): {cure}"
        case 404:
            cure = "check the name, and HF_ENDPOINT if it is set"
            return f"{without_password(endpoint())} has no {repo} (404): {cure}"
        case 407:
            return _PROXY_DENIES
        case 429:
            seconds = wait_of(response)
            wait = counted(seconds, "second") if seconds else "some minutes"
            return f"too many requests to the Hub (429): wait {wait}, or set HF_TOKEN"
        case status:
            return f"the Hub answers {status} for {repo}: try again later, {WAY_OUT}"


def wait_of(response: Any) -> int:
    """Return the seconds to wait by the two headers that the client respects."""
    waits = re.findall(r"^\d+$", response.headers.get("Retry-After", ""))
    if response.status_code == 429:
        waits += re.findall(r"r\s*=\s*0\s*;\s*t\s*=\s*(\d+)", response.headers.get("RateLimit", ""))
    return max(map(int, waits), default=0)
