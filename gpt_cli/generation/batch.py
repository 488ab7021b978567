"""Many prompts, a batch at a time: computed in order of length, returned in order of input."""

import sys
from collections.abc import Iterable, Iterator
from itertools import islice

from gpt_cli.generation.generate import Completion, Run, working_set
from gpt_cli.generation.loaded import LoadedModel
from gpt_cli.generation.row import Request

LARGEST = 64  # rows; a larger batch needs memory and gains little speed on a CPU
_READ_AHEAD = 4  # batches, whose rows are sorted by length


def read_ahead(batch_size: int | None) -> int:
    """Return the number of rows that are sorted by length together."""
    return min(_READ_AHEAD * (batch_size or LARGEST), sys.maxsize)  # the limit of islice


def complete(
    loaded: LoadedModel, requests: Iterable[Request], batch_size: int | None = None
) -> Iterator[Completion]:
    """Continue any number of prompts; yield the results in order, as soon as possible.

    The requests are read a few batches ahead and sorted by length.
    By default as many are computed side by side as fit half of the free memory, up to LARGEST.
    """
    rows = iter(requests)
    while chunk := list(islice(rows, read_ahead(batch_size))):
        early: dict[int, Completion] = {}  # by row, those that come after a row that has not ended
        following = 0
        for indices in _batches(loaded, chunk, batch_size):
            run = Run(loaded, [chunk[index] for index in indices])
            for step in run:
                if step.finish_reason is not None:
                    early[indices[step.row]] = run.completions[step.row]
                while following in early:
                    yield early.pop(following)
                    following += 1


def _batches(
    loaded: LoadedModel, requests: list[Request], batch_size: int | None
) -> list[list[int]]:
    """Cut rows into batches by the lengths of their prompts and completions.

    The batch with the first row comes first, since its result is needed first.
    """

    def length(index: int) -> tuple[int, int]:
        return len(requests[index].prompt), requests[index].options.max_tokens

    def needed(indices: list[int]) -> int:
        batch = [requests[index] for index in indices]
        prefixes = loaded.prefixes.new_bytes([row.prompt[:-1] for row in batch])
        return working_set(loaded.model, batch) + prefixes

    indices = sorted(range(len(requests)), key=length, reverse=True)
    batches = []
    free = None if batch_size else loaded.model.ops.free_memory()
    while indices:
        size = batch_size or LARGEST
        while free is not None and size > 1 and 2 * needed(indices[:size]) > free:
            size //= 2
        batches.append(indices[:size])
        indices = indices[size:]
    return sorted(batches, key=min)
