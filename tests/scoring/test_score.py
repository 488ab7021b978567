import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpt_cli
from gpt_cli.engine import Engine
from gpt_cli.errors import CheckpointError, InputError
from gpt_cli.gpt2.model import unembed
from gpt_cli.ops import Ops
from gpt_cli.scoring.score import Score
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.measures import ranks
from support.checkpoints import VOCAB
from support.scores import N_POSITIONS, one_by_one, same, score_ids, texts

# --- against transformers ------------------------------------------------------------------------


def test_likelihoods_and_perplexity_are_those_of_transformers(engine, golden):
    reference = golden("score.json")
    result = engine.score(reference["text"])
    assert result.ids == reference["ids"]
    assert result.token_logprobs[0] is None
    assert result.token_logprobs[1:] == pytest.approx(reference["token_logprobs"], rel=1e-5)
    assert result.total_logprob == pytest.approx(sum(reference["token_logprobs"]), rel=1e-5)
    assert result.perplexity == pytest.approx(reference["perplexity"], rel=1e-5)


@pytest.mark.parametrize("stride", [1, 16, 40, 79])
def test_perplexity_by_sliding_windows_is_that_of_transformers(
    load_case, tokenizer, golden, stride
):
    reference = golden("windows.json")
    assert len(reference["ids"]) > 4 * N_POSITIONS
    (result,) = score_ids(LoadedModel(load_case("saved"), tokenizer), [reference["ids"]], stride)
    assert result.perplexity == pytest.approx(reference["perplexities"][str(stride)], rel=1e-5)


# --- what is scored, after what ------------------------------------------------------------------


def test_each_token_is_scored_given_those_before_it(load_case, tokenizer):
    model, ids = load_case("untied"), [5, 200, 7, 7, 260]
    (result,) = score_ids(LoadedModel(model, tokenizer), [ids])
    for position in range(1, len(ids)):
        exact = one_by_one(model, ids, position, N_POSITIONS)
        assert result.token_logprobs[position] == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("count", [80, 81, 119, 120, 121, 200])
def test_beyond_the_context_a_token_is_scored_in_the_first_window_that_holds_it(
    load_case, tokenizer, count
):
    model = load_case("saved")
    ids = np.random.default_rng(count).integers(len(VOCAB), size=count).tolist()
    # Windows are from 0 to 80, 40 to 120, ...
    (result,) = score_ids(LoadedModel(model, tokenizer), [ids])
    assert len(result.token_logprobs) == count
    assert None not in result.token_logprobs[1:]
    for position in {1, 79, count - 1} | ({80} if count > 80 else set()):
        start = max(0, math.ceil((position + 1 - N_POSITIONS) / 40)) * 40
        exact = one_by_one(model, ids, position, position - start)
        assert result.token_logprobs[position] == pytest.approx(exact, rel=1e-4)


def test_the_smallest_context_has_a_stride(make_model, tokenizer):
    model = make_model(n_positions=2)
    (result,) = score_ids(LoadedModel(model, tokenizer), [[5, 6, 7]])
    exact = [one_by_one(model, [5, 6, 7], position, 1) for position in (1, 2)]
    assert result.token_logprobs[1:] == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("stride", [-1, 0, 80, 1000])
def test_a_stride_out_of_range_is_refused(load_case, tokenizer, stride):
    with pytest.raises(InputError, match="stride must be from 1 to 79"):
        score_ids(LoadedModel(load_case("saved"), tokenizer), [], stride)


@given(batch=st.lists(texts, max_size=6))
@settings(max_examples=30)
def test_a_text_has_the_score_that_it_has_alone(load_case, tokenizer, batch):
    model = load_case("saved")
    together = score_ids(LoadedModel(model, tokenizer), batch)
    assert [result.ids for result in together] == batch
    for result, ids in zip(together, batch, strict=True):
        (alone,) = score_ids(LoadedModel(model, tokenizer), [ids])
        assert result.token_logprobs[:1] == alone.token_logprobs[:1] == [None] * bool(ids)
        assert result.token_logprobs[1:] == same(model, alone.token_logprobs[1:])
        assert result.bytes_scored == alone.bytes_scored


