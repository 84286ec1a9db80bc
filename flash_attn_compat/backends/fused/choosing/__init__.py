"""Choose the kernels of a call: their tiles, macros and variants. It computes with numbers only, without PyTorch."""
