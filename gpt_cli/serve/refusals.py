"""Errors in OpenAI's shape."""

from typing import Any

from starlette.responses import JSONResponse

BUG = "a bug; standard error of the server has it"


def refusal(
    status: int, message: str, code: str | None = None, field: str | None = None, **headers: str
) -> JSONResponse:
    """Return the answer to a request that is refused, or has failed."""
    return JSONResponse(error_object(status, message, code, field), status, headers)


def error_object(
    status: int, message: str, code: str | None = None, field: str | None = None
) -> dict[str, Any]:
    """Return the JSON of an error."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}
