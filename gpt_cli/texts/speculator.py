"""The draft model: a copy of a model with int8 weights, created on first use."""

from contextlib import suppress

from gpt_cli.gpt2.assembly import build
from gpt_cli.gpt2.memory import weights_bytes
from gpt_cli.gpt2.model import GPT2
from gpt_cli.gpt2.source import is_modified
from gpt_cli.gpt2.weights import named_weights

_MIN_BYTES = 64e6  # of the weights: smaller ones stay in the processor's cache


class Speculator:
    """A model, and its draft model once that is needed."""

    def __init__(self, model: GPT2):
        self.model = model
        self.draft_model: GPT2 | None = None
        self.may_have_draft_model = model.ops.draft_ops() is not None

    @property
    def pays(self) -> bool:
        """Return whether drafts can save time, and leave the texts as they are."""
        ops = self.model.ops
        size = weights_bytes(self.model.config, ops.dtype)
        # Drafts come from the library as well, whose layers are those of the unmodified model.
        return ops.batch_invariant and size >= _MIN_BYTES and not is_modified()

    @property
    def needed_bytes(self) -> int:
        """Return the memory that a draft model would take; 0 if there is one, or can be none."""
        is_missing = self.may_have_draft_model and self.draft_model is None
        return weights_bytes(self.model.config, "int8") if is_missing else 0

    def ensure_draft_model(self) -> GPT2 | None:
        """Return the draft model; None if there are no operations or no memory for it."""
        if self.draft_model is None and self.may_have_draft_model:
            self.draft_model = make_draft_model(self.model)
            self.may_have_draft_model = self.draft_model is not None
        return self.draft_model

    def release(self) -> None:
        """Give back the memory of the draft model."""
        self.draft_model = None


def make_draft_model(model: GPT2) -> GPT2 | None:
    """Return a model with its matrices in int8; the embeddings and vectors are shared.

    None if memory is short, or if no operations are faster.
    """
    ops = model.ops.draft_ops()
    free = model.ops.free_memory()
    if ops is None or (free is not None and 2 * weights_bytes(model.config, "int8") > free):
        return None
    with suppress(MemoryError):
        weights = dict(named_weights(model))
        for name, weight in weights.items():
            if hasattr(weight, "panels") and name != "wte.weight":  # a packed matrix
                weights[name] = ops.quantize(weight)
        return build(model.config, ops, weights)
    return None
