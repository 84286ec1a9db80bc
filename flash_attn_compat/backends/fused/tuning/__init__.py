"""Results of ``flash-attn-compat tune`` and the tiles that it tries."""
