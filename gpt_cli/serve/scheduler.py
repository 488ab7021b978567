"""Continuous batching: many texts share the passes of one model, in one thread.

A text waits, its prompt is computed, and then it is decoded beside the others. A turn of the
thread computes a chunk of a few prompts, and one pass for all texts that are being decoded:

    turn      1        2        3        4        5
    text A    prompt   token    token    token    token
    text B    .        chunk    chunk    token    token     a long prompt takes several turns
    text C    .        .        .        chunk    token

So a text may join at any turn. It leaves when it ends or is cancelled. Its tokens do not depend on
the texts beside it (`Ops.batch_invariant`): they are the same on a busy server and on an idle one.
A beam search is one text with one row for each beam.
"""

import heapq
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import count

import numpy.random  # noqa: F401 (sampling would import it when no file can be opened any more)

from gpt_cli.errors import GPTCLIError, ResourceError, counted
from gpt_cli.generation.beams import new_row
from gpt_cli.generation.decode import Batch
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.memory import cache_bytes
from gpt_cli.gpt2.model import GPT2
from gpt_cli.gpt2.weights import NotFiniteError
from gpt_cli.serve.prompts import MeasuredText, Pace, PendingText, Prompts
from gpt_cli.serve.refusals import QueueFullError, RequestError, StoppedError
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.prefix_cache import MIN_PREFIX_TOKENS, Prefix, cache_budget, common_length

_LOOK_AHEAD = 16  # waiting texts that others may overtake
_IDLE_SECONDS = 60.0  # until the memory of earlier texts is released


@dataclass(order=True)
class _Waiting:
    """A text in the queue. Texts of one request are a round apart, so that requests take turns."""

    round: int
    request: int  # its number
    text: PendingText = field(compare=False)


class Turns:
    """The turns of schedulers on the same cores, where two passes at a time would be slower.

    The next pass is that of the busy scheduler that has computed for the least time, so all that
    are busy have equal shares of the time, whatever a pass takes.
    """

    def __init__(self, schedulers: int = 1, clock: Callable[[], float] = time.perf_counter):
        """Prepare for a number of schedulers."""
        self.schedulers = schedulers
        self._clock = clock
        self._changed = threading.Condition()
        self._busy: list[object] = []
        self._computing: object = None  # the one whose turn it is
        self._since = 0.0  # by the clock
        self._seconds: dict[object, float] = {}  # of computing, by scheduler
        self._level = 0.0  # the seconds of the one whose turn came last, before it

    def begin(self, scheduler: object) -> None:
        """Wait for the next turn of a scheduler, whose last one ends."""
        with self._changed:
            self._count(scheduler)
            if scheduler not in self._busy:
                self._busy.append(scheduler)
                # Nobody can save up time while idle.
                self._seconds[scheduler] = max(self._seconds.get(scheduler, 0.0), self._level)
            while self._computing is not None or scheduler is not self._next:
                self._changed.wait()
            self._computing = scheduler
            self._since = self._clock()
            self._level = self._seconds[scheduler]

    def end(self, scheduler: object) -> None:
        """End the turn of a scheduler that has nothing to compute."""
        with self._changed:
            self._count(scheduler)
            if scheduler in self._busy:
                self._busy.remove(scheduler)
                if not self._busy:  # then all begin anew, with the same time
                    self._level = max(self._seconds.values())

    @property
    def _next(self) -> object:
        """Return the busy scheduler that has computed for the least time."""
        return min(self._busy, key=self._seconds.__getitem__)

    def _count(self, scheduler: object) -> None:
        """Count the time of a turn that ends, if it is this scheduler's."""
        if self._computing is scheduler:
            self._computing = None
            self._seconds[scheduler] += self._clock() - self._since
            self._changed.notify_all()


