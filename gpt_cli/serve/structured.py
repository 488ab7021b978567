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


class Asked(NamedTuple):
    """The value of an option, and the field that it comes from."""

    field: str
    value: Any


def take(given: dict[str, Any]) -> dict[str, Asked]:
    """Remove the fields from a request; return the option that they ask for, if any.

    Raises:
        RequestError: a field is not understood, or there are several.
    """
    own = {field: given.pop(field) for field in FIELDS if given.get(field) is not None}
    found = [each for field, value in own.items() for each in _read(field, value)]
    if len(found) > 1:
        _, second = found[1]
        raise RequestError(f"{second.field} must be the only constraint of a text", second.field)
    return dict(found)


def _read(field: str, value: Any) -> Iterator[tuple[str, Asked]]:
    """Yield the options of one field."""
    match field, value:
        case "response_format", {"type": "text"}:
            pass
        case "response_format", {"type": "json_object"}:
            yield "json_schema", Asked(field, {"type": "object"})
        case "response_format", {"type": "json_schema", "json_schema": {"schema": schema}}:
            yield "json_schema", Asked(field, schema)
        case "response_format", _:
            known = '{"type": "json_schema", "json_schema": {"schema": ...}}'
            message = f'{field} must be {known}, {{"type": "json_object"}} or {{"type": "text"}}'
            raise RequestError(message, field)
        case "structured_outputs", dict() if value.keys() <= _OPTIONS.keys():
            for name, each in value.items():
                if each is not None:
                    yield _OPTIONS[name], Asked(field, each)
        case "structured_outputs", _:
            raise RequestError(
                f"{field} must be an object with one of {', '.join(_OPTIONS)}", field
            )
        case _:
            yield _OPTIONS[field.removeprefix("guided_")], Asked(field, value)
