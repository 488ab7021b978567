"""Drafts decide how soon a text is ready, and never what it says."""

import functools
import itertools
import random
import re
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpt_cli
from gpt_cli.folder.config import GPT2Config
from gpt_cli.generation import speculate
from gpt_cli.generation.generate import Run, working_set
from gpt_cli.generation.row import Request
from gpt_cli.generation.speculate import MAX_DRAFTS, MAX_ROW_DRAFTS, DraftPolicy
from gpt_cli.gpt2.memory import weights_bytes
from gpt_cli.options.request import Options
from gpt_cli.texts import speculator
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.speculator import Speculator, make_draft_model
from gpt_cli.texts.text import Text
from support.checkpoints import VOCAB
from support.commands import ENDLESS, LONG, PIPES, text_of
from support.drafting import (
    OTHERS,
    SMALL,
    FakeRow,
    options,
    options_of,
    planned,
    plans,
    prompts,
    requests_of,
    speculating,
)
from support.in_process import records_here, run_here
from support.models import DTYPES, completions_of, favouring, model_of, outcomes
from support.processes import COMMAND, LimitedProcess, posix
from support.sampling_values import VALUES, sampling_options

# --- the number of drafts ------------------------------------------------------------------------


def never_repeats(row, position):
    return 1000 * row + position


def repeats(row, position):
    return position % 5


def guessed(row, position):
    """Return a random one of nine tokens: one in nine drafts from n-grams is right."""
    return random.Random(position).randrange(9)


def misleads(row, position):
    """After the three tokens that repeat, each time another one follows."""
    return position if position % 4 == 3 else position % 4


