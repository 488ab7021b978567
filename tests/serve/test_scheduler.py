"""Texts that share a scheduler are what they are alone, whatever else is computed."""

import importlib.util
import itertools
import queue
import threading
import time
import weakref
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_cli.errors import CheckpointError, ResourceError
from gpt_cli.generation import decode
from gpt_cli.generation.generate import Completion, Run
from gpt_cli.generation.row import Request
from gpt_cli.gpt2 import prefill
from gpt_cli.gpt2.hooks import FINAL
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.options.request import Options
from gpt_cli.scoring.activations import activations
from gpt_cli.scoring.score import score
from gpt_cli.serve import prompts, scheduler
from gpt_cli.serve.prompts import Pace, PendingScore, PendingText, PendingVector, PromptScore
from gpt_cli.serve.scheduler import QueueFullError, Scheduler, StoppedError
from gpt_cli.texts import prefix_cache
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.speculator import Speculator
from gpt_cli.texts.text import Text
from support.checkpoints import VOCAB
from support.decoding import decoding_ahead
from support.models import DTYPES, computing, model_of

SMALL = {"n_head": 2, "n_layer": 2, "n_positions": 150, "eos_token_id": 7}

an_id = st.integers(0, len(VOCAB) - 1)
options = st.builds(
    Options,
    max_tokens=st.integers(1, 30),
    temperature=st.sampled_from([0, 0.8, 1]),
    top_k=st.sampled_from([0, 5]),
    seed=st.integers(0, 99),
    frequency_penalty=st.sampled_from([0, 1]),
    top_logprobs=st.sampled_from([0, 2]),
)
searches = st.builds(
    Options,
    max_tokens=st.integers(1, 30),
    beams=st.integers(1, 4),
    length_penalty=st.sampled_from([-1, 0, 1]),
    early_stopping=st.sampled_from([False, True, "never"]),
    no_repeat_ngram=st.sampled_from([0, 2]),
    top_logprobs=st.sampled_from([0, 2]),
)


@st.composite
def wanted(draw):
    """Return requests that may begin alike, and numbers of likeliest tokens of their prompts."""
    begun = draw(st.lists(st.lists(an_id, max_size=100), min_size=1, max_size=2))
    ends = st.lists(an_id, min_size=1, max_size=20)
    request = st.builds(
        lambda start, end, chosen, index: Request(Text(start + end), chosen, index),
        *(st.sampled_from(begun), ends, options | searches, st.integers(0, 3)),
    )
    return draw(st.lists(st.tuples(request, st.sampled_from([None, 0, 3])), max_size=12))


class Caller:
    """Collects what becomes of the tasks of one caller."""

    def __init__(self):
        self.events = queue.Queue()
        self.completions, self.scores, self.vectors, self.errors = {}, {}, {}, {}

    def task(self, request, score=None, decode=True):
        if score is None:
            return self._numbered(PendingText, request)
        return self._numbered(PendingScore, request, prompt_logprobs=score, decode=decode)

    def vector(self, request, hook, first=0):
        return self._numbered(PendingVector, request, hook=hook, first=first)

    def _numbered(self, kind, request, **fields):
        number = len(self.completions)
        self.completions[number] = Completion(len(request.prompt), request.seed)
        task = kind(request, lambda event: self.events.put((number, event)), **fields)
        task.number = number
        return task

    def compute(self, shared, tasks, at_once=False):
        """Submit tasks and wait for them; `at_once` they are all there at the next turn."""
        with shared._changed if at_once else nullcontext():
            shared.submit(tasks)
        self.wait(tasks)

    def wait(self, tasks):
        """Wait until all have ended."""
        left = {task.number for task in tasks}
        while left:
            number, event = self.events.get(timeout=60)
            task = next(task for task in tasks if task.number == number)
            if isinstance(event, Exception):
                self.errors[number] = event
                left.discard(number)
            elif isinstance(event, np.ndarray):
                self.vectors[number] = event
                left.discard(number)
            elif isinstance(event, PromptScore):
                self.scores[number] = event
                if not task.decode:
                    left.discard(number)
            else:
                self.completions[number].add(event)
                if event.finish_reason and not event.hypothesis:
                    left.discard(number)


