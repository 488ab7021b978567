"""The fields of a request that constrain a text: OpenAI's and vLLM's.

https://platform.openai.com/docs/guides/structured-outputs
https://docs.vllm.ai/en/latest/features/structured_outputs.html
"""

from collections.abc import Iterator, Mapping
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


class Constrained(NamedTuple):
    """An option that constrains a text, its value, and the field that it comes from."""

    option: str
    value: Any
    field: str


def constraint_of(body: Mapping[str, Any]) -> Constrained | None:
    """Return the constraint of a request, if any; raise RequestError if it is not valid."""
    values = {field: body[field] for field in FIELDS if body.get(field) is not None}
    constraints = [item for field, value in values.items() for item in _read(field, value)]
    for _, value, field in constraints:
        if value in ("", []):
            raise RequestError(f"{field} must not be empty", field)
    if len(constraints) > 1:
        field = constraints[1].field
        raise RequestError(f"{field} must be the only constraint of a text", field)
    return constraints[0] if constraints else None


def _read(field: str, value: Any) -> Iterator[Constrained]:
    """Yield the constraints of one field."""
    if field == "structured_outputs":
        yield from _structured_outputs(value)
    elif field != "response_format":
        yield Constrained(_OPTIONS[field.removeprefix("guided_")], value, field)
    elif (schema := _schema_of(value)) is not None:
        yield Constrained("json_schema", schema, field)


def _schema_of(format: Any) -> Any:
    """Return the schema of OpenAI's "response_format", or None for any text."""
    match format:
        case {"type": "text"}:
            return None
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return schema
        # The form for llama.cpp's server, and others.
        case {"type": "json_schema" | "json_object", "schema": dict() as schema}:
            return schema
        case {"type": "json_object", **more} if more.get("schema") is None:
            return _ANY_OBJECT
    raise RequestError(f"response_format must be {_FORMATS}", "response_format")


def _structured_outputs(value: Any) -> Iterator[Constrained]:
    """Yield the constraints of vLLM's "structured_outputs", at least one."""
    known = ", ".join((*_OPTIONS, "json_object"))
    parts = value if isinstance(value, dict) else {}
    if parts.get("json_object") is not True and all(parts.get(name) is None for name in _OPTIONS):
        message = f"structured_outputs must be an object with one of {known}"
        raise RequestError(message, "structured_outputs")
    for name, part in parts.items():
        field = f"structured_outputs.{name:.40}"
        if name in _OPTIONS and part is not None:
            yield Constrained(_OPTIONS[name], part, field)
        elif name == "json_object" and part is True:
            yield Constrained("json_schema", _ANY_OBJECT, field)
        elif part not in (None, False) and name != "disable_fallback":
            raise RequestError(f"{field} is not known here; there are {known}", field)
