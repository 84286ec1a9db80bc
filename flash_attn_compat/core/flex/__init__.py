"""Translation of flex_attention's score_mod and mask_mod from PyTorch's graphs to C++ for our kernels."""