@pytest.mark.parametrize(("a_pass", "a_slice"), [(1, 1), (7, 3), (100, 10_000)])
def test_how_the_work_is_cut_changes_nothing(
    load_case, tokenizer, golden, monkeypatch, a_pass, a_slice
):
    model, ids = load_case("saved"), golden("windows.json")["ids"]
    texts = [ids, ids[:50], ids[:3], ids[7:9]]
    expected = [
        result.token_logprobs[1:] for result in score_ids(LoadedModel(model, tokenizer), texts)
    ]
    monkeypatch.setattr(Ops, "pass_tokens", a_pass)
    monkeypatch.setattr(Ops, "logits_rows", a_slice)

    def unembed_slice(model, x, hook):
        assert len(x) <= a_slice
        return unembed(model, x, hook)

    monkeypatch.setattr("gpt_cli.texts.measures.unembed", unembed_slice)
    actual = [
        result.token_logprobs[1:] for result in score_ids(LoadedModel(model, tokenizer), texts)
    ]
    for row, exact in zip(actual, expected, strict=True):
        assert row == same(model, exact)


def test_damaged_weights_are_no_score(make_model, tokenizer):
    model = make_model()
    damaged = np.full(model.config.n_embd, np.nan, np.float32)
    model = replace(model, ln_f=replace(model.ln_f, weight=damaged))
    with pytest.raises(CheckpointError, match="damaged"):
        score_ids(LoadedModel(model, tokenizer), [[1, 2, 3]])


# --- the start token, ranks and entropies --------------------------------------------------------


@given(ids=st.lists(texts, max_size=3), prefix=texts)
@settings(max_examples=20)
def test_a_prefix_is_before_each_text_and_not_part_of_it(load_case, tokenizer, ids, prefix):
    model = load_case("saved")
    loaded, measures = LoadedModel(model, tokenizer), {"ranks": ranks}
    actual = score_ids(loaded, ids, start=prefix, measures=measures)
    for result, row in zip(actual, ids, strict=True):
        whole = score_ids(
            LoadedModel(model, tokenizer), [[*prefix, *row]], measures={"ranks": ranks}
        )[0]
        assert result.ids == row
        first = 0 if prefix else 1
        expected = whole.token_logprobs[len(prefix) + first :]
        assert result.token_logprobs[first:] == same(model, expected)
        assert len(result.ranks) == len(row)
        scored = row[first:]
        assert result.tokens_scored == len(scored)
        assert result.bytes_scored == sum(len(tokenizer.token_bytes(id)) for id in scored)


def test_with_the_start_token_the_first_token_is_scored(engine):
    start = engine.model.config.bos_token_id
    (expected,) = score_ids(engine.loaded, [[start, *engine.encode("He said")]])
    result = engine.score("He said", bos=True)
    assert result.ids == engine.encode("He said")
    assert result.token_logprobs == expected.token_logprobs[1:]
    assert (result.tokens_scored, result.bytes_scored) == (len(result.ids), len("He said"))
    assert engine.score("H", bos=True).tokens_scored == 1
    with pytest.raises(InputError, match="at least 1 token"):
        engine.score("", bos=True)
    empty, also = engine.score_many(["", "He said"], bos=True)
    assert (empty.ids, empty.perplexity) == ([], None)
    assert also.token_logprobs == same(engine.model, result.token_logprobs)


@pytest.mark.parametrize("bos", [None, len(VOCAB)])
def test_a_model_without_a_start_token_cannot_score_after_it(engine, bos):
    model = replace(engine.model, config=replace(engine.model.config, bos_token_id=bos))
    without = Engine(LoadedModel(model, engine.tokenizer), "m", 0)
    with pytest.raises(
        InputError, match="given: bos \\(--bos\\) is set, and this model has no start token"
    ):
        without.score("He said", bos=True)
    assert without.score("He said") == engine.score("He said")


