"""The model: its forward pass, cache, weights and digests."""
