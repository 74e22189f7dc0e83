"""Kernels of Triton for GPUs. Triton comes with torch for GPUs, so that these files are imported only there."""
