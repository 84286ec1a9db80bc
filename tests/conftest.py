"""What every test needs: one thread per process (the suite runs one per core) and no backend forced from outside."""

import os

os.environ.pop("FLASH_ATTN_COMPAT_BACKEND", None)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
