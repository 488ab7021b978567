"""Errors in OpenAI's shape."""

import json
from typing import Any

from starlette.responses import Response

from gpt_cli.errors import InputError

BUG = "a bug; standard error of the server has it"


def refusal(
    status: int, message: str, code: str | None = None, field: str | None = None, **headers: str
) -> Response:
    """Return the answer to a request that is refused, or has failed."""
    # In ASCII: it quotes the request, whose texts may have no UTF-8 (such as "\ud800").
    body = json.dumps(error_object(status, message, code, field))
    return Response(body, status, headers, "application/json")


def error_object(
    status: int, message: str, code: str | None = None, field: str | None = None
) -> dict[str, Any]:
    """Return the JSON of an error."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


class RequestError(InputError):
    """A request cannot be answered; `field` is what is wrong in it, if it is a field."""

    def __init__(self, message: str, field: str | None = None, status: int = 400):
        super().__init__(message)
        self.field, self.status = field, status
