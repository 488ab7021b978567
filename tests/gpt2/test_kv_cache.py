import numpy as np
import pytest

from gpt_cli.folder.config import GPT2Config
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.memory import cache_bytes
from gpt_cli.ops.numpy_ops import NumPyOps
from support.checkpoints import CONFIG, noise


def cache_of(ops, capacity: int = 5, batch: int = 2) -> KVCache:
    return KVCache(GPT2Config.from_dict(CONFIG), ops, batch, capacity)


@pytest.fixture
def cache() -> KVCache:
    return cache_of(NumPyOps())


def heads(tokens: int, name: str = "keys", batch: int = 2):
    return noise(name, batch, 4, tokens, 8).astype(np.float32)


def append(cache, layer, k, v, new=None):
    """Append the new tokens of each row to one layer."""
    cache.reserve(np.full(len(k), k.shape[2]) if new is None else np.array(new))
    return cache.append(layer, k, v)


def copy_of(cache, rows, to):
    """Copy rows of a cache, which may repeat, to all rows of another."""
    for index, row in enumerate(rows):
        to.copy_row(index, cache, row, int(cache.lengths[row]))
    return to


def mixed(cache, layer, ops):
    """Return the attention of fixed queries, which shows the contents of a layer in any layout."""
    q = heads(3, "queries", len(cache.lengths))
    visible = np.repeat(cache.lengths[:, None], 3, axis=1)
    return ops.to_host(ops.attend(q, cache.keys[layer], cache.values[layer], 1.0, visible))


