"""Decode: the next tokens of rows side by side, a pass at a time.

Operations with `decode`, those of a GPU, compute some passes in one call: the tokens of a pass are
sampled there, and the next pass begins at once.
"""

import time
from collections.abc import Iterable, Sequence
from itertools import islice, repeat

import numpy as np

from gpt_cli.errors import CheckpointError
from gpt_cli.generation.beams import Beam, BeamSearch
from gpt_cli.generation.row import BatchRow, NextToken, Position, Sampler, Step
from gpt_cli.generation.speculate import DraftPolicy
from gpt_cli.gpt2.hooks import Hook
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.model import hidden_states, unembed
from gpt_cli.gpt2.prefill import next_logits, right_pad
from gpt_cli.gpt2.source import is_modified
from gpt_cli.ops import Array, Ops
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.measures import top_logprobs
from gpt_cli.texts.prefix_cache import common_length
from gpt_cli.texts.text import editing_hook

_MIN_CAPACITY = 128  # tokens: of a cache that rows join
# A GPU takes about half a millisecond for a pass, so a stream stays smooth, a row that joins waits
# for milliseconds, and a row that ends drops few tokens.
_PASSES_PER_CALL = 16


class Batch:
    """Rows that are continued side by side; they may join and leave between passes."""

    def __init__(self, loaded: LoadedModel, max_rows: int = 1, *, speculate: bool = True):
        """Make an empty batch, to which up to `max_rows` rows may be added."""
        self._loaded = loaded
        self._model = loaded.model
        self._max_rows = max_rows
        self._sampler = Sampler(loaded)
        self._policy: DraftPolicy | None = None
        if loaded.speculator and speculate:
            self._policy = DraftPolicy(loaded.speculator, self._sampler)
        self._start = time.perf_counter()
        self.clear()

    def clear(self) -> None:
        """Drop all rows, and give back the memory of the cache."""
        self.rows: list[BatchRow] = []  # those that have not ended
        self.cache: KVCache | None = None  # of all tokens of the rows except the last
        self._memory: KVCache | None = None  # the cache, with unused rows
        self._logits: Array | None = None  # of the next tokens, if they are computed already
        self._fill_seconds = 0.0

    def fill(self, rows: list[BatchRow], *, use_cache: bool = True, share: bool = True) -> None:
        """Replace all rows by one or more, and compute their texts.

        With `share`, the tokens that texts share at their beginning are computed once.
        """
        began = time.perf_counter()
        self.clear()
        self.rows = rows
        texts = [row.window for row in rows]
        if use_cache:
            capacity = max(len(row.window) + row.tokens_left for row in rows)
            rows_of = {row.request_number: row.options.beams or 1 for row in rows}
            max_rows = sum(rows_of.values())
            self._memory = KVCache(self._model.config, self._model.ops, max_rows, capacity)
            self.cache = cache = self._memory.view(len(rows))
            prefixes = self._loaded.prefixes
            # The last token must be computed.
            known = [row.window[:-1] if row.prompt.is_plain else [] for row in rows]
            for n, indices in prefixes.groups(known) if share else ():
                prefix = prefixes.prefix(known[indices[0]][:n])
                for index in indices:
                    cache.copy_row(index, prefix.cache, 0, n)
            texts = [text[n:] for text, n in zip(texts, cache.lengths.tolist(), strict=True)]
        self._logits = next_logits(self._model, texts, self.cache, self._hook())
        self._fill_seconds = time.perf_counter() - began

    def add(self, row: BatchRow, cache: KVCache | None, cache_row: int) -> None:
        """Add a row, whose tokens except the last are in a row of a cache.

        `cache` is None if the row has a single token.
        """
        memory = self._memory
        config = self._model.config
        capacity = len(row.window) + row.tokens_left
        if not memory or capacity > memory.capacity:
            capacity = max(_MIN_CAPACITY, 2 ** (capacity - 1).bit_length())  # seldom a larger one
            capacity = min(capacity, config.n_positions)
            memory = KVCache(config, self._model.ops, self._max_rows, capacity)
            for index, other in enumerate(self.rows):
                assert self._memory  # noqa: S101 (narrows the type)
                memory.copy_row(index, self._memory, index, len(other.window) - 1)
        if cache:
            memory.copy_row(len(self.rows), cache, cache_row, len(row.window) - 1)
        self._memory = memory  # after all copies: a MemoryError leaves the batch as it was
        self.rows.append(row)
        self._set_lengths()

    def drop(self, rows: Sequence[BatchRow]) -> None:
        """Drop rows; the last rows take their places in the cache."""
        memory = self._memory
        for index in reversed(range(len(self.rows))):
            if self.rows[index] in rows:
                last = self.rows.pop()
                if index < len(self.rows):
                    self.rows[index] = last
                    if memory:
                        memory.copy_row(index, memory, len(self.rows), len(last.window) - 1)
        if not self.rows:
            self.cache = None  # its memory serves the next rows
        elif rows:
            self._set_lengths()

    def step(self) -> list[Step]:
        """Append the next tokens of rows, at least one per row, and drop the rows that end.

        The first step after `fill` takes the logits that it has computed. Without a cache, call
        `fill` before each step; else ValueError.
        """
        if self._logits is None and self.cache is None:
            raise ValueError("without a cache, fill the batch before each step")
        began = time.perf_counter() - self._fill_seconds
        logits = self._logits
        self._logits = None
        self._fill_seconds = 0.0
        searches = dict.fromkeys(row.search for row in self.rows if isinstance(row, Beam))
        may_run_ahead = logits is None and not searches
        self._draft(is_possible=may_run_ahead)
        if may_run_ahead:
            ahead = self._decode_ahead()
            if ahead is not None:
                return self._advance(ahead, began)
        if logits is None:
            logits = self._next_logits()
        model_seconds = time.perf_counter() - began
        alone = [index for index, row in enumerate(self.rows) if not isinstance(row, Beam)]
        rows = [self.rows[index] for index in alone]
        # Without searches, the logits may have further rows: those after drafts.
        part = logits[alone] if searches else logits
        new = sampled_tokens(self._model.ops, self._sampler, part, rows) if rows else []
        seconds = time.perf_counter() - self._start
        steps = self._append(rows, new, repeat(seconds), model_seconds)
        for search in searches:
            steps += self._search(search, logits, seconds, model_seconds)
        self._drop_ended()
        return steps

    def _draft(self, *, is_possible: bool) -> None:
        """Set the drafts of rows, if drafts save time."""
        if self._policy:
            # Drafts would delay the first token.
            is_possible = is_possible and all(row.generated for row in self.rows)
            try:
                self._policy.draft(self.rows, self.cache if is_possible else None)
            except MemoryError:  # drafts are not necessary
                self._policy = None

    def _decode_ahead(self) -> list[list[NextToken]] | None:
        """Decode up to _PASSES_PER_CALL passes in one call of `Ops.decode`; None if that cannot.

        Each row has one token per pass. No row is a beam.
        """
        model = self._model
        rows = self.rows
        cache = self.cache
        decode = model.ops.decode
        if decode is None or cache is None or is_modified() or not all(map(_is_plain, rows)):
            return None
        count = min(_PASSES_PER_CALL, *(row.tokens_left for row in rows))
        sampling = self._sampler.shared_sampling(rows, count)
        if sampling is None:
            return None
        last = np.array([row.window[-1] for row in rows])
        decoded = decode(model, cache, last, *sampling)
        if decoded is None:
            return None  # it lacks an option, or `_next_logits` will report damaged weights
        ids, logprobs = decoded  # (passes, rows)
        new = []
        for row_ids, row_logprobs in zip(ids.T.tolist(), logprobs.T.tolist(), strict=True):
            new.append([NextToken(*token, []) for token in zip(row_ids, row_logprobs, strict=True)])
        return new

    def _advance(self, new: list[list[NextToken]], began: float) -> list[Step]:
        """Append the tokens of some passes to the rows; return the steps."""
        now = time.perf_counter()
        count = len(new[0])
        pass_seconds = (now - began) / count
        seconds = [now - self._start - pass_seconds * left for left in reversed(range(count))]
        steps = self._append(self.rows, new, seconds, now - began, count)
        self._drop_ended()
        return steps

    def _append(
        self,
        rows: Sequence[BatchRow],
        new: Sequence[Sequence[NextToken]],
        seconds: Iterable[float],
        model_seconds: float,
        passes: int = 1,
    ) -> list[Step]:
        """Append new tokens to rows, and let the policy of drafts learn from them.

        `seconds` are the times of the tokens of a row; `model_seconds` is the time of all passes.
        """
        if self._policy:
            ids = [[token.id for token in tokens] for tokens in new]
            self._policy.learn(rows, ids, passes)
        steps = list[Step]()
        for row, tokens in zip(rows, new, strict=True):
            steps += _steps(row, tokens, seconds, model_seconds)
        return steps

    def _drop_ended(self) -> None:
        """Drop rows that have ended, and what the cache holds beyond the texts of the others."""
        self._set_lengths()
        # After the lengths are set, which `drop` copies.
        self.drop([row for row in self.rows if row.ended])

    def _search(
        self, search: BeamSearch, logits: Array, seconds: float, model_seconds: float
    ) -> list[Step]:
        """Replace the beams of a search, by the logits (rows, V); return all steps at its end."""
        ops = self._model.ops
        indices = [self.rows.index(beam) for beam in search.beams]
        parents = search.advance(ops, self._sampler, logits[indices], seconds, model_seconds)
        # The first beam of a parent takes its row, so that no copy overwrites another source.
        free = [index for number, index in enumerate(indices) if number not in parents]
        for number, (beam, parent) in enumerate(zip(search.beams, parents, strict=True)):
            index = indices[parent]
            if parent in parents[:number]:
                index = free.pop() if free else len(self.rows)
                self._copy_text(indices[parent], index, beam.window[:-1])
            self.rows[index : index + 1] = [beam]
        return [] if search.beams else search.steps()

    def _copy_text(self, source: int, index: int, text: list[int]) -> None:
        """Let a row of the cache hold a text: copy from the row `source` what differs."""
        known = self.rows[index].window if index < len(self.rows) else []
        if self._memory:
            start = common_length(known, text)
            self._memory.copy_row(index, self._memory, source, len(text), start)

    def _next_logits(self) -> Array:
        """Compute the logits (P, V) after the last token of a row and after its drafts."""
        model = self._model
        xp = self._model.ops.xp
        ids, lengths = right_pad([row.window[-1:] + row.drafts for row in self.rows])
        hook = self._hook()
        x = hidden_states(model, xp.asarray(ids), self.cache, lengths, hook)
        states = [x[row, :length] for row, length in enumerate(lengths.tolist())]
        try:
            return unembed(model, xp.concatenate(states), hook)
        except CheckpointError:  # weights that only a wrong draft uses are no reason to end
            if not any(row.drafts for row in self.rows):
                raise
            self._set_lengths()
            return self._next_logits()

    def _hook(self) -> Hook:
        return editing_hook([row.prompt for row in self.rows], self._model.ops)

    def _set_lengths(self) -> None:
        """Drop the drafts: set the lengths of the cache to the tokens that the rows have."""
        if self._memory:
            if self.cache is None or len(self.cache.lengths) != len(self.rows):
                self.cache = self._memory.view(len(self.rows))
            self.cache.rewind(np.array([len(row.window) - 1 for row in self.rows]))
        for row in self.rows:
            row.drafts = []


