"""Dispatch: choose the backend of a call, run it, record its gradients, and show it to torch.compile as an operator."""
