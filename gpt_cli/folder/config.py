"""GPT2Config: the hyperparameters of a checkpoint, read from its `config.json`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt_cli.errors import CheckpointError
from gpt_cli.system.files import read_json

ACTIVATIONS = ("gelu_new", "gelu", "relu", "silu", "tanh")

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
        if not path.exists():
            raise CheckpointError(
                f"{path} is missing: give the folder of a whole model, or get the model again"
            )
        raw = read_json(path)
        generation = folder / "generation_config.json"
        if generation.is_file():
            eos = read_json(generation).get("eos_token_id")
            raw |= {} if eos is None else {"eos_token_id": eos}
        return cls.from_dict(raw, source=str(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], source: str = "config") -> "GPT2Config":
        """Validate a parsed `config.json`; a CheckpointError names `source` and the field."""
        raw = {_ALIASES.get(name, name): value for name, value in raw.items()}
        try:
            if (model_type := raw.get("model_type", "gpt2")) != "gpt2":
                raise ValueError(f"model_type is {model_type!r:.40}, not gpt2")
            if raw.get("add_cross_attention"):
                raise ValueError("add_cross_attention is set, unlike in GPT-2")
            if (quantization := raw.get("quantization_config")) not in (None, INT8):
                raise ValueError(f"quantization_config is {quantization!r:.80}, not {INT8}")
            values = {name: raw[name] for name in _FIELDS if name in raw}
            if name := values.get("activation_function"):
                values["activation_function"] = _ACTIVATION_ALIASES.get(str(name), name)
            for name, value in values.items():
                is_valid, kind = _FIELDS[name]
                if not is_valid(value):
                    raise ValueError(f"{name} is {value!r:.40}, not {kind}")
            if "eos_token_id" in values:
                values["eos_token_id"] = tuple(_ids(values["eos_token_id"]))
            config = cls(**values, dtype="float32" if quantization is None else "int8")
            if config.n_embd % config.n_head:
                raise ValueError(f"n_head {config.n_head} does not divide n_embd {config.n_embd}")
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{source}: {error}: correct the file or get it again, or use a GPT-2 model"
            ) from None
        return config


def _is_size(value: Any, least: int = 1) -> bool:
    return type(value) is int and least <= value <= _LARGEST


def _is_token(value: Any) -> bool:
    return value is None or _is_size(value, 0)


def _ids(tokens: Any) -> list[int]:
    """Return the ids of a field that may be one id, a list of ids, or null."""
    return [id for id in (tokens if isinstance(tokens, list) else [tokens]) if id is not None]


_SIZE = _is_size, f"an integer from 1 to {_LARGEST}"
_FLAG = (lambda value: isinstance(value, bool)), "true or false"
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {  # the valid values
    "vocab_size": _SIZE,
    "n_positions": (lambda value: _is_size(value, 2), f"an integer from 2 to {_LARGEST}"),
    "n_embd": _SIZE,
    "n_layer": _SIZE,
    "n_head": _SIZE,
    "n_inner": (lambda value: value is None or _is_size(value), _SIZE[1]),
    "activation_function": (ACTIVATIONS.__contains__, f"one of {', '.join(ACTIVATIONS)}"),
    "layer_norm_epsilon": (
        lambda value: type(value) in (int, float) and 0 < value < 1,
        "a number between 0 and 1",
    ),
    "scale_attn_weights": _FLAG,
    "scale_attn_by_inverse_layer_idx": _FLAG,
    "tie_word_embeddings": _FLAG,
    "bos_token_id": (_is_token, "a token id"),
    "eos_token_id": (lambda value: all(map(_is_token, _ids(value))), "a token id or a list of ids"),
}
