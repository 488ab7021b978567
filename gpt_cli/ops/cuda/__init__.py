"""The kernels of a GPU, and the compilation of them."""
