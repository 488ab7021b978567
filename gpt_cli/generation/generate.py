"""Prefill, decode, stop: continue prompts step by step, and collect steps in completions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from gpt_cli.folder.config import GPT2Config
from gpt_cli.folder.tokenizer import Tokenizer
from gpt_cli.generation.decode import Batch, Step, TopLogprobs
from gpt_cli.generation.drafts import Speculator
from gpt_cli.generation.prefix_cache import PrefixCache
from gpt_cli.generation.row import FinishReason, Request, Row
from gpt_cli.generation.sampling import GROUP
from gpt_cli.generation.speculate import DRAFTS
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.model import GPT2, PASS, hidden_states, right_pad, unembed
from gpt_cli.ops import Array
from gpt_cli.system.machine import check_room

_BLOCK = 32  # tokens: a cache has whole blocks


@dataclass
class Completion:
    """The continuation of one prompt."""

    prompt_tokens: int
    seed: int
    text: str = ""  # without the prompt and the end token
    ids: list[int] = field(default_factory=list)  # new tokens, with the end token or stop string
    logprobs: list[float] = field(default_factory=list)  # one for each id
    top_logprobs: list[TopLogprobs] = field(default_factory=list)  # one for each id
    seconds: list[float] = field(default_factory=list)  # from the start to each id
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


def working_set(config: GPT2Config, requests: Sequence[Request], drafts: int = 0) -> int:
    """Estimate the bytes to continue requests side by side, with some drafts in all of a pass.

    The weights, and those of a twin, are not included.
    """
    rows = len(requests)
    prompt = max((len(row.prompt) for row in requests), default=0)
    new = [min(r.options.max_tokens, config.n_positions - len(r.prompt)) for r in requests]
    length = -(-(prompt + max(new, default=0)) // _BLOCK) * _BLOCK
    cached = all(row.options.use_cache for row in requests)
    copies = 3 if drafts else 2  # keys, values, and the twin's in float16
    cache = copies * config.n_layer * rows * length * config.n_embd if cached else 0
    tokens = min(rows * prompt, max(rows, PASS)) if cached else rows * length
    widths = 6 * config.n_embd + 3 * config.inner_size
    layer = tokens * (widths + config.n_head * length)  # with the scores of the attention
    # `sampling.likely_columns` returns all columns if k is large.
    among_all = any(not 0 < row.options.top_k <= config.vocab_size // GROUP for row in requests)
    # Logits and the arrays of sampling, which are small where top-k leaves few columns.
    vocabulary = (12 if among_all else 5) * (rows + drafts) * config.vocab_size
    return 4 * (cache + max(layer, vocabulary))


def generate(
    model: GPT2,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    speculator: Speculator | None = None,
    prefixes: PrefixCache | None = None,
) -> Iterator[Step]:
    """Return an iterator that continues prompts side by side, a token of each row at a time.

    The cache is used if all rows have `use_cache`; then drafts of the speculator save passes, and
    a row may have several tokens in turn. The iterator raises CheckpointError if the weights are
    damaged.

    Raises:
        ResourceError: there is not enough memory.
    """
    needed, free = working_set(model.config, requests), model.ops.free_memory()
    prefixes = prefixes or PrefixCache(model)
    if free is not None and needed > free:
        prefixes.release()
        if speculator:
            speculator.release()
        free = model.ops.free_memory()
    check_room(
        f"a batch of {len(requests)} needs about",
        needed,
        free,
        "generate fewer at a time, or shorter texts",
    )
    if speculator and free is not None:
        needed = working_set(model.config, requests, DRAFTS) + speculator.needed_bytes
        speculator = speculator if needed <= free else None
    return _steps(model, tokenizer, requests, speculator, prefixes)


def _steps(
    model: GPT2,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    speculator: Speculator | None,
    prefixes: PrefixCache,
) -> Iterator[Step]:
    use_cache = all(row.options.use_cache for row in requests)
    rows = [Row(place, row, tokenizer, model.config) for place, row in enumerate(requests)]
    batch = Batch(model, tokenizer, speculator)
    batch.begin(rows)

    def first_logits() -> Array:
        if use_cache:
            batch.begin(batch.rows, _begin(model, batch.rows, prefixes))
        return _prefill(model, batch.rows, batch.cache)

    while batch.rows:
        yield from batch.step(None if batch.cache else first_logits)
        if _shift(batch.rows, model.config.n_positions):
            batch.begin(batch.rows)


def _begin(model: GPT2, rows: Sequence[Row], prefixes: PrefixCache) -> KVCache:
    """Return a cache for the rows, with the beginnings that several have in common."""
    capacity = max(len(row.window) + row.growth for row in rows)
    cache = KVCache(model.config, model.ops, len(rows), capacity)
    windows = [row.window[:-1] for row in rows]  # the last token is to be computed
    for n, places in prefixes.groups(windows):
        prefix = prefixes.prefix(windows[places[0]][:n])
        for place in places:
            cache.begin(place, prefix.cache, 0, n)
    return cache


def _prefill(model: GPT2, rows: Sequence[Row], cache: KVCache | None) -> Array:
    """Compute the tokens that are not in the cache; return the logits (B, V) after each row."""
    xp = model.ops.xp
    known = cache.lengths.tolist() if cache else [0] * len(rows)
    windows = [row.window[n:] for row, n in zip(rows, known, strict=True)]
    ids, lengths = right_pad(windows)
    width = max(1, PASS // len(rows)) if cache else ids.shape[1]
    last: dict[int, Array] = {}  # of each row, the state (C,) at its last token
    for start in range(0, ids.shape[1], width):
        some = ids[:, start : start + width]
        left = lengths - start
        new = np.clip(left, 0, some.shape[1])
        x = hidden_states(model, xp.asarray(some), cache, new)
        for row in np.flatnonzero((left > 0) & (left <= some.shape[1])).tolist():
            last[row] = x[row, left[row] - 1].copy()  # not a view, which would keep all of x
    return unembed(model, xp.stack([last[row] for row in range(len(rows))]))


def _shift(rows: Sequence[Row], n_positions: int) -> bool:
    """Drop the oldest half of the rows that fill the context; return whether there are any.

    Positions are learned, so cached keys and values cannot be moved to other positions.
    """
    full = [row for row in rows if row.growth == 0]
    for row in full:
        row.window = row.window[-(n_positions // 2) :]
    return bool(full)