def _is_plain(row: BatchRow) -> bool:
    """Return whether the id and the log-probability of a row's next token are all that it needs."""
    return row.prompt.is_plain and not row.drafts and not row.options.top_logprobs


def _steps(
    row: BatchRow, tokens: Sequence[NextToken], seconds: Iterable[float], model_seconds: float
) -> list[Step]:
    """Append tokens to a row until it ends; return the steps."""
    steps: list[Step] = []
    drafted = len(row.drafts)
    accepted = len(tokens) - 1 if drafted else 0
    for number, (token, token_seconds) in enumerate(zip(tokens, seconds, strict=False)):
        text, finish_reason = row.push(token.id)
        step = Step(
            row.request_number,
            *token,
            text,
            finish_reason,
            token_seconds,
            accepted=number < accepted,
            stop_reason=row.stop_reason,
        )
        steps.append(step)
        if finish_reason is not None:
            row.ended = True
            break
    steps[0] = steps[0]._replace(model_seconds=model_seconds, drafted=drafted)
    return steps


def sampled_tokens(
    ops: Ops, sampler: Sampler, logits: Array, rows: Sequence[BatchRow]
) -> list[list[NextToken]]:
    """Return the next tokens of rows: the accepted drafts, and the token after them.

    logits (P, V) are those after the last token of a row and after its drafts.
    """
    positions = [
        Position(row, row.drafts[:count]) for row in rows for count in range(len(row.drafts) + 1)
    ]
    normalizer = ops.log_normalizer(logits)  # includes tokens that may not be chosen
    top = top_logprobs(ops, logits, [row.options.top_logprobs for row, _ in positions])
    ids = sampler.sample_at(logits, positions)
    logprobs = ops.to_host(logits[ops.xp.arange(len(ids)), ids] - normalizer).tolist()
    sampled = map(NextToken, ops.to_host(ids).tolist(), logprobs, top)
    new = []
    for row in rows:
        tokens = list(islice(sampled, len(row.drafts) + 1))
        accepted = common_length(row.drafts, [token.id for token in tokens])
        new.append(tokens[: accepted + 1])
    return new
