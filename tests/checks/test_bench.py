import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gpt_cli.checks import bench
from gpt_cli.checks.bench import Plan, Spread, measure, prompts
from gpt_cli.engine import Engine
from gpt_cli.errors import ContextError, InputError, MismatchError
from gpt_cli.generation.decode import Step
from gpt_cli.generation.generate import Completion
from gpt_cli.gpt2.memory import count_parameters, weights_bytes
from gpt_cli.texts.speculator import Speculator

SMALL = Plan(prompt_tokens=5, max_tokens=6, batch=2, repetitions=2)
SPECULATION = ("speculation", "cache on")


def run_of(completions, steps):
    return type("Run", (), {"completions": completions, "__iter__": lambda _: iter(steps)})()


@pytest.fixture
def watch(monkeypatch):
    """Return a list of what engines are asked to run: the mode, its speculator, texts, options.

    `change` may change the ids that come out.
    """

    def start(change=lambda mode, options, run: None):
        runs, real = [], Engine.run

        def run(engine, texts, options):
            mode = "cache on" if options.use_cache else "cache off"
            mode = "speculation" if engine.loaded.speculator else mode
            runs.append((mode, engine.loaded.speculator, texts, options))
            run = real(engine, texts, options)
            steps = list(run)
            change(mode, options, run)
            return run_of(run.completions, steps)

        monkeypatch.setattr(Engine, "run", run)
        return runs

    return start


# --- prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 32, 79, 300, 512])
@pytest.mark.parametrize("batch", [1, 5])
def test_prompts_have_exactly_the_tokens_that_are_wanted(tiny, engine, tokens, batch):
    for any_engine in (tiny, engine):
        texts = prompts(any_engine, tokens, batch)
        assert [len(any_engine.encode(text)) for text in texts] == [tokens] * batch
        assert len(set(texts)) == batch


def test_prompts_repeat_after_the_last_position(tiny):
    texts = prompts(tiny, 20, 1000)
    positions = len(set(texts))
    assert 50 < positions < 1000
    assert texts[positions:] == texts[: 1000 - positions]


def test_prompts_have_fewer_tokens_where_no_position_gives_enough():
    class Melting:
        """A character is a token; but 9 have 8 after a capital, and else 10."""

        def encode(self, text):
            ids = [*map(ord, text)]
            if len(ids) != 9:
                return ids
            return ids[:8] if text[0].isupper() else [*ids, 0]

        def decode(self, ids):
            return "".join(map(chr, ids))

        @property
        def tokenizer(self):
            return SimpleNamespace(encode=lambda text: [*map(ord, text)])

        model = SimpleNamespace(config=SimpleNamespace(vocab_size=10**6))

    melting = Melting()
    texts = prompts(melting, 9, 3)
    assert [len(melting.encode(text)) for text in texts] == [8] * 3
    assert len(set(texts)) == 3
    assert [len(text) for text in prompts(melting, 8, 3)] == [8] * 3


# --- what is run ---------------------------------------------------------------------------------


def test_the_modes_take_turns_after_a_warm_up_and_all_is_greedy(engine, watch, monkeypatch):
    loaded = replace(engine.loaded, speculator=Speculator(engine.model))  # is not used
    monkeypatch.setattr(engine, "loaded", loaded)
    runs, steps = watch(), []
    measure(engine, replace(SMALL, max_tokens=25), steps.append)
    modes, _, texts, options = zip(*runs, strict=True)
    assert modes == ("cache on", "cache off") * 3
    assert [row.max_tokens for row in options] == [20] * 2 + [25] * 4
    assert set(map(tuple, texts)) == {tuple(prompts(engine, 5, 2))}
    assert {(o.temperature, o.ignore_eos, o.stop) for o in options} == {(0, True, ())}
    repetitions = [f"{mode}, repetition {n} of 2" for n in (1, 2) for mode in modes[:2]]
    assert steps == ["warming up", *repetitions]


