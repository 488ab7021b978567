"""The kernels for a GPU: their sources, compilation and launches."""
