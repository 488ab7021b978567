"""Small LoRA adapters, as PEFT saves them, for the checkpoints of `support.checkpoints`."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.checkpoints import CONFIG, Stored, make_weights, noise, safetensors_bytes, store

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
WTE = "transformer.wte.weight"
_COPY = re.compile(r"\.(original_module|modules_to_save)\.")
C_ATTN = "transformer.h.{}.attn.c_attn"
ALL = (
    C_ATTN,
    *(f"transformer.h.{{}}.{name}" for name in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
)
# As PEFT 0.21 writes them.
FIELDS: dict[str, Any] = json.loads("""{
"alora_invocation_tokens": null, "alpha_pattern": {}, "arrow_config": null, "auto_mapping": null,
"base_model_name_or_path": null, "bias": "none", "corda_config": null, "ensure_weight_tying": false,
"eva_config": null, "exclude_modules": null, "fan_in_fan_out": true, "inference_mode": true,
"init_lora_weights": true, "kasa_config": null, "layer_replication": null, "layers_pattern": null,
"layers_to_transform": null, "loftq_config": {}, "lora_alpha": 8, "lora_bias": false,
"lora_dropout": 0.05, "lora_ga_config": null, "megatron_config": null,
"megatron_core": "megatron.core", "modules_to_save": null, "monteclora_config": null,
"peft_type": "LORA", "peft_version": "0.21.2", "qalora_group_size": 16, "r": 4, "rank_pattern": {},
"revision": null, "target_modules": ["c_attn"], "target_parameters": null,
"task_type": "CAUSAL_LM", "trainable_token_indices": null, "use_bdlora": null, "use_dora": false,
"use_qalora": false, "use_rslora": false, "velora_config": null
}""")


@dataclass(frozen=True)
class Adapter:
    """The fields of a configuration, and what the file of weights holds."""

    fields: dict[str, Any] = field(default_factory=dict)
    modules: tuple[str, ...] = (C_ATTN,)  # with {} for a layer
    layers: tuple[int, ...] = (0, 1, 2)
    ranks: Mapping[str, int] = field(default_factory=dict)  # of modules that do not have rank 4
    saved: tuple[str, ...] = ()  # tensors that are saved whole
    dtype: str = "F32"
    base: str = "saved"  # the case of `checkpoints.CASES`
    same: Mapping[str, str] = field(default_factory=dict)  # those with the numbers of others
    new_tokens: int = 0  # of a vocabulary that was resized: then `saved` are embeddings

    def tensors(self) -> dict[str, Stored]:
        """Return the tensors by their names in the file."""
        model = make_weights(CONFIG, head="own")
        arrays = {}
        for module in (name.format(layer) for name in self.modules for layer in self.layers):
            n_in, n_out = model[f"{module.removeprefix('transformer.')}.weight"].shape
            rank = self.ranks.get(module, 4)
            arrays[f"{module}.lora_A.weight"] = noise(f"{module} A", rank, n_in) / 5
            arrays[f"{module}.lora_B.weight"] = noise(f"{module} B", n_out, rank) / 20
        for name in self.saved:
            shape = model[_COPY.sub(".", name).removeprefix("transformer.")].shape
            shape = (shape[0] + self.new_tokens, *shape[1:])
            arrays[name] = noise(f"saved {self.same.get(name, name)}", *shape) / 10
        return {f"{PREFIX}{name}": store(array, self.dtype) for name, array in arrays.items()}

    def write(self, folder: Path) -> Path:
        """Write the adapter and return its folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ADAPTER_CONFIG).write_text(json.dumps(FIELDS | self.fields), encoding="utf-8")
        (folder / ADAPTER_WEIGHTS).write_bytes(safetensors_bytes(self.tensors()))
        return folder


_EVERY = {"target_modules": ["c_attn", "c_proj", "c_fc"]}
ADAPTERS = {
    "plain": Adapter(),
    "stabilized": Adapter({"use_rslora": True}),
    "patterns": Adapter(
        _EVERY
        | {
            "rank_pattern": {
                "attn.c_proj": 2,
                r"^transformer\.h\.1\.mlp\.c_fc": 3,
                "h.[02].mlp.(c_fc|c_proj)": 5,
                "proj": 7,  # the end of no name
            },
            "alpha_pattern": {"c_attn": 16, "transformer.h.2.mlp.c_proj": 0.5, r"h\.\d.mlp.*": 3},
        },
        ALL,
        ranks={
            **{f"transformer.h.{layer}.attn.c_proj": 2 for layer in range(3)},
            "transformer.h.1.mlp.c_fc": 3,
            **{f"transformer.h.{i}.mlp.{name}": 5 for i in (0, 2) for name in ("c_fc", "c_proj")},
        },
    ),
    "not_transposed": Adapter({"fan_in_fan_out": False}),
    "some_layers": Adapter(
        {"target_modules": r"transformer\.h\.[01]\.mlp\.c_(fc|proj)"}, ALL[2:], layers=(0, 1)
    ),
    "bfloat16": Adapter({"lora_alpha": 4}, dtype="BF16"),
    "saved_norm": Adapter(
        {"modules_to_save": ["ln_f"]},
        saved=("transformer.ln_f.weight", "transformer.ln_f.bias"),
    ),
    "saved_wte": Adapter({"modules_to_save": ["wte"]}, saved=("transformer.wte.weight",)),
    "saved_head": Adapter({"modules_to_save": ["lm_head"]}, saved=("lm_head.weight",)),
    "saved_both": Adapter(
        {"modules_to_save": ["lm_head", "wte"]},
        saved=("lm_head.weight", "transformer.wte.weight"),
        base="untied",
    ),
    # After resize_token_embeddings, PEFT stores both embeddings, and modules to save thrice.
    "resized": Adapter(saved=(WTE, "lm_head.weight"), same={"lm_head.weight": WTE}, new_tokens=3),
    "resized_wte": Adapter(
        {"modules_to_save": ["wte"]},
        saved=(
            WTE,
            "transformer.wte.modules_to_save.weight",
            "transformer.wte.original_module.weight",
            "lm_head.weight",
        ),
        same={
            "transformer.wte.modules_to_save.weight": WTE,
            "transformer.wte.original_module.weight": "lm_head.weight",
        },
        new_tokens=3,
    ),
    "resized_head": Adapter(
        {"modules_to_save": ["lm_head"]},
        saved=(
            WTE,
            "lm_head.modules_to_save.weight",
            "lm_head.original_module.weight",
            "lm_head.weight",
        ),
        same={
            "lm_head.modules_to_save.weight": "lm_head.weight",
            "lm_head.original_module.weight": WTE,
        },
        new_tokens=3,
    ),
    "saved_mlp": Adapter(
        {"modules_to_save": ["mlp"]},
        saved=tuple(
            f"{name.format(layer)}.{part}"
            for name in ALL[2:]
            for layer in range(3)
            for part in ("weight", "bias")
        ),
    ),
}
