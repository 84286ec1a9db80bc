"""FlexAttention on our kernels: operators, mods, hooks, and a generator of random mods."""
