"""The errors that are raised on purpose, each with its exit code.

A message is one line that says what is wrong and what to do. Any other exception is a bug, with
exit code 1.
"""

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from itertools import count, islice
from types import ModuleType
from typing import Any, TypeVar

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")
Result = TypeVar("Result")

# Exceptions from parsing a damaged file, from its JSON to the use of its values.
MALFORMED = (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError)


class GPTCLIError(Exception):
    """Base of every error raised on purpose; never raised itself."""

    exit_code = 1


class InputError(GPTCLIError):
    """The prompt, an option or an argument cannot be used."""

    exit_code = 2
    code = "invalid_input"  # in the JSON of a row


class ContextError(InputError):
    """The text does not fit the model's context."""

    code = "context_overflow"


class StuckError(InputError):
    """A text must go on to match its constraint, and no token can follow."""

    code = "stuck"


class ModelNotFoundError(GPTCLIError):
    """No local model has this name, and the Hub does not provide it."""

    exit_code = 3


class CheckpointError(GPTCLIError):
    """The model's files are damaged, incomplete or not GPT-2's."""

    exit_code = 4


class ResourceError(GPTCLIError):
    """Memory, disk, a device or a package is missing."""

    exit_code = 5


class MismatchError(GPTCLIError):
    """Two ways to compute the same result disagree."""


class RowsError(GPTCLIError):
    """Some rows of a batch failed; the others are done."""

    exit_code = 6


def compute_valid(
    items: Iterable[Item],
    prepare: Callable[[Item], Prepared],
    compute: Callable[[Iterator[Prepared]], Iterable[Result]],
) -> Iterator[Result | InputError]:
    """Yield the result of each item, in order, or the InputError that `prepare` raises for it.

    `compute` gets the other items, prepared, and yields their results. It may read them ahead.
    """
    errors: dict[int, InputError] = {}

    def valid() -> Iterator[Prepared]:
        for index, item in enumerate(items):
            try:
                prepared = prepare(item)
            except InputError as error:
                errors[index] = error
            else:
                yield prepared

    results = iter(compute(valid()))
    waiting: list[Result] = []  # at most one
    for index in count():
        if index not in errors and not waiting:
            waiting.extend(islice(results, 1))  # this may add errors
        if index in errors:
            yield errors.pop(index)
        elif waiting:
            yield waiting.pop()
        else:
            return


def single(results: Iterable[Result | InputError]) -> Result:
    """Return the only one of results; raise it if it is an error."""
    (result,) = results
    return checked(result)


def checked(result: Result | InputError, item: str = "") -> Result:
    """Return a result; raise it if it is an error, perhaps of an item such as `texts[1]`."""
    if isinstance(result, InputError):
        raise about(item, result) if item else result
    return result


def about(item: str, error: InputError) -> InputError:
    """Return an error itself, whose message now begins with the item that it is about."""
    complaint, *rest = error.args
    error.args = (f"{item}: {complaint}", *rest)
    return error


def import_extra(purpose: str, package: str, *modules: str) -> ModuleType:
    """Import modules of an optional package and return the first; raise ResourceError without it.

    The purpose begins the message, such as "Parquet needs pyarrow".
    """
    try:
        imported = [import_module(module) for module in modules]
    except ImportError as error:
        raise ResourceError(f"{purpose} ({error}): pip install {package}") from None
    return imported[0]


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as `1 token` or `2 tokens`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def brief(value: object, most: int = 40, show: Callable[[Any], str] = repr) -> str:
    """Return a value as text, or its beginning and `...` if it has more than `most` characters."""
    text = show(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean NAME?)" with a name that has this prefix, or is close; else ""."""
    from difflib import get_close_matches

    names = {known_name.lower(): known_name for known_name in known}
    beginning = [known_name for known_name in names if name and known_name.startswith(name.lower())]
    near = beginning or get_close_matches(name.lower(), names, 1)
    return f" (did you mean {names[near[0]]}?)" if near else ""
