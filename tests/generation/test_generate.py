import tracemalloc
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_cli.errors import InputError, ResourceError
from gpt_cli.generation import decode
from gpt_cli.generation.generate import Run, working_set
from gpt_cli.generation.row import Request, StopStrings, fit
from gpt_cli.generation.sampling import sample, uniforms
from gpt_cli.gpt2.model import forward, hidden_states, unembed
from gpt_cli.gpt2.prefill import right_pad
from gpt_cli.ops import Ops
from gpt_cli.ops.memory import Workspace
from gpt_cli.options.request import Options
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.text import Text
from support.checkpoints import ALPHABET, CASES, END, END_ID, VOCAB
from support.models import GREEDY, completions_of, exact_logprobs, favouring, run
from support.sampling_values import sampling_options

SAMPLED = {"temperature": 1.5, "top_k": 0, "top_p": 1.0}
FILTERED = {"temperature": 2, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repeat_penalty": 1.3}
PARAMS = [GREEDY, SAMPLED, FILTERED]

NEW_TOKENS = 64  # in the golden files

prompt_ids = st.lists(st.integers(0, len(VOCAB) - 1), min_size=1, max_size=11)
prompts = st.lists(prompt_ids, min_size=2, max_size=4)


@pytest.fixture(scope="session")
def model(make_model):
    """A model of which a third of the tokens end the text, with a short context."""
    return make_model(n_positions=24, n_layer=2, eos_token_id=list(range(0, len(VOCAB), 3)))


@pytest.fixture(scope="session")
def endless(make_model):
    """A model without end token, with a context of 12."""
    return make_model(n_positions=12, n_layer=2, eos_token_id=None)


def texts_of(completions) -> list[tuple]:
    return [(done.ids, done.text, done.finish_reason) for done in completions]


# --- against transformers ------------------------------------------------------------------------


@pytest.mark.parametrize("case", [name for name in CASES if name != "padded_vocabulary"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_greedy_ids_are_those_of_transformers(case, use_cache, load_case, tokenizer, golden):
    reference = golden("models.npz")
    model = load_case(case)
    model = replace(model, config=replace(model.config, eos_token_id=()))
    done = run(
        model, tokenizer, reference["rows"].tolist(), max_tokens=NEW_TOKENS, use_cache=use_cache
    )
    error = 2e-4 * reference[f"{case}/logits"].std()
    for row, ids, margins in zip(
        done, reference[f"{case}/greedy"], reference[f"{case}/margins"], strict=True
    ):
        unclear = [*np.flatnonzero(margins <= error), len(ids)][0]  # the ways may part there
        assert row.ids[:unclear] == ids[:unclear].tolist()


def test_greedy_ids_of_a_ragged_batch_are_those_of_transformers(load_case, tokenizer, golden):
    model = load_case("saved")
    model = replace(model, config=replace(model.config, eos_token_id=()))
    done = run(model, tokenizer, golden("padded.json")["rows"], max_tokens=NEW_TOKENS)
    assert [row.ids for row in done] == golden("models.npz")["padded/greedy"].tolist()


# --- a row's result depends on nothing but the row -----------------------------------------------


def test_rows_of_one_prompt_differ_by_seed_and_index(endless, tokenizer):
    first, again, other = (
        run(endless, tokenizer, [[1, 2]] * 4, SAMPLED, seed=seed, max_tokens=8)
        for seed in (7, 7, 8)
    )
    assert len({tuple(row.ids) for row in first}) == 4
    assert texts_of(first) == texts_of(again) != texts_of(other)
    request = Request(Text([1, 2]), Options(**SAMPLED, seed=7, max_tokens=8), 3)
    (alone,) = completions_of(endless, tokenizer, [request])
    assert texts_of([alone]) == texts_of(first[3:])


def test_every_step_has_its_draw(endless, tokenizer, monkeypatch):
    drawn = []

    def recording(ops, logits, draws, *args):
        drawn.append(draws.tolist())
        return sample(ops, logits, draws, *args)

    monkeypatch.setattr("gpt_cli.generation.row.sample", recording)
    run(endless, tokenizer, [[1], [2]], SAMPLED, seed=7, max_tokens=300, overflow="shift")
    rows = [uniforms((7, row), 0, 300).tolist() for row in range(2)]
    assert drawn == [list(pair) for pair in zip(*rows, strict=True)]


# --- rows with options of their own --------------------------------------------------------------

options_of_rows = st.fixed_dictionaries(
    {
        "use_cache": st.booleans(),
        "max_tokens": st.integers(1, 12),
        "seed": st.integers(0, 2**64 - 1),
        "ignore_eos": st.booleans(),
        "stop": st.sampled_from([(), ("a", "he"), tuple(chr(33 + byte) for byte in range(30))]),
        "bad_words": st.sampled_from([(), ("a", "he")]),
        "overflow": st.sampled_from(["truncate", "shift"]),
        "top_logprobs": st.sampled_from([0, 3]),
    }
)
requests = st.lists(
    st.builds(
        lambda prompt, params, rest, index: Request(Text(prompt), Options(**params, **rest), index),
        st.lists(st.integers(0, len(VOCAB) - 1), min_size=1, max_size=20),
        sampling_options,
        options_of_rows,
        st.integers(0, 2**64 - 1),
    ),
    min_size=1,
    max_size=5,
)


@given(requests=requests)
@settings(max_examples=40)
def test_a_row_of_a_batch_has_its_options_and_the_text_of_the_row_alone(model, tokenizer, requests):
    together = completions_of(model, tokenizer, requests)
    for done, request in zip(together, requests, strict=True):
        (alone,) = completions_of(model, tokenizer, [request])
        assert texts_of([done]) == texts_of([alone])
        if model.ops.name == "native":
            assert (done.logprobs, done.top_logprobs) == (alone.logprobs, alone.top_logprobs)
        np.testing.assert_allclose(done.logprobs, alone.logprobs, rtol=1e-3, atol=1e-4)
        for top in done.top_logprobs:
            assert len(top) == request.options.top_logprobs


@pytest.mark.parametrize("a_pass", [1, 5, 16])
def test_a_long_prompt_may_take_several_passes(endless, tokenizer, monkeypatch, a_pass):
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15, 16, 17]]
    at_once = run(endless, tokenizer, prompts, overflow="shift", max_tokens=20)
    monkeypatch.setattr(Ops, "pass_tokens", a_pass)
    piecewise = run(endless, tokenizer, prompts, overflow="shift", max_tokens=20)
    assert texts_of(piecewise) == texts_of(at_once)


def test_logprobs_are_the_models_own_whatever_the_filters(endless, tokenizer):
    (done,) = run(endless, tokenizer, [[1, 2]], FILTERED, max_tokens=6, top_logprobs=4)
    exact = exact_logprobs(endless, [1, 2, *done.ids])[1:-1]
    np.testing.assert_allclose(done.logprobs, exact[range(6), done.ids], rtol=1e-4)
    for step, top in enumerate(done.top_logprobs):
        best = np.argsort(-exact[step])[:4]
        assert [id for id, _ in top] == best.tolist()
        np.testing.assert_allclose([value for _, value in top], exact[step, best], rtol=1e-4)


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_cache", [True, False])
def test_what_does_not_fit_in_memory_is_refused_before_it_is_taken(
    endless, tokenizer, monkeypatch, use_cache
):
    rows = [Request(Text([1] * 9), Options(use_cache=use_cache))] * 50
    needed = working_set(endless, rows)
    monkeypatch.setattr(endless.ops, "free_memory", lambda: needed - 1)
    with pytest.raises(ResourceError, match="a batch of 50 needs about"):
        Run(LoadedModel(endless, tokenizer), rows)
    monkeypatch.setattr(endless.ops, "free_memory", lambda: needed)
    next(Run(LoadedModel(endless, tokenizer), rows))


@pytest.mark.parametrize(
    ("rows", "prompt", "use_cache", "top_k"),
    [
        (1, 400, True, 0),
        (1, 400, False, 40),
        (16, 20, True, 40),
        (16, 20, False, 0),
        (8, 300, True, 1000),
        (8, 300, False, 0),
    ],
)
def test_the_estimate_is_not_far_from_what_is_taken(
    make_model, tokenizer, monkeypatch, rows, prompt, use_cache, top_k
):
    model = make_model(n_positions=512, n_embd=96, n_layer=6, vocab_size=20_000)
    workspace = Workspace()  # while tokens are chosen, it still has what the layers took
    if model.ops.name == "native":
        monkeypatch.setattr(model.ops, "_workspace", workspace)
    options = Options(max_tokens=2, ignore_eos=True, use_cache=use_cache, top_k=top_k)
    requests = [Request(Text([7] * (prompt - row)), options) for row in range(rows)]
    tracemalloc.start()
    try:
        completions_of(model, tokenizer, requests)
        taken = tracemalloc.get_traced_memory()[1] + workspace.free_bytes()
    finally:
        tracemalloc.stop()
    assert 0.4 < taken / working_set(model, requests) <= 1


# --- finishing -----------------------------------------------------------------------------------


def test_the_reason_is_length_after_max_tokens_and_context_where_it_is_full(endless, tokenizer):
    (done,) = run(endless, tokenizer, [[1]], max_tokens=5)
    assert done.finish_reason == "length"
    assert len(done.ids) == len(done.logprobs) == len(done.seconds) == 5
    short, full = run(endless, tokenizer, [[1] * 3, [2] * 11], max_tokens=50)
    assert (short.finish_reason, len(short.ids)) == ("context", 9)
    assert (full.finish_reason, len(full.ids)) == ("context", 1)


X, BYTE_E4 = VOCAB["x"], VOCAB[ALPHABET[0xE4]]
PENALTY = {"temperature": 0, "repeat_penalty": 1.5}
ENDS = {  # the likeliest ids, options; the reason, the ids and the text
    "an end token gives no text": ([END_ID], {}, "eos", [END_ID], ""),
    "a stop string": ([X], {"stop": ["y", "xxx"]}, "stop", [X] * 3, ""),
    "a stop string on the last token": (
        [X], {"stop": ["y", "xxx"], "max_tokens": 3}, "stop", [X] * 3, ""
    ),
    "a stop string that has begun": (
        [X, END_ID], {"params": PENALTY, "stop": ["xy"]}, "eos", [X, END_ID], "x"
    ),
    "an incomplete character": ([BYTE_E4], {"max_tokens": 1}, "length", [BYTE_E4], "\ufffd"),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_a_text_ends_with_a_reason(make_model, tokenizer, end):
    likeliest, options, reason, ids, text = ENDS[end]
    (done,) = run(favouring(make_model(), *likeliest), tokenizer, [[1]], **options)
    assert (done.finish_reason, done.ids, done.text) == (reason, ids, text)


def test_what_a_stop_string_held_back_comes_out_at_the_end(make_model, tokenizer):
    loaded = LoadedModel(favouring(make_model(), X), tokenizer)
    steps = list(
        Run(loaded, [Request(Text([1]), Options(temperature=0, max_tokens=3, stop=["xxxx"]))])
    )
    assert [step.text for step in steps] == ["", "", "xxx"]
    assert [step.finish_reason for step in steps] == [None, None, "length"]


# --- what is never chosen ------------------------------------------------------------------------


@pytest.mark.parametrize("params", PARAMS)
def test_ids_without_a_token_and_ignored_end_tokens_are_never_chosen(make_model, tokenizer, params):
    model = make_model(vocab_size=len(VOCAB) + 5)
    model = favouring(model, *range(len(VOCAB), len(VOCAB) + 5), END_ID)
    (done,) = run(model, tokenizer, [[1]], params, ignore_eos=True)
    assert (done.finish_reason, len(done.ids)) == ("length", 20)
    assert max(done.ids) < len(VOCAB)
    assert END_ID not in done.ids
    assert END not in done.text
    assert np.isfinite(done.logprobs).all()


@pytest.mark.parametrize("params", PARAMS)
def test_no_end_token_comes_before_min_tokens(make_model, tokenizer, params):
    model = favouring(make_model(), END_ID)
    for least in (0, 1, 5):
        (done,) = run(model, tokenizer, [[1]], params, min_tokens=least)
        assert (done.finish_reason, len(done.ids)) == ("eos", least + 1)
        assert done.ids.index(END_ID) == least


def test_no_stop_string_comes_before_min_tokens(make_model, tokenizer):
    model = favouring(make_model(), X)
    for least in range(6):
        options = Options(temperature=0, min_tokens=least, stop=["xx"])
        (done,) = completions_of(model, tokenizer, [Request(Text([1]), options)])
        assert (done.finish_reason, done.text) == ("stop", "x" * least)
        assert len(done.ids) == least + 2


def test_an_end_token_beyond_the_vocabulary_ends_nothing(make_model, tokenizer):
    model = make_model(eos_token_id=[len(VOCAB), 50256])
    for ignore_eos in (False, True):
        (done,) = run(model, tokenizer, [[1]], ignore_eos=ignore_eos)
        assert done.finish_reason == "length"


# --- steps ---------------------------------------------------------------------------------------


def test_steps_come_while_the_rest_is_not_computed(endless, tokenizer, monkeypatch):
    passes = []
    for name in ("next_logits", "hidden_states"):
        function = getattr(decode, name)
        counted = partial(lambda function, *args: passes.append(1) or function(*args), function)
        monkeypatch.setattr(decode, name, counted)
    steps = Run(LoadedModel(endless, tokenizer), [Request(Text([1, 2, 3]), Options(temperature=0))])
    for new in (0, 1, 2):
        assert len(passes) == new
        next(steps)


def test_logprobs_count_what_is_never_chosen(make_model, tokenizer):
    model = make_model(vocab_size=len(VOCAB) + 100)
    (done,) = run(model, tokenizer, [[1, 2]], ignore_eos=True, max_tokens=6)
    exact = exact_logprobs(model, [1, 2, *done.ids])[1:-1][range(6), done.ids]
    np.testing.assert_allclose(done.logprobs, exact, rtol=1e-4)


def test_a_step_has_the_seconds_of_the_model(endless, tokenizer, monkeypatch):
    clock = [100.0]

    def takes(seconds, function):
        def slow(*args, **options):
            clock[0] += seconds
            return function(*args, **options)

        return slow

    simulated = SimpleNamespace(perf_counter=lambda: clock[0])
    monkeypatch.setattr("gpt_cli.generation.decode.time", simulated)
    for module in ("gpt2.prefill", "generation.decode"):
        monkeypatch.setattr(f"gpt_cli.{module}.hidden_states", takes(2, hidden_states))
        monkeypatch.setattr(f"gpt_cli.{module}.unembed", takes(1, unembed))
    monkeypatch.setattr("gpt_cli.generation.row.sample", takes(0.25, sample))
    requests = [Request(Text([1, 2]), Options(temperature=0, max_tokens=3))] * 2
    steps = list(Run(LoadedModel(endless, tokenizer), requests))
    assert [step.model_seconds for step in steps] == [3] * 6
    assert [step.seconds for step in steps] == [3.25, 3.25, 6.5, 6.5, 9.75, 9.75]


def test_the_repeat_penalty_counts_the_prompt_and_what_follows(make_model, tokenizer):
    model = favouring(make_model(eos_token_id=None), 10, 11, 12, 13)
    (done,) = run(model, tokenizer, [[11]], {"temperature": 0, "repeat_penalty": 2}, max_tokens=3)
    assert done.ids == [10, 12, 13]


# --- past the context ----------------------------------------------------------------------------


def shifted_by_hand(model, prompts, max_tokens):
    """Greedy, with the whole windows computed for each token."""
    half, windows, texts = model.config.n_positions // 2, prompts, [[] for _ in prompts]
    for _ in range(max_tokens):
        windows = [ids if len(ids) < 2 * half else ids[-half:] for ids in windows]
        ids, lengths = right_pad(windows)
        logits = forward(model, ids, None, lengths)
        best = logits[np.arange(len(ids)), lengths - 1].argmax(axis=-1).tolist()
        windows = [[*ids, id] for ids, id in zip(windows, best, strict=True)]
        texts = [[*ids, id] for ids, id in zip(texts, best, strict=True)]
    return texts


@given(prompts=prompts, use_cache=st.booleans())
def test_shift_goes_on_with_the_newest_half_of_the_context(endless, tokenizer, prompts, use_cache):
    done = run(endless, tokenizer, prompts, overflow="shift", max_tokens=25, use_cache=use_cache)
    assert [row.ids for row in done] == shifted_by_hand(endless, prompts, 25)
    assert {row.finish_reason for row in done} == {"length"}


def test_a_prompt_that_leaves_room_stays_whole_and_another_is_an_error_by_default():
    for overflow in ("error", "shift"):
        options = Options(max_tokens=100, overflow=overflow)
        assert fit([*range(11)], 12, options) == [*range(11)]
    for length in (12, 100):
        with pytest.raises(InputError, match=f"the prompt has {length} tokens"):
            fit([1] * length, 12, Options(max_tokens=1))
    assert fit([*range(30)], 12, Options(overflow="shift")) == [*range(24, 30)]


@given(length=st.integers(1, 60), n_positions=st.integers(2, 30), max_tokens=st.integers(1, 60))
def test_truncate_drops_the_oldest_until_what_follows_fits_or_half_is_free(
    length, n_positions, max_tokens
):
    prompt = list(range(length))
    kept = fit(prompt, n_positions, Options(max_tokens=max_tokens, overflow="truncate"))
    room = max(n_positions - max_tokens, n_positions // 2)
    assert kept == prompt[length - min(length, room) :]
    assert 1 <= len(kept) < n_positions


def test_right_pad_puts_zeros_behind_the_shorter_rows():
    ids, lengths = right_pad([[5, 6, 7], [8]])
    assert ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert lengths.tolist() == [3, 1]


# --- stop strings --------------------------------------------------------------------------------

letters = st.sampled_from("ab\n")
pieces_of_text = st.lists(st.text(letters, max_size=4), max_size=10)
stop_strings = st.lists(st.text(letters, min_size=1, max_size=4), max_size=3)


def cut_at_a_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop string that is complete first (of several, the longest)."""
    for end in range(len(text) + 1):
        if ends := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, ends))], True
    return text, False


@given(pieces=pieces_of_text, stops=stop_strings)
@settings(max_examples=300)
def test_a_text_is_cut_at_a_stop_string_and_only_what_may_begin_one_is_held(pieces, stops):
    filter, passed, text = StopStrings(stops), "", ""
    for piece in pieces:
        passed += filter.push(piece)
        text += piece
        if filter.stop is not None:
            break
        assert not any(stop in passed for stop in stops)
        held = text[len(passed) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
    assert (passed + filter.flush(), filter.stop is not None) == cut_at_a_stop(
        "".join(pieces), stops
    )
