"""The fields of a request that say what a text must match: OpenAI's and vLLM's.

https://platform.openai.com/docs/guides/structured-outputs
https://docs.vllm.ai/en/latest/features/structured_outputs.html
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from gpt_cli.serve.refusals import RequestError

# vLLM's names, in "structured_outputs" and after its older "guided_", with those of options.
_OPTIONS = {"json": "json_schema", "regex": "regex", "choice": "choices", "grammar": "grammar"}
FIELDS = ("response_format", "structured_outputs", *(f"guided_{name}" for name in _OPTIONS))
_ANY_OBJECT = {"type": "object"}
_FORMATS = (
    '{"type": "json_schema", "json_schema": {"schema": {...}}}, {"type": "json_object"} or '
    '{"type": "text"}'
)


class Asked(NamedTuple):
    """The value of an option, and the field that it comes from."""

    field: str
    value: Any


def take(given: dict[str, Any]) -> dict[str, Asked]:
    """Remove the fields from a request; return the option that they ask for, if any.

    Raises:
        RequestError: a field is not understood, or there are several.
    """
    given.pop("guided_decoding_backend", None)  # there is only one
    own = {field: given.pop(field) for field in FIELDS if given.get(field) is not None}
    found = [each for field, value in own.items() for each in _read(field, value)]
    for _, (field, value) in found:
        if value in ("", []):
            raise RequestError(f"{field} must not be empty", field)
    if len(found) > 1:
        _, second = found[1]
        raise RequestError(f"{second.field} must be the only constraint of a text", second.field)
    return dict(found)


def _read(field: str, value: Any) -> Iterator[tuple[str, Asked]]:
    """Yield the options of one field."""
    if field == "structured_outputs":
        yield from _structured_outputs(value)
    elif field != "response_format":
        yield _OPTIONS[field.removeprefix("guided_")], Asked(field, value)
    elif (schema := _schema_of(value)) is not None:
        yield "json_schema", Asked(field, schema)


def _schema_of(format: Any) -> Any:
    """Return the schema of OpenAI's "response_format", or None for any text."""
    match format:
        case {"type": "text"}:
            return None
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return schema
        # Written like this for llama.cpp's server, and others.
        case {"type": "json_schema" | "json_object", "schema": dict() as schema}:
            return schema
        case {"type": "json_object", **more} if more.get("schema") is None:
            return _ANY_OBJECT
    raise RequestError(f"response_format must be {_FORMATS}", "response_format")


def _structured_outputs(given: Any) -> Iterator[tuple[str, Asked]]:
    """Yield the options of vLLM's "structured_outputs", at least one."""
    known = ", ".join((*_OPTIONS, "json_object"))
    asked = isinstance(given, dict) and any(given.get(name) is not None for name in _OPTIONS)
    if not (asked or (isinstance(given, dict) and given.get("json_object") is True)):
        message = f"structured_outputs must be an object with one of {known}"
        raise RequestError(message, "structured_outputs")
    for name, value in given.items():
        field = f"structured_outputs.{name:.40}"
        if name in _OPTIONS and value is not None:
            yield _OPTIONS[name], Asked(field, value)
        elif name == "json_object" and value is True:
            yield "json_schema", Asked(field, _ANY_OBJECT)
        elif value not in (None, False) and name != "disable_fallback":
            raise RequestError(f"{field} is not known here; there are {known}", field)
