"""SHA-256 digests of a model and its tokens, and of the logits that it computes here."""

import hashlib
from collections.abc import Iterable
from functools import partial

import numpy as np

from gpt_cli.folder.config import GPT2Config
from gpt_cli.folder.dtypes import SHORT
from gpt_cli.folder.tokenizer import Tokenizer
from gpt_cli.gpt2.model import GPT2, forward
from gpt_cli.gpt2.weights import leaves
from gpt_cli.ops import Array
from gpt_cli.ops.short import round_to, widen

TEXT = (
    "A librarian once copied a long book by hand. Before each new word she went back to the first "
    "page and read everything again, and so the work became slower and slower. Then a child gave "
    'her a notebook. "Write down what you learn from each page," said the child, "and you need not '
    'read it twice." From that day on, the last word took no longer than the first, and the book '
    "was finished before the winter came.\n"
)
_TOKENS = 64


def sample_ids(tokenizer: Tokenizer, config: GPT2Config) -> list[int]:
    """Return the tokens of TEXT; those of the vocabulary, again and again, if TEXT has too few.

    A vocabulary may have no letters, such as one of the bases of DNA.
    """
    size = config.vocab_size
    ids = [id for id in tokenizer.encode(TEXT) if id < size]
    if len(ids) >= _TOKENS:
        return ids
    others = {*tokenizer.missing_ids(size), *tokenizer.special.values()}
    ordinary = [id for id in range(size) if id not in others] or [0]
    return ordinary * (_TOKENS // len(ordinary) + 1)


def logits_digest(model: GPT2, tokenizer: Tokenizer) -> str:
    """Return the digest of the logits of the first tokens of a sample."""
    ids = sample_ids(tokenizer, model.config)[: min(_TOKENS, model.config.n_positions)]
    logits = model.ops.to_host(forward(model, model.ops.xp.asarray([ids])))
    return hashlib.sha256(logits.astype("<f4", copy=False).tobytes()).hexdigest()


def weights_digest(model: GPT2, tokenizer: Tokenizer, dtype: str | None = None) -> str:
    """Return the digest of a model in memory, as the compiled library holds it, and of its tokens.

    The library holds weights in one layout on all processors. With another `dtype` than the model's
    (float32, float16 or bfloat16), return the digest of the same weights in this dtype. If the
    dtype cannot hold them, no model in it has this digest.
    """
    ops = model.ops
    dtype = dtype or ops.dtype
    digest = hashlib.sha256()
    seen = set()
    for _, leaf in leaves((model.wte, model.wpe, model.h, model.ln_f, model.lm_head)):
        is_matrix = hasattr(leaf, "library_panels")
        if not is_matrix and not isinstance(leaf, (np.ndarray, ops.xp.ndarray)):
            digest.update(repr(leaf).encode())
        elif id(leaf) not in seen:  # a tied matrix counts once
            seen.add(id(leaf))
            panels: Iterable[Array] = leaf.library_panels() if is_matrix else [ops.to_host(leaf)]
            if is_matrix and leaf.format != dtype:  # one at a time: a copy may be large
                panels = map(partial(_converted, leaf.format, dtype), panels)
            for panel in panels:
                digest.update(np.ascontiguousarray(panel).data.cast("B"))
    for token_id, token in enumerate(tokenizer.all_bytes(model.config.vocab_size)):
        digest.update(b"%d %d " % (token_id, len(token)) + token)
    return digest.hexdigest()


def _converted(format: str, dtype: str, panel: Array) -> Array:
    """Return a panel in another dtype, or in float32 if that does not have all its values."""
    values = widen(panel, format) if format in SHORT else panel
    if dtype == "float32":
        return values
    narrow = round_to(values, dtype)
    return narrow if np.array_equal(widen(narrow, dtype), values) else values
