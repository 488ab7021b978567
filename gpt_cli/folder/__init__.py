"""What a model's folder holds: configuration, tokenizer, tensors."""
