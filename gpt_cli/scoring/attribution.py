"""Which parts of a model make it predict an answer: attribution, patching and ablation.

All use one measure: the logit of the answer after the last token, or its difference to the logit of
a wrong answer. Sources: Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021;
Wang et al., "Interpretability in the Wild", arXiv 2211.00593.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from gpt_cli.errors import InputError, counted
from gpt_cli.gpt2.edits import Bound, Edit, bind, editor
from gpt_cli.gpt2.hooks import Recorder, hook_shapes, rows_of, select_hooks
from gpt_cli.gpt2.model import GPT2, hidden_states, unembed
from gpt_cli.gpt2.prefill import PASS, next_logits
from gpt_cli.gpt2.weights import columns_of
from gpt_cli.options.declare import OptionError
from gpt_cli.scoring.activations import edited_activations

_TOKENS = PASS // 2  # side by side: copies of values are made, and larger ones took 5% longer

What: TypeAlias = Literal["resid_pre", "attn_out", "mlp_out", "z"]
Answers: TypeAlias = Sequence[int]  # the id of the answer, and of the wrong one if there is one
PRECISION = 1e-4  # of a measure


@dataclass(frozen=True)
class Attribution:
    """What parts of a model add to the measure; but for rounding, they add up to `total`."""

    embedding: float  # of the last token
    position: float
    heads: NDArray[np.float64]  # (L, H)
    attention_bias: NDArray[np.float64]  # (L,) of c_proj
    mlp: NDArray[np.float64]  # (L,)
    bias: float  # of the final layer norm
    total: float

    @property
    def attention(self) -> NDArray[np.float64]:
        """Return what the attention of each layer adds (L,): its heads and its bias."""
        return self.heads.sum(axis=1) + self.attention_bias

    @property
    def error(self) -> float:
        """Return the difference between the sum of the parts and the total."""
        layers = self.attention.sum() + self.mlp.sum()
        return float(abs(self.embedding + self.position + layers + self.bias - self.total))


@dataclass(frozen=True)
class Patching:
    """The measure of texts in which activations were replaced."""

    clean: float  # without a patch
    corrupt: float
    patched: NDArray[np.float64]  # (L, T): by layer and position; or (L, H): by layer and head

    @property
    def recovered(self) -> NDArray[np.float64]:
        """Return the share of the difference that a patch recovers: 0 corrupt, 1 clean."""
        return (self.patched - self.corrupt) / (self.clean - self.corrupt)


@dataclass(frozen=True)
class Ablation:
    """The measure of a text without a part."""

    whole: float
    heads: NDArray[np.float64]  # (L, H)
    mlp: NDArray[np.float64]  # (L,)


def attribute(
    model: GPT2, ids: Sequence[int], answers: Answers, edits: Sequence[Edit] = ()
) -> Attribution:
    """Return what each part of a model adds to the measure of a text.

    The scale of the final layer norm is held, and each part is centred as the norm centres their
    sum. So a part adds its product with one vector.
    """
    config, ops = model.config, model.ops
    final = f"blocks.{config.n_layer - 1}.hook_resid_post"
    globs = ["hook_*embed", "*.attn.hook_z", "*.hook_attn_out", "*.hook_mlp_out", final]
    bounds = bind(edits, len(ids), len(ids))
    recorder = Recorder(frozenset(select_hooks(config, globs)), editor([bounds], ops.xp))
    state = hidden_states(model, ops.xp.asarray([ids]), hook=recorder)[0, -1]
    (row,) = rows_of(recorder.values, [len(ids)])
    last = {name: ops.to_host(value[-1]).astype(np.float64) for name, value in row.items()}

    unembedding = columns_of(ops, model.lm_head.weight, config.n_embd, answers).astype(np.float64)
    toward = _difference(unembedding)
    gain, offset = (ops.to_host(x).astype(np.float64) for x in (model.ln_f.weight, model.ln_f.bias))
    deviation = np.sqrt(last[final].var() + model.ln_f.epsilon)
    direction = gain * toward
    direction = (direction - direction.mean()) / deviation

    heads, biases, mlp = [], [], []
    for layer, b in enumerate(model.h):
        all_rows = range(config.n_embd)
        matrix = columns_of(ops, b.attn.c_proj.weight, config.n_embd, all_rows)  # (n_out, n_in)
        read = (direction @ matrix).reshape(config.n_head, -1)  # what a head's z is multiplied by
        heads.append((last[f"blocks.{layer}.attn.hook_z"] * read).sum(axis=1))
        biases.append(last[f"blocks.{layer}.hook_attn_out"] @ direction - heads[-1].sum())
        mlp.append(last[f"blocks.{layer}.hook_mlp_out"] @ direction)
    logits = ops.to_host(unembed(model, state[None])[0, ops.xp.asarray(answers)])
    return Attribution(
        embedding=float(last["hook_embed"] @ direction),
        position=float(last["hook_pos_embed"] @ direction),
        heads=np.array(heads),
        attention_bias=np.array(biases),
        mlp=np.array(mlp),
        bias=float(offset @ toward),
        total=float(_difference(logits.astype(np.float64))),
    )


def patch(
    model: GPT2,
    clean: Sequence[int],
    corrupt: Sequence[int],
    answers: Answers,
    what: What = "resid_pre",
    edits: Sequence[Edit] = (),
) -> Patching:
    """Return the measure of a corrupt text in which activations of the clean one replace its own.

    One activation is replaced at a time: of each layer and position, or with "z" of each head at
    all positions. InputError if the texts have different numbers of tokens, or the same measure.
    """
    config = model.config
    if what not in get_args(What):
        raise OptionError("what", f"must be one of {', '.join(get_args(What))}")
    if len(clean) != len(corrupt):
        lengths = f"{counted(len(clean), 'token')} and {len(corrupt):,}"
        raise InputError(f"the texts have {lengths}: they must have equally many")
    glob = "*.attn.hook_z" if what == "z" else f"*.hook_{what}"
    names, T = select_hooks(config, [glob]), len(clean)
    bounds = bind(edits, T, T)
    measures = [*chain(*(_measures(model, ids, answers, [bounds]) for ids in (clean, corrupt)))]
    if abs(measures[0] - measures[1]) < PRECISION:
        raise InputError(f"both texts give {measures[0]:.4f}: there is nothing to recover")
    row = next(edited_activations(model, [(clean, bounds)], names))
    shapes, positions = hook_shapes(config), np.arange(T)

    def patches() -> Iterator[list[Bound]]:
        for name in names:
            stored = {name: row[name]}
            whole = Edit(name, {name: shapes[name]}, slice(None), ":", "=")
            if what == "z":
                for head in range(config.n_head):
                    edit = Edit(name, {name: shapes[name]}, [head], ":", "=")
                    edit = edit.with_arrays(stored, "the clean text", positions)
                    yield [*bounds, Bound(edit, 0, T)]
            else:
                edit = whole.with_arrays(stored, "the clean text", positions)
                for position in range(T):
                    yield [*bounds, Bound(edit, position, position + 1)]

    patched = np.array([*_measures(model, corrupt, answers, [*patches()])])
    return Patching(measures[0], measures[1], patched.reshape(config.n_layer, -1))


def ablate(
    model: GPT2, ids: Sequence[int], answers: Answers, edits: Sequence[Edit] = ()
) -> Ablation:
    """Return the measure of a text without each head (its z is 0), and without each MLP."""
    config = model.config
    bounds = bind(edits, len(ids), len(ids))
    texts = [
        f"blocks.{layer}.{part}=0"
        for layer in range(config.n_layer)
        for part in (*(f"attn.hook_z[{h}]" for h in range(config.n_head)), "hook_mlp_out")
    ]
    parsed = [bind([*edits, Edit.parse(text, config)], len(ids), len(ids)) for text in texts]
    whole, *ablated = _measures(model, ids, answers, [bounds, *parsed])
    grid = np.array(ablated).reshape(config.n_layer, config.n_head + 1)
    return Ablation(whole, grid[:, :-1], grid[:, -1])


def _measures(
    model: GPT2, ids: Sequence[int], answers: Answers, rows: Sequence[list[Bound]]
) -> Iterator[float]:
    """Yield the measure of a text with the edits of each row, as many side by side as fit."""
    ops, step = model.ops, max(1, _TOKENS // len(ids))
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        logits = next_logits(model, [ids] * len(part), hook=editor(part, ops.xp))
        columns = ops.to_host(logits[:, ops.xp.asarray(answers)]).astype(np.float64)
        yield from map(float, _difference(columns.T))


def _difference(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values of the answer, minus those of the wrong one if there is one."""
    return values[0] - values[1] if len(values) > 1 else values[0]
