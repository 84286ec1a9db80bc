"""Turn a call into launches of kernels: their parameters, the layouts of tensors, grids, workspaces and plans."""
