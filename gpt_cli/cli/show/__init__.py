"""`gpt-cli show`: views of the computation inside a model."""
