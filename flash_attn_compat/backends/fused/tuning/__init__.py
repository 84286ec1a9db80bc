"""The results of ``flash-attn-compat tune``, and the tiles that it times."""
