"""The name flash_attn: patching, installing, child processes, and PyTorch's and transformers' extras."""
