"""What the package costs, measured here and now: `python -m benchmarks.cpu`, `python -m benchmarks.memory`."""
