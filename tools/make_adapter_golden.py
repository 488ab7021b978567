"""Make tests/golden/adapters.npz: logits of small models with adapters, merged by PEFT.

It needs PyTorch, transformers and PEFT, in an environment of its own: see tools/make_golden.py, and
`pip install peft`. Run it again only if tests/support/adapters.py changes.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.adapters import ADAPTER_WEIGHTS, ADAPTERS  # noqa: E402 (it is not installed)
from support.checkpoints import CASES  # noqa: E402

ROWS = [[72, 5, 258, 286, 199], [287, 41, 41, 120, 7]]


def merged_logits(case: str, folder: Path) -> np.ndarray:
    """Return the logits after ROWS; check first that PEFT reads every tensor of the adapter."""
    adapter = ADAPTERS[case]
    model = GPT2LMHeadModel.from_pretrained(
        CASES[adapter.base].write(folder / "base"), dtype=torch.float32
    )
    if adapter.new_tokens:
        model.resize_token_embeddings(model.config.vocab_size + adapter.new_tokens)
    adapted = PeftModel.from_pretrained(model, str(adapter.write(folder))).eval()
    resized = adapter.new_tokens > 0
    read = get_peft_model_state_dict(adapted, save_embedding_layers=resized)
    stored = load_file(folder / ADAPTER_WEIGHTS)
    if read.keys() != stored.keys() or not all(
        torch.equal(read[name].float(), stored[name].float()) for name in stored
    ):
        raise SystemExit(f"{case}: PEFT does not read the tensors as they are stored")
    merged = adapted.merge_and_unload()
    return merged(torch.tensor(ROWS)).logits[:, -1].numpy()


@torch.inference_mode()
def main() -> None:
    """Write the file."""
    torch.set_num_threads(1)
    arrays = {"rows": np.array(ROWS, np.int32)}
    for case in ADAPTERS:
        with tempfile.TemporaryDirectory() as temporary:
            arrays[case] = merged_logits(case, Path(temporary))
        print(f"{case}: logits of std {arrays[case].std():.3f}")
    np.savez_compressed(ROOT / "tests" / "golden" / "adapters.npz", **arrays)


if __name__ == "__main__":
    main()
