"""vLLM's attention layers on our kernels."""
