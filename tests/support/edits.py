"""Edits of every kind, with the files that they name; tests/golden/edits.npz has their results."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from support.checkpoints import CASES, noise

STORED = 12  # tokens of the activations in files
PROMPTS = [[72, 5, 258, 286, 0, 199, 33, 80, 256], [41, 7, 130, 9], [11, 3, 200, 5, 90, 14]]
_V, _S = "v.safetensors", "stored.npz"

# The number of a prompt, and edits of it; {h} is one or two heads.
EDITS: list[tuple[int, list[str]]] = [
    (0, []),
    (0, ["hook_embed*=1.5"]),
    (1, ["hook_embed@1=v.npy"]),
    (0, ["hook_pos_embed@2:=0"]),
    (1, [f"blocks.1.hook_resid_pre+=2*{_V}"]),
    (2, [f"blocks.2.hook_resid_pre@-1={_S}"]),
    (0, ["blocks.0.ln1.hook_normalized[3,5]@prompt=0.5"]),
    (2, ["blocks.1.attn.hook_q[{h}]@2:*=-1.5"]),
    (0, ["blocks.0.attn.hook_k[{h}]=0", f"blocks.2.attn.hook_k[{{h}}]@:4+=0.5*{_V}"]),
    (1, [f"blocks.1.attn.hook_v@:-1={_S}"]),
    (2, ["blocks.0.attn.hook_attn_scores[{h}]@3:*=0.25"]),
    (0, [f"blocks.1.attn.hook_attn_scores@-2:={_S}"]),
    (1, ["blocks.2.attn.hook_attn_scores[{h}]=0"]),
    (0, ["blocks.1.attn.hook_pattern[{h}]@1:*=0.5"]),
    (2, [f"blocks.0.attn.hook_pattern[{{h}}]={_S}"]),
    (1, ["blocks.2.attn.hook_pattern=0.25"]),
    (0, ["blocks.1.attn.hook_z[{h}]=0"]),
    (1, [f"*.attn.hook_z[{{h}}]@-1=mean:{_S}"]),
    (2, [f"blocks.1.hook_attn_out=mean:{_S}"]),
    (0, [f"blocks.0.hook_resid_mid@4+={_V}"]),
    (1, ["blocks.?.hook_resid_mid[0:7]=0"]),
    (2, ["blocks.2.ln2.hook_normalized*=0.5"]),
    (0, [f"blocks.1.mlp.hook_pre[7]@3:={_S}"]),
    (1, [f"blocks.0.mlp.hook_post+=-3*{_V}"]),
    (2, ["blocks.2.hook_mlp_out@:3=0", f"blocks.2.hook_mlp_out@1:5+={_V}"]),
    (0, [f"blocks.1.hook_resid_post[1,8]@1:-1={_S}:blocks.0.hook_resid_post"]),
    (1, [f"ln_final.hook_normalized={_S}"]),
]
# Those that are also generated with: positions are those of a text that grows.
GENERATED: list[tuple[int, list[str]]] = [
    (0, []),
    (0, [f"blocks.1.hook_resid_pre+=2*{_V}"]),
    (1, [f"blocks.0.attn.hook_v[{{h}}]@prompt={_S}", "*.attn.hook_attn_scores@generated*=0.5"]),
    (2, ["blocks.1.attn.hook_pattern[{h}]@1:*=0.5", f"blocks.2.hook_resid_mid@-1:+={_V}"]),
]
GENERATING = ("saved", "n_inner", "upcast", "one_head")
ODD = (*GENERATING, "untied", "gelu", "relu", "unscaled", "inverse_layer", "epsilon", "minimal",
       "padded_vocabulary", "bf16")  # fmt: skip


def edits_of(case: str, edits: list[str]) -> list[str]:
    """Return edits with the heads of a case."""
    return [edit.format(h="0" if case == "one_head" else "1,3") for edit in edits]


def write_files(case: str, folder: Path) -> None:
    """Write the files that edits of a case name: vectors, and activations of STORED tokens."""
    config: dict[str, Any] = CASES[case].config
    C, H = config.get("n_embd", 32), config.get("n_head", 4)
    D, inner = C // H, config.get("n_inner") or 4 * C
    shapes = dict.fromkeys(["hook_embed", "hook_pos_embed", "ln_final.hook_normalized"], (C,))
    for layer in range(3):
        sizes: dict[tuple[str, ...], tuple[int, ...]] = {
            ("hook_resid_pre", "ln1.hook_normalized", "hook_attn_out", "hook_resid_mid",
             "ln2.hook_normalized", "hook_mlp_out", "hook_resid_post"): (C,),
            ("attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_z"): (H, D),
            ("attn.hook_attn_scores", "attn.hook_pattern"): (H, STORED),
            ("mlp.hook_pre", "mlp.hook_post"): (inner,),
        }  # fmt: skip
        shapes |= {f"blocks.{layer}.{n}": size for names, size in sizes.items() for n in names}
    scales = {name: 0.1 if name.endswith("pattern") else 1 for name in shapes}

    def made(prefix: str, *first: int) -> dict[str, Any]:
        arrays = {n: scales[n] * noise(prefix + n, *first, *shapes[n]) for n in shapes}
        return {name: array.astype(np.float32) for name, array in arrays.items()}

    vectors = made("vector ")
    save_file(vectors, folder / "v.safetensors")
    np.save(folder / "v.npy", np.tile(vectors["hook_embed"], (STORED, 1)))
    np.savez(folder / "stored.npz", **made("stored ", STORED))
