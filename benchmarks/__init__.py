"""What the package costs, measured here and now: `python -m benchmarks.cpu`, `.end_to_end`."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # some PyTorch releases announce each profile on stderr
