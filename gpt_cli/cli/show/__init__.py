"""`gpt-cli show`: what a model computes, to be seen."""
