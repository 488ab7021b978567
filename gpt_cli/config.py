"""GPT2Config: the hyperparameters of a checkpoint, read from its `config.json`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpt_cli.errors import CheckpointError
from gpt_cli.files import read_json

ACTIVATIONS = ("gelu_new", "gelu", "relu", "silu", "tanh")

# Other names of fields in published configurations.
_ALIASES = {
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
}

# Other names of activation functions.
_ACTIVATION_ALIASES = {"gelu_fast": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "swish": "silu"}

# quantization_config of a checkpoint that `quantize` has written.
INT8 = {"quant_method": "gpt-cli", "bits": 8, "block_size": 64}

_LARGEST_SIZE = 2**20  # far above any GPT-2; a larger size means a damaged file


@dataclass(frozen=True)
class GPT2Config:
    """The fields of `config.json` that affect the computation.

    The defaults for missing fields are GPT-2's own values, as in transformers.
    """

    vocab_size: int = 50257  # V, the rows of wte
    n_positions: int = 1024  # the context in tokens, the rows of wpe
    n_embd: int = 768  # C
    n_layer: int = 12
    n_head: int = 12  # H
    n_inner: int | None = None  # the width of the MLP; None means 4 C
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True  # divide attention scores by sqrt(D)
    scale_attn_by_inverse_layer_idx: bool = False  # and by the layer's number from 1
    tie_word_embeddings: bool = True  # the head is wte
    bos_token_id: int | None = 50256
    eos_token_id: tuple[int, ...] = (50256,)
    dtype: str = "float32"  # float32, or int8 by quantization_config

    @property
    def head_size(self) -> int:
        """Return D = C / H, the width of an attention head."""
        return self.n_embd // self.n_head

    @property
    def inner_size(self) -> int:
        """Return the width of the MLP's hidden layer."""
        return self.n_inner or 4 * self.n_embd

    @classmethod
    def from_folder(cls, folder: Path) -> "GPT2Config":
        """Read `config.json`, and eos_token_id from `generation_config.json` if that has one.

        Raises:
            CheckpointError: a file is missing, is not a JSON object, or is not GPT-2's.
        """
        path = folder / "config.json"
        raw = _read_object(path)
        generation = folder / "generation_config.json"
        if generation.is_file():
            eos = _read_object(generation).get("eos_token_id")
            raw |= {} if eos is None else {"eos_token_id": eos}
        return cls.from_dict(raw, source=str(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], source: str = "config") -> "GPT2Config":
        """Validate a parsed `config.json`; errors name `source`.

        Raises:
            CheckpointError: a field has a value that no GPT-2 can have.
        """
        raw = {_ALIASES.get(name, name): value for name, value in raw.items()}
        try:
            if (model_type := raw.get("model_type", "gpt2")) != "gpt2":
                raise _OtherModelError(f"model_type is {model_type!r:.40}")
            if raw.get("add_cross_attention"):
                raise _OtherModelError("add_cross_attention is set, unlike in GPT-2")
            config = cls(**{name: read(name, raw[name]) for name, read in _FIELDS if name in raw})
            config = replace(config, dtype=_dtype(raw.get("quantization_config")))
            if config.n_positions < 2:
                raise ValueError("n_positions is 1, too few for a new token")
            if config.n_embd % config.n_head:
                raise ValueError(f"n_head {config.n_head} does not divide n_embd {config.n_embd}")
        except _OtherModelError as error:
            raise CheckpointError(f"{source}: {error}: use a GPT-2 model") from None
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{source}: {error}; correct the file or get it again") from None
        return config


class _OtherModelError(ValueError):
    """The configuration is valid, but not of a model that this program runs."""


def _size(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= _LARGEST_SIZE:
        raise ValueError(f"{name} is {value!r:.40}, not an integer from 1 to {_LARGEST_SIZE}")
    return value


def _optional_size(name: str, value: Any) -> int | None:
    return None if value is None else _size(name, value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r:.40}, not true or false")
    return value


def _activation(name: str, value: Any) -> str:
    activation = _ACTIVATION_ALIASES.get(str(value), value)
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name} is {value!r:.40}, not one of {', '.join(ACTIVATIONS)}")
    return str(activation)


def _epsilon(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not (0 < value < 1 and math.isfinite(value)):
        raise ValueError(f"{name} is {value!r:.40}, not a number between 0 and 1")
    return float(value)


def _token(name: str, value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value <= _LARGEST_SIZE):
        raise ValueError(f"{name} is {value!r:.40}, not a token id")
    return value


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    return tuple(id for id in (_token(name, item) for item in ids) if id is not None)


def _dtype(quantization: Any) -> str:
    if quantization is None:
        return "float32"
    if quantization != INT8:
        raise _OtherModelError(
            f"quantization_config is {quantization!r:.80}, but only {INT8} is supported"
        )
    return "int8"


_FIELDS: list[tuple[str, Callable[[str, Any], Any]]] = [
    ("vocab_size", _size),
    ("n_positions", _size),
    ("n_embd", _size),
    ("n_layer", _size),
    ("n_head", _size),
    ("n_inner", _optional_size),
    ("activation_function", _activation),
    ("layer_norm_epsilon", _epsilon),
    ("scale_attn_weights", _flag),
    ("scale_attn_by_inverse_layer_idx", _flag),
    ("tie_word_embeddings", _flag),
    ("bos_token_id", _token),
    ("eos_token_id", _tokens),
]


def _read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise CheckpointError(
            f"{path} is missing: give the folder of a whole model, or get the model again"
        )
    value = read_json(path)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object: get it again")
    return value