class Simulation:
    """Texts that are known, and a clock that passes and drafts move on.

    A pass over one token takes a second, and over more as many as `DraftPolicy._times` says.
    Passes, or drafts, may take longer and shorter in turn, by a part of their time. `passes` has
    the number of drafts of each pass, and whether they are the draft model's.
    """

    def __init__(
        self, patch, text=never_repeats, right=lambda position: True, *, draft_seconds=0.1,
        drafts_vary=0.0, passes_vary=0.0, dtype="float32", has_room=True,
    ):  # fmt: skip
        self._text, self._right, self._draft_seconds = text, right, draft_seconds
        self._drafts_vary, self._passes_vary = drafts_vary, passes_vary
        self._has_room = has_room
        self.seconds, self.models_made, self.passes, self._followed = 0.0, 0, [], False
        patch.setattr(speculate, "time", SimpleNamespace(perf_counter=lambda: self.seconds))
        patch.setattr(speculator, "make_draft_model", self._make_draft_model)
        patch.setattr(speculate, "DraftModel", lambda *_: self)
        draft_ops = None if dtype == "int8" else object()
        ops = SimpleNamespace(dtype=dtype, decode=None, draft_ops=lambda: draft_ops)
        self._speculator = Speculator(SimpleNamespace(ops=ops))

    def run(self, *sizes, prompt=1, first=0, policy=None):
        """Continue prompts by these numbers of tokens; return `passes`.

        The numbers of rows begin with `first`. The policy is by default a new one.
        """
        drafting = self.drafting = policy or DraftPolicy(self._speculator, None)
        self.passes = []
        rows = [
            FakeRow(
                request_number=row, ids=[self._text(row, position) for position in range(prompt)],
                tokens_left=size, drafts=[], window=[],
            )
            for row, size in enumerate(sizes, first)
        ]  # fmt: skip
        while rows := [row for row in rows if row.tokens_left]:
            self._by_model = False
            drafting.draft(rows, SimpleNamespace(capacity=10**9))
            drafts = [row.drafts for row in rows]
            most = max(map(len, drafts))
            assert most <= min(MAX_ROW_DRAFTS, MAX_DRAFTS // len(rows))
            assert all(len(row.drafts) < row.tokens_left for row in rows)
            self.passes.append((most, self._by_model))
            seconds = drafting._times(len(rows) + sum(map(len, drafts)))
            self.seconds += self._varied(seconds, self._passes_vary)
            new = [self._verified(row) for row in rows]
            drafting.learn(rows, new)
            for row, ids in zip(rows, new, strict=True):
                row.ids += ids
                row.tokens_left -= len(ids)
                row.drafts = []
        return self.passes

    def _varied(self, seconds, part):
        return seconds * (1 + part * (-1) ** len(self.passes))

    def _verified(self, row):
        """Return the next tokens of a row: the right drafts and one more."""
        ids = []
        for draft in [*row.drafts, None]:
            ids.append(self._text(row.request_number, len(row.ids) + len(ids)))
            if draft != ids[-1]:
                break
        return ids

    def _make_draft_model(self, model):
        self.models_made += 1
        if not self._has_room:
            return None
        self.seconds += 10
        return model

    def sync(self, cache):
        self.seconds += 0 if self._followed else 2  # is not a part of drafting
        self._followed = True

    def draft(self, rows, count):
        self._by_model = True
        self.seconds += self._varied(count * self._draft_seconds, self._drafts_vary)
        return [
            [
                self._text(row.request_number, position) if self._right(position) else -1
                for position in range(len(row.ids), len(row.ids) + count)
            ]
            for row in rows
        ]


@pytest.fixture
def simulated(monkeypatch):
    return functools.partial(Simulation, monkeypatch)


def tries(passes):
    """Return the numbers of the passes with drafts of the draft model."""
    return [number for number, (_, by_model) in enumerate(passes) if by_model]


def assert_given_up(passes):
    """The draft model is tried at the beginning, and then ever more rarely, with one draft."""
    gaps = np.diff(tries(passes)).tolist()
    begun = gaps.count(1)
    expected = [speculate._PATIENCE * 2**number for number in range(len(gaps) - begun)]
    assert gaps == [1] * begun + expected
    assert len(expected) >= 3
    assert begun <= 4
    assert {passes[number][0] for number in tries(passes)[-3:]} == {1}


def test_a_draft_model_that_is_always_right_drafts_as_much_as_it_may_and_halves_the_time(simulated):
    passes = simulated().run(400)
    assert passes[0] == (0, False)  # takes the time of a pass
    full = passes.index((MAX_ROW_DRAFTS, True))
    assert full < 10
    assert set(passes[full:-2]) == {(MAX_ROW_DRAFTS, True)}
    simulation = simulated(draft_seconds=0.3)
    simulation.run(400)
    assert simulation.seconds < 0.45 * 400


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_draft_model_that_is_always_wrong_is_soon_given_up(simulated, rows):
    passes = simulated(right=lambda position: False, draft_seconds=0.3).run(*[400] * rows)
    assert_given_up(passes)
    assert not any(count for count, by_model in passes if not by_model)


def test_a_draft_model_that_saves_no_or_hardly_any_time_is_given_up_although_it_is_right(simulated):
    assert_given_up(simulated(draft_seconds=1.5).run(400))
    assert len(tries(simulated(draft_seconds=0.97).run(400)[12:])) <= 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pass_over_more_tokens_takes_longer_but_less_than_one_pass_each(simulated, dtype):
    simulation = simulated(dtype=dtype)
    simulation.run(1)
    times = [simulation.drafting._times(tokens) for tokens in range(1, 2 * MAX_DRAFTS)]
    assert times[0] == 1 < 2 < times[-1]
    assert times == sorted(times)
    assert all(seconds < tokens for tokens, seconds in enumerate(times[1:], 2))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_times_are_measured(simulated, rows, dtype):
    """The time to make the draft model is no part of them."""
    simulation = simulated(draft_seconds=0.2, dtype=dtype)
    simulation.run(*[400] * rows)
    assert simulation.drafting._pass_seconds == pytest.approx(1)
    assert simulation.drafting._model_history.seconds == pytest.approx(0.2, rel=1e-3)


def test_times_that_vary_change_little(simulated):
    passes = simulated(draft_seconds=1.3, passes_vary=0.5).run(400)
    assert len(tries(passes[12:])) <= 5
    passes = simulated(draft_seconds=0.7, drafts_vary=0.85).run(400)
    assert all(by_model for _, by_model in passes[1:-1])


@pytest.mark.parametrize("wrong", [20, 100, 300])
def test_a_draft_model_that_is_right_again_is_used_again(simulated, wrong):
    passes = simulated(right=lambda position: position > wrong).run(3000)
    again = next(number for number, (count, _) in enumerate(passes) if count > 3)
    assert again < 3 * wrong
    assert (MAX_ROW_DRAFTS, True) in passes[again : again + 20]


def test_what_drafts_saved_is_forgotten_with_the_texts(simulated):
    simulation = simulated(right=lambda position: len(simulation.passes) >= crowd or policy is None)
    policy, crowd = None, 10**9
    alone = simulation.run(400)
    policy = DraftPolicy(simulation._speculator, None)
    crowd = len(simulation.run(*[400] * 8, policy=policy))
    assert simulation.passes[-1] == (0, False)
    crowd = 0
    assert simulation.run(400, first=8, policy=policy) == alone


def test_a_draft_model_that_begins_to_be_wrong_is_given_up_step_by_step(simulated):
    passes = simulated(right=lambda position: position < 300).run(800)
    full = max(number for number, (count, _) in enumerate(passes) if count == MAX_ROW_DRAFTS)
    counts = [count for count, _ in passes[full:]]
    falling = counts[: counts.index(0)]
    assert falling == sorted(falling, reverse=True)
    assert set(falling) == {*speculate._COUNTS}
    assert len(falling) < 60
    assert not any(counts[len(falling) :][: speculate._PATIENCE - 1])


def test_where_n_grams_are_always_right_the_draft_model_is_hardly_used(simulated):
    passes = simulated(repeats).run(2000)
    assert passes[20:-2].count((MAX_ROW_DRAFTS, False)) > 0.95 * len(passes[20:-2])
    assert all(count == 1 for count, by_model in passes[20:] if by_model)
    assert simulated(repeats, dtype="int8").run(400).count((MAX_ROW_DRAFTS, False)) > 25


def test_n_grams_that_are_always_wrong_are_soon_given_up(simulated):
    passes = simulated(misleads, dtype="int8").run(400)
    assert any(count for count, _ in passes[:20])
    assert not any(count for count, _ in passes[-20:])


def test_n_grams_that_are_seldom_right_are_hardly_used(simulated):
    passes = simulated(guessed, dtype="int8").run(3000)
    used = [count > 0 for count, _ in passes[1000:]]  # all n-grams were in the text before
    assert sum(used) < 0.25 * len(used)


def test_the_first_pass_is_timed_without_drafts(simulated):
    passes = simulated(repeats).run(100, prompt=20)
    assert passes[0] == (0, False)
    assert passes[1][0] > 0


@pytest.mark.parametrize("rows", [2, 3, 5, 8, 24, 30])
@pytest.mark.parametrize("text", [never_repeats, repeats])
def test_rows_share_the_drafts_of_a_pass(simulated, rows, text):
    """`Simulation.run` compares each pass with the limit."""
    counts = {count for count, _ in simulated(text, draft_seconds=0.01).run(*[300] * rows)}
    assert max(counts) == max(
        count for count in (0, *speculate._COUNTS) if count <= MAX_DRAFTS // rows
    )


def test_a_row_with_room_for_one_token_has_no_drafts(simulated):
    """`Simulation.run` compares each pass with the room."""
    simulation = simulated()
    assert simulation.run(1) == [(0, False)]
    assert simulation.run(2, 200)[0] == (0, False)
    assert simulation.passes[1][0] > 0  # of the other row
    assert max(count for count, _ in simulation.run(40, 400)[-10:]) == MAX_ROW_DRAFTS


def test_no_draft_model_is_made_for_a_few_tokens(simulated):
    enough = speculate._MIN_TOKENS + 1  # one takes the time of a pass
    simulation = simulated()
    for sizes in ([enough - 1], [enough // 2] * 2, [1, enough - 1]):
        assert not tries(simulation.run(*sizes))
        assert simulation.models_made == 0
    assert tries(simulation.run(*[1 + enough // 2] * 2))
    assert tries(simulation.run(20))  # there is one now
    assert simulation.models_made == 1


def test_without_memory_for_a_draft_model_n_grams_draft_and_it_is_not_tried_again(simulated):
    simulation = simulated(repeats, has_room=False)
    for _ in range(2):
        assert not tries(simulation.run(400))
        assert (MAX_ROW_DRAFTS, False) in simulation.passes
        assert simulation.models_made == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", [never_repeats, misleads])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_drafts_that_are_always_wrong_cost_little(simulated, text, dtype, rows):
    simulation = simulated(text, lambda position: False, draft_seconds=0.3, dtype=dtype)
    simulation.run(*[400] * rows)
    assert simulation.seconds <= 1.05 * 400 * simulation.drafting._times(rows)


@pytest.mark.parametrize("chance", [0.05, 0.2, 0.4, 0.6])
def test_drafts_that_are_sometimes_right_cost_little(simulated, chance):
    drawn = random.Random(1)
    right = [drawn.random() < chance for _ in range(500)]
    simulation = simulated(right=right.__getitem__, draft_seconds=0.3)
    simulation.run(400)
    assert simulation.seconds <= 1.05 * 400


# --- texts ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def endless(native):
    """A model without an end token."""
    return model_of(native("float32"), eos_token_id=None, **SMALL)


CHANGING = ("repeat_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
UNCHANGED = {name: VALUES[name][0] for name in CHANGING}  # they do not change the logits
rows = st.lists(st.tuples(prompts, sampling_options, options), min_size=1, max_size=3)


@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=rows, plans=plans)
@settings(max_examples=12)
def test_a_text_is_the_same_with_any_drafts(native, tokenizer, dtype, rows, plans):
    model, requests = model_of(native(dtype), dtype, **SMALL), requests_of(rows)
    expected = outcomes(completions_of(model, tokenizer, requests))
    with planned(*plans):
        actual = completions_of(model, tokenizer, requests, Speculator(model))
    assert outcomes(actual) == expected


@pytest.mark.slow
def test_thousands_of_texts_are_the_same_with_drafts(native, tokenizer, monkeypatch):
    """The draft model of the same model is usually right, and that of a similar one sometimes."""
    # It takes a fifth of the time.
    monkeypatch.setattr("gpt_cli.generation.generate.check_room", lambda *_: None)
    ends = list(range(0, len(VOCAB), 9))
    config = {"n_layer": 1, "n_head": 1, "n_positions": 16, "eos_token_id": ends}
    model = model_of(native("float32"), **config)
    monkeypatch.setattr(model.ops, "threads", 1)
    draft_model = make_draft_model(model)
    similar = replace(draft_model, wpe=np.roll(draft_model.wpe, 1, axis=0))
    speculators = [speculating(model, drafting) for drafting in (draft_model, similar)]
    drawn = random.Random(5)

    def one_of(values):
        return {name: drawn.choice(some) for name, some in values.items()}

    requests, actual = [], []
    while len(requests) < 2000:
        alike = drawn.random() < 0.5  # so that the library drafts in one call
        shared = one_of(VALUES | {"ignore_eos": [False, True]}) | UNCHANGED if alike else {}
        rows = []
        for _ in range(drawn.randint(1, 3)):
            chosen = one_of(VALUES | OTHERS | {"max_tokens": range(1, 13)}) | shared
            prompt = [drawn.randrange(len(VOCAB)) for _ in range(drawn.randint(1, 10))]
            rows.append(Request(Text(prompt), options_of(chosen), len(requests) + len(rows)))
        with planned(*[(drawn.randint(0, MAX_ROW_DRAFTS), drawn.random() < 0.7) for _ in range(5)]):
            actual += completions_of(model, tokenizer, rows, drawn.choice(speculators))
        requests += rows
    assert outcomes(actual) == outcomes(completions_of(model, tokenizer, requests))
    accepted = sum(row.accepted for row in actual)
    assert 0.2 < accepted / sum(row.drafted for row in actual) < 0.8
    assert accepted > 3000


def test_a_draft_model_whose_results_are_not_finite_changes_nothing(endless, tokenizer):
    request = Request(Text([1, 2]), Options(seed=1, max_tokens=9))
    draft_model = make_draft_model(endless)
    draft_model = replace(draft_model, wpe=np.full_like(draft_model.wpe, np.nan))
    with planned((3, True)):
        actual = completions_of(endless, tokenizer, [request], speculating(endless, draft_model))
    assert outcomes(actual) == outcomes(completions_of(endless, tokenizer, [request]))
    assert actual[0].accepted == 0


@pytest.mark.parametrize("rows", [1, 2])
def test_weights_that_only_a_dropped_draft_uses_are_not_missed(endless, tokenizer, rows):
    model = favouring(endless, VOCAB["x"])
    wpe = model.wpe.copy()
    wpe[6:] = np.nan  # damaged, but the texts end before
    damaged = replace(model, wpe=wpe)
    options = Options(temperature=0, max_tokens=20, stop=["xxx"])
    requests = [Request(Text([1, 2]), options)] * rows
    with planned((7, True)):
        actual = completions_of(damaged, tokenizer, requests, speculating(damaged, model))
    assert outcomes(actual) == outcomes(completions_of(damaged, tokenizer, requests))


@pytest.mark.parametrize("is_made", [True, False])
def test_nothing_is_drafted_without_memory_for_drafts_and_their_model(
    endless, tokenizer, monkeypatch, is_made
):
    request = Request(Text([1, 2]), Options(seed=1, max_tokens=20))
    needed = working_set(endless, [request], MAX_DRAFTS)
    needed += 0 if is_made else weights_bytes(endless.config, "int8")
    for spare in (0, -1):
        monkeypatch.setattr(endless.ops, "free_memory", lambda free=needed + spare: free)
        drafting = speculating(endless, endless) if is_made else Speculator(endless)
        with planned((3, True)):
            (done,) = completions_of(endless, tokenizer, [request], drafting)
        assert (done.drafted > 0) == (spare == 0)


def test_a_draft_model_gives_way_to_the_texts(endless, tokenizer, monkeypatch):
    request = Request(Text([1, 2]), Options(seed=1, max_tokens=20))
    made = speculating(endless, make_draft_model(endless))
    needed = working_set(endless, [request])
    room = iter([needed - 1, needed])  # without the draft model, the text fits
    monkeypatch.setattr(endless.ops, "free_memory", lambda: next(room))
    list(Run(LoadedModel(endless, tokenizer, made), [request]))
    assert made.draft_model is None


def test_short_of_memory_a_text_is_the_same(endless, tokenizer, monkeypatch):
    drafting, request = Speculator(endless), Request(Text([1, 2]), Options(seed=1, max_tokens=20))
    monkeypatch.setattr(speculator, "make_draft_model", lambda model: None)
    with planned((3, True)):
        actual = completions_of(endless, tokenizer, [request], drafting)
    assert (drafting.may_have_draft_model, drafting.draft_model) == (False, None)
    assert outcomes(actual) == outcomes(completions_of(endless, tokenizer, [request]))


@pytest.fixture(scope="module")
def tiny(library):
    """Return the bundled model, which is stored in float16, in float32."""
    return gpt_cli.load("tiny", device="cpu", dtype="float32")


@pytest.mark.parametrize("threads", [1, 2])
def test_drafts_of_the_bundled_model_are_mostly_right(tiny, level, monkeypatch, threads):
    monkeypatch.setattr(tiny.model.ops, "threads", threads)
    texts = ["Once upon a time", "The fox", "A list: one, two, one, two, one", "\n"]
    requests = [
        Request(Text(tiny.encode(text)), Options(seed=1, max_tokens=40, temperature=temperature))
        for text, temperature in zip(texts, [0, 0.8, 1, 1.5], strict=True)
    ]
    speculator = Speculator(tiny.model)
    with planned((4, True), (11, False), (2, True)):
        actual = []
        for request in requests:
            actual += completions_of(tiny.model, tiny.tokenizer, [request], speculator)
    assert outcomes(actual) == outcomes(completions_of(tiny.model, tiny.tokenizer, requests))
    assert 0.5 < sum(row.accepted for row in actual) / sum(row.drafted for row in actual) <= 1


def test_what_was_generated_before_an_interrupt_is_the_same(endless, tokenizer):
    request = Request(Text([1, 2]), Options(seed=1, max_tokens=20))
    (whole,) = completions_of(endless, tokenizer, [request])
    with planned((5, True)):
        for count in range(1, 20):
            steps = Run(LoadedModel(endless, tokenizer, Speculator(endless)), [request])
            first = list(itertools.islice(steps, count))
            assert [step.id for step in first] == whole.ids[:count]
            assert whole.text.startswith("".join(step.text for step in first))


# --- what is counted -----------------------------------------------------------------------------


def drafts_of_steps(model, tokenizer, draft_model, **options):
    """Return the drafts and the accepted drafts of steps, and which begin a pass."""
    request = Request(Text([1, 2]), Options(**{"temperature": 0, "max_tokens": 12} | options))
    with planned((3, True)):
        steps = list(Run(LoadedModel(model, tokenizer, speculating(model, draft_model)), [request]))
    values = ((step.drafted, step.accepted, step.model_seconds > 0) for step in steps)
    return [list(column) for column in zip(*values, strict=True)]


def test_drafts_are_counted(endless, tokenizer):
    drafted, accepted, passes = drafts_of_steps(endless, tokenizer, endless)  # all are right
    assert drafted == [0, 3, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0]
    assert accepted == [0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0]
    assert passes == [True, True, 0, 0, 0, True, 0, 0, 0, True, 0, 0]
    right, wrong = (favouring(endless, VOCAB[letter]) for letter in "xy")
    drafted, accepted, passes = drafts_of_steps(right, tokenizer, wrong)
    assert drafted == [0, 3, 3, 3, 3, 3, 3, 3, 3, 2, 1, 0]
    assert not any(accepted)
    assert all(passes)
    # Only drafts that are in the text count as accepted.
    drafted, accepted, _ = drafts_of_steps(right, tokenizer, right, stop=["xxx"])
    assert (drafted, accepted) == ([0, 3, 0], [False, True, True])


@pytest.mark.parametrize("use_cache", [True, False])
def test_without_the_cache_nothing_is_drafted(endless, tokenizer, use_cache):
    request = Request(Text([1, 2]), Options(max_tokens=9, use_cache=use_cache))
    with planned((3, True)):
        (done,) = completions_of(endless, tokenizer, [request], Speculator(endless))
    assert (done.drafted > 0) == use_cache


# --- where it is used ----------------------------------------------------------------------------


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_an_engine_speculates_from_some_size_on(case_folder, monkeypatch, dtype):
    def loaded(**options):
        folder = str(case_folder("saved"))
        return gpt_cli.load(folder, device="cpu", dtype=dtype, **options).loaded

    without = loaded()
    assert without.speculator is None
    size = weights_bytes(without.config, dtype)
    for least, is_used in ((size + 1, False), (size, True)):
        monkeypatch.setattr(speculator, "_MIN_BYTES", least)
        assert (loaded().speculator is not None) == is_used
        assert loaded(speculate=False).speculator is None


def test_numpy_never_speculates(case_folder, monkeypatch):
    monkeypatch.setattr(speculator, "_MIN_BYTES", 0)
    monkeypatch.setenv("GPT_CLI_OPS", "numpy")
    assert gpt_cli.load(str(case_folder("saved")), device="cpu").loaded.speculator is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_pays_for_every_published_model_and_not_for_small_ones(native, dtype):
    def pays(**sizes):
        config = GPT2Config.from_dict({"model_type": "gpt2"} | sizes)
        return Speculator(SimpleNamespace(config=config, ops=native(dtype))).pays

    assert pays()
    assert pays(n_layer=6)  # distilgpt2
    assert not pays(n_layer=4, n_embd=96, vocab_size=5000)


SPECULATES = ["generate", "--model", "tiny", "Once upon a time", "-n", "100", "--seed", "1"]


@pytest.fixture
def with_tiny(library, monkeypatch):
    """Speculate with the bundled model, too."""
    monkeypatch.setattr(speculator, "_MIN_BYTES", 0)


@pytest.mark.usefixtures("with_tiny")
@pytest.mark.parametrize("flags", [[], ["--samples", "3"], ["--temp", "0", "--dtype", "float32"]])
def test_generate_prints_the_same_with_and_without_drafts(flags):
    with_drafts, told = run_here(*SPECULATES, "--stats", *flags)
    without, told_without = run_here(*SPECULATES, "--stats", *flags, "--no-speculate")
    assert with_drafts == without
    assert " drafted tokens accepted" in told
    assert "drafted" not in told_without


BATCH = ["batch", "--model", "tiny", "-n", "80", "--seed", "1", "-q", "-", "--batch-size"]


@pytest.mark.usefixtures("with_tiny")
@pytest.mark.parametrize("command", [[*SPECULATES, "--json"], [*BATCH, "1"], [*BATCH, "3"]])
def test_records_are_the_same_with_and_without_drafts_which_they_count(command):
    prompts = b"Once upon a time\nThe fox\nOne day, a girl\nThe\nA boy and\n"
    records, expected = (
        records_here(*command, *flags, input=prompts) for flags in ([], ["--no-speculate"])
    )
    drafted, none = ([row.pop("timing") for row in rows] for rows in (records, expected))
    assert records == expected
    assert all(0 <= timing["accepted"] <= timing["drafted"] for timing in drafted)
    assert sum(timing["accepted"] for timing in drafted) > 20
    assert {timing["drafted"] for timing in none} == {timing["accepted"] for timing in none} == {0}


# --- a real process ------------------------------------------------------------------------------

SPECULATING = """
import sys
from gpt_cli.texts import speculator
from gpt_cli.cli import app
speculator._MIN_BYTES = 0
sys.exit(app.run(sys.argv[1:]))
"""


@posix
@pytest.mark.usefixtures("library")
def test_an_interrupt_keeps_the_beginning_of_a_speculated_text():
    command = [sys.executable, "-P", "-c", SPECULATING, *ENDLESS[len(COMMAND) :]]
    # Without a buffer: `communicate` would lose what is in it.
    with LimitedProcess(command, **PIPES, bufsize=0) as process:
        beginning = b""
        while len(beginning) < 200 and (piece := process.stdout.read(200)):
            beginning += piece
        process.send_signal(signal.SIGINT)
        rest, notes = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in notes
    assert re.search(rb"[1-9]\d* of \d+ drafted tokens accepted, finish reason interrupted", notes)
    text, whole = (beginning + rest).decode(), text_of(*LONG)
    assert whole.startswith(text[: len(whole)])
