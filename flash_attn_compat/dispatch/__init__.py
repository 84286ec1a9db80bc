"""Serving a call: which backend, gradients, and what torch.compile sees. It knows the backends; the engine does not."""
