"""Prefill, decode, stop: continue prompts step by step, and collect steps in completions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gpt_cli.generation.decode import Batch, Step, TopLogprobs
from gpt_cli.generation.loaded import LoadedModel
from gpt_cli.generation.row import BatchRow, FinishReason, Request
from gpt_cli.generation.sampling import GROUP
from gpt_cli.generation.speculate import DRAFTS
from gpt_cli.gpt2.memory import FLOAT, cache_bytes, logits_bytes
from gpt_cli.gpt2.model import GPT2
from gpt_cli.gpt2.prefill import PASS
from gpt_cli.system.machine import check_room


@dataclass
class Completion:
    """The continuation of one prompt."""

    prompt_tokens: int
    seed: int
    text: str = ""  # without the prompt and the end token
    ids: list[int] = field(default_factory=list)  # new tokens, with the end token or stop string
    logprobs: list[float] = field(default_factory=list)  # of these ids
    top_logprobs: list[TopLogprobs] = field(default_factory=list)  # after the same tokens
    seconds: list[float] = field(default_factory=list)  # from the start to the id
    finish_reason: FinishReason = "interrupted"  # until the row has ended
    drafted: int = 0  # tokens
    accepted: int = 0  # drafted tokens that are in `ids`

    def add(self, step: Step) -> None:
        """Append the next step of this row."""
        self.text += step.text
        self.ids.append(step.id)
        self.logprobs.append(step.logprob)
        self.top_logprobs.append(step.top_logprobs)
        self.seconds.append(step.seconds)
        self.drafted += step.drafted
        self.accepted += step.accepted
        if step.finish_reason is not None:
            self.finish_reason = step.finish_reason


class Run(Iterator[Step]):
    """An iterator that continues requests; `completions` holds the results so far."""

    def __init__(self, loaded: LoadedModel, requests: Sequence[Request]):
        self.completions = [Completion(len(row.prompt), row.seed) for row in requests]
        self._steps = generate(loaded, requests)

    def __next__(self) -> Step:
        step = next(self._steps)
        self.completions[step.row].add(step)
        return step


def working_set(model: GPT2, requests: Sequence[Request], drafts: int = 0) -> int:
    """Estimate the bytes to continue requests side by side, with `drafts` in all of a pass.

    The weights, those of a draft model, and prefixes are not included.
    """
    config, rows = model.config, len(requests)
    prompt = max((len(row.prompt) for row in requests), default=0)
    new = [min(r.options.max_tokens, config.n_positions - len(r.prompt)) for r in requests]
    slots = model.ops.cache_panel
    length = -(-(prompt + max(new, default=0)) // slots) * slots
    cached = all(row.options.use_cache for row in requests)
    cache = 0
    if cached:
        cache = cache_bytes(config, rows * length, model.ops.cache_type.itemsize)
        if drafts:  # the draft model's copy is in float16
            cache += cache_bytes(config, rows * length, 2)
    tokens = min(rows * prompt, max(rows, PASS)) if cached else rows * length
    widths = 6 * config.n_embd + 3 * config.inner_size
    layer = FLOAT * tokens * (widths + config.n_head * length)  # with the scores of the attention
    # `sampling.likely_columns` returns all columns if k is large.
    among_all = any(not 0 < row.options.top_k <= config.vocab_size // GROUP for row in requests)
    # Logits and the arrays of sampling, which are small if top-k leaves few columns.
    sampling = logits_bytes(config, (12 if among_all else 5) * (rows + drafts))
    return cache + max(layer, sampling)


def generate(loaded: LoadedModel, requests: Sequence[Request]) -> Iterator[Step]:
    """Return an iterator that continues prompts side by side, one step per row after the other.

    The cache is used if all rows have `use_cache`; then drafts save passes, and a row may have
    several tokens in turn.
    """
    model, speculator = loaded.model, loaded.speculator
    needed, free = working_set(model, requests), model.ops.free_memory()
    if free is not None and needed > free:
        loaded.release()
        free = model.ops.free_memory()
    check_room(
        f"a batch of {len(requests)} needs about",
        needed,
        free,
        "generate fewer at a time, or shorter texts",
    )
    share = speculate = True
    if free is not None:  # memory for what saves time, but is not necessary
        prefixes = loaded.prefixes.new_bytes([row.prompt[:-1] for row in requests])
        share = needed + prefixes <= free
        if speculator:
            needed = working_set(model, requests, DRAFTS) + speculator.needed_bytes
            speculate = needed + (prefixes if share else 0) <= free
    return _steps(loaded, requests, share=share, speculate=speculate)


def _steps(
    loaded: LoadedModel, requests: Sequence[Request], *, share: bool, speculate: bool
) -> Iterator[Step]:
    use_cache = all(row.options.use_cache for row in requests)
    batch = Batch(loaded, speculate=speculate)
    rows = [BatchRow(number, request, loaded) for number, request in enumerate(requests)]
    is_filled = False
    while rows:
        if not is_filled:
            batch.fill(rows, use_cache=use_cache, share=share)
        yield from batch.step()
        rows = batch.rows
        full = [row for row in rows if row.growth == 0]
        for row in full:
            row.window = row.window[-(loaded.config.n_positions // 2) :]
        # Positions are learned, so cached keys and values cannot be moved to other positions.
        is_filled = use_cache and not full
