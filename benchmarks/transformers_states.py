"""Write the outputs of all layers for lines with transformers to one file; print the seconds.

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
texts = Path(lines).read_text().splitlines()
start = time.perf_counter()
with Path(out).open("wb") as file:
    for first in range(0, len(texts), BATCH):
        batch = tokenizer(texts[first : first + BATCH], return_tensors="pt", padding=True)
        _, *states = model(**batch, output_hidden_states=True).hidden_states
        lengths = batch.attention_mask.sum(1).tolist()
        for of_line, length in zip(torch.stack(states, 1), lengths, strict=True):
            file.write(of_line[:, :length].contiguous().numpy().tobytes())
print(time.perf_counter() - start)
