"""Continuous batching: many texts share the passes of one model, which one thread owns.

A text waits, its prompt is computed, and then it is decoded with the others. Each turn of the
thread computes a piece of some prompts, and one pass for all texts that are being decoded:

    turn      1        2        3        4        5
    text A    prompt   token    token    token    token
    text B    .        piece    piece    token    token     a long prompt takes several turns
    text C    .        .        .        piece    token

So a text may join at any turn, and leaves when it ends or nobody wants it any more. Its tokens do
not depend on what is computed beside them (`Ops.batch_invariant`): a text is the same on a busy
server and on an idle one.
"""

import heapq
import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from gpt_cli.errors import GPTCLIError, ResourceError
from gpt_cli.generation.decode import Batch
from gpt_cli.generation.loaded import LoadedModel
from gpt_cli.generation.prefix_cache import SHORTEST, Prefix, cache_budget, common_length
from gpt_cli.generation.row import BatchRow
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.memory import cache_bytes, cache_itemsize
from gpt_cli.gpt2.model import GPT2
from gpt_cli.serve.prompts import PIECE, Prompts, Task

_LOOK_AHEAD = 16  # waiting texts that others may pass
_IDLE_SECONDS = 60.0  # after which the memory of earlier texts is given back


class QueueFullError(GPTCLIError):
    """Too many texts are waiting."""


class StoppedError(GPTCLIError):
    """The scheduler has stopped."""


@dataclass(order=True)
class _Waiting:
    """A task in the queue. Texts of one request are a round apart, so that requests take turns."""

    round: int
    request: int  # its number
    task: Task = field(compare=False)


