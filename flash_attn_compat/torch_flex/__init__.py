"""PyTorch's flex_attention, computed by this package's kernels on request.

The operators are torch.ops.higher_order.flex_attention and its backward, eager (operator.py) and in graphs of inductor
(inductor.py). Only launch.py calls the kernels. Nothing is registered before a program switches flex on (override.py).
PyTorch computes the calls that we decline.
"""
