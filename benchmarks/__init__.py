"""What the package costs, measured here and now. Each is run as `python -m benchmarks.NAME`.

- cpu: speed on a CPU, as ratios to PyTorch's own attention
- host_time: what one small call costs the host, with our kernels; no GPU needed
- end_to_end: whole programs beside flash-attn, SDPA and plain formulas
- fine_tuning: whether a loss curve is eager attention's
- kernel_tiles: which tile of each kernel is the fastest on this GPU
- kernel_report: registers, spills and instructions of each kernel; no GPU needed
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # some PyTorch releases announce each profile on stderr
