"""Texts as tokens: how they are prepared, computed and measured."""
