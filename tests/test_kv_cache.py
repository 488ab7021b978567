import numpy as np
import pytest
from checkpoints import CONFIG, noise

from gpt_cli.config import GPT2Config
from gpt_cli.kv_cache import KVCache
from gpt_cli.ops.numpy_ops import NumPyOps


@pytest.fixture
def cache() -> KVCache:
    return KVCache(GPT2Config.from_dict(CONFIG), NumPyOps(), batch=2, capacity=5)


def keys(tokens: int, name: str = "keys"):
    return noise(name, 2, 4, tokens, 8).astype(np.float32)


def test_it_has_room_for_each_layer_row_head_and_token(cache):
    assert cache.k.shape == cache.v.shape == (3, 2, 4, 5, 8)
    assert cache.length == 0


def test_append_returns_all_that_a_layer_holds_with_the_new_ones_last(cache):
    first, second = keys(3), keys(2, "more")
    cache.append(NumPyOps(), 1, first, -first)
    cache.advance(3)
    k, v = cache.append(NumPyOps(), 1, second, -second)
    assert np.array_equal(k, np.concatenate([first, second], axis=2))
    assert np.array_equal(v, -k)


def test_every_layer_appends_at_the_same_place_until_advance(cache):
    for layer in range(3):
        k, _ = cache.append(NumPyOps(), layer, keys(1) + layer, keys(1))
        assert k.shape[2] == 1
    cache.advance(1)
    assert cache.length == 1
    assert np.array_equal(cache.k[2, :, :, :1], keys(1) + 2)


def test_it_is_written_in_place(cache):
    k, v = cache.append(NumPyOps(), 0, keys(2), keys(2))
    assert np.shares_memory(k, cache.k)
    assert np.shares_memory(v, cache.v)


def test_keep_drops_rows_and_keeps_the_length(cache):
    cache.append(NumPyOps(), 0, keys(2), keys(2))
    cache.advance(2)
    cache.keep([1])
    assert cache.length == 2
    assert np.array_equal(cache.k[0, :, :, :2], keys(2)[1:])
    assert np.array_equal(cache.v[0, :, :, :2], keys(2)[1:])


def test_copies_begin_alike_and_go_on_apart(make_model):
    model = make_model()
    one = KVCache(model.config, model.ops, 1, 3)
    one.append(model.ops, 2, keys(3)[:1], -keys(3)[:1])
    one.advance(3)
    copies = one.copies(2, 5)
    assert copies.length == 3
    k, v = copies.append(model.ops, 2, keys(2), keys(2, "more"))
    assert np.array_equal(k, np.concatenate([np.repeat(keys(3)[:1], 2, axis=0), keys(2)], axis=2))
    assert np.array_equal(v[:, :, :3], np.repeat(-keys(3)[:1], 2, axis=0))
    assert one.length == 3
