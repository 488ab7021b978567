"""Compress data with the probabilities of a model."""
