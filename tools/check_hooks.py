"""Compare all hook points of the bundled model with TransformerLens, by its own names.

It needs PyTorch, transformers and TransformerLens 2, in an environment of its own:

    python -m venv .venv-lens
    .venv-lens/bin/pip install -e ".[train]" "transformer-lens<3"
    .venv-lens/bin/python tools/check_hooks.py > benchmarks/results/hooks.md

Nothing is downloaded. In TransformerLens 3, `hook_normalized` is before the gain and the bias.
"""

import os
import sys
from collections import defaultdict
from datetime import date
from importlib.metadata import version
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from transformer_lens import HookedTransformer, HookedTransformerConfig
from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights
from transformers import GPT2LMHeadModel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gpt_cli.gpt2 import checkpoint  # noqa: E402 (it may not be installed)
from gpt_cli.gpt2.hooks import hook_shapes  # noqa: E402
from gpt_cli.ops.native_ops import NativeOps  # noqa: E402
from gpt_cli.ops.numpy_ops import NumPyOps  # noqa: E402
from gpt_cli.scoring.activations import activations  # noqa: E402
from gpt_cli.texts.text import Text  # noqa: E402

TINY = ROOT / "weights" / "tiny"
TOKENS = 100
NOTE = """\
The largest difference in all layers from TransformerLens in float64, in standard deviations of the
values. Names and shapes are the same, and so are the scores that are -inf. From TransformerLens 3
on, `hook_normalized` is before the gain and the bias of the LayerNorm; here it is after them, as in
all versions before."""


def lens_values(ids: list[int]) -> dict[str, np.ndarray]:
    """Return all values that TransformerLens records; its weights are as published."""
    published = GPT2LMHeadModel.from_pretrained(TINY, dtype=torch.float64)
    given = published.config
    config = HookedTransformerConfig(
        n_layers=given.n_layer,
        d_model=given.n_embd,
        n_ctx=given.n_positions,
        d_head=given.n_embd // given.n_head,
        n_heads=given.n_head,
        d_vocab=given.vocab_size,
        act_fn=given.activation_function,
        eps=given.layer_norm_epsilon,
        normalization_type="LN",
        dtype=torch.float64,
        device="cpu",
    )
    model = HookedTransformer(config)
    model.load_state_dict(convert_gpt2_weights(published, config), strict=False)
    _, cache = model.run_with_cache(torch.tensor([ids]))
    return {name: value[0].numpy() for name, value in cache.items()}


@torch.inference_mode()
def main() -> None:
    """Print the largest difference at each hook point, over all layers."""
    ids = (np.arange(TOKENS) * 31 % 2000).tolist()
    expected, worst = lens_values(ids), defaultdict(list)
    for ops in (NumPyOps(), NativeOps()):
        model = checkpoint.load(TINY, ops)
        (values,) = activations(model, [Text(ids)], [*hook_shapes(model.config)])
        differences: dict[str, float] = defaultdict(float)
        for name, value in values.items():
            other = expected[name]
            if value.shape != other.shape:
                sys.exit(f"{name}: {value.shape} is not {other.shape}")
            finite = np.isfinite(other)
            np.testing.assert_array_equal(value[~finite], other[~finite], name)
            difference = abs(value[finite] - other[finite]).max() / other[finite].std()
            end = "blocks.L." + name.split(".", 2)[2] if name.startswith("blocks.") else name
            differences[end] = max(differences[end], difference)
        for end, difference in differences.items():
            worst[end].append(difference)
    print(f"- date: {date.today()}")
    for package in ("transformer-lens", "transformers", "torch", "numpy"):
        print(f"- {package}: {version(package)}")
    print(f"- model: tiny, {TOKENS} tokens\n\n| hook point | NumPy | library |\n|-|-|-|")
    for end, (numpy, native) in worst.items():
        print(f"| `{end}` | {numpy:.1e} | {native:.1e} |")
    print(f"\n{NOTE}")


if __name__ == "__main__":
    main()
