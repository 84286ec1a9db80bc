"""PyTorch's own attention operators, computed by this package's kernels where a program asks for that and they win.

F.scaled_dot_product_attention and aten::_efficient_attention_forward, with their gradients. Uses the engine through
door.py alone; nothing is registered before somebody holds the switch. Other calls go where they went before.
"""
