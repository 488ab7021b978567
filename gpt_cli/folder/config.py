"""GPT2Config: the hyperparameters in a `config.json`; the tensors that these require."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from gpt_cli.errors import CheckpointError, InputError
from gpt_cli.options.declare import WHOLE, Declared, Kind, OptionError, Range, between, option
from gpt_cli.system.files import read_json

SCALE = "_scale"  # suffix of the names of scales of int8 weights
Activation: TypeAlias = Literal["gelu_new", "gelu", "relu", "silu", "tanh"]
ACTIVATIONS = get_args(Activation)

# Other names of fields and activation functions in published configurations.
_ALIASES = {
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
}
_ACTIVATION_ALIASES = {"gelu_fast": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "swish": "silu"}

# quantization_config of a checkpoint that `quantize` has written.
INT8 = {"quant_method": "gpt-cli", "bits": 8, "block_size": 64}

_LARGEST = 2**20  # far above any GPT-2; a larger size means a damaged file


def _convert_tokens(value: Any) -> tuple[int, ...]:
    """Convert a token id, a list of ids, or null."""
    ids = value if isinstance(value, list | tuple) else [value]
    return tuple(WHOLE.convert(id) for id in ids if id is not None)


_SIZES = between(1, _LARGEST)
_TOKENS = Range(lambda id: id is None or 0 <= id <= _LARGEST, f"from 0 to {_LARGEST}")
_ID_LISTS = Range(lambda ids: all(map(_TOKENS.contains, ids)), f"ids {_TOKENS.name}")
_TOKEN = Kind("a token id", int, lambda id: None if id is None else WHOLE.convert(id))


@dataclass(frozen=True)
class GPT2Config(Declared):
    """The fields of `config.json` that affect the computation.

    The defaults for missing fields are GPT-2's values, as in transformers.
    """

    vocab_size: int = option(50257, range=_SIZES)  # V, the rows of wte
    n_positions: int = option(1024, range=between(2, _LARGEST))  # the context, the rows of wpe
    n_embd: int = option(768, range=_SIZES)  # C
    n_layer: int = option(12, range=_SIZES)
    n_head: int = option(12, range=_SIZES)  # H
    n_inner: int | None = option(None, range=_SIZES)  # of the MLP; None means 4 C
    activation_function: Activation = option("gelu_new")
    layer_norm_epsilon: float = option(
        1e-5, range=Range(lambda epsilon: 0 < epsilon < 1, "between 0 and 1")
    )
    scale_attn_weights: bool = option(True)  # divide attention scores by sqrt(D)
    scale_attn_by_inverse_layer_idx: bool = option(False)  # and by the layer's number from 1
    tie_word_embeddings: bool = option(True)  # the head is wte
    bos_token_id: int | None = option(50256, range=_TOKENS, kind=_TOKEN)
    eos_token_id: tuple[int, ...] = option(
        (50256,), range=_ID_LISTS, kind=Kind("a token id or a list of ids", str, _convert_tokens)
    )
    dtype: str = option("float32")  # or int8, by quantization_config

    @property
    def head_size(self) -> int:
        """Return D = C / H, the width of an attention head."""
        return self.n_embd // self.n_head

    @property
    def inner_size(self) -> int:
        """Return the width of the MLP's hidden layer."""
        return self.n_inner or 4 * self.n_embd

    def check_ids(self, ids: Sequence[int]) -> list[int]:
        """Return token ids; raise InputError if the model has no such token."""
        size = self.vocab_size
        if unknown := [id for id in ids if not 0 <= id < size]:
            raise InputError(
                f"the model has no token {unknown[0]}; its ids are from 0 to {size - 1}"
            )
        return list(ids)

    def start_token(self, reason: str) -> int:
        """Return the token that begins a text; without one, raise OptionError with a reason."""
        if self.bos_token_id is None or self.bos_token_id >= self.vocab_size:
            raise OptionError(
                "bos_token", f"must be given: {reason}, and this model has no start token"
            )
        return self.bos_token_id

    @classmethod
    def from_folder(cls, folder: Path) -> "GPT2Config":
        """Read `config.json`; `with_special_tokens` settles the start and end tokens."""
        path = folder / "config.json"
        if not path.exists():
            fault = "is a link to itself or to nothing" if path.is_symlink() else "is missing"
            raise CheckpointError(
                f"{path} {fault}: give the folder of a whole model, or get the model again"
            )
        return cls.from_dict(read_json(path), source=str(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], source: str = "config") -> "GPT2Config":
        """Validate a parsed `config.json`; a CheckpointError names `source` and the field."""
        raw = {_ALIASES.get(name, name): value for name, value in raw.items()}
        try:
            model_type = raw.get("model_type", "gpt2")
            if model_type != "gpt2":
                raise CheckpointError(
                    f"{source}: model_type is {model_type!r:.40}, not gpt2: gpt-cli computes GPT-2 "
                    "only: see docs/models.md"
                )
            if raw.get("add_cross_attention"):
                raise ValueError("add_cross_attention is set, unlike in GPT-2")
            quantization = raw.get("quantization_config")
            if quantization not in (None, INT8):
                raise ValueError(f"quantization_config is {quantization!r:.80}, not {INT8}")
            names = [field.name for field in fields(cls)]
            values = {name: raw[name] for name in names if name in raw}
            activation = values.get("activation_function")
            if activation:
                values["activation_function"] = _ACTIVATION_ALIASES.get(str(activation), activation)
            values["dtype"] = "float32" if quantization is None else "int8"
            config = cls(**cls.parse_json(values))
            if config.n_embd % config.n_head:
                raise ValueError(f"n_head {config.n_head} does not divide n_embd {config.n_embd}")
        except (InputError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{source}: {error}: correct the file or get it again, or use a GPT-2 model"
            ) from None
        return config


def expected_shapes(
    config: GPT2Config, *, head: bool = False
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every tensor of a GPT-2.

    The head is included if it is not tied, or with `head`: a tied head may be stored, too.
    """
    C, inner = config.n_embd, config.inner_size
    linear = (  # (n_in, n_out)
        ("attn.c_attn", (C, 3 * C)),
        ("attn.c_proj", (C, C)),
        ("mlp.c_fc", (C, inner)),
        ("mlp.c_proj", (inner, C)),
    )
    yield "wte.weight", (config.vocab_size, C)
    yield "wpe.weight", (config.n_positions, C)
    for layer in range(config.n_layer):
        h = f"h.{layer}."
        for name, shape in linear:
            yield f"{h}{name}.weight", shape
            yield f"{h}{name}.bias", shape[1:]
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