@pytest.mark.usefixtures("library")
def test_speculation_takes_turns_with_the_cache_and_its_draft_model_is_warm(engine, watch):
    runs = watch()
    found = measure(engine, replace(SMALL, max_tokens=25, modes=SPECULATION))
    modes, speculators, _, options = zip(*runs, strict=True)
    assert modes == SPECULATION * 3
    assert [row.max_tokens for row in options] == [25, 20] + [25] * 4
    assert {row.use_cache for row in options} == {True}
    assert len(set(speculators)) == 2  # one with its draft model, and None
    assert list(found.modes) == ["cache on", "speculation"]
    assert (found.cache_off, found.ids_equal) == (None, True)


def test_speculation_is_refused_where_it_could_change_results(engine, watch, monkeypatch):
    runs = watch()
    monkeypatch.setattr(engine.model.ops, "batch_invariant", False)
    with pytest.raises(
        InputError, match=r"^speculation needs the compiled library or a GPU, .*doctor`$"
    ):
        measure(engine, replace(SMALL, modes=SPECULATION))
    assert runs == []


def test_the_result_describes_what_was_measured(engine):
    found = measure(engine, SMALL)
    texts, ops, config = prompts(engine, 5, 2), engine.model.ops, engine.model.config
    greedy = engine.generate(texts, temperature=0.0, max_tokens=6, ignore_eos=True, seed=0)
    facts = {"ids": [completion.ids for completion in greedy], "ids_equal": True}
    facts |= {"prompt_tokens": 5, "max_tokens": 6, "batch": 2, "repetitions": 2}
    facts |= {"positions": [6, 7, 8, 9, 10, 11], "early": (7, 8), "late": (10, 11)}
    facts |= {"model": engine.name, "load_s": engine.load_seconds}
    facts |= {"ops": ops.name, "dtype": ops.dtype, "threads": ops.threads}
    facts |= {"parameters": count_parameters(config)}
    facts |= {"weights_bytes": weights_bytes(config, ops.dtype)}
    assert {name: getattr(found, name) for name in facts} == facts
    assert found.ids[0] != found.ids[1]
    assert list(found.modes) == ["cache on", "cache off"]
    for mode in found.modes.values():
        assert len(mode.token_s) == 6
        assert min(mode.token_s) > 0
        for figure in vars(mode).values():
            if isinstance(figure, Spread):
                assert 0 < figure.min <= figure.median <= figure.max
        assert mode.first_token_s.max < mode.total_s.max


@pytest.mark.parametrize("mode", ["cache on", "cache off"])
def test_one_mode_may_be_measured_alone(engine, watch, mode):
    runs = watch()
    found = measure(engine, replace(SMALL, modes=(mode,)))
    assert [run[0] for run in runs] == [mode] * 3
    assert list(found.modes) == [mode]
    others = {"cache_on", "cache_off", "speculation"} - {mode.replace(" ", "_")}
    others |= {"drafted", "accepted", "ratio", "ids_equal"}
    assert {getattr(found, name) for name in others} == {None}


def test_a_text_may_fill_the_context_and_not_more(engine, watch):
    plan = Plan(1, 79, repetitions=1, modes=("cache on",))
    assert measure(engine, plan).positions[-1] == 80
    runs = watch()
    with pytest.raises(ContextError, match=r"40 .* 41 .* 81 tokens, .* context of 80"):
        measure(engine, Plan(40, 41))
    assert runs == []


@pytest.mark.parametrize("name", ["prompt_tokens", "max_tokens", "batch", "repetitions"])
@pytest.mark.parametrize("number", [0, 1_000_001, 10**20])
def test_numbers_out_of_range_are_refused(name, number):
    with pytest.raises(InputError, match=f"^{name} must be from 1 to 1000000"):
        Plan(**{name: number})


