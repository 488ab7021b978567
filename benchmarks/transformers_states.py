"""Write the outputs of all layers for lines with transformers to one file; print the seconds.

The last one is after the final layer norm, unlike `hook_resid_post`.

transformers_states.py FOLDER LINES OUT
"""

import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2TokenizerFast

BATCH = 8  # lines, which are padded to the same length

folder, lines, out = sys.argv[1:]
torch.set_grad_enabled(False)
tokenizer = GPT2TokenizerFast.from_pretrained(folder)
tokenizer.pad_token = "<|endoftext|>"  # noqa: S105
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).transformer.eval()
texts = Path(lines).read_text("utf-8").splitlines()


def states_of(texts: list[str]) -> tuple[torch.Tensor, list[int]]:
    """Return the outputs of all layers (texts, layers, tokens, C), and the numbers of tokens."""
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    _, *states = model(**batch, output_hidden_states=True).hidden_states
    return torch.stack(states, 1), batch.attention_mask.sum(1).tolist()


states_of(texts[:BATCH])  # the first pass is slower
start = time.perf_counter()
with Path(out).open("wb") as file:
    for first in range(0, len(texts), BATCH):
        for of_text, length in zip(*states_of(texts[first : first + BATCH]), strict=True):
            file.write(of_text[:, :length].contiguous().numpy().tobytes())
print(time.perf_counter() - start)
