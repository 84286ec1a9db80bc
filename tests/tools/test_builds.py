"""Tests that act out a GPU pass with every build of PyTorch: for CPUs, for CUDA without a driver, and beside a GPU.

Builds that are not at hand are acted out too: a copy of an interpreter pretends to be one and runs those tests.
"""

from __future__ import annotations

import pytest

from tests.tools.interpreters import CAN_FORK, REPOSITORY, forked

# Their fixtures hand CPU tensors to code for GPUs.
ACTING = (
    "tests/answers/test_sdpa_on_amd.py",
    "tests/kernels/test_tensor_cores.py",
    "tests/observers/test_exits.py::test_a_device_is_waited_for_once_and_a_cpu_never",
    "tests/answers/test_others_kernels.py::test_a_flash_attn_that_is_switched_off_or_runs_on_ours_is_not_asked",
    "tests/answers/test_others_kernels.py::test_slopes_are_read_through_their_strides",
)
WITHOUT_DRIVER = """
def fail(*arguments):
    raise RuntimeError("Found no NVIDIA driver on your system")
torch.version.cuda = "13.0"
torch.backends.cuda.is_built = lambda: True
torch.cuda.is_available = lambda: False
torch.cuda.device_count = lambda: 0
"""
BESIDE_A_GPU = """
def fail(*arguments):
    raise AssertionError("a test that acts out a GPU asked the real one")
torch.version.cuda = "13.0"
torch.backends.cuda.is_built = torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
torch.cuda.device_count = lambda: 2
torch.cuda.get_device_capability = lambda device=None: (9, 0)
"""
ASKING = "torch._C._cuda_getDevice = torch._C._cuda_isCurrentStreamCapturing = torch.cuda.current_device = fail"


@pytest.mark.skipif(not CAN_FORK, reason="a new interpreter for each would take a minute")
@pytest.mark.parametrize("build", [WITHOUT_DRIVER, BESIDE_A_GPU], ids=["CUDA without a driver", "beside a GPU"])
def test_tests_that_act_out_a_gpu_never_ask_a_real_one(build: str) -> None:
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not gpu", *ACTING]
    run = f"import os, sys, pytest; os.chdir({REPOSITORY!r}); sys.exit(pytest.main({options!r}))"
    answer = forked(f"import torch\n{build}\n{ASKING}\n{run}")
    assert answer.returncode == 0, answer.stdout + answer.stderr
