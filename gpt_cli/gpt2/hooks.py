"""Hook points: named values inside the forward pass, to read or to change.

The names are TransformerLens's. `model.py` gives each value to a `Hook` under its name. As before
TransformerLens 3, `hook_normalized` is what a LayerNorm returns, with its gain and bias.
"""

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy

from gpt_cli.errors import brief, did_you_mean
from gpt_cli.folder.config import GPT2Config
from gpt_cli.ops import Array
from gpt_cli.options.declare import OptionError

# The shape of a value for a text of T tokens, by the end of its name.
_SHAPES = {
    "hook_embed": ("T", "C"),
    "hook_pos_embed": ("T", "C"),
    "hook_resid_pre": ("T", "C"),
    "ln1.hook_normalized": ("T", "C"),
    "attn.hook_q": ("T", "H", "D"),
    "attn.hook_k": ("T", "H", "D"),
    "attn.hook_v": ("T", "H", "D"),
    "attn.hook_attn_scores": ("H", "T", "T"),
    "attn.hook_pattern": ("H", "T", "T"),
    "attn.hook_z": ("T", "H", "D"),
    "hook_attn_out": ("T", "C"),
    "hook_resid_mid": ("T", "C"),
    "ln2.hook_normalized": ("T", "C"),
    "mlp.hook_pre": ("T", "inner"),
    "mlp.hook_post": ("T", "inner"),
    "hook_mlp_out": ("T", "C"),
    "hook_resid_post": ("T", "C"),
    "ln_final.hook_normalized": ("T", "C"),
}
_NUMBERED = re.compile(r"blocks\.\d+\.")
FINAL = "ln_final.hook_normalized"  # the states that `hidden_states` returns
_BEFORE_BLOCKS = ("hook_embed", "hook_pos_embed")
_AFTER_BLOCKS = (FINAL,)


class Hook:
    """Gets the values of some hook points. Without names, nobody listens: values pass unchanged."""

    names: Collection[str] = ()
    changes_values: bool = False
    _prefix = ""  # of the names in a block

    def begin(self, positions: Array, new: Array) -> "Hook":
        """Return the hook of a pass: positions (B, T), numbers of tokens without padding (B,)."""
        return self

    def at(self, layer: int) -> "Hook":
        """Return the hook of a block."""
        if not self.names:
            return self
        hook = copy(self)
        hook._prefix = f"blocks.{layer}."
        return hook

    def listens(self, *names: str) -> bool:
        """Return whether one of the values is of interest; without names, any of the block."""
        if not names:
            return any(name.startswith(self._prefix) for name in self.names)
        return any(self._prefix + name in self.names for name in names)

    def __call__(self, name: str, value: Array) -> Array:
        """Return the value that the pass continues with: this one, or a changed copy.

        A value is (B, T, ...), but (B, H, T, D) for q, k, v and z, and (B, H, T, S) for scores and
        the pattern.
        """
        name = self._prefix + name
        return self.take(name, value) if name in self.names else value

    def take(self, name: str, value: Array) -> Array:
        """Return the value of a hook point, or a changed copy; the name has its layer."""
        return value


NO_HOOK = Hook()


class Recorder(Hook):
    """Keeps the values of some hook points, as another hook has changed them."""

    def __init__(self, names: Iterable[str], inner: Hook = NO_HOOK):
        self._kept = frozenset(names)
        self._inner = inner
        self.changes_values = inner.changes_values
        self.names = self._kept.union(inner.names)
        self.values: dict[str, Array] = {}  # in the order of computation

    def begin(self, positions: Array, new: Array) -> "Recorder":
        """Return the recorder of a pass with the same values."""
        recorder = copy(self)
        recorder._inner = self._inner.begin(positions, new)
        return recorder

    def take(self, name: str, value: Array) -> Array:
        """Keep a value if its name is among those to keep."""
        value = self._inner.take(name, value)
        if name in self._kept:
            self.values[name] = value
        return value


def hook_shapes(config: GPT2Config) -> dict[str, tuple[str | int, ...]]:
    """Return the shapes of all hook points of a model, in order of computation; "T" is tokens."""
    C, H, D = config.n_embd, config.n_head, config.head_size
    sizes = {"C": C, "H": H, "D": D, "inner": config.inner_size}
    of_block = [name for name in _SHAPES if name not in _BEFORE_BLOCKS + _AFTER_BLOCKS]
    names = [f"blocks.{layer}.{name}" for layer in range(config.n_layer) for name in of_block]
    return {
        name: tuple(sizes.get(axis, axis) for axis in _SHAPES[_end(name)])
        for name in (*_BEFORE_BLOCKS, *names, *_AFTER_BLOCKS)
    }


def _end(name: str) -> str:
    """Return the name of a hook point without its layer."""
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


def has_key_axis(name: str) -> bool:
    """Return whether a value has numbers for each pair of tokens, as attention scores have."""
    return _SHAPES[_end(name)] == ("H", "T", "T")


def indexed(name: str) -> str:
    """Return what the numbers of a value at one token are indexed by, such as "heads"."""
    axis = next(axis for axis in _SHAPES[_end(name)] if axis != "T")
    return {"H": "heads", "inner": "neurons", "C": "dimensions"}[axis]


def select_hooks(config: GPT2Config, globs: Sequence[str]) -> list[str]:
    """Return the hook points that match one of the globs, in order of computation.

    `*` and `?` match dots, too. OptionError if a glob matches none, or if there is no glob.
    """
    if not globs:
        raise OptionError("hook", "is not set: give at least one hook point")
    names = [*hook_shapes(config)]
    for glob in globs:
        if not fnmatch.filter(names, glob):
            raise OptionError("hook", f"{brief(glob, 80)} is not a hook point{_hint(glob, names)}")
    return [name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]


def _hint(glob: str, names: Sequence[str]) -> str:
    if f"blocks.0.{glob}" in names:
        return f" without its layer: give blocks.0.{glob}, or *.{glob} for all layers"
    if ends := [end for end in _SHAPES if end.endswith(f".{glob}")]:
        globs = " or ".join(end if end in _AFTER_BLOCKS else f"*.{end}" for end in ends)
        return f" without its submodule: give {globs}"
    numbered = _NUMBERED.match(glob)
    if numbered and not any(name.startswith(numbered[0]) for name in names):
        return f" of this model: the last one is {names[-2]}"
    return did_you_mean(glob, names) or ": `gpt-cli activations --hooks -m MODEL` lists them"


def rows_of(values: Mapping[str, Array], lengths: Sequence[int]) -> list[dict[str, Array]]:
    """Cut the values of a pass into texts, with the shapes of `hook_shapes`."""
    return [
        {name: _row(name, value[row], length) for name, value in values.items()}
        for row, length in enumerate(lengths)
    ]


def _row(name: str, value: Array, length: int) -> Array:
    match _SHAPES[_end(name)]:
        case ("H", "T", "T"):
            return value[:, :length, :length]
        case ("T", "H", "D"):
            return value[:, :length].swapaxes(0, 1)
        case _:
            return value[:length]