class Scheduler:
    """Computes texts for many callers at once, in a thread of its own.

    Attributes:
        reused: tokens of prompts that were not computed again.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_batch: int = 32,
        max_queue: int = 64,
    ):
        """Start the thread.

        Args:
            loaded: the model; only this scheduler may use it until it has stopped.
            max_batch: texts at a time; fewer if memory is short.
            max_queue: requests that may wait for a place for some of their texts.
        """
        self._model = loaded.model
        self._loaded = replace(loaded, kept_bytes=cache_budget(loaded.model))
        self._max_batch, self._max_queue = _fitting(self._model, max_batch), max_queue
        self._batch = Batch(self._loaded, self._max_batch)
        self._running: set[Task] = set()  # those that do not wait
        self._decoded: dict[int, Task] = {}  # by `BatchRow.number`
        self._prompts: deque[Prompts] = deque()
        self._waiting: list[_Waiting] = []  # a heap
        self._prefixes = self._loaded.prefixes
        self._numbers, self._round = count(), 0
        self._stopped = False
        self._changed = threading.Condition()
        self.reused = 0
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> bool:
        """Return whether no more texts are computed."""
        return self._stopped

    @property
    def running(self) -> int:
        """Return the number of texts that are being computed."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Return the number of texts that wait for a place."""
        return sum(not each.task.cancelled for each in list(self._waiting))

    def submit(self, tasks: Sequence[Task]) -> None:
        """Queue the texts of one request.

        Raises:
            QueueFullError: too many requests are waiting already.
            StoppedError: the scheduler has stopped.
        """
        with self._changed:
            if self._stopped:
                raise StoppedError("the server is shutting down")
            waiting = {entry.request for entry in self._waiting if not entry.task.cancelled}
            if len(waiting) >= self._max_queue + max(0, self._max_batch - self.running):
                raise QueueFullError(f"{len(waiting)} requests are waiting; try again later")
            number = next(self._numbers)
            for turn, task in enumerate(tasks):
                heapq.heappush(self._waiting, _Waiting(self._round + turn, number, task))
            self._changed.notify()

    def stop(self) -> None:
        """End all texts with a StoppedError, and the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def join(self) -> None:
        """Wait until the thread has ended, after `stop`."""
        self._thread.join()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopped:
            with self._changed:
                while not (self._stopped or self._waiting or self.running):
                    if not self._changed.wait(_IDLE_SECONDS):
                        self._batch.clear()
            try:
                self._turn()
            except Exception as error:  # a bug must not end the server
                self._fail(error)
        self._fail(StoppedError("the server is shutting down"))

    def _turn(self) -> None:
        """Admit texts, compute a piece of some prompts, and one pass for the texts after them."""
        self._drop_cancelled()
        self._admit()
        if self._prompts:
            prompts = self._prompts[0]
            try:
                if prompts.advance():
                    self._finish(prompts)
                    self._prompts.popleft()
                else:
                    self._prompts.rotate(-1)  # others take the next turn
            except (GPTCLIError, MemoryError) as error:
                self._prompts.popleft()
                self._end(prompts.tasks, error)
        if self._batch.rows:
            try:
                steps = self._batch.step()
            except (GPTCLIError, MemoryError) as error:
                self._batch.clear()
                tasks = list(self._decoded.values())
                self._decoded.clear()
                self._end(tasks, error)
                return
            for step in steps:
                task = self._decoded[step.row]
                if step.finish_reason:
                    del self._decoded[step.row]
                    self._running.discard(task)
                task.deliver(step)

    def _drop_cancelled(self) -> None:
        with self._changed:
            self._waiting = [entry for entry in self._waiting if not entry.task.cancelled]
            heapq.heapify(self._waiting)
        gone = [number for number, task in self._decoded.items() if task.cancelled]
        self._batch.drop([row for row in self._batch.rows if row.number in gone])
        for number in gone:
            self._running.discard(self._decoded.pop(number))
        for prompts in [each for each in self._prompts if each.cancelled]:
            self._prompts.remove(prompts)
            self._running.difference_update(prompts.tasks)

    def _admit(self) -> None:
        """Let texts join whose prompts are known, and begin others that fit one pass together."""
        taken: list[Task] = []
        passed: list[_Waiting] = []
        longest = 0  # of the tokens to compute
        try:
            while len(passed) < _LOOK_AHEAD and self.running < self._max_batch:
                with self._changed:
                    if not self._waiting:
                        break
                    entry = heapq.heappop(self._waiting)
                task = entry.task
                self._running.add(task)  # at once, so that any error ends it
                found, known = self._prefixes.find(task.known)
                new = max(longest, len(task.known) - known)
                too_many = taken and new * (len(taken) + 1) > PIECE
                is_known = known == len(task.known) and task.score is None
                if not is_known and (too_many or self._will_be_known(task, known, taken)):
                    self._running.discard(task)
                    passed.append(entry)
                    continue
                self._round = max(self._round, entry.round)
                if not is_known:
                    taken.append(task)
                    longest = new
                    continue
                try:
                    self._join(task, found.cache if found else None)
                    self.reused += known
                except (GPTCLIError, MemoryError) as error:
                    self._end([task], error)
        finally:
            with self._changed:
                for entry in passed:
                    heapq.heappush(self._waiting, entry)
        if taken:
            try:
                made = Prompts(self._model, taken, self._prefixes)
            except MemoryError as error:
                self._end(taken, error)
            else:
                self.reused += made.reused
                self._prompts.append(made)

    def _will_be_known(self, task: Task, known: int, taken: Sequence[Task]) -> bool:
        """Return whether more of a prompt will be known once those being computed are ready."""
        if not self._prefixes.keeps:
            return False
        others = [*taken, *(other for each in self._prompts for other in each.tasks)]
        common = [common_length(task.known, other.known) for other in others]
        return max(common, default=0) >= max(known + 1, SHORTEST)

    def _finish(self, prompts: Prompts) -> None:
        """Keep prompts that are ready, and let their texts join."""
        for place, task in enumerate(prompts.tasks):
            if self._prefixes.keeps and len(task.known) >= SHORTEST:
                alone = len(prompts.tasks) == 1
                cache = prompts.cache if alone else prompts.cache.select([place], len(task.known))
                self._prefixes.keep(Prefix(task.known, cache, prompts.states(place)))
            if task.decode and not task.cancelled:
                self._join(task, prompts.cache, place)
            else:
                self._running.discard(task)

    def _join(self, task: Task, cache: KVCache | None, place: int = 0) -> None:
        """Let a text join the batch; all its tokens but the last are in a place of a cache."""
        number = next(self._numbers)
        row = BatchRow(number, task.request, self._loaded)
        self._batch.add(row, cache, place)
        self._decoded[number] = task

    def _fail(self, error: Exception) -> None:
        """End all texts that are being computed, and after `stop` those that wait, too."""
        self._end(self._running, error)
        self._prompts.clear()
        self._decoded.clear()
        self._batch.clear()
        if self._stopped:
            with self._changed:
                tasks = [entry.task for entry in self._waiting]
                self._waiting.clear()
            self._end(tasks, error)

    def _end(self, tasks: Iterable[Task], error: Exception) -> None:
        """End texts with an error."""
        if isinstance(error, MemoryError):
            self._prefixes.release()
            if not self._batch.rows:
                self._batch.clear()  # gives back the memory of earlier rows
            error = ResourceError("there is not enough memory for this text now; try again later")
        for task in list(tasks):
            self._running.discard(task)
            task.cancelled = True  # it may have joined already
            task.deliver(error)


def _fitting(model: GPT2, texts: int) -> int:
    """Return how many texts of full length fit half of the free memory, up to a number."""
    free = model.ops.free_memory()
    if free is None:
        return texts
    one = cache_bytes(model.config, model.config.n_positions, cache_itemsize(model.ops))
    prefixes = cache_budget(model)  # that are kept
    return max(1, min(texts, math.floor((free - prefixes) / 2 / one)))
