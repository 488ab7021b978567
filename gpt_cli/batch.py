"""Many prompts, a batch at a time: computed by length, and given back in their order."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from gpt_cli.config import GPT2Config
from gpt_cli.errors import InputError
from gpt_cli.generate import Completion, Options, Request, generate, working_set
from gpt_cli.model import GPT2
from gpt_cli.tokenizer import Tokenizer

LARGEST = 64  # rows: beyond, a batch takes memory and gives little speed on a CPU
_READ_AHEAD = 4  # batches, of which the rows are sorted by length

_WHOLE: tuple[str, tuple[type, ...]] = ("a whole number", (int,))
_NUMBER: tuple[str, tuple[type, ...]] = ("a number", (int, float))

# What a row may say for itself, each with its type.
ROW_OPTIONS = {
    "max_tokens": _WHOLE,
    "temperature": _NUMBER,
    "top_k": _WHOLE,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "repeat_penalty": _NUMBER,
    "seed": _WHOLE,
    "stop": ("a string or a list of strings", (str, list)),
}


def row_options(defaults: Options, row: Mapping[str, Any]) -> Options:
    """Return the options of a row: its own, or the defaults where it has none or None.

    Raises:
        InputError: an option has no such name, type or value.
    """
    options = {name: value for name, value in row.items() if value is not None}
    for name, value in options.items():
        if name not in ROW_OPTIONS:
            raise InputError(f"unknown field {name!r:.40}; a row may have {', '.join(ROW_OPTIONS)}")
        kind, types = ROW_OPTIONS[name]
        if isinstance(value, bool) or not isinstance(value, types):
            raise InputError(f"{name} must be {kind}, not {json.dumps(value, default=str):.40}")
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    if not all(isinstance(stop, str) for stop in options.get("stop", ())):
        raise InputError(f"stop must be {ROW_OPTIONS['stop'][0]}")
    return replace(defaults, **options)


def read_ahead(batch_size: int | None) -> int:
    """Return how many rows are sorted by length, of which batches are then cut."""
    return min(_READ_AHEAD * (batch_size or LARGEST), sys.maxsize)  # all that islice counts to


def complete(
    model: GPT2,
    tokenizer: Tokenizer,
    requests: Iterable[Request | InputError],
    batch_size: int | None = None,
) -> Iterator[Completion | InputError]:
    """Continue any number of prompts; each result comes as soon as those before it have come.

    Args:
        model: the weights.
        tokenizer: gives the text.
        requests: the rows; an error in place of a row is passed on. They are read a few batches
            ahead, and taken together by length.
        batch_size: how many rows are computed side by side; by default as many as half of the
            free memory holds, up to LARGEST.

    Raises:
        ResourceError: there is not enough memory.
        CheckpointError: the weights are damaged.
    """
    rows = iter(requests)
    while window := list(islice(rows, read_ahead(batch_size))):
        results: dict[int, Completion | InputError] = {}
        following = 0
        for place, result in _complete_window(model, tokenizer, window, batch_size):
            results[place] = result
            while following in results:
                yield results.pop(following)
                following += 1


def _complete_window(
    model: GPT2,
    tokenizer: Tokenizer,
    window: list[Request | InputError],
    batch_size: int | None,
) -> Iterator[tuple[int, Completion | InputError]]:
    """Yield each result, in whatever order they come, with the place of its row."""
    requests: dict[int, Request] = {}
    for place, row in enumerate(window):
        if isinstance(row, InputError):
            yield place, row
        else:
            requests[place] = row
    for places in _batches(model, requests, batch_size):
        batch = [requests[place] for place in places]
        completions = [Completion(len(row.prompt), row.options.seed) for row in batch]
        for step in generate(model, tokenizer, batch):
            completions[step.row].add(step)
            if step.finish_reason is not None:
                yield places[step.row], completions[step.row]


def _batches(model: GPT2, requests: dict[int, Request], batch_size: int | None) -> list[list[int]]:
    """Cut rows in batches, by the length of the prompt and of what may follow.

    The batch that holds the first row comes first, for its result is waited for.
    """

    def length(place: int) -> tuple[int, int]:
        return len(requests[place].prompt), requests[place].options.max_tokens

    places = sorted(requests, key=length, reverse=True)
    batches = []
    free = model.ops.free_memory()
    while places:
        longest = [requests[place] for place in places[:LARGEST]]
        size = batch_size or _fitting(model.config, longest, free)
        batches.append(places[:size])
        places = places[size:]
    return sorted(batches, key=min)


def _fitting(config: GPT2Config, requests: list[Request], free: int | None) -> int:
    """Return of how many of the rows a batch is: LARGEST, halved until half of `free` holds it."""
    size = LARGEST
    while free is not None and size > 1 and 2 * working_set(config, requests[:size]) > free:
        size //= 2
    return size