def test_ranks_and_entropies_are_those_of_the_distributions(engine):
    text = "The sand is hering. " * 9  # longer than the context
    result = engine.score(text, ranks=True, entropies=True, stride=1)
    assert len(result.ids) > N_POSITIONS
    assert result.ranks[0] is result.entropies[0] is None
    for position in (1, 2, N_POSITIONS - 1, N_POSITIONS, len(result.ids) - 1):
        before = result.ids[max(0, position + 1 - N_POSITIONS) : position]
        logits = engine.logits([before])[0, -1].astype(np.float64)
        p = np.exp(logits - np.logaddexp.reduce(logits))
        assert result.ranks[position] == (p > p[result.ids[position]]).sum() + 1
        assert result.entropies[position] == pytest.approx(-(p * np.log(p)).sum(), rel=1e-5)


def test_min_k_and_moments_are_those_of_the_distributions(engine):
    result = engine.score("The sand is hering. The sand", entropies=True, gaps=True)
    logits = engine.logits([result.ids])[0, :-1].astype(np.float64)
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    p, own = np.exp(logprobs), logprobs[np.arange(len(logprobs)), result.ids[1:]]
    means = (p * logprobs).sum(axis=-1)
    deviations = np.sqrt((p * logprobs**2).sum(axis=-1) - means**2)
    assert result.moments[0] is result.gaps[0] is None
    np.testing.assert_allclose(result.moments[1:], np.stack([means, deviations], 1), rtol=1e-4)
    assert result.gaps[1:] == pytest.approx((logprobs.max(axis=-1) - own).tolist(), abs=1e-5)
    for percent, count in ((0.1, 1), (20, int(len(own) * 0.2)), (100, len(own))):
        lowest = np.sort((own - means) / deviations)[:count]
        assert result.min_k(percent) == pytest.approx(np.sort(own)[:count].mean(), rel=1e-5)
        assert result.min_k_plus_plus(percent) == pytest.approx(lowest.mean(), rel=1e-4)


def test_min_k_has_an_answer_for_every_distribution(engine):
    result = Score([1, 2, 3], [None, -1.0, 0.0], 2, moments=[None, [-2.0, 0.5], [0.0, 0.0]])
    assert (result.min_k_plus_plus(50), result.min_k_plus_plus(100)) == (0, 1)
    assert replace(result, token_logprobs=[None, -1.0, -9.0]).min_k_plus_plus(50) == -math.inf
    assert Score([1], [None], 0, moments=[None]).min_k_plus_plus(20) is None
    assert Score([], [], 0).min_k(20) is None
    with pytest.raises(InputError, match="set entropies=True"):
        engine.score("He said").min_k_plus_plus(20)


# --- layers --------------------------------------------------------------------------------------


def test_layers_are_those_of_the_logit_lens(engine):
    text = "The sand is hering. " * 9  # longer than the context
    result = engine.score(text, stride=1, layers=True, words=True)
    assert [row[-1] for row in result.layers] == result.token_logprobs
    assert result.layers[0] == [None] * (engine.model.config.n_layer + 1)
    for end in (N_POSITIONS, N_POSITIONS + 1, len(result.ids)):
        window = result.ids[max(0, end - N_POSITIONS) : end]
        logits = engine.trace(engine.decode(window)).logits[:, -2].astype(np.float64)
        logprobs = logits[:, window[-1]] - np.logaddexp.reduce(logits, axis=-1)
        assert result.layers[end - 1] == pytest.approx(logprobs.tolist(), rel=1e-4)


def test_words_have_their_surprisal_after_each_layer(engine):
    result = engine.score("The sand is hering. the ", bos=True, layers=True, words=True)
    assert None not in (word.layers for word in result.words)
    assert [word.layers[-1] for word in result.words] == [word.surprisal for word in result.words]
    of_layers = zip(*(word.layers for word in result.words), strict=True)
    for surprisals, logprobs in zip(of_layers, zip(*result.layers, strict=True), strict=True):
        assert math.fsum(surprisals) == pytest.approx(-math.fsum(logprobs) / math.log(2))
    assert engine.score_many(["", "a"], layers=True, words=True)[0].words == []


