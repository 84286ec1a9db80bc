"""Starts a worker of tests/clients in two processes under `flash-attn-compat run`, as a user starts torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


def run_two_processes(module: str, output: Path) -> Any:
    """What the worker wrote into `output`; nothing but the launcher patches anything."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", module, str(output)]
    command = [sys.executable, "-W", "ignore", "-m", "flash_attn_compat", "run", "-m", *launcher]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return json.loads(output.read_text())
