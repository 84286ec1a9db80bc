"""flex_attention's functions, from PyTorch's graphs to C++: capture, the table of operators, printer."""
