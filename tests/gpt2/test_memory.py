"""Each estimate of memory is what arrays take."""

import pytest

from gpt_cli.generation.generate import working_set
from gpt_cli.generation.row import Request
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.memory import cache_bytes, logits_bytes, prefix_bytes
from gpt_cli.gpt2.model import forward
from gpt_cli.options.request import Options
from gpt_cli.texts.prefix_cache import PrefixCache
from gpt_cli.texts.text import Text
from support.models import DTYPES, model_of

SIZES = {"n_head": 2, "head_size": 64, "n_layer": 2, "n_positions": 128}


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_values_and_states_take_these_bytes(native, dtype):
    ops = native(dtype)
    model = model_of(ops, dtype, **SIZES)
    cache = KVCache(model.config, ops, 3, 64)
    itemsize = ops.cache_type.itemsize
    assert itemsize == (2 if dtype == "int8" else 4)
    expected = cache.keys.nbytes + cache.values.nbytes
    assert cache_bytes(model.config, 3 * 64, itemsize) == expected
    assert prefix_bytes(model.config, ops, 64) == PrefixCache(model).prefix([1] * 64).bytes


def test_logits_take_these_bytes(make_model):
    model = make_model()
    logits = forward(model, model.ops.xp.asarray([[1, 2, 3]]))
    assert logits_bytes(model.config, 3) == logits.astype("f4").size * 4


def test_a_cache_with_int8_weights_counts_half(native):
    long = Request(Text([1]), Options(max_tokens=127))
    sizes = SIZES | {"n_layer": 12, "n_positions": 1024, "vocab_size": 290}
    models = {dtype: model_of(native(dtype), dtype, **sizes) for dtype in ("float32", "int8")}
    counts = {
        dtype: working_set(model, [long] * 8) - working_set(model, [replaced(long)] * 8)
        for dtype, model in models.items()
    }
    assert counts["float32"] > 1.9 * counts["int8"] > 0


def replaced(request):
    """Return the same request without a cache for many tokens."""
    return Request(Text(request.prompt), Options(max_tokens=1))
