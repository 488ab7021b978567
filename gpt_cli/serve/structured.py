"""The fields of a request that constrain a text: OpenAI's and vLLM's.

https://platform.openai.com/docs/guides/structured-outputs
https://docs.vllm.ai/en/latest/features/structured_outputs.html
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gpt_cli.serve.refusals import RequestError

# vLLM's names, in "structured_outputs" and after its older "guided_", with those of options.
_OPTIONS = {"json": "json_schema", "regex": "regex", "choice": "choices", "grammar": "grammar"}
_GUIDED = {f"guided_{name}": option for name, option in _OPTIONS.items()}
CONSTRAINT_FIELDS = ("response_format", "structured_outputs", *_GUIDED)
_ANY_OBJECT = {"type": "object"}
_FORMATS = (
    '{"type": "json_schema", "json_schema": {"schema": {...}}}, {"type": "json_object"} or '
    '{"type": "text"}'
)


class FieldConstraint(NamedTuple):
    """A constraint of a text, as an option, and the field of a request that sets it."""

    option: str
    value: Any
    field: str  # of the body


def constraint_of(body: Mapping[str, Any]) -> FieldConstraint | None:
    """Return the constraint of a request, or None; raise RequestError if a field is not valid."""
    fields = [field for field in CONSTRAINT_FIELDS if body.get(field) is not None]
    constraints = [constraint for field in fields for constraint in _read(field, body[field])]
    for constraint in constraints:
        if constraint.value in ("", []):
            field = constraint.field
            raise RequestError(f"{field} must not be empty", field)
    if len(constraints) > 1:
        field = constraints[1].field
        raise RequestError(f"{field} must be the only constraint of a text", field)
    return constraints[0] if constraints else None


def _read(field: str, value: Any) -> Iterator[FieldConstraint]:
    """Yield the constraints of one field."""
    match field, value:
        case "structured_outputs", _:
            yield from _structured_outputs(value)
        case "response_format", {"type": "text"}:
            return
        case (
            "response_format",
            {"type": "json_schema", "json_schema": {"schema": dict() as schema}}
            # The form for llama.cpp's server, and others.
            | {"type": "json_schema" | "json_object", "schema": dict() as schema},
        ):
            yield FieldConstraint("json_schema", schema, field)
        case "response_format", {"type": "json_object", **more} if more.get("schema") is None:
            yield FieldConstraint("json_schema", _ANY_OBJECT, field)
        case "response_format", _:
            raise RequestError(f"response_format must be {_FORMATS}", field)
        case _:
            yield FieldConstraint(_GUIDED[field], value, field)


def _structured_outputs(value: Any) -> Iterator[FieldConstraint]:
    """Yield the constraints of vLLM's "structured_outputs", at least one."""
    known = ", ".join((*_OPTIONS, "json_object"))
    parts = value if isinstance(value, dict) else {}
    if parts.get("json_object") is not True and all(parts.get(name) is None for name in _OPTIONS):
        message = f"structured_outputs must be an object with one of {known}"
        raise RequestError(message, "structured_outputs")
    for name, part in parts.items():
        field = f"structured_outputs.{name:.40}"
        if name in _OPTIONS and part is not None:
            yield FieldConstraint(_OPTIONS[name], part, field)
        elif name == "json_object" and part is True:
            yield FieldConstraint("json_schema", _ANY_OBJECT, field)
        elif part not in (None, False) and name != "disable_fallback":
            raise RequestError(f"{field} is not known here; there are {known}", field)