class Scheduler:
    """Computes texts for many callers at once, in another thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        max_batch: int = 32,
        max_queue: int = 64,
        turns: Turns | None = None,
    ):
        """Start the thread, which alone may use the model until it has stopped.

        It computes up to `max_batch` rows at a time, fewer if memory is short. Beyond them,
        `max_queue` requests may have texts that wait. Schedulers with the same `turns` share the
        cores and the memory.
        """
        self._model = loaded.model
        self._loaded = replace(loaded, kept_bytes=cache_budget(loaded.model))
        self._turns = turns or Turns()
        self.max_batch = _fitting(self._model, max_batch, self._turns.schedulers)
        self._max_queue = max_queue
        self._batch = Batch(self._loaded, self.max_batch)
        self._running: set[PendingText] = set()  # all that do not wait
        self._decoded: dict[int, PendingText] = {}  # by `BatchRow.request_number`
        self._prompts: deque[Prompts] = deque()
        self._pace = Pace(loaded.model.ops.pass_tokens)
        self._waiting: list[_Waiting] = []  # a heap
        self._prefixes = self._loaded.prefixes
        self._numbers = count()  # of requests and of rows
        self._round = 0  # of the next text that is submitted
        self.stopped = False  # then no more texts are queued or computed
        self.reused = 0  # tokens of prompts that were not computed again
        self.hits = 0  # texts with such tokens
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Return the number of texts that are being computed."""
        return len(self._running)

    @property
    def _free_rows(self) -> int:
        return self.max_batch - sum(text.request.rows for text in list(self._running))

    @property
    def waiting(self) -> int:
        """Return the number of texts in the queue."""
        return sum(not entry.text.cancelled for entry in list(self._waiting))

    def submit(self, texts: Sequence[PendingText]) -> None:
        """Queue the texts of one request; raise QueueFullError or StoppedError.

        Raise RequestError if a beam search has more beams than are computed at a time.
        """
        if any(text.request.rows > self.max_batch for text in texts):
            room = f"there is room for {counted(self.max_batch, 'beam')} at a time"
            raise RequestError(f"best_of: {room} (--batch-size)", "best_of")
        with self._changed:
            if self.stopped:
                raise StoppedError("the server has stopped: try again")
            waiting = {entry.request for entry in self._waiting if not entry.text.cancelled}
            if len(waiting) >= self._max_queue + self._free_rows:
                requests = counted(self._max_queue, "request")
                raise QueueFullError(f"the queue is full ({requests}); try again later")
            number = next(self._numbers)
            for round, text in enumerate(texts, self._round):
                heapq.heappush(self._waiting, _Waiting(round, number, text))
            self._changed.notify()

    def stop(self) -> None:
        """End all texts with a StoppedError, and the thread."""
        with self._changed:
            self.stopped = True
            self._changed.notify()

    def join(self) -> None:
        """Wait until the thread has ended, after `stop`."""
        self._thread.join()

    def _run(self) -> None:
        while not self.stopped:
            with self._changed:
                while not (self.stopped or self._waiting or self.running):
                    self._turns.end(self)
                    if not self._changed.wait(_IDLE_SECONDS):
                        self._batch.clear()
            self._turns.begin(self)
            try:
                self._drop_cancelled()
                self._admit()
                if self._prompts:
                    self._advance()
                if self._batch.rows:
                    self._decode()
            except Exception as error:  # a bug must not end the server
                self._fail(error)
        self._turns.end(self)
        self._fail(StoppedError("the server has stopped before the answer was complete: try again"))

    def _drop_cancelled(self) -> None:
        with self._changed:
            if any(entry.text.cancelled for entry in self._waiting):
                self._waiting = [entry for entry in self._waiting if not entry.text.cancelled]
                heapq.heapify(self._waiting)
        self._drop({number for number, text in self._decoded.items() if text.cancelled})
        for prompts in list(self._prompts):
            if all(text.cancelled for text in prompts.texts):
                self._prompts.remove(prompts)
                self._running.difference_update(prompts.texts)

    def _drop(self, numbers: Set[int]) -> list[PendingText]:
        """Drop the rows with these numbers from the batch; return their texts."""
        self._batch.drop([row for row in self._batch.rows if row.request_number in numbers])
        texts = [self._decoded.pop(number) for number in numbers]
        self._running.difference_update(texts)
        return texts

    def _admit(self) -> None:
        """Let texts with cached prompts join, and begin others that fit one pass together."""
        new: list[PendingText] = []
        passed: list[_Waiting] = []  # they stay in the queue
        longest = 0  # number of tokens to compute for a prompt
        try:
            while len(passed) < _LOOK_AHEAD:
                entry = self._take()
                if entry is None:
                    break
                text = entry.text
                prefix, cached = self._prefixes.find(text.cacheable_ids)
                width = max(longest, len(text.prefill_ids) - cached)
                fits = not new or width * (len(new) + 1) <= self._pace.tokens
                if cached == len(text.prefill_ids) and not isinstance(text, MeasuredText):
                    self._join(text, prefix.cache if prefix else None, 0)
                    self.reused += cached
                    self.hits += cached > 0
                elif fits and not self._will_be_cached(text, cached, new):
                    new.append(text)
                    longest = width
                else:
                    self._running.discard(text)
                    passed.append(entry)
                    continue
                self._round = max(self._round, entry.round)
        finally:
            with self._changed:
                for entry in passed:
                    heapq.heappush(self._waiting, entry)
        if new:
            self._begin(new)

    def _begin(self, texts: Sequence[PendingText]) -> None:
        """Begin to compute the prompts of texts, side by side."""
        try:
            prompts = Prompts(self._model, texts, self._prefixes, self._pace)
        except MemoryError as error:
            self._end(texts, error)
        else:
            self.reused += prompts.reused
            self.hits += prompts.hits
            self._prompts.append(prompts)

    def _take(self) -> _Waiting | None:
        """Take the first entry from the queue; None if there is none, or no room for its rows."""
        with self._changed:
            if not self._waiting:
                return None
            first = self._waiting[0]
            if first.text.request.rows > self._free_rows:
                self._round = max(self._round, first.round)  # new texts come after it
                return None
            self._running.add(first.text)  # at once, so that any error ends it
            return heapq.heappop(self._waiting)

    def _will_be_cached(self, text: PendingText, cached: int, new: Sequence[PendingText]) -> bool:
        """Return whether more of a prompt will be cached once those being computed are ready."""
        if not self._prefixes.keeps:
            return False
        others = list(new)
        for prompts in self._prompts:
            others += prompts.texts
        common = [common_length(text.cacheable_ids, other.cacheable_ids) for other in others]
        return max(common, default=0) >= max(cached + 1, MIN_PREFIX_TOKENS)

    def _advance(self) -> None:
        """Compute a chunk of the first prompts; once they are ready, let their texts join."""
        prompts = self._prompts.popleft()
        try:
            if prompts.advance():
                self._finish(prompts)
            else:
                self._prompts.append(prompts)  # others have the next turn
        except (GPTCLIError, MemoryError) as error:
            self._end(prompts.texts, error)

    def _finish(self, prompts: Prompts) -> None:
        """Keep prompts that are ready, and let their texts join."""
        for row, text in enumerate(prompts.texts):
            if self._prefixes.keeps and len(text.cacheable_ids) >= MIN_PREFIX_TOKENS:
                cache = prompts.cache
                length = len(text.prefill_ids)
                if len(prompts.texts) > 1:
                    cache = KVCache(self._model.config, self._model.ops, 1, length)
                    cache.copy_row(0, prompts.cache, row, length)
                self._prefixes.keep(Prefix(text.prefill_ids, cache, prompts.states[row]))
            if text.decode and not text.cancelled:
                self._join(text, prompts.cache, row)
            else:
                self._running.discard(text)

    def _join(self, text: PendingText, cache: KVCache | None, cache_row: int) -> None:
        """Let a text join the batch; all its tokens except the last are in a row of a cache."""
        number = next(self._numbers)
        try:
            row = new_row(number, text.request, self._loaded)
            for id in text.generated:
                row.push(id)
            self._batch.add(row, cache, cache_row)
            self._decoded[number] = text
        except (GPTCLIError, MemoryError) as error:
            self._end([text], error)

    def _decode(self) -> None:
        """Compute one pass for the texts in the batch."""
        try:
            steps = self._batch.step()
        except (GPTCLIError, MemoryError) as error:
            # Perhaps only a few texts use the damaged weights.
            damaged = error.rows if isinstance(error, NotFiniteError) else ()
            numbers = {self._batch.rows[index].request_number for index in damaged}
            self._end(self._drop(numbers or set(self._decoded)), error)
            return
        for step in steps:
            text = self._decoded[step.row]
            if step.finish_reason and not step.hypothesis:  # the best hypothesis comes last
                del self._decoded[step.row]
                self._running.discard(text)
            text.deliver(step)

    def _fail(self, error: Exception) -> None:
        """End all texts that are being computed, and after `stop` those that wait, too."""
        texts = list(self._running)
        if self.stopped:
            texts += [entry.text for entry in self._waiting]
        self._end(texts, error)
        self._prompts.clear()
        self._decoded.clear()
        self._batch.clear()

    def _end(self, texts: Sequence[PendingText], error: Exception) -> None:
        if isinstance(error, MemoryError):
            self._prefixes.release()
            if not self._batch.rows:
                self._batch.clear()  # releases the memory of earlier rows
            error = ResourceError("there is not enough memory for this text now; try again later")
        for text in texts:
            self._running.discard(text)
            text.fail(error)  # cancelled, since it may have joined already


def _fitting(model: GPT2, texts: int, schedulers: int) -> int:
    """Return how many texts of full length fit half of the free memory, at most `texts`.

    Each of several schedulers has an equal part of the memory.
    """
    free = model.ops.free_memory()
    if free is None:
        return texts
    text_bytes = cache_bytes(model.config, model.config.n_positions, model.ops.cache_type.itemsize)
    rows = math.floor((free / schedulers - cache_budget(model)) / 2 / text_bytes)
    return max(1, min(texts, rows))
