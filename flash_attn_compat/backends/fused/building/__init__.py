"""Compile kernels, keep the compiled ones on disk, and load them on a GPU."""
