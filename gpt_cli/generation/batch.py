"""Many prompts, a batch at a time: computed in order of length, returned in order of input."""

import sys
from collections.abc import Iterable, Iterator
from itertools import islice

from gpt_cli.errors import InputError
from gpt_cli.folder.tokenizer import Tokenizer
from gpt_cli.generation.drafts import Speculator
from gpt_cli.generation.generate import Completion, generate, working_set
from gpt_cli.generation.prefix_cache import PrefixCache
from gpt_cli.generation.row import Request
from gpt_cli.gpt2.model import GPT2

LARGEST = 64  # rows; a larger batch needs memory and gains little speed on a CPU
_READ_AHEAD = 4  # batches, whose rows are sorted by length


def read_ahead(batch_size: int | None) -> int:
    """Return the number of rows that are sorted by length together."""
    return min(_READ_AHEAD * (batch_size or LARGEST), sys.maxsize)  # the limit of islice


def complete(
    model: GPT2,
    tokenizer: Tokenizer,
    requests: Iterable[Request | InputError],
    batch_size: int | None = None,
    speculator: Speculator | None = None,
    prefixes: PrefixCache | None = None,
) -> Iterator[Completion | InputError]:
    """Continue any number of prompts; yield the results in order, each as soon as possible.

    The requests are read a few batches ahead and sorted by length; an error in place of one is
    passed on. By default as many are computed side by side as fit half of the free memory, up to
    LARGEST.

    Raises:
        ResourceError: there is not enough memory.
        CheckpointError: the weights are damaged.
    """
    rows = iter(requests)
    while window := list(islice(rows, read_ahead(batch_size))):
        valid = {place: row for place, row in enumerate(window) if not isinstance(row, InputError)}
        batches = _batches(model, valid, batch_size)
        finished = _complete(model, tokenizer, valid, batches, speculator, prefixes)
        early: dict[int, Completion] = {}
        for place, row in enumerate(window):
            while place in valid and place not in early:
                early.update([next(finished)])
            yield row if isinstance(row, InputError) else early.pop(place)


def _complete(
    model: GPT2,
    tokenizer: Tokenizer,
    requests: dict[int, Request],
    batches: list[list[int]],
    speculator: Speculator | None,
    prefixes: PrefixCache | None,
) -> Iterator[tuple[int, Completion]]:
    """Yield the place of each row with its completion, as they come."""
    for places in batches:
        batch = [requests[place] for place in places]
        completions = [Completion(len(row.prompt), row.seed) for row in batch]
        for step in generate(model, tokenizer, batch, speculator, prefixes):
            completions[step.row].add(step)
            if step.finish_reason is not None:
                yield places[step.row], completions[step.row]


def _batches(model: GPT2, requests: dict[int, Request], batch_size: int | None) -> list[list[int]]:
    """Cut rows into batches by the lengths of their prompts and completions.

    The batch with the first row comes first, since its result is needed first.
    """

    def length(place: int) -> tuple[int, int]:
        return len(requests[place].prompt), requests[place].options.max_tokens

    def needed(places: list[int]) -> int:
        return working_set(model.config, [requests[place] for place in places])

    places = sorted(requests, key=length, reverse=True)
    batches = []
    free = None if batch_size else model.ops.free_memory()
    while places:
        size = batch_size or LARGEST
        while free is not None and size > 1 and 2 * needed(places[:size]) > free:
            size //= 2
        batches.append(places[:size])
        places = places[size:]
    return sorted(batches, key=min)
