"""Continue a prompt in a whole process, as a user of transformers would."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompt, new = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
inputs = tokenizer(prompt, return_tensors="pt")
output = model.generate(
    **inputs, max_new_tokens=int(new), min_new_tokens=int(new), do_sample=False, pad_token_id=0
)
print(tokenizer.decode(output[0]))