def test_details_are_given_if_asked_for(engine):
    names = ("ranks", "entropies", "gaps", "words", "initial_logprobs", "layers", "initial_layers")
    for options in ((), ("ranks",), ("entropies",), ("gaps",), ("words",), ("layers",), names[:4]):
        result = engine.score("He said", **dict.fromkeys(options, True))
        present = [name for name in names if getattr(result, name) is not None]
        assert present == [*options, *(["initial_logprobs"] if "words" in options else [])]


@given(batch=st.lists(texts, max_size=6))
@settings(max_examples=20)
def test_ranks_and_entropies_do_not_depend_on_other_texts(engine, batch):
    batch = [engine.decode(ids) for ids in batch]
    options = {"ranks": True, "entropies": True}
    together = engine.score_many(batch, **options)
    for result, text in zip(together, batch, strict=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ops, "logits_rows", 2)
            (alone,) = engine.score_many([text], **options)
        assert result.entropies[1:] == same(engine.model, alone.entropies[1:])
        if engine.model.ops.batch_invariant:
            assert result.ranks == alone.ranks


# --- sums ----------------------------------------------------------------------------------------


def test_the_sums_are_over_the_scored_tokens():
    result = Score([1, 2, 3], [None, -1.5, -0.5], bytes_scored=4)
    assert result.tokens_scored == 2
    assert result.total_logprob == -2
    assert result.perplexity == pytest.approx(math.e)
    assert result.bits_per_byte == pytest.approx(2 / math.log(2) / 4)


@pytest.mark.parametrize("ids", [[], [7]])
def test_of_no_token_there_is_no_mean(load_case, tokenizer, ids):
    (result,) = score_ids(LoadedModel(load_case("saved"), tokenizer), [ids])
    assert (result.tokens_scored, result.total_logprob) == (0, 0)
    assert result.perplexity is result.bits_per_byte is None


@pytest.mark.parametrize(
    ("nats", "perplexity"), [(0, 1), (3, math.e**3), (708, math.e**708), (709.8, math.inf)]
)
def test_a_text_far_too_unlikely_has_an_infinite_perplexity(nats, perplexity):
    assert Score([1, 2], [None, -nats], 1).perplexity == pytest.approx(perplexity)


def test_bits_per_byte_counts_the_bytes_after_the_first_token(engine):
    assert engine.score("aé😀").bytes_scored == 6


@pytest.mark.parametrize("bos", [False, True])
def test_after_a_start_token_a_text_needs_one_token(engine, monkeypatch, bos):
    start = [engine.model.config.bos_token_id]
    monkeypatch.setattr(LoadedModel, "start", [] if bos else start)
    assert engine.score("a", bos=bos).tokens_scored == 1
    with pytest.raises(InputError, match=r"needs at least 1 token$"):
        engine.score("", bos=bos)


@pytest.mark.parametrize("percent", [-5, 0, 100.1, math.nan])
def test_a_percentage_out_of_range_is_refused(percent):
    score = Score([1, 2], [None, -1.5], 1, moments=[None, [-2.0, 0.5]])
    for method in (score.min_k, score.min_k_plus_plus):
        with pytest.raises(InputError, match="percent must be above 0 and at most 100"):
            method(percent)


def test_equal_scores_compare_equal(engine):
    one, other = (engine.score("unbelievable strangeness", words=True, layers=True) for _ in "ab")
    assert one == other
    assert None in one.initial_logprobs[1:]  # tokens inside a word


def test_bos_without_a_start_token_is_one_error(load_case, tokenizer):
    model = load_case("saved")
    model = replace(model, config=replace(model.config, bos_token_id=None))
    engine = gpt_cli.Engine(LoadedModel(model, tokenizer), "x", 0.0)
    for call in (engine.score_many, lambda texts, bos: engine.activations(texts, ["*"], bos=bos)):
        with pytest.raises(InputError, match="bos_token must be given"):
            call([], bos=True)
