"""What the package costs, measured here and now: `python -m benchmarks.cpu`, `.memory`, `.end_to_end`."""
