"""Measure texts: likelihoods, words, choices, the inner state."""