@pytest.fixture
def loaded(native, tokenizer):
    return LoadedModel(model_of(native("float32"), **SMALL), tokenizer)


@pytest.fixture
def running(loaded, monkeypatch):
    """Return a function that starts a scheduler, which is stopped at the end.

    Its passes have `CHUNK` tokens of prompts, however long they take.
    """
    monkeypatch.setattr(Pace, "learn", lambda *_: None)
    started = []

    def start(computing=loaded, **limits):
        started.append(Scheduler(computing, **limits))
        return started[-1]

    yield start
    for shared in started:
        shared.stop()
        shared.join()


def drafting(loaded):
    return replace(loaded, speculator=Speculator(loaded.model))


def alone(loaded, request):
    run = Run(replace(loaded, speculator=None), [request])
    list(run)
    return run.completions[0]


def assert_same(actual, expected):
    for name in ("text", "ids", "logprobs", "top_logprobs", "finish_reason", "score"):
        assert getattr(actual, name) == getattr(expected, name), name
    for other, expected_other in zip(actual.others, expected.others, strict=True):
        assert_same(other, expected_other)


def busy(running, **limits):
    """Return a scheduler with a text that decodes on and on, and its task."""
    started, caller = running(**limits), Caller()
    task = caller.task(Request(Text([1]), Options(max_tokens=149, ignore_eos=True, temperature=0)))
    started.submit([task])
    caller.events.get(timeout=60)
    return started, task


# --- equality ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=6)
@given(requests=wanted(), max_batch=st.integers(4, 9), chunk=st.sampled_from([1, 7, 96]))
def test_each_text_is_the_one_that_it_is_alone(
    native, tokenizer, dtype, requests, max_batch, chunk
):
    loaded, caller = LoadedModel(model_of(native(dtype), dtype, **SMALL), tokenizer), Caller()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "CHUNK", chunk)
        patch.setattr(Pace, "learn", lambda *_: None)
        patch.setattr(prefix_cache, "_MIN_BUDGET", 300_000)
        patch.setattr(prefix_cache, "_BUDGET_SHARE", 0)
        shared = Scheduler(drafting(loaded), max_batch=max_batch)
        tasks = [caller.task(request, score=count) for request, count in requests]
        half = len(tasks) // 2
        shared.submit(tasks[:half])
        shared.submit(tasks[half:])
        caller.wait(tasks)
        assert (shared.running, shared.waiting) == (0, 0)
        shared.stop()
        shared.join()
    for task, (request, count) in zip(tasks, requests, strict=True):
        assert_same(caller.completions[task.number], alone(loaded, request))
        if count is not None:
            actual = caller.scores[task.number]
            (expected,) = score(loaded, [request.text])
            assert actual.logprobs == expected.token_logprobs[1:]
            assert {len(top) for top in actual.top_logprobs} <= {count}


def test_texts_join_and_leave_between_calls_that_decode_ahead(loaded, running):
    requests = [
        Request(Text([n]), Options(seed=n, max_tokens=5 + 7 * n % 40, ignore_eos=n % 8 > 5))
        for n in range(20)
    ]
    expected = [alone(loaded, request) for request in requests]
    with decoding_ahead(loaded.model.ops) as calls:
        shared, caller = running(max_batch=5), Caller()
        tasks = [caller.task(request) for request in requests]
        shared.submit(tasks[:7])
        shared.submit(tasks[7:])
        caller.wait(tasks)
    for task, completion in zip(tasks, expected, strict=True):
        assert_same(caller.completions[task.number], completion)
    assert max(passes for passes, _ in calls) > 1
    assert max(rows for _, rows in calls) > 1


