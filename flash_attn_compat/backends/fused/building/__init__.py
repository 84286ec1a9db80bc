"""From a variant to a loaded kernel: compiling, loading, and compiled kernels on disk."""
