from dataclasses import replace
from types import SimpleNamespace

import pytest

from gpt_cli import bench, checkpoint
from gpt_cli.bench import Plan, Spread, measure, prompts
from gpt_cli.errors import ContextError, InputError, MismatchError
from gpt_cli.generate import Completion, Step

SMALL = Plan(prompt_tokens=5, max_tokens=6, batch=2, repetitions=2)


class Watched:
    """The engine, with what it was asked to run; `change` may change the ids that come out."""

    def __init__(self, engine, change=lambda options, run: None):
        self._engine = engine
        self._change = change
        self.runs = []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def run(self, texts, options):
        self.runs.append((texts, options))
        run = self._engine.run(texts, options)
        steps = list(run)
        self._change(options, run)
        return type(
            "Run", (), {"completions": run.completions, "__iter__": lambda _: iter(steps)}
        )()


# --- prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 32, 79, 300, 512])
@pytest.mark.parametrize("batch", [1, 5])
def test_prompts_have_exactly_the_tokens_that_are_wanted(tiny, engine, tokens, batch):
    for any_engine in (tiny, engine):
        texts = prompts(any_engine, tokens, batch)
        assert [len(any_engine.encode(text)) for text in texts] == [tokens] * batch
        assert len(set(texts)) == batch


def test_prompts_begin_again_where_there_are_no_more_places(tiny):
    texts = prompts(tiny, 20, 1000)
    places = len(set(texts))
    assert 50 < places < 1000
    assert texts[places:] == texts[: 1000 - places]


def test_prompts_have_fewer_tokens_where_no_place_gives_as_many():
    class Melting:
        """A character is a token; but 9 have 8 after a capital, and else 10."""

        def encode(self, text):
            ids = [*map(ord, text)]
            if len(ids) != 9:
                return ids
            return ids[:8] if text[0].isupper() else [*ids, 0]

        def decode(self, ids):
            return "".join(map(chr, ids))

    melting = Melting()
    texts = prompts(melting, 9, 3)
    assert [len(melting.encode(text)) for text in texts] == [8] * 3
    assert len(set(texts)) == 3
    assert [len(text) for text in prompts(melting, 8, 3)] == [8] * 3


# --- what is run ---------------------------------------------------------------------------------


def test_the_modes_take_turns_after_a_warm_up_and_all_is_greedy(engine):
    watched, told = Watched(engine), []
    measure(watched, replace(SMALL, max_tokens=25), told.append)
    assert [options.use_cache for _, options in watched.runs] == [True, False] * 3
    assert [options.max_tokens for _, options in watched.runs] == [20] * 2 + [25] * 4
    assert {tuple(texts) for texts, _ in watched.runs} == {tuple(prompts(engine, 5, 2))}
    assert {(o.temperature, o.ignore_eos, o.stop) for _, o in watched.runs} == {(0, True, ())}
    assert told == [
        "warming up",
        "cache on, repetition 1 of 2",
        "cache off, repetition 1 of 2",
        "cache on, repetition 2 of 2",
        "cache off, repetition 2 of 2",
    ]


def test_what_was_measured_is_told(engine):
    found = measure(engine, SMALL)
    texts = prompts(engine, 5, 2)
    greedy = engine.generate(texts, temperature=0.0, max_tokens=6, ignore_eos=True, seed=0)
    assert found.ids == [completion.ids for completion in greedy]
    assert found.ids[0] != found.ids[1]
    assert found.ids_equal is True
    sizes = checkpoint.memory(engine.model.config, engine.model.ops.dtype)
    assert (found.parameters, found.weights_bytes) == (sizes["parameters"], sizes["weights_bytes"])
    assert (found.model, found.ops) == (engine.name, engine.model.ops.name)
    assert (found.dtype, found.threads) == (engine.model.ops.dtype, engine.model.ops.threads)
    assert found.load_s == engine.load_seconds
    assert (found.prompt_tokens, found.max_tokens, found.batch, found.repetitions) == (5, 6, 2, 2)
    assert found.positions == [6, 7, 8, 9, 10, 11]
    assert (found.early, found.late) == ((7, 8), (10, 11))
    assert list(found.modes) == ["cache on", "cache off"]
    for mode in found.modes.values():
        assert len(mode.token_s) == 6
        assert min(mode.token_s) > 0
        for figure in vars(mode).values():
            if isinstance(figure, Spread):
                assert 0 < figure.min <= figure.median <= figure.max
        assert mode.tokenize_s.min < mode.first_token_s.max < mode.total_s.max


