"""Attribution, patching and ablation: the parts of a model that make it predict an answer.

All use one number, the answer logit: the logit of the answer after the last token, minus that of a
wrong answer if there is one. Edits of the model apply in all passes.

Sources: Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021; Wang et al.,
"Interpretability in the Wild", arXiv 2211.00593.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from gpt_cli.errors import InputError, counted
from gpt_cli.gpt2.edits import Bound, ModelEdit
from gpt_cli.gpt2.hooks import select_hooks
from gpt_cli.gpt2.model import GPT2, unembed
from gpt_cli.gpt2.weights import columns_of
from gpt_cli.ops import Array, Ops
from gpt_cli.options.declare import OptionError
from gpt_cli.options.edit import Edit
from gpt_cli.scoring.activations import activations
from gpt_cli.texts.result import Recorded
from gpt_cli.texts.states import states
from gpt_cli.texts.text import Text

What: TypeAlias = Literal["resid_pre", "attn_out", "mlp_out", "z"]
Answers: TypeAlias = Sequence[int]  # the id of the answer, and of the wrong one if there is one
_PRECISION = 1e-4  # of an answer logit


@dataclass(frozen=True, repr=False, kw_only=True)
class OfAnswer(Recorded):
    """A result about an answer logit."""

    ids: list[int]  # of the text, or of the clean one
    answers: Answers
    prompts: list[str] = field(default_factory=list)  # the text, or the clean and the corrupt one

    def _about(self) -> str:
        """Return what the result is about: the answer, and the text before it."""
        return f"logit {self._quoted(self.answers[:1])} after {self._quoted(self.ids)}"


@dataclass(frozen=True, repr=False)
class Attribution(OfAnswer):
    """The terms that parts of a model add to the answer logit."""

    heads: NDArray[np.float64]  # (L, H)
    attention: NDArray[np.float64]  # (L,): the sum of the heads, and the bias of c_proj
    mlp: NDArray[np.float64]  # (L,)
    embedding: float  # of the last token
    position: float  # of its position
    bias: float  # of the final layer norm
    total: float  # the answer logit

    @property
    def error(self) -> float:
        """Return the difference between the sum of the parts and the total.

        It is due to rounding, and to edits of the residual stream or of the final layer norm.
        """
        layers = self.attention.sum() + self.mlp.sum()
        return float(abs(layers + self.embedding + self.position + self.bias - self.total))

    def _facts(self) -> str:
        L, H = self.heads.shape
        return f"{L} layers x {H} heads, {self._about()}: {self.total:.4g}"


@dataclass(frozen=True, repr=False)
class Patching(OfAnswer):
    """The answer logits of a clean and a corrupt text, and of the corrupt one with patches."""

    clean: float  # after the clean text
    corrupt: float  # after the corrupt one
    patched: NDArray[np.float64]  # (L, T): by layer and position; or (L, H): by layer and head
    what: What = "resid_pre"  # the activations that are patched

    @property
    def recovered(self) -> NDArray[np.float64]:
        """Return the share of the difference that a patch recovers: 0 corrupt, 1 clean."""
        return (self.patched - self.corrupt) / (self.clean - self.corrupt)

    def _facts(self) -> str:
        return f"{self.what} {self.patched.shape}, {self._about()}: {self.clean:.4g}"


@dataclass(frozen=True, repr=False)
class Ablation(OfAnswer):
    """The answer logits of a text, by the whole model and without each part."""

    whole: float  # by the whole model
    heads: NDArray[np.float64]  # (L, H)
    mlp: NDArray[np.float64]  # (L,)

    def _facts(self) -> str:
        L, H = self.heads.shape
        return f"{L} layers x {H} heads, {self._about()}: {self.whole:.4g}"


def attribute(model: GPT2, text: Text, answers: Answers) -> Attribution:
    """Return what each part of a model adds to the answer logit of a text.

    The scale of the final layer norm is held, and each part is centred as the norm centres their
    sum. So a part adds its product with one vector.
    """
    config = model.config
    ops = model.ops
    layers = range(model.config.n_layer)
    final = f"blocks.{layers[-1]}.hook_resid_post"
    globs = ["hook_*embed", "*.attn.hook_z", "*.hook_attn_out", "*.hook_mlp_out", final]
    (computed,) = states(model, [text], select_hooks(config, globs))
    (row,) = computed.rows
    logits = unembed(model, row.states[-1:], computed.hook)
    last = {name: _on_host(ops, value[-1]) for name, value in row.values.items()}

    unembedding = columns_of(ops, model.lm_head.weight, config.n_embd, answers).astype(np.float64)
    toward = _difference(unembedding)  # (C,)
    gain = _on_host(ops, model.ln_f.weight)
    offset = _on_host(ops, model.ln_f.bias)
    deviation = np.sqrt(last[final].var() + model.ln_f.epsilon)
    direction = (gain * toward - (gain * toward).mean()) / deviation

    def heads(layer: int) -> NDArray[np.float64]:
        c_proj = model.h[layer].attn.c_proj.weight
        matrix = columns_of(ops, c_proj, config.n_embd, range(config.n_embd))  # (n_out, n_in)
        z = last[f"blocks.{layer}.attn.hook_z"]  # (H, D)
        return (z * (direction @ matrix).reshape(z.shape)).sum(axis=1)

    return Attribution(
        np.array([heads(layer) for layer in layers]),
        np.array([last[f"blocks.{layer}.hook_attn_out"] @ direction for layer in layers]),
        np.array([last[f"blocks.{layer}.hook_mlp_out"] @ direction for layer in layers]),
        embedding=float(last["hook_embed"] @ direction),
        position=float(last["hook_pos_embed"] @ direction),
        bias=float(offset @ toward),
        total=float(_difference(_on_host(ops, logits[0, ops.xp.asarray(answers)]))),
        ids=text.ids,
        answers=answers,
    )


def patch(
    model: GPT2, clean: Text, corrupt: Text, answers: Answers, what: What = "resid_pre"
) -> Patching:
    """Return the answer logit of a corrupt text, with activations of the clean one in its place.

    One activation is replaced at a time: of each layer and position, or with "z" of each head at
    all positions. InputError if the texts differ in length, or have the same answer logit.
    """
    config = model.config
    T = len(clean.ids)
    if what not in get_args(What):
        raise OptionError("what", f"must be one of {', '.join(get_args(What))}")
    if len(corrupt.ids) != T:
        lengths = f"{counted(T, 'token')} and {len(corrupt.ids):,}"
        raise InputError(f"the texts have {lengths}: they must have equally many")
    names = select_hooks(config, ["*.attn.hook_z" if what == "z" else f"*.hook_{what}"])
    of_clean, of_corrupt = _answer_logits(model, [clean, corrupt], answers)
    if abs(of_clean - of_corrupt) < _PRECISION:
        raise InputError(f"both texts give {of_clean:.4f}: there is nothing to recover")
    (values,) = activations(model, [clean], names)

    def patches(name: str) -> Iterator[Bound]:
        whole = ModelEdit.of(Edit(name, values[name]), config)
        if what == "z":
            heads = (replace(whole, index=[head]) for head in range(config.n_head))
            return (Bound(head, [(0, T)]) for head in heads)
        return (Bound(whole, [(position, position + 1)]) for position in range(T))

    patched = [_with_edit(corrupt, bound) for name in names for bound in patches(name)]
    grid = np.array(_answer_logits(model, patched, answers)).reshape(config.n_layer, -1)
    return Patching(of_clean, of_corrupt, grid, what, ids=clean.ids, answers=answers)


def ablate(model: GPT2, text: Text, answers: Answers) -> Ablation:
    """Return the answer logit of a text without each head (its z is 0), and without each MLP."""
    config = model.config
    T = len(text.ids)
    parts = [f"attn.hook_z[{head}]" for head in range(config.n_head)]
    parts.append("hook_mlp_out")
    ablated = []
    for layer in range(config.n_layer):
        for part in parts:
            edit = ModelEdit.of(f"blocks.{layer}.{part}=0", config)
            ablated.append(_with_edit(text, Bound(edit, [(0, T)])))
    whole, *logits = _answer_logits(model, [text, *ablated], answers)
    grid = np.array(logits).reshape(config.n_layer, len(parts))
    return Ablation(whole, grid[:, :-1], grid[:, -1], ids=text.ids, answers=answers)


def _with_edit(text: Text, bound: Bound) -> Text:
    """Return a text with one more edit."""
    return replace(text, edits=[*text.edits, bound])


def _answer_logits(model: GPT2, texts: Sequence[Text], answers: Answers) -> list[float]:
    """Return the answer logit of each text."""
    ops = model.ops
    measures = [0.0] * len(texts)
    for computed in states(model, texts):
        last = ops.xp.stack([row.states[-1] for row in computed.rows])
        logits = unembed(model, last, computed.hook)[:, ops.xp.asarray(answers)]
        for row, measure in zip(computed.rows, _difference(_on_host(ops, logits).T), strict=True):
            measures[row.text_index] = float(measure)
    return measures


def _on_host(ops: Ops, array: Array) -> NDArray[np.float64]:
    return ops.to_host(array).astype(np.float64)


def _difference(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values of the answer, minus those of the wrong one if there is one."""
    return values[0] - values[1] if len(values) > 1 else values[0]
