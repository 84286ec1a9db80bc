"""examples/distributed: each script runs in two processes over gloo and finds its answers right."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import warnings
from pathlib import Path

import pytest
from torch.torch_version import TorchVersion

from tests.interpreters import forked, forked_group, free_port

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "distributed"
NEEDS = {
    "data_parallel": (),
    "gathered_keys": (),
    "ring": ("ring_flash_attn", "yunchang"),
    "ulysses": ("deepspeed",),
}


def process(rank: int, name: str, port: int) -> None:
    import flash_attn_compat

    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    os.environ.update({**place, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""})
    flash_attn_compat.patch()
    sys.path.insert(0, str(FOLDER))  # as `python examples/distributed/NAME.py` does
    warnings.simplefilter("ignore")
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert sum(flash_attn_compat.backend_counts().values()) > 0


def test_every_script_is_run_or_needs_a_gpu() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*NEEDS, "common", "torch_context_parallel"}


@pytest.mark.parametrize("name", NEEDS)
def test_two_processes_find_the_answer_of_one(name: str) -> None:
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if name == "data_parallel":
        import torch

        if TorchVersion(torch.__version__) < "2.6":
            pytest.skip("PyTorch has fully_shard from 2.6 on")
    forked_group(process, name, free_port())


def test_where_pytorchs_ring_would_be_wrong_the_script_says_so_and_stops() -> None:
    script = str(FOLDER / "torch_context_parallel.py")
    code = f"""
import runpy, sys
sys.path.insert(0, {str(FOLDER)!r})
try:
    runpy.run_path({script!r}, run_name="__main__")
except SystemExit as stop:
    print(stop.code)
"""
    assert "no operator for a CPU" in forked(code, CUDA_VISIBLE_DEVICES="").stdout