@pytest.mark.parametrize(
    ("other", "wrong", "names"),
    [
        ("cache off", 3, r"\(cache on, repetition 1\) and 0 \(cache off, repetition 1\)"),
        ("cache off", 4, r"\(cache on, repetition 1\) and 0 \(cache on, repetition 2\)"),
        ("speculation", 3, r"\(cache on, repetition 1\) and 0 \(speculation, repetition 1\)"),
    ],
)
def test_ids_that_differ_are_an_error_that_names_the_first(
    engine, watch, monkeypatch, other, wrong, names
):
    monkeypatch.setattr(engine.model.ops, "batch_invariant", True)
    count = itertools.count()  # of runs, after two to warm up

    def change(mode, options, run):
        if next(count) == wrong:
            run.completions[1].ids[3:] = [0] * 9

    watch(change)
    plan = Plan(5, 12, batch=2, repetitions=2, modes=("cache on", other))
    with pytest.raises(MismatchError, match=rf"^new token 4 of row 2 is \d+ {names}\. "):
        measure(engine, plan)


# --- the figures ---------------------------------------------------------------------------------


class Clockwork:
    """Two rows, all of whose parts take a known time, on another clock.

    A repetition takes `pace` times as long as the first. With the cache, a pass takes 3 in the
    model; without it, as many as there are tokens before it. With speculation, a pass gives a row a
    number of tokens, in `passes`, from 4 drafts times the pace.
    """

    def __init__(self, pace, passes):
        self.now = 0.0
        self.pace, self.passes = iter(pace), passes

    def encode(self, text):
        self.now += 0.125
        return [1] * 4

    def run(self, texts, options, speculator):
        pace = 1.0 if options.max_tokens < 12 else next(self.pace)
        completions = [Completion(4, 0) for _ in texts]
        passes = self.passes if speculator else [[1] * len(texts)] * options.max_tokens

        def steps():
            self.now += 2 * pace  # tokenization, for one
            began = self.now
            for number, counts in enumerate(passes):
                model = (3.0 if options.use_cache and number else 4.0 + number) * pace
                self.now += model + 1 * pace
                seconds = self.now - began
                for row, count in enumerate(counts):
                    shared = model, int(4 * pace) if speculator and number else 0
                    for token in range(1, count + 1):
                        self.now += 0.5 * pace  # the text
                        details = 5, 0.0, [], "", None, seconds
                        step = Step(row, *details, *shared, accepted=token < count)
                        completions[row].add(step)
                        yield step
                        shared = 0.0, 0

        return run_of(completions, steps())


@pytest.fixture
def clockwork(engine, monkeypatch):
    """Return a function that returns an engine with the times of a clockwork."""

    def make(*pace, passes=()):
        clock = Clockwork(pace, passes)

        def run(engine, *arguments):
            return clock.run(*arguments, engine.loaded.speculator)

        monkeypatch.setattr(Engine, "encode", lambda engine, text: clock.encode(text))
        monkeypatch.setattr(Engine, "run", run)
        monkeypatch.setattr(engine.model.ops, "batch_invariant", True)
        monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: clock.now))
        monkeypatch.setattr(bench, "_WARM_UP", 8)
        monkeypatch.setattr(bench, "prompts", lambda engine, tokens, batch: ["text"] * batch)
        return engine

    return make


def test_every_figure_is_what_its_name_says(clockwork):
    # With the cache, repetitions take 1/4, 1 and 2 times as long; without it, they do not differ.
    found = measure(clockwork(1 / 4, 1, 1, 1, 2, 1), Plan(4, 12, batch=2, repetitions=3))
    on, off = found.cache_on, found.cache_off
    assert on.tokenize_s == off.tokenize_s == Spread(0.25, 0.25, 0.25)
    # Tokenization 2, model 4, sampling 1, text of two rows 1.
    assert on.first_token_s == Spread(8, 2, 16)
    assert off.first_token_s == Spread(8, 8, 8)
    assert on.prefill_tok_s == Spread(8 / 5, 8 / 10, 8 / 1.25)
    assert on.token_s == [8, *[5] * 11]
    assert off.token_s == [8, *range(7, 18)]
    assert on.decode_tok_s == Spread(2 / 5, 2 / 10, 2 / 1.25)
    assert off.decode_tok_s == Spread(*[22 / sum(range(7, 18))] * 3)
    assert on.model_s == Spread(3, 0.75, 6)
    assert on.other_s == Spread(2, 0.5, 4)
    assert off.model_s == Spread(10, 10, 10)
    assert off.other_s == Spread(2, 2, 2)
    assert on.total_s == Spread(8 + 55, (8 + 55) / 4, 2 * (8 + 55))
    assert off.total_s.median == 8 + sum(range(7, 18))
    assert (found.early, found.late) == ((6, 10), (12, 16))
    assert on.growth == 1
    assert off.growth == 15 / 9
    assert found.ratio == pytest.approx(
        {
            "first_token_s": 1,
            "prefill_tok_s": 1,
            "decode_tok_s": 12 / 5,
            "model_s": 10 / 3,
            "other_s": 1,
            "total_s": (8 + sum(range(7, 18))) / (8 + 55),
        }
    )


