"""vLLM's attention on this package's kernels, for GPUs that vLLM has no attention kernels for (Turing).

vLLM finds ``plugin.register`` by an entry point, and imports nothing else of this folder before. No other folder of
this package imports vLLM.
"""
