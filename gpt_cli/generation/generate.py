"""Continue prompts: side by side, step by step; or any number, a batch at a time."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from gpt_cli.errors import counted
from gpt_cli.generation.beams import new_row
from gpt_cli.generation.decode import Batch
from gpt_cli.generation.row import FinishReason, Request, Step
from gpt_cli.generation.sampling import BAND
from gpt_cli.generation.speculate import MAX_DRAFTS
from gpt_cli.gpt2.memory import FLOAT, cache_bytes, logits_bytes
from gpt_cli.gpt2.model import GPT2
from gpt_cli.system.machine import check_room
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.measures import TopLogprobs
from gpt_cli.texts.result import Recorded, beginning, shown_by

_MAX_ROWS = 64  # of a batch; more need memory and gain little speed on a CPU
_READ_AHEAD = 4  # batches, whose requests are sorted by length


@dataclass(repr=False)
class Completion(Recorded):
    """The continuation of one prompt."""

    prompt_tokens: int  # their number
    seed: int  # of its random draws
    text: str = ""  # without the prompt and the end token
    ids: list[int] = field(default_factory=list)  # new tokens, with the end token or stop string
    logprobs: list[float] = field(default_factory=list)  # of these ids
    top_logprobs: list[TopLogprobs] = field(default_factory=list)  # after the same tokens
    seconds: list[float] = field(default_factory=list)  # from the start to the id
    finish_reason: FinishReason = "interrupted"  # why it ended; this until then
    stop_reason: str | int | None = None  # the stop string or the token of `stop_token_ids`
    drafted: int = 0  # tokens, accepted or not
    accepted: int = 0  # drafted tokens that are in `ids`
    score: float | None = None  # of a beam search
    others: list["Completion"] = field(default_factory=list)  # its next best texts, best first

    @property
    def tokens(self) -> list[dict[str, Any]]:
        """Return the new tokens as `gpt-cli generate --json --logprobs N`."""
        return self._tokens()

    def _facts(self) -> str:
        size = counted(len(self.ids), "token")
        return f"{size}, {self.finish_reason}, seed {self.seed}: {beginning(self.text)}"

    def add(self, step: Step) -> None:
        """Append the next step of this row, or of a hypothesis, of which the best comes last."""
        if step.hypothesis:
            while len(self.others) < step.hypothesis:
                other = Completion(self.prompt_tokens, self.seed)
                self.others.append(shown_by(self._display, other))
            self.others[step.hypothesis - 1].add(step._replace(hypothesis=0))
            return
        self.text += step.text
        self.ids.append(step.id)
        self.logprobs.append(step.logprob)
        self.top_logprobs.append(step.top_logprobs)
        self.seconds.append(step.seconds)
        self.drafted += step.drafted
        self.accepted += step.accepted
        self.score = step.score
        if step.finish_reason is not None:
            self.finish_reason = step.finish_reason
            self.stop_reason = step.stop_reason


class Run(Iterator[Step]):
    """Continues prompts side by side, one step per row after the other.

    The cache is used if all rows have `use_cache`; then drafts save passes, and a row may have
    several tokens in turn. ResourceError if memory is short.
    """

    def __init__(self, loaded: LoadedModel, requests: Sequence[Request]):
        self.completions = [  # so far
            Completion(len(request.prompt), request.seed) for request in requests
        ]
        share, speculate = _fit_memory(loaded, requests)
        # The steps of each pass, which are none while all rows are searches.
        self.passes = _passes(loaded, requests, share, speculate)
        self._steps = chain.from_iterable(self.passes)

    def __next__(self) -> Step:
        return self.add(next(self._steps))

    def add(self, step: Step) -> Step:
        """Add a step of one of the `passes` to the results; return it."""
        self.completions[step.row].add(step)
        return step


def working_set(model: GPT2, requests: Sequence[Request], drafts: int = 0) -> int:
    """Estimate the bytes to continue requests, with up to `drafts` drafts in a pass.

    The weights, those of a draft model, and prefixes are not included.
    """
    config = model.config
    rows = sum(request.rows for request in requests)
    prompt = max((len(request.prompt) for request in requests), default=0)
    new = 0
    for request in requests:
        left = config.n_positions - len(request.prompt)
        new = max(new, min(request.options.max_tokens, left))
    slots = model.ops.cache_panel
    length = -(-(prompt + new) // slots) * slots
    cached = all(request.options.use_cache for request in requests)
    itemsize = model.ops.cache_type.itemsize + (2 if drafts else 0)  # drafts: a copy in float16
    cache = cache_bytes(config, rows * length, itemsize) if cached else 0
    tokens = min(rows * prompt, max(rows, model.ops.pass_tokens)) if cached else rows * length
    widths = 6 * config.n_embd + 3 * config.inner_size
    layer = FLOAT * tokens * (widths + config.n_head * length)  # with the scores of the attention
    # `sampling.likely_columns` returns all columns if k is large.
    bands = config.vocab_size // BAND
    among_all = any(not 0 < request.options.top_k <= bands for request in requests)
    # Logits and the arrays of sampling, which are small if top-k leaves few columns.
    sampling = logits_bytes(config, (12 if among_all else 5) * (rows + drafts))
    return cache + max(layer, sampling)


def _fit_memory(loaded: LoadedModel, requests: Sequence[Request]) -> tuple[bool, bool]:
    """Check that memory suffices; return whether it does with prefixes, and with drafts."""
    model = loaded.model
    speculator = loaded.speculator
    needed = working_set(model, requests)
    free = model.ops.free_memory()
    if free is not None and needed > free:
        loaded.release()
        free = model.ops.free_memory()
    check_room(
        f"a batch of {sum(request.rows for request in requests)} needs about",
        needed,
        free,
        "generate fewer at a time, with fewer beams, or shorter texts",
    )
    if free is None:
        return True, True
    prefixes = _prefix_bytes(loaded, requests)
    share = needed + prefixes <= free
    if not speculator:
        return share, False
    needed = working_set(model, requests, MAX_DRAFTS) + speculator.needed_bytes
    return share, needed + (prefixes if share else 0) <= free


def _prefix_bytes(loaded: LoadedModel, requests: Sequence[Request]) -> int:
    return loaded.prefixes.new_bytes([request.prompt[:-1] for request in requests])


def _passes(
    loaded: LoadedModel, requests: Sequence[Request], share: bool, speculate: bool
) -> Iterator[list[Step]]:
    use_cache = all(request.options.use_cache for request in requests)
    batch = Batch(loaded, speculate=speculate)
    rows = [new_row(number, request, loaded) for number, request in enumerate(requests)]
    is_filled = False
    while rows:
        if not is_filled:
            batch.fill(rows, use_cache=use_cache, share=share)
        yield batch.step()
        rows = batch.rows
        full = [row for row in rows if row.tokens_left == 0]
        for row in full:
            row.window = row.window[-(loaded.config.n_positions // 2) :]
        # Positions are learned, so cached keys and values cannot be moved to other positions.
        is_filled = use_cache and not full


def read_ahead(batch_size: int | None) -> int:
    """Return the number of requests that `complete` sorts by length together."""
    return min(_READ_AHEAD * (batch_size or _MAX_ROWS), sys.maxsize)  # the limit of islice


def complete(
    loaded: LoadedModel, requests: Iterable[Request], batch_size: int | None = None
) -> Iterator[Completion]:
    """Continue any number of prompts; yield the results in order, as soon as possible.

    By default, a batch has as many as fit half of the free memory, up to _MAX_ROWS.
    """
    remaining = iter(requests)
    while chunk := list(islice(remaining, read_ahead(batch_size))):
        early: dict[int, Completion] = {}  # by index, those after a request that has not ended
        following = 0  # the index of the next result
        for indices in _batches(loaded, chunk, batch_size):
            run = Run(loaded, [chunk[index] for index in indices])
            for step in run:
                if step.finish_reason is not None and not step.hypothesis:
                    early[indices[step.row]] = run.completions[step.row]
                while following in early:
                    yield early.pop(following)
                    following += 1


def _batches(
    loaded: LoadedModel, requests: list[Request], batch_size: int | None
) -> list[list[int]]:
    """Cut requests into batches of similar lengths of prompt and completion: return their indices.

    The batch with the first request comes first, since its result is needed first.
    """

    def length(index: int) -> tuple[int, int]:
        return len(requests[index].prompt), requests[index].options.max_tokens

    indices = sorted(range(len(requests)), key=length, reverse=True)
    free = loaded.model.ops.free_memory()
    batches = []
    while indices:
        first = [requests[index] for index in indices[:_MAX_ROWS]]
        size = batch_size or _fitting_rows(loaded, first, free)
        batches.append(indices[:size])
        indices = indices[size:]
    return sorted(batches, key=min)


def _fitting_rows(loaded: LoadedModel, requests: list[Request], free: int | None) -> int:
    """Return how many of the first requests make a batch: _MAX_ROWS, halved until they fit.

    They may take half of the free memory.
    """
    size = _MAX_ROWS
    while size > 1:
        batch = requests[:size]
        rows = sum(request.rows for request in batch)
        needed = working_set(loaded.model, batch) + _prefix_bytes(loaded, batch)
        if rows <= _MAX_ROWS and (free is None or 2 * needed <= free):
            break
        size //= 2
    return size
