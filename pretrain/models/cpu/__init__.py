"""Kernels that only a CPU needs; a reader with a GPU may skip them."""
