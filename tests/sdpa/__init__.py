"""PyTorch's scaled_dot_product_attention on our kernels."""
