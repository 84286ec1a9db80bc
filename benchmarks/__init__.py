"""What the package costs, measured here and now: `python -m benchmarks` lists it, `python -m benchmarks NAME` runs one.

Workloads, contestants, timing and tables are verify's, whose bench is the largest of them.
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # some PyTorch releases announce each profile on stderr
