"""Models made in memory, and how tests compute with them."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from gpt_cli.folder.config import GPT2Config
from gpt_cli.generation.generate import Completion, Run
from gpt_cli.generation.row import Request
from gpt_cli.gpt2 import assembly
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.model import forward
from gpt_cli.ops import Linear, bindings
from gpt_cli.options.request import Options
from gpt_cli.system.library import native_library
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.text import Text
from support.checkpoints import ALPHABET, CONFIG, VOCAB, filed, make_weights

GREEDY = {"temperature": 0}


def favouring(model, *ids):
    """The model, with these ids far more likely than all others, the first most."""
    bias = np.zeros(model.config.vocab_size, np.float32)
    bias[list(ids)] = 1000 - np.arange(len(ids))
    return replace(model, lm_head=Linear(model.lm_head.weight, bias))


def ids_of(text: str) -> list[int]:
    return [VOCAB[ALPHABET[byte]] for byte in text.encode()]


def completions_of(model, tokenizer, requests, speculator=None) -> list[Completion]:
    run = Run(LoadedModel(model, tokenizer, speculator), requests)
    list(run)
    return run.completions


def outcomes(completions):
    """Return everything but times and drafts."""
    return [
        (row.text, row.ids, row.logprobs, row.top_logprobs, row.finish_reason)
        for row in completions
    ]


def run(model, tokenizer, prompts, params=GREEDY, seed=7, **options) -> list[Completion]:
    options = Options(**{"max_tokens": 20, "seed": seed} | params | options)
    requests = [Request(Text(prompt), options, row) for row, prompt in enumerate(prompts)]
    return completions_of(model, tokenizer, requests)


def exact_logprobs(model, ids):
    """The logarithms of the probabilities (T, V) of what follows each token of a text."""
    logits = forward(model, np.array([ids]))[0].astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


LEVELS = bindings.levels() if native_library() else []

DTYPES = ["float32", "bfloat16", "float16", "int8"]

threads_and_levels = st.tuples(st.integers(1, 4), st.sampled_from(LEVELS or [""]))


def model_of(ops, weights_of=None, seed=0, head_size=8, **changes):
    """Return a model of `CONFIG` with changes; its matrices may be stored in another dtype."""
    config = CONFIG | {"n_embd": (CONFIG | changes)["n_head"] * head_size} | changes
    weights = make_weights(config, seed=seed)
    if weights_of in ("bfloat16", "float16"):
        weights = {
            name: filed(array, weights_of) if array.ndim == 2 else array
            for name, array in weights.items()
        }
    return assembly.assemble(GPT2Config.from_dict(config), ops, weights)


@contextmanager
def computing(ops, threads, level):
    """Compute with this number of threads, at this level of the processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "threads", threads)
        bindings.use_level(level)
        yield patch
    bindings.choose_level()


def forward_in_chunks(model, ids, ends, lengths=None):
    """Return logits (B, T, V), computed in chunks; the first `lengths` of a row are real."""
    cache = KVCache(model.config, model.ops, *ids.shape)
    lengths = np.full(len(ids), ids.shape[1]) if lengths is None else lengths
    logits = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        new = np.clip(lengths - start, 0, end - start)
        logits.append(forward(model, ids[:, start:end], cache, new))
    return np.concatenate(logits, axis=1)
