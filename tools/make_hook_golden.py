"""Make tests/golden/hooks.npz: values inside transformers' GPT-2, in the order of their names.

It needs PyTorch and transformers, in an environment of its own: see tools/make_golden.py. Run it
again only if its cases or tests/support/checkpoints.py change.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.checkpoints import CASES, HOOKED  # noqa: E402 (it is not installed)

IDS = [72, 258, 41]


def load(case: str, folder: Path) -> GPT2LMHeadModel:
    """Load a checkpoint in float64, in which an attention with `upcast` cannot compute."""
    dtype = torch.float32 if case == "upcast" else torch.float64
    return GPT2LMHeadModel.from_pretrained(
        CASES[case].write(folder / case), dtype=dtype, attn_implementation="eager"
    ).eval()


@contextmanager
def recording(model: GPT2LMHeadModel) -> Iterator[dict[str, Tensor]]:
    """Record inputs and results of modules, and of the softmax, by the names of hook points."""
    values: dict[str, Tensor] = {}
    layer, softmax = 0, nn.functional.softmax
    heads = model.config.n_head

    def by_head(x: Tensor) -> Tensor:
        return x.unflatten(-1, (heads, -1))

    def keep_input(module: nn.Module, name: str) -> None:
        def keep(_: nn.Module, inputs: Any) -> None:
            values[name] = inputs[0][0]

        module.register_forward_pre_hook(keep)

    def keep_result(module: nn.Module, name: str) -> None:
        def keep(_: nn.Module, inputs: Any, result: Any) -> None:
            values[name] = (result[0] if isinstance(result, tuple) else result)[0]

        module.register_forward_hook(keep)

    def recorded_softmax(scores: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        nonlocal layer
        pattern = softmax(scores, *arguments, **keywords)
        masked = scores[0] <= torch.finfo(scores.dtype).min / 2  # transformers has no -inf
        values[f"blocks.{layer}.attn.hook_attn_scores"] = scores[0].masked_fill(masked, -torch.inf)
        values[f"blocks.{layer}.attn.hook_pattern"] = pattern[0]
        layer += 1
        return pattern

    body = model.transformer
    keep_result(body.wte, "hook_embed")
    keep_result(body.wpe, "hook_pos_embed")
    for number, block in enumerate(body.h):
        at = f"blocks.{number}."
        keep_input(block, at + "hook_resid_pre")
        keep_result(block.ln_1, at + "ln1.hook_normalized")
        keep_result(block.attn.c_attn, at + "attn.qkv")
        keep_input(block.attn.c_proj, at + "attn.hook_z")
        keep_result(block.attn, at + "hook_attn_out")
        keep_input(block.ln_2, at + "hook_resid_mid")
        keep_result(block.ln_2, at + "ln2.hook_normalized")
        keep_result(block.mlp.c_fc, at + "mlp.hook_pre")
        keep_input(block.mlp.c_proj, at + "mlp.hook_post")
        keep_result(block.mlp, at + "hook_mlp_out")
        keep_result(block, at + "hook_resid_post")
    keep_result(body.ln_f, "ln_final.hook_normalized")
    nn.functional.softmax = recorded_softmax
    try:
        yield values
    finally:
        nn.functional.softmax = softmax
    for number in range(len(body.h)):
        at = f"blocks.{number}.attn."
        for name, part in zip("qkv", values.pop(at + "qkv").chunk(3, dim=-1), strict=True):
            values[f"{at}hook_{name}"] = by_head(part)
        values[at + "hook_z"] = by_head(values[at + "hook_z"])


@torch.inference_mode()
def main() -> None:
    """Write the file."""
    torch.set_num_threads(1)
    arrays = {"ids": np.array(IDS, np.int32)}
    for case in HOOKED:
        with tempfile.TemporaryDirectory() as temporary:
            model = load(case, Path(temporary))
        with recording(model) as values:
            model(torch.tensor([IDS]))
        # In one array, since a name in the file takes as much space as a short text's values.
        flat = [values[name].flatten() for name in sorted(values)]
        arrays[case] = torch.cat(flat).numpy().astype(np.float32)
        print(f"{case}: {len(values)} hook points")
    np.savez_compressed(ROOT / "tests" / "golden" / "hooks.npz", **arrays)


if __name__ == "__main__":
    main()