def test_the_time_of_a_token_is_its_median_over_the_repetitions(clockwork):
    found = measure(clockwork(4, 1, 9), Plan(4, 12, batch=2, repetitions=3, modes=("cache on",)))
    assert found.cache_on.token_s == [32, *[20] * 11]


def test_tokens_of_a_pass_share_its_time_evenly(clockwork):
    passes = [[1], [4], [2], [1], [4]]
    plan = Plan(4, 12, repetitions=1, modes=SPECULATION)
    found = measure(clockwork(1, 1, 1, passes=passes), plan)
    # A pass takes 4, and each of its tokens 0.5; the first 5, and tokenization 2.
    times = [7.5, *[6 / 4] * 4, *[5 / 2] * 2, 4.5, *[6 / 4] * 4]
    assert found.speculation.token_s == times
    assert found.speculation.growth == 1
    assert found.speculation.decode_tok_s.median == 11 / sum(times[1:])
    assert found.speculation.model_s.median == 4 * 3 / 11
    assert found.speculation.other_s.median == (4 + 11 * 0.5) / 11
    assert found.ratio["decode_tok_s"] == pytest.approx(11 * 4.5 / sum(times[1:]))
    assert found.ratio["total_s"] == pytest.approx((7.5 + 11 * 4.5) / sum(times))


def test_a_token_arrives_when_every_row_has_it(clockwork):
    passes = [[1, 1], [1, 2], [4, 1], [2, 8], [4, 0]]
    plan = Plan(4, 12, batch=2, repetitions=3, modes=SPECULATION)
    found = measure(clockwork(1, 1, 1, 1 / 4, 1, 2, 1, passes=passes), plan)
    # When the tokens of the two rows come, in the first repetition.
    one = [7.5, 12.5, 14.25, 16, 17.75, 19.5, 22.25, 25, 27.5, 30, 32.5, 35]
    other = [8, 10.75, 13.5, *(20 + 1.125 * n for n in range(9))]
    both = [0, *map(max, one, other)]
    assert found.speculation.token_s == [b - a for a, b in itertools.pairwise(both)]
    assert found.speculation.total_s == Spread(35, 35 / 4, 70)
    assert found.speculation.model_s == Spread(12 / 11, 3 / 11, 24 / 11)
    # Drafted: 4 in each of 4 and 3 passes; accepted: 7 and 8.
    assert (found.drafted, found.accepted) == (14, 8)


@pytest.mark.parametrize(
    ("tokens", "early", "late"),
    [(1, None, None), (2, None, None), (3, (7, 7), (8, 8)), (40, (7, 16), (36, 45))],
)
def test_few_tokens_have_fewer_figures(engine, tokens, early, late):
    found = measure(engine, Plan(5, tokens, repetitions=1))
    assert (found.early, found.late) == (early, late)
    for mode in found.modes.values():
        assert len(mode.token_s) == tokens
        assert (mode.growth is None) == (tokens < 3)
        figures = (mode.decode_tok_s, mode.model_s, mode.other_s)
        assert [figure is None for figure in figures] == [tokens == 1] * 3
    assert ("decode_tok_s" in found.ratio) == (tokens > 1)