def test_a_text_that_was_begun_elsewhere_goes_on_as_it_would_have_there(tiny, running):
    stopped = {"stop": ["girl named", " a"], "min_tokens": 9, "bad_words": ["very"]}
    chosen = [{}, {"repeat_penalty": 1.3}, {"frequency_penalty": 1}, stopped, {"temperature": 0}]
    chosen += [{"top_logprobs": 2}, {"min_tokens": 30, "top_k": 5}]
    if importlib.util.find_spec("llguidance"):
        chosen.append({"regex": "( very,){9,40} (small|old)\\."})
    ids = tiny.encode("Once upon a time, there was")
    requests = [
        Request(Text(ids), Options(seed=5, max_tokens=40, **fields), index)
        for index, fields in enumerate(chosen)
    ]
    shared, caller = running(drafting(tiny.loaded)), Caller()
    expected = [alone(tiny.loaded, request) for request in requests]
    for cut in (1, 7, 20):
        tasks = [caller.task(request) for request in requests]
        for task, whole in zip(tasks, expected, strict=True):
            task.generated = whole.ids[: min(cut, len(whole.ids) - 1)]
        caller.compute(shared, tasks)
        for task, whole in zip(tasks, expected, strict=True):
            rest, known = caller.completions[task.number], len(task.generated)
            assert rest.ids == whole.ids[known:]
            assert rest.logprobs == whole.logprobs[known:]
            assert whole.text.endswith(rest.text)
            assert rest.finish_reason == whole.finish_reason


