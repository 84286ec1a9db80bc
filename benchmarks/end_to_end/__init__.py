"""Whole programs by each implementation of attention: `python -m benchmarks.end_to_end`. Random weights, real shapes.

Nothing is downloaded. Every implementation has a process of its own, in which programs run one after the other; what
fails there is a row in the table.
"""
