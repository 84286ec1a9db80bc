"""vLLM's attention on this package's kernels, for GPUs that vLLM has no attention kernels for (Turing).

vLLM finds ``plugin.register`` by its entry point. Nothing here is imported before, and nothing else imports vLLM.
"""
