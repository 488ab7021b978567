"""Continue a prompt in a whole process, as a user of llama.cpp's Python binding would."""

import os
import sys

from llama_cpp import Llama

file, prompt, new = sys.argv[1:]
model = Llama(file, n_ctx=1024, n_threads=os.cpu_count(), verbose=False)  # default: half
output = model(prompt, max_tokens=int(new), temperature=0)
print(output["choices"][0]["text"])
