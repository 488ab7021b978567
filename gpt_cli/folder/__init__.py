"""The files in a model's folder: configuration, tokenizer, tensors."""
