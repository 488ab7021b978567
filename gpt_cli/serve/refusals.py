"""Errors in OpenAI's shape."""

from typing import Any

from gpt_cli.errors import GPTCLIError, InputError, ResourceError


class QueueFullError(GPTCLIError):
    """Too much is being computed already."""


class StoppedError(GPTCLIError):
    """The scheduler has stopped."""


class RequestError(GPTCLIError):
    """A request is refused or has failed; `field` is the one that is wrong, if it is a field."""

    def __init__(
        self,
        message: str,
        field: str | None = None,
        status: int = 400,
        code: str | None = None,
        **headers: str,
    ):
        super().__init__(message)
        self.field = field
        self.status = status
        self.code = code
        self.headers = headers

    @classmethod
    def of(cls, error: Exception) -> "RequestError":
        """Return any error as one with a status; 503 lets a client try again."""
        if isinstance(error, RequestError):
            return error
        if isinstance(error, QueueFullError):
            return cls(str(error), status=429, code="server_busy")
        if isinstance(error, StoppedError):
            return cls(str(error), status=503, code="stopped")
        if isinstance(error, ResourceError):
            return cls(str(error), status=503)
        if isinstance(error, GPTCLIError):
            return cls(str(error), status=400 if isinstance(error, InputError) else 500)
        return cls("a bug; standard error of the server has it", status=500, code="bug")

    @property
    def kind(self) -> str:
        """Return OpenAI's type of the error."""
        overloaded = self.status == 429 or self.status >= 500  # both have one type
        return "server_error" if overloaded else "invalid_request_error"

    @property
    def json(self) -> dict[str, Any]:
        """Return the body of the response."""
        error = {"message": str(self), "type": self.kind, "param": self.field, "code": self.code}
        return {"error": error}

    @property
    def reason(self) -> dict[str, str | None]:
        """Return what the log has of the error; without a code, the type stands for it."""
        return {"code": self.code or self.kind, "param": self.field}


def no_route(method: str, path: str, allowed: str | None = None) -> RequestError:
    """Return the refusal of a path, or of a method if others are `allowed` there."""
    message = f"{method} {path!r:.100}: there is no such path"
    if allowed:
        message = f"{method} {path!r:.100}: use {allowed}"
    elif path == "/v1/chat/completions":
        message = "GPT-2 is a base model and cannot chat: use /v1/completions"
    elif not path.startswith("/v1/"):
        message += "; OpenAI's begin with /v1"
    if allowed:
        return RequestError(message, status=405, code="method_not_supported")
    return RequestError(message, status=404, code="unknown_url")
