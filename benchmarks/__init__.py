"""Benchmarks of the package: `python -m benchmarks` lists them, `python -m benchmarks NAME` runs one.

Workloads, contestants, timing and tables come from verify, whose command bench is the largest benchmark.
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # some PyTorch releases print a line on stderr for each profile
