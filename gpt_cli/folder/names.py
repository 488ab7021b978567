"""The names and shapes of GPT-2's tensors."""

from collections.abc import Iterator

from gpt_cli.folder.config import GPT2Config

SCALE = "_scale"  # suffix of the names of scales of int8 weights


def expected_shapes(
    config: GPT2Config, *, head: bool = False
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every tensor of a GPT-2.

    The head is included if it is not tied, or with `head`: a tied head may be stored, too.
    """
    C, inner = config.n_embd, config.inner_size
    yield "wte.weight", (config.vocab_size, C)
    yield "wpe.weight", (config.n_positions, C)
    for layer in range(config.n_layer):
        h = f"h.{layer}."
        for name, n_in, n_out in (
            ("attn.c_attn", C, 3 * C),
            ("attn.c_proj", C, C),
            ("mlp.c_fc", C, inner),
            ("mlp.c_proj", inner, C),
        ):
            yield f"{h}{name}.weight", (n_in, n_out)
            yield f"{h}{name}.bias", (n_out,)
        for part in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"):
            yield h + part, (C,)
    yield "ln_f.weight", (C,)
    yield "ln_f.bias", (C,)
    if head or not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, C)


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is a matrix for `Ops.place_matrix`, which may be in int8."""
    return len(shape) == 2 and name != "wpe.weight"


def is_transposed(name: str) -> bool:
    """Return whether a matrix is stored as (n_out, n_in)."""
    return name in ("wte.weight", "lm_head.weight")
