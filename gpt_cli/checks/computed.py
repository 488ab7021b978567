"""Results of a model, to compare the ways to compute them."""

from collections.abc import Sequence
from contextlib import suppress
from io import BytesIO
from typing import Any

import numpy as np

from gpt_cli.compression.archive import ArchiveReader
from gpt_cli.compression.codec import Codec
from gpt_cli.engine import Engine
from gpt_cli.errors import InputError
from gpt_cli.generation.generate import Completion
from gpt_cli.gpt2.digests import TEXT, logits_digest, sample_ids
from gpt_cli.gpt2.hooks import FINAL, select_hooks
from gpt_cli.ops import Array
from gpt_cli.scoring.activations import activations
from gpt_cli.scoring.score import score
from gpt_cli.texts.text import Text

PROMPTS = ("Once upon a time", "The", TEXT[:300], "In the beginning there was")
_NEW_TOKENS = 12
SEGMENT = 32  # tokens, in the round trip


def texts(engine: Engine, prompts: Sequence[str], *, use_cache: bool = True) -> list[Completion]:
    """Continue prompts greedily, side by side."""
    return engine.generate(
        prompts,
        max_tokens=_NEW_TOKENS,
        temperature=0,
        ignore_eos=True,
        use_cache=use_cache,
        overflow="truncate",
    )


def logprobs(engine: Engine) -> Array:
    """Return the log-probability of each token of a sample but the first."""
    text = Text(sample_ids(engine.tokenizer, engine.model.config))
    (scored,) = score(engine.loaded, [text])
    return np.array(scored.token_logprobs[1:], float)


def hook_values(engine: Engine, *, together: bool = False) -> Array:
    """Return values at the hook points of the last layer, in standard deviations: see PROMPTS."""
    config = engine.model.config
    names = select_hooks(config, [f"blocks.{config.n_layer - 1}.*", FINAL])
    sample = sample_ids(engine.tokenizer, config)
    ids = [engine.encode(prompt) or sample for prompt in PROMPTS]
    texts = [Text(row[: config.n_positions]) for row in ids]
    batches = [texts] if together else [[text] for text in texts]
    rows = [row for batch in batches for row in activations(engine.model, batch, names)]
    arrays = [array[np.isfinite(array)] for row in rows for array in row.values()]
    return np.concatenate([array / (array.std() or 1) for array in arrays])


def exact(engine: Engine) -> dict[str, Any]:
    """Return results, by what they are, that have the same bits on a CPU and on a GPU."""
    alone = [texts(engine, [prompt])[0] for prompt in PROMPTS]
    ways = texts(engine, PROMPTS), texts(engine, PROMPTS, use_cache=False), alone
    results: dict[str, Any] = {
        "logits": logits_digest(engine.model, engine.tokenizer),
        "texts": [[(text.ids, text.logprobs) for text in rows] for rows in ways],
        "values at hook points": hook_values(engine, together=True).tobytes(),
    }
    with suppress(InputError):  # a model that cannot compress, such as without a start token
        codec = Codec(engine.model, engine.tokenizer)
        packed = b"".join(codec.compress(BytesIO(TEXT.encode()), SEGMENT))
        unpacked = b"".join(codec.decompress(ArchiveReader(BytesIO(packed))))
        results["compressed files"] = packed, unpacked
    return results
