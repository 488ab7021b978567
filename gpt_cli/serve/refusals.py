"""Errors in OpenAI's shape."""

import json
from typing import Any

from starlette.responses import Response

from gpt_cli.errors import GPTCLIError, InputError, ResourceError

BUG = "a bug; standard error of the server has it"


class RequestError(InputError):
    """A request cannot be answered; `field` is the one that is wrong, if it is a field."""

    def __init__(self, message: str, field: str | None = None, status: int = 400):
        super().__init__(message)
        self.field, self.status = field, status


class QueueFullError(GPTCLIError):
    """Too much is being computed already."""


class StoppedError(GPTCLIError):
    """The scheduler has stopped."""


def described(error: Exception) -> tuple[int, str, str | None, str | None]:
    """Return the arguments of `refusal` for an error; 503 lets a client try again."""
    if isinstance(error, RequestError):
        code = "model_not_found" if error.status == 404 else None
        return error.status, str(error), code, error.field
    if isinstance(error, GPTCLIError):
        return (
            503 if isinstance(error, StoppedError | ResourceError) else 500,
            str(error),
            None,
            None,
        )
    return 500, BUG, "bug", None


def refusal(
    status: int, message: str, code: str | None = None, field: str | None = None, **headers: str
) -> Response:
    """Return the answer to a request that is refused or has failed."""
    # In ASCII: it quotes the request, whose texts may not be valid Unicode (such as "\ud800").
    body = json.dumps(error_object(status, message, code, field))
    return Response(body, status, headers, "application/json")


def error_object(
    status: int, message: str, code: str | None = None, field: str | None = None
) -> dict[str, Any]:
    """Return the JSON of an error."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}
