"""PyTorch's own attention operators, computed by this package's kernels on request where they are faster.

The operators are F.scaled_dot_product_attention and aten::_efficient_attention_forward, with their gradients. Only
bridge.py calls dispatch. Nothing is registered before a program switches sdpa on (override.py). PyTorch computes the
calls that we decline.
"""