def test_a_text_is_the_same_at_1_8_and_32_callers(tiny, running):
    texts = ["Once upon a time", "The moon", "Every day, the fox", "A girl named Emma" * 20]
    requests = [
        Request(Text(tiny.encode(texts[n % 4])), Options(seed=n, max_tokens=4 + n), n % 3)
        for n in range(32)
    ]
    expected = [alone(tiny.loaded, request) for request in requests]
    for callers in (1, 8, 32):
        shared = running(tiny.loaded, max_batch=max(1, callers // 2))
        actual = {}

        def call(first, shared=shared, actual=actual, callers=callers):
            caller = Caller()
            for number in range(first, 32, callers):
                task = caller.task(requests[number])
                caller.compute(shared, [task])
                actual[number] = caller.completions[task.number]

        threads = [threading.Thread(target=call, args=(first,)) for first in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, completion in enumerate(expected):
            assert_same(actual[number], completion)
        shared.stop()
        shared.join()


def test_drafts_of_a_scheduler_change_nothing(loaded, running):
    shared, caller = running(drafting(loaded)), Caller()
    # A loop, which n-grams draft.
    requests = [
        Request(Text([1, 2, 3, 4] * 5), Options(temperature=0, max_tokens=100)) for _ in range(3)
    ]
    tasks = [caller.task(request) for request in requests]
    caller.compute(shared, tasks)
    for task, request in zip(tasks, requests, strict=True):
        assert_same(caller.completions[task.number], alone(loaded, request))
    assert sum(done.accepted for done in caller.completions.values()) > 0


def test_a_prompt_is_scored_without_new_tokens(tiny, running):
    shared, caller = running(tiny.loaded), Caller()
    ids = tiny.encode("Once upon a time there was a girl. " * 30)
    tasks = [
        caller.task(Request(Text(text), Options()), 2, decode=False) for text in (ids, ids[:1])
    ]
    caller.compute(shared, tasks)
    long, short = caller.scores[0], caller.scores[1]
    assert (
        long.logprobs == tiny.score("Once upon a time there was a girl. " * 30).token_logprobs[1:]
    )
    assert (short.logprobs, short.top_logprobs) == ([], [])
    caller.compute(shared, [caller.task(Request(Text([1]), Options(max_tokens=1)))])
    assert [len(completion.ids) for completion in caller.completions.values()] == [0, 0, 1]
    assert shared.running == 0


def test_a_search_that_loses_beams_changes_no_other(loaded, running):
    pytest.importorskip("llguidance")
    # Of the first, three of four beams end at the second token, and new ones begin.
    patterns = ["jk|lk|mk|q[rs][tu][vw]", "n{9}|o{9}|p{9}"]
    panel = loaded.model.ops.cache_panel
    for size in range(panel - 2, panel + 2):  # the token of a moved row is the first of a panel
        shared, caller = running(max_batch=8), Caller()
        searches = [Options(max_tokens=9, beams=4, regex=pattern) for pattern in patterns]
        tasks = [
            caller.task(Request(Text([n] * size), chosen)) for n, chosen in enumerate(searches)
        ]
        caller.compute(shared, tasks, at_once=True)
        for task in tasks:
            assert_same(caller.completions[task.number], alone(loaded, task.request))


# --- sharing -------------------------------------------------------------------------------------


@pytest.fixture
def passes(monkeypatch):
    """Return a list of the shapes (B, T) of passes over prompts."""
    shapes, computed = [], prefill.hidden_states

    def hidden_states(model, ids, *others):
        if threading.current_thread().name == "model":  # of the scheduler
            shapes.append(ids.shape)
        return computed(model, ids, *others)

    monkeypatch.setattr(prefill, "hidden_states", hidden_states)
    return shapes


def test_a_prompt_of_several_texts_is_computed_once(running, passes):
    shared, caller = running(), Caller()
    sampling = Options(max_tokens=5, seed=1, ignore_eos=True)
    tasks = [caller.task(Request(Text([3] * 101), sampling, index)) for index in range(6)]
    caller.compute(shared, tasks)
    assert passes == [(1, 72), (1, 28)]
    assert shared.reused == 500
    more = caller.task(Request(Text([3] * 101 + [5] * 10), sampling), score=0)
    caller.compute(shared, [more])
    assert passes[2:] == [(1, 10)]  # only what follows is computed, and all is scored
    assert len(caller.scores[more.number].logprobs) == 110


def test_each_of_several_prompts_in_a_pass_is_known_afterwards(loaded, running, passes):
    shared, caller = running(), Caller()
    begun = [[3, 4] * 10, [5, 6] * 12]
    first = [caller.task(Request(Text(ids), Options(max_tokens=1))) for ids in begun]
    caller.compute(shared, first, at_once=True)
    assert passes == [(2, 23)]
    more = [caller.task(Request(Text(ids + [7] * 5), Options(seed=1)), score=0) for ids in begun]
    for task in more:
        caller.compute(shared, [task])
        assert_same(caller.completions[task.number], alone(loaded, task.request))
        (expected,) = score(loaded, [task.request.text])
        assert caller.scores[task.number].logprobs == expected.token_logprobs[1:]
    assert passes[1:] == [(1, 5), (1, 5)]


def test_a_pass_of_prompts_has_the_tokens_that_the_machine_computes_in_its_time():
    pace = Pace(1000)
    assert pace.tokens == prompts.CHUNK
    for rate in (100, 1000, 100_000):
        for _ in range(40):
            pace.learn(pace.tokens, pace.tokens / rate)
        expected = min(max(prompts._LEAST_TOKENS, prompts._PASS_SECONDS * rate), 1000)
        assert pace.tokens == pytest.approx(expected, rel=0.01, abs=1)


def test_short_prompts_share_a_pass_and_a_long_one_has_chunks(running, passes):
    shared, _ = busy(running)
    caller = Caller()
    prompts_of = [[9 + n] * (11 + n) for n in range(4)] + [[5] * 149]
    tasks = [caller.task(Request(Text(ids), Options(max_tokens=1))) for ids in prompts_of]
    caller.compute(shared, tasks, at_once=True)
    assert passes[0] == (4, 13)
    assert passes[1:] == [(1, 72), (1, 72), (1, 4)]


@pytest.mark.parametrize("hook", [FINAL, "blocks.1.mlp.hook_post", "blocks.0.attn.hook_q"])
def test_vectors_are_computed_in_the_passes_of_prompts(loaded, running, passes, hook):
    shared, caller = running(), Caller()
    texts = [[9] * 20, [8] * 15, [7] * 149]
    vectors = [caller.vector(Request(Text(ids), Options()), hook) for ids in texts]
    text = caller.task(Request(Text([9] * 20), Options(max_tokens=3, seed=1)), score=0)
    caller.compute(shared, [*vectors, text], at_once=True)
    assert all(rows * width <= prompts.CHUNK for rows, width in passes)
    assert passes[0] == (2 if hook == FINAL else 3, 20)  # side by side, and with the text
    rows = activations(loaded.model, map(Text, texts), [hook], lambda text: [(0, len(text.ids))])
    for task, row in zip(vectors, rows, strict=True):
        assert np.array_equal(caller.vectors[task.number], row[hook][0])
    assert_same(caller.completions[text.number], alone(loaded, text.request))
    # The prefix cache has the texts of states, and no other values.
    again = caller.vector(Request(Text([7] * 149), Options()), FINAL, 148)
    reused = shared.reused
    caller.compute(shared, [again])
    assert shared.reused - reused == (149 if hook == FINAL else 0)
    assert (shared.running, shared.waiting) == (0, 0)


def test_others_go_on_while_a_long_prompt_is_computed(running, monkeypatch):
    monkeypatch.setattr(prompts, "CHUNK", 10)
    shared, order = running(), queue.Queue()

    def task(name, request):
        return PendingText(request, lambda event: order.put(name))

    shared.submit([task("short", Request(Text([1]), Options(max_tokens=100, ignore_eos=True)))])
    order.get(timeout=60)
    shared.submit([task("long", Request(Text([2] * 81), Options(max_tokens=1)))])
    shared.submit([task("new", Request(Text([4, 5]), Options(max_tokens=1)))])
    names = [order.get(timeout=60) for _ in range(101)]
    assert names.index("new") < names.index("long")
    assert names[: names.index("long")].count("short") >= 8  # one between two chunks


def test_texts_of_several_requests_take_turns(running):
    shared, blocking = busy(running, max_batch=1, max_queue=100)
    ended = queue.Queue()

    def task(name):
        return PendingText(Request(Text([1]), Options(max_tokens=1)), lambda event: ended.put(name))

    shared.submit([task("first") for _ in range(30)])
    shared.submit([task("second") for _ in range(3)])
    blocking.cancelled = True
    names = [ended.get(timeout=60) for _ in range(33)]
    assert Counter(names[:6]) == {"first": 3, "second": 3}


def test_a_request_that_comes_later_does_not_overtake_what_waits(running):
    shared, blocking = busy(running, max_batch=1, max_queue=100)
    names, done = [], threading.Event()

    def task(name):
        return PendingText(Request(Text([1]), Options(max_tokens=1)), lambda event: end(name))

    def end(name):
        names.append(name)
        if len(names) == 10:
            shared.submit([task("later") for _ in range(10)])
        if len(names) == 30:
            done.set()

    shared.submit([task("first") for _ in range(20)])
    blocking.cancelled = True
    assert done.wait(60)
    assert Counter(names[10:20]) == {"first": 5, "later": 5}


# --- places --------------------------------------------------------------------------------------


def test_a_text_that_is_not_wanted_any_more_leaves_at_the_next_turn(loaded, running):
    shared, first = busy(running, max_batch=1)
    caller = Caller()
    waiting = caller.task(Request(Text([2] * 50), Options(max_tokens=3, seed=1)))
    dropped = caller.task(Request(Text([3]), Options(max_tokens=3)))
    shared.submit([dropped])
    shared.submit([waiting])
    dropped.cancelled = True
    assert (shared.running, shared.waiting) == (1, 1)
    first.cancelled = True
    caller.wait([waiting])
    assert_same(caller.completions[waiting.number], alone(loaded, waiting.request))
    assert not caller.completions[dropped.number].ids
    assert (shared.running, shared.waiting) == (0, 0)


def test_a_search_that_is_not_wanted_any_more_leaves_with_all_its_rows(
    loaded, running, monkeypatch
):
    shared, caller, sizes, inner = running(max_batch=5), Caller(), [], decode.hidden_states
    endless = Options(max_tokens=149, beams=4, ignore_eos=True)
    search = caller.task(Request(Text([2]), endless))
    text = caller.task(Request(Text([3]), Options(max_tokens=149, ignore_eos=True, seed=1)))
    waiting = caller.task(Request(Text([4]), replace(endless, max_tokens=3)))

    def leave(model, ids, *args):
        sizes.append(len(ids))
        search.cancelled = len(sizes) >= 9
        return inner(model, ids, *args)

    monkeypatch.setattr(decode, "hidden_states", leave)
    with shared._changed:
        shared.submit([search, text, waiting])
    caller.wait([text, waiting])
    assert sizes[1:11] == [5] * 8 + [2, 5]
    for task in (text, waiting):
        assert_same(caller.completions[task.number], alone(loaded, task.request))
    assert not caller.completions[search.number].ids
    assert (shared.running, shared.waiting, shared._batch.rows) == (0, 0, [])


def test_a_search_that_needs_many_rows_is_not_overtaken(running, monkeypatch):
    shared, ended, inner = running(max_batch=3), queue.Queue(), decode.hidden_states
    passes = itertools.count()

    def task(name, tokens, **options):
        def deliver(step):
            if step.finish_reason and not step.hypothesis:
                ended.put(name)

        options = Options(max_tokens=tokens, ignore_eos=True, **options)
        return PendingText(Request(Text([1]), options), deliver)

    def come(*args):
        if 3 < next(passes) < 9:
            shared.submit([task("later", 1)])
        return inner(*args)

    monkeypatch.setattr(decode, "hidden_states", come)
    shared.submit([task("long", 12), task("short", 2), task("search", 2, beams=3)])
    names = [ended.get(timeout=60) for _ in range(8)]
    assert names == ["short", "long", "search", *["later"] * 5]


def test_a_prompt_that_is_not_wanted_any_more_is_not_computed_to_its_end(
    running, monkeypatch, passes
):
    monkeypatch.setattr(prompts, "CHUNK", 1)
    shared, caller = running(), Caller()
    task = caller.task(Request(Text([2] * 149), Options(max_tokens=1)))
    inner = prefill.hidden_states

    def leave(*args):
        task.cancelled = len(passes) >= 5
        return inner(*args)

    monkeypatch.setattr(prefill, "hidden_states", leave)
    shared.submit([task])
    deadline = time.monotonic() + 60
    while not task.cancelled or shared.running:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert len(passes) == 6  # the one in which it was cancelled is the last


def test_no_more_texts_wait_than_allowed(running, monkeypatch):
    shared, first = busy(running, max_batch=1, max_queue=2)
    caller = Caller()
    tasks = [caller.task(Request(Text([n]), Options(max_tokens=1))) for n in range(4)]
    shared.submit(tasks[:1])
    shared.submit(tasks[1:3])  # a request is accepted as a whole
    for most, name in ((1, "1 request"), (2, "2 requests")):  # not the number that wait
        monkeypatch.setattr(shared, "_max_queue", most)
        with pytest.raises(QueueFullError, match=rf"the queue is full \({name}\)"):
            shared.submit(tasks[3:])
    tasks[0].cancelled = tasks[1].cancelled = True
    shared.submit(tasks[3:])
    first.cancelled = True
    caller.wait(tasks[2:])


def test_free_places_do_not_count_as_a_queue(running):
    shared, caller = running(max_batch=3, max_queue=2), Caller()
    tasks = [caller.task(Request(Text([1]), Options(max_tokens=1))) for _ in range(6)]
    with shared._changed:  # so that none has begun
        for task in tasks[:5]:
            shared.submit([task])
        with pytest.raises(QueueFullError):
            shared.submit(tasks[5:])
    caller.wait(tasks[:5])


def test_fewer_texts_at_a_time_if_memory_is_short(loaded, running, monkeypatch):
    model = loaded.model
    one = 2 * 2 * 16 * 4 * 150  # keys and values, layers, width, bytes, context
    monkeypatch.setattr(prefix_cache, "_MIN_BUDGET", one)  # kept prefixes
    monkeypatch.setattr(prefix_cache, "_BUDGET_SHARE", 0)
    monkeypatch.setattr(type(model.ops), "free_memory", lambda ops: 8 * one)
    assert scheduler._fitting(model, 32, 1) == 3
    assert scheduler._fitting(model, 2, 1) == 2
    monkeypatch.setattr(type(model.ops), "free_memory", lambda ops: 0)
    assert scheduler._fitting(model, 32, 1) == 1


# --- errors --------------------------------------------------------------------------------------


def test_a_stop_ends_all_texts(running):
    shared, _ = busy(running, max_batch=1)
    caller = Caller()
    waiting = caller.task(Request(Text([1]), Options()))
    shared.submit([waiting])
    shared.stop()
    shared.join()
    caller.wait([waiting])
    assert isinstance(caller.errors[waiting.number], StoppedError)
    with pytest.raises(StoppedError):
        shared.submit([waiting])


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (CheckpointError("damaged"), CheckpointError),
        (MemoryError(), ResourceError),
        (ZeroDivisionError("a bug"), ZeroDivisionError),
    ],
)
@pytest.mark.parametrize(
    "function",
    ["gpt2.prefill.hidden_states", "serve.prompts.KVCache", "generation.decode.hidden_states"],
)
def test_an_error_ends_its_texts_and_others_are_computed(
    loaded, running, monkeypatch, error, seen, function
):
    shared, caller = running(), Caller()

    def fail(*args, **options):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(f"gpt_cli.{function}", fail)
        bad = [caller.task(Request(Text([n] * 30), Options(max_tokens=3))) for n in range(2)]
        bad += [caller.task(Request(Text([2] * 30), Options(max_tokens=3, beams=2)))]
        caller.compute(shared, bad)
    assert {type(error) for error in caller.errors.values()} == {seen}
    if seen is ResourceError:
        assert "not enough memory" in str(caller.errors[0])
    good = caller.task(Request(Text([5] * 30), Options(max_tokens=3, seed=2)))
    caller.compute(shared, [good])
    assert_same(caller.completions[good.number], alone(loaded, good.request))
    assert (shared.running, shared.waiting) == (0, 0)


def test_damaged_weights_end_only_the_texts_that_use_them(loaded, running):
    loaded.model.wpe[60] = np.nan  # only texts use it that reach this position
    shared, caller = running(drafting(loaded)), Caller()
    options = Options(max_tokens=50, temperature=0, ignore_eos=True)
    long, *short = [
        caller.task(Request(Text([n] * length), options)) for n, length in ((3, 40), (5, 2))
    ]
    short += [caller.task(Request(Text([1, 2, 3] * 3), options))]
    caller.compute(shared, [long, *short], at_once=True)
    assert isinstance(caller.errors.pop(long.number), CheckpointError)
    assert not caller.errors
    assert len(caller.completions[long.number].ids) == 21  # those before the position
    for text in short:
        assert_same(caller.completions[text.number], alone(loaded, text.request))
    assert (shared.running, shared._batch.rows) == (0, [])


def test_damaged_weights_of_one_beam_end_its_search(loaded, running, monkeypatch):
    search = Request(Text([5, 6]), Options(max_tokens=9, beams=3, ignore_eos=True))
    (bad,) = (
        alone(loaded, replace(search, options=replace(search.options, max_tokens=1))).others[1].ids
    )
    text = Request(
        Text([5]), Options(max_tokens=99, logit_bias={bad: -100}, seed=1, ignore_eos=True)
    )
    expected, inner = alone(loaded, text), decode.hidden_states

    def damaged(model, ids, *args):
        states = inner(model, ids, *args)
        states[(ids == bad).any(axis=1)] = np.nan
        return states

    monkeypatch.setattr(decode, "hidden_states", damaged)
    shared, caller = running(max_batch=4), Caller()
    tasks = [caller.task(text), caller.task(search)]
    caller.compute(shared, tasks, at_once=True)
    assert isinstance(caller.errors.pop(1), CheckpointError)
    assert_same(caller.completions[0], expected)
    assert (caller.errors, shared.running, shared._batch.rows) == ({}, 0, [])


def test_damaged_weights_end_only_the_vectors_that_use_them(loaded, running):
    loaded.model.wpe[20] = np.nan
    shared, caller = running(), Caller()
    bad, good = (
        caller.vector(Request(Text([n] * length), Options()), "blocks.0.hook_resid_post")
        for n, length in ((3, 30), (4, 18))
    )
    caller.compute(shared, [bad, good], at_once=True)
    assert isinstance(caller.errors.pop(bad.number), CheckpointError)
    assert (caller.errors, [*caller.vectors]) == ({}, [good.number])


def test_damaged_weights_end_only_the_scores_that_use_them(loaded, running):
    loaded.model.wpe[20] = np.nan
    shared, caller = running(), Caller()
    one_token = Options(max_tokens=1, seed=1)
    bad, good = (
        caller.task(Request(Text([n] * length), one_token), score=1)
        for n, length in ((3, 30), (4, 18))
    )
    caller.compute(shared, [bad, good], at_once=True)
    assert isinstance(caller.errors.pop(bad.number), CheckpointError)
    assert not caller.errors
    (expected,) = score(loaded, [good.request.text])
    assert caller.scores[good.number].logprobs == expected.token_logprobs[1:]
    assert_same(caller.completions[good.number], alone(loaded, good.request))


@pytest.mark.parametrize(
    ("error", "ended"), [(MemoryError(), {"known"}), (ZeroDivisionError("a bug"), {"known", "new"})]
)
def test_an_error_while_texts_are_admitted_loses_none(loaded, running, monkeypatch, error, ended):
    shared, _ = busy(running)
    caller, joined = Caller(), scheduler.Batch.add

    def add(batch, row, cache, cache_row):
        if row.options.seed == 9:
            raise error
        joined(batch, row, cache, cache_row)

    monkeypatch.setattr(scheduler.Batch, "add", add)
    tasks = {
        "new": caller.task(Request(Text([2] * 40), Options(max_tokens=3, seed=1))),
        "passed": caller.task(Request(Text([2] * 40), Options(max_tokens=3, seed=2))),
        "known": caller.task(Request(Text([2]), Options(max_tokens=3, seed=9))),
    }
    caller.compute(shared, list(tasks.values()), at_once=True)
    assert {name for name, task in tasks.items() if task.number in caller.errors} == ended
    for name in tasks.keys() - ended:
        actual = caller.completions[tasks[name].number]
        assert_same(actual, alone(loaded, tasks[name].request))


def test_a_text_that_an_error_has_ended_leaves_the_batch(running, monkeypatch):
    shared, caller = running(), Caller()
    tasks = [
        caller.task(Request(Text([n] * 30), Options(max_tokens=99, ignore_eos=True)))
        for n in (1, 2)
    ]
    kept = []

    def fail_for_the_second(*arguments):
        kept.append(arguments)
        if len(kept) == 2:
            raise MemoryError
        return KVCache(*arguments)

    monkeypatch.setattr(scheduler, "KVCache", fail_for_the_second)
    caller.compute(shared, tasks, at_once=True)
    assert len(kept) == 2
    assert [type(caller.errors[task.number]) for task in tasks] == [ResourceError] * 2
    other = Caller()
    last = other.task(Request(Text([3]), Options(max_tokens=9)))
    shared.submit([last])
    other.wait([last])
    assert caller.events.qsize() <= 1  # a step, in the turn of the error
    assert (shared.running, shared._batch.rows) == (0, [])


def test_if_memory_is_short_all_that_is_not_in_use_is_given_back(running, monkeypatch):
    shared, caller = running(), Caller()
    tasks = [caller.task(Request(Text([n] * 30), Options(max_tokens=3))) for n in range(2)]
    shared.submit(tasks[:1])
    caller.wait(tasks[:1])
    held = [weakref.ref(shared._batch._memory), weakref.ref(shared._prefixes._kept[0].cache)]

    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(prompts, "KVCache", fail)
    shared.submit(tasks[1:])
    caller.wait(tasks[1:])
    assert isinstance(caller.errors[1], ResourceError)
    assert [reference() for reference in held] == [None, None]


def test_other_threads_and_levels_give_the_same_texts(loaded, level):
    request = Request(Text([1, 2, 3] * 30), Options(max_tokens=20, seed=3))
    expected = alone(loaded, request)
    with computing(loaded.model.ops, 3, level):
        shared, caller = Scheduler(loaded), Caller()
        tasks = [caller.task(request) for _ in range(3)]
        caller.compute(shared, tasks)
        shared.stop()
        shared.join()
    for done in caller.completions.values():
        assert_same(done, expected)