def test_its_arrays_have_the_axes_layer_row_head_and_token(ops):
    cache = cache_of(ops)
    assert cache.keys.shape[:3] == cache.values.shape[:3] == (3, 2, 4)
    assert cache.keys.shape[3] == cache.values.shape[3] == -(-5 // ops.cache_panel)
    assert cache.lengths.tolist() == [0, 0]


def test_each_row_has_a_length_of_its_own(cache):
    first, second = heads(3), heads(2, "more")
    append(cache, 1, first, -first, [1, 3])
    cache.advance()
    keys, values = append(cache, 1, second, -second, [2, 1])
    cache.advance()
    assert cache.lengths.tolist() == [3, 4]
    assert np.array_equal(values, -keys)
    assert np.array_equal(keys[0, :, :3], np.concatenate([first[0, :, :1], second[0]], axis=1))
    assert np.array_equal(keys[1, :, :4], np.concatenate([first[1], second[1, :, :1]], axis=1))


def test_every_layer_appends_at_the_same_place_until_advance(cache):
    cache.reserve(np.array([1, 1]))
    for layer in range(3):
        cache.append(layer, heads(1) + layer, heads(1))
    assert cache.lengths.tolist() == [0, 0]
    cache.advance()
    assert cache.lengths.tolist() == [1, 1]
    assert np.array_equal(cache.keys[2, :, :, :1], heads(1) + 2)


@pytest.mark.parametrize("new", [[3, 2], [1, 4], [6, 0]])
def test_tokens_beyond_the_capacity_are_rejected_before_anything_is_stored(ops, new):
    cache = cache_of(ops)
    append(cache, 0, heads(3), heads(3), [3, 2])
    cache.advance()
    with pytest.raises(IndexError, match="the cache has room for 5 tokens, not for"):
        cache.reserve(np.array(new))
    none = cache_of(ops, batch=0)
    none.reserve(np.array([], np.int64))  # of no texts, any have room


def test_it_is_written_in_place(ops):
    cache = cache_of(ops)
    keys, values = append(cache, 0, heads(2), heads(2))
    assert np.shares_memory(keys, cache.keys)
    assert np.shares_memory(values, cache.values)


@pytest.mark.parametrize("rows", [[1], [2, 0], [1, 2]])
def test_rows_are_copied_with_their_lengths(ops, rows):
    cache = cache_of(ops, batch=3)
    append(cache, 1, heads(2, batch=3), -heads(2, batch=3), [2, 1, 2])
    cache.advance()
    lengths, before = cache.lengths, mixed(cache, 1, ops)
    cache = copy_of(cache, rows, cache_of(ops, batch=len(rows)))
    assert cache.lengths.tolist() == lengths[rows].tolist()
    visible, q = np.repeat(cache.lengths[:, None], 3, axis=1), heads(3, "queries", 3)[rows]
    found = ops.attend(q, cache.keys[1], cache.values[1], 1.0, visible)
    assert np.array_equal(ops.to_host(found), before[rows])


def test_tokens_beyond_the_lengths_are_overwritten(ops):
    cache = cache_of(ops)
    append(cache, 0, heads(3), -heads(3))
    cache.advance()
    before = mixed(cache, 0, ops)
    append(cache, 0, heads(2, "more"), heads(2, "more"))
    cache.advance()
    assert not np.array_equal(mixed(cache, 0, ops), before)
    cache.lengths = cache.lengths - 2
    assert cache.lengths.tolist() == [3, 3]
    assert np.array_equal(mixed(cache, 0, ops), before)


def test_copies_start_alike_and_continue_independently(ops):
    one = cache_of(ops, 3, batch=1)
    append(one, 2, heads(3)[:1], -heads(3)[:1])
    one.advance()
    copies = copy_of(one, [0, 0], cache_of(ops, 40))
    assert copies.lengths.tolist() == [3, 3]
    append(copies, 2, heads(2), heads(2, "more"), [2, 1])
    copies.advance()
    assert one.lengths.tolist() == [3]
    assert copies.lengths.tolist() == [5, 4]

    apart = cache_of(ops, 40)
    begun = np.repeat(heads(3)[:1], 2, axis=0)
    append(apart, 2, begun, -begun)
    apart.advance()
    append(apart, 2, heads(2), heads(2, "more"), [2, 1])
    apart.advance()
    assert np.array_equal(mixed(copies, 2, ops), mixed(apart, 2, ops))


def test_without_a_cache_there_is_room_for_one_layer_at_a_time():
    cache = KVCache(GPT2Config.from_dict(CONFIG), NumPyOps(), 2, 5, layers=1)
    assert len(cache.keys) == 1
    cache.reserve(np.array([2, 2]))
    for layer in range(3):
        keys, _ = cache.append(layer, heads(2) + layer, heads(2))
        assert np.array_equal(keys[:, :, :2], heads(2) + layer)


def test_its_first_rows_use_its_memory(ops):
    one, expected = cache_of(ops, batch=3), cache_of(ops, batch=2)
    append(one, 1, heads(2, batch=3), -heads(2, batch=3), [2, 1, 2])
    one.advance()
    expected.copy_row(0, one, 0, 2)
    expected.copy_row(1, one, 1, 1)
    first = one.view(2)
    assert first.lengths.tolist() == [2, 1]
    assert first.capacity == one.capacity
    for cache in (first, expected):
        append(cache, 1, heads(2, "more"), heads(2, "more"), [2, 1])
        cache.advance()
    assert np.array_equal(mixed(first, 1, ops), mixed(expected, 1, ops))
    assert np.shares_memory(first.keys, one.keys)
    assert np.shares_memory(first.values, one.values)
    assert one.lengths.tolist() == [2, 1, 2]


def test_a_token_takes_the_bytes_of_its_keys_and_values(cache):
    expected = cache_bytes(GPT2Config.from_dict(CONFIG), 2 * 5, NumPyOps().cache_type.itemsize)
    assert cache.keys.nbytes + cache.values.nbytes == expected


def test_a_cache_that_follows_another_has_its_tokens_and_drops_its_own(ops):
    one, other = cache_of(ops, 70), cache_of(ops, 70)
    for new, name in (([3, 2], "a"), ([30, 0], "b"), ([0, 0], "c"), ([1, 29], "d"), ([1, 1], "e")):
        append(one, 1, heads(30, name), -heads(30, name), new)
        one.advance()
        other.sync(one)
        assert other.lengths.tolist() == one.lengths.tolist()
        assert np.array_equal(mixed(other, 1, ops), mixed(one, 1, ops))
        append(other, 1, heads(2, "drafts"), heads(2, "drafts"), [2, 1])
    append(one, 1, heads(1), heads(1))
    assert not np.array_equal(other.keys[1], one.keys[1])  # nothing is shared
