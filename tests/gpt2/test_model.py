import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_cli.folder.config import ACTIVATIONS
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.model import forward, merge_heads, split_heads
from gpt_cli.gpt2.prefill import right_pad
from support.checkpoints import CASES, CONFIG
from support.models import forward_in_chunks

TOLERANCE = 1e-4  # in standard deviations of the reference's logits
VOCAB_SIZE = 40
N_POSITIONS = 16

configs = st.fixed_dictionaries(
    {
        "vocab_size": st.just(VOCAB_SIZE),
        "n_positions": st.just(N_POSITIONS),
        "n_layer": st.integers(1, 3),
        "n_head": st.sampled_from([1, 2, 4]),
        "n_embd": st.sampled_from([8, 16]),
        "n_inner": st.sampled_from([None, 12]),
        "activation_function": st.sampled_from(ACTIVATIONS),
        "scale_attn_weights": st.booleans(),
        "scale_attn_by_inverse_layer_idx": st.booleans(),
        "tie_word_embeddings": st.booleans(),
        "seed": st.integers(0, 1000),
    }
)
texts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=N_POSITIONS)
batches = st.lists(texts, min_size=1, max_size=4)


def chunks_of(data, T):
    """Draw the ends of the chunks of a text."""
    return [*sorted(data.draw(st.sets(st.integers(1, T), max_size=4), "cuts") - {T}), T]


def assert_same_logits(model, one, other):
    """Compare the bits if the library computes, else to within rounding."""
    if model.ops.name == "native":
        assert np.array_equal(one.view(np.uint32), other.view(np.uint32))
    np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE / 4 * np.std(other))


# --- golden --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, load_case, golden):
    reference = golden("models.npz")
    expected = reference[f"{case}/logits"]
    logits = forward(load_case(case), reference["rows"])
    assert logits.dtype == np.float32
    assert abs(logits - expected).max() <= TOLERANCE * expected.std()


@pytest.mark.parametrize("case", CASES)
def test_the_most_likely_tokens_are_those_of_transformers(case, load_case, golden):
    reference = golden("models.npz")
    rows, greedy = reference["rows"], reference[f"{case}/greedy"]
    logits = forward(load_case(case), np.hstack([rows, greedy]))[:, rows.shape[1] - 1 : -1]
    clear = reference[f"{case}/margins"] > 2 * TOLERANCE * reference[f"{case}/logits"].std()
    assert clear.mean() > 0.9
    assert np.array_equal(logits.argmax(axis=-1)[clear], greedy[clear])


@pytest.mark.parametrize(
    "case", [name for name in CASES if name not in ("hub", "saved", "upcast", "padded_vocabulary")]
)
def test_the_tolerance_distinguishes_each_configuration(case, golden):
    plain, other = (golden("models.npz")[f"{name}/logits"] for name in ("hub", case))
    assert abs(plain - other).max() > 4 * TOLERANCE * plain.std()


def test_a_ragged_batch_has_the_logits_of_transformers(load_case, golden):
    rows = golden("padded.json")["rows"]
    expected = golden("models.npz")["padded/logits"]
    ids, lengths = right_pad(rows)
    logits = forward(load_case("saved"), ids, None, lengths)
    real = np.concatenate([row[:length] for row, length in zip(logits, lengths, strict=True)])
    assert abs(real - expected).max() <= TOLERANCE * expected.std()


# --- invariants ----------------------------------------------------------------------------------


@given(config=configs, text=texts)
def test_token_by_token_equals_the_whole_text(make_model, config, text):
    model, ids = make_model(**config), np.array([text])
    logits = forward_in_chunks(model, ids, range(1, len(text) + 1))
    assert_same_logits(model, logits, forward(model, ids))


@given(config=configs, rows=batches, data=st.data())
def test_a_row_of_a_ragged_batch_equals_the_row_alone(make_model, config, rows, data):
    model = make_model(**config)
    ids, lengths = right_pad(rows)
    for logits in (
        forward(model, ids, None, lengths),
        forward_in_chunks(model, ids, chunks_of(data, ids.shape[1]), lengths),
    ):
        for row, text in zip(logits, rows, strict=True):
            assert_same_logits(model, row[: len(text)], forward(model, np.array([text]))[0])


@given(config=configs, text=texts.filter(lambda text: len(text) > 1), data=st.data())
def test_a_token_sees_nothing_that_comes_after_it(make_model, config, text, data):
    model = make_model(**config)
    place = data.draw(st.integers(1, len(text) - 1))
    changed = [*text[:place], *((id + 1) % VOCAB_SIZE for id in text[place:])]
    logits, others = forward(model, np.array([text, changed]))
    assert_same_logits(model, logits[:place], others[:place])
    assert abs(logits[place:] - others[place:]).max() > 0


# --- the small parts -----------------------------------------------------------------------------


def test_the_head_shares_the_memory_of_wte_when_tied(load_case):
    for case in ("hub", "tied_but_stored"):
        assert load_case(case).lm_head.weight is load_case(case).wte


def test_weights_are_the_same_after_a_pass(make_model):
    model, fresh = make_model(), make_model()
    forward(model, np.array([[1, 2, 3]]))
    for ids in (np.array([[3, 2, 1]]), np.arange(60).reshape(3, 20)):
        assert np.array_equal(forward(model, ids), forward(fresh, ids))


def test_heads_are_split_from_neighbouring_channels_and_merged_back():
    qkv = np.arange(2 * 3 * 24).reshape(2, 3, 24)
    heads = split_heads(qkv, 4)
    assert heads.shape == (3, 2, 4, 3, 2)
    assert heads[0, 1, 2, 0].tolist() == qkv[1, 0, 4:6].tolist()
    assert heads[2, 1, 2, 0].tolist() == qkv[1, 0, 20:22].tolist()
    for number, part in enumerate(heads):
        assert np.array_equal(merge_heads(part), qkv[:, :, 8 * number : 8 * number + 8])


def test_a_pass_with_a_cache_counts_the_tokens_of_each_row(make_model):
    model = make_model()
    cache = KVCache(model.config, model.ops, 2, 6)
    forward(model, np.array([[1, 2, 3], [4, 0, 0]]), cache, np.array([3, 1]))
    assert cache.lengths.tolist() == [3, 1]
    forward(model, np.array([[0, 0], [5, 6]]), cache, np.array([0, 2]))
    assert cache.lengths.tolist() == [3, 3]
    with pytest.raises(IndexError, match="the cache has room for 6 tokens, not for 7"):
        forward(model, np.full((2, 4), 1), cache)
    assert cache.lengths.tolist() == [3, 3]


def test_the_longest_text_that_fits_is_n_positions(make_model):
    assert forward(make_model(), np.zeros((1, CONFIG["n_positions"]), int)).shape[1] == 80
    with pytest.raises(IndexError):
        forward(make_model(), np.zeros((1, CONFIG["n_positions"] + 1), int))
