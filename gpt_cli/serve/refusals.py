"""Errors in OpenAI's shape."""

import json
from typing import Any

from starlette.responses import Response

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
        if isinstance(error, GPTCLIError):
            can_retry = isinstance(error, StoppedError | ResourceError)
            fault = 400 if isinstance(error, InputError) else 500
            return cls(str(error), status=503 if can_retry else fault)
        return cls("a bug; standard error of the server has it", status=500, code="bug")

    @property
    def json(self) -> dict[str, Any]:
        """Return the body of the response."""
        kind = "invalid_request_error"
        if self.status == 429 or self.status >= 500:  # OpenAI's type of both: it is overloaded
            kind = "server_error"
        error = {"message": str(self), "type": kind, "param": self.field, "code": self.code}
        return {"error": error}

    @property
    def response(self) -> Response:
        """Return the response, in ASCII: it may quote a text that is not valid Unicode."""
        return Response(json.dumps(self.json), self.status, self.headers, "application/json")
