"""Gradients and higher derivatives, eager and in graphs."""