@pytest.mark.parametrize("cache", [True, False])
def test_one_mode_may_be_measured_alone(engine, cache):
    watched = Watched(engine)
    found = measure(watched, replace(SMALL, caches=(cache,)))
    assert [options.use_cache for _, options in watched.runs] == [cache] * 3
    assert list(found.modes) == ["cache on" if cache else "cache off"]
    assert (found.cache_on is None, found.cache_off is None) == (not cache, cache)
    assert found.ratio is None
    assert found.ids_equal is None


def test_a_text_may_fill_the_context_and_not_more(engine):
    assert measure(engine, Plan(1, 79, repetitions=1, caches=(True,))).positions[-1] == 80
    watched = Watched(engine)
    with pytest.raises(ContextError, match=r"40 .* 41 .* 81 tokens, .* context of 80"):
        measure(watched, Plan(40, 41))
    assert watched.runs == []


@pytest.mark.parametrize("name", ["prompt_tokens", "max_tokens", "batch", "repetitions"])
@pytest.mark.parametrize("number", [0, 1_000_001, 10**20])
def test_numbers_out_of_range_are_refused(name, number):
    with pytest.raises(InputError, match=f"^--{name.replace('_', '-')} must be from 1 to 1000000"):
        Plan(**{name: number})


@pytest.mark.parametrize(
    ("cache", "names"),
    [
        (False, r"\(cache on, repetition 1\) and 0 \(cache off, repetition 1\)"),
        (True, r"\(cache on, repetition 1\) and 0 \(cache on, repetition 2\)"),
    ],
)
def test_ids_that_differ_are_an_error_that_names_the_first(engine, cache, names):
    seen = []

    def change(options, run):
        seen.append(options.use_cache)
        if (
            options.max_tokens == 12
            and options.use_cache == cache
            and seen.count(cache) > 1 + cache
        ):
            run.completions[1].ids[3:] = [0] * 9

    plan = Plan(5, 12, batch=2, repetitions=2)
    with pytest.raises(MismatchError, match=rf"^new token 4 of row 2 is \d+ {names}\. "):
        measure(Watched(engine, change), plan)


# --- the figures ---------------------------------------------------------------------------------


class Clockwork:
    """An engine of two rows whose every part takes a time that is known, on a clock of its own.

    A repetition takes `pace` times as long as the first. With the cache, a token takes 3 in the
    model; without, as many as there are tokens before it.
    """

    def __init__(self, pace):
        self.now = 0.0
        self.pace = iter(pace)
        self.name, self.load_seconds = "clockwork", 7.0

    def encode(self, text):
        self.now += self.tokenizing
        return [1] * 4

    def run(self, texts, options):
        pace = 1.0 if options.max_tokens < 12 else next(self.pace)
        completions = [Completion(4, 0) for _ in texts]

        def steps():
            self.now += 2 * pace  # tokenization, for one
            began = self.now
            for token in range(options.max_tokens):
                model = (3.0 if options.use_cache and token else 4.0 + token) * pace
                self.now += model + 1 * pace
                seconds = self.now - began
                for row, completion in enumerate(completions):
                    self.now += 0.5 * pace  # the text
                    step = Step(row, 5, 0.0, [], "", None, seconds, model)
                    completion.add(step)
                    yield step

        return type("Run", (), {"completions": completions, "__iter__": lambda _: steps()})()


@pytest.fixture
def clockwork(engine, monkeypatch):
    def make(*pace):
        made = Clockwork(pace)
        made.model, made.tokenizing = engine.model, 0.125
        monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: made.now))
        monkeypatch.setattr(bench, "_WARM_UP", 8)
        monkeypatch.setattr(bench, "prompts", lambda engine, tokens, batch: ["text"] * batch)
        return made

    return make


def test_every_figure_is_what_it_is_called(clockwork):
    # With the cache thrice as fast, as fast and twice as slow; without it always as fast.
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
    found = measure(clockwork(4, 1, 9), Plan(4, 12, batch=2, repetitions=3, caches=(True,)))
    assert found.cache_on.token_s == [32, *[20] * 11]


@pytest.mark.parametrize(
    ("tokens", "early", "late"),
    [(1, None, None), (2, None, None), (3, (7, 7), (8, 8)), (40, (7, 16), (36, 45))],
)
def test_few_tokens_say_less(engine, tokens, early, late):
    found = measure(engine, Plan(5, tokens, repetitions=1))
    assert (found.early, found.late) == (early, late)
    for mode in found.modes.values():
        assert len(mode.token_s) == tokens
        assert (mode.growth is None) == (tokens < 3)
        figures = (mode.decode_tok_s, mode.model_s, mode.other_s)
        assert [figure is None for figure in figures] == [tokens == 1] * 3
    assert ("decode_tok_s" in found.ratio) == (tokens > 1)
