"""The emulator of the CUDA kernels computes what the instructions compute, and notices what must not be."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from flash_attn_compat.backends.fused import params
from tests.kernels import emulate
from tests.kernels.emulate import EmulationError, Kernel, compile_kernel

pytestmark = pytest.mark.skipif(bool(emulate.why_not()), reason=emulate.why_not())


def machine(entry: str) -> Kernel:
    return compile_kernel(emulate.HERE / "machine.cu", entry, {})


def launch(entry: str, q: Tensor, out: Tensor | None = None, lse: Tensor | None = None, threads: int = 32) -> None:
    """The struct has these addresses, each where params.py says; all else is 0."""
    given = {name: x for name, x in (("q", q), ("out", out), ("lse", lse)) if x is not None}
    head = params.head(given).pack(*(x.data_ptr() for x in given.values()), 0)
    machine(entry).launch(head + params.rest({}), 1, threads, 1024, list(given.values()))


def test_mma_multiplies() -> None:
    q, product = torch.randn(24, 8).half(), torch.empty(16, 8)
    launch("multiply_k8", q, lse=product)
    torch.testing.assert_close(product, q[:16].float() @ q[16:].float().T, rtol=1e-6, atol=1e-6)


def test_ldmatrix_hands_out_rows_and_columns() -> None:
    q, out = torch.randn(4, 8, 8).half(), torch.empty(2, 4, 8, 8, dtype=torch.float16)
    launch("matrices", q, out)
    assert torch.equal(out[0], q)
    assert torch.equal(out[1], q.transpose(1, 2))


def test_all_warps_meet_at_a_barrier() -> None:
    q, sums = torch.arange(128).half(), torch.empty(128)
    launch("sum", q, lse=sums, threads=128)
    assert sums.tolist() == [127 * 64] * 128


def test_shared_memory_starts_as_nan() -> None:
    lse = torch.zeros(32)
    launch("uninitialised", torch.zeros(1).half(), lse=lse)
    assert lse.isnan().all()


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("wrong_no_barrier", "race"),
        ("wrong_no_barrier_before_writing", "race"),
        ("wrong_no_syncwarp", "race"),
        ("wrong_behind_shared_memory", "of 1024"),
        ("wrong_shared_alignment", "not aligned"),
        ("wrong_behind_a_tensor", "belong to no tensor"),
        ("wrong_global_alignment", "not aligned"),
        ("wrong_address", "fault at address 0x"),
        ("wrong_lanes_missing", "lanes that do not come"),
        ("wrong_lanes_elsewhere", "lanes of one warp"),
        ("wrong_barrier_missed", "do not come"),
    ],
)
def test_a_mistake_is_an_error(entry: str, said: str) -> None:
    q, out, lse = torch.zeros(256).half(), torch.zeros(256).half(), torch.zeros(64)
    with pytest.raises(EmulationError, match=f"{entry}: block 0, thread .*{said}"):
        launch(entry, q, out, lse, threads=64 if "barrier" in entry else 32)


@pytest.mark.parametrize(("entry", "said"), [("wrong_no_barrier", "race"), ("wrong_address", "fault")])
def test_the_next_launch_after_an_error_is_none_the_worse(entry: str, said: str) -> None:
    test_a_mistake_is_an_error(entry, said)
    test_all_warps_meet_at_a_barrier()


def test_a_tensor_without_memory_is_an_error() -> None:
    with pytest.raises(EmulationError, match="meta"):
        machine("sum").launch(b"", 1, 32, 0, [torch.empty(4, device="meta")])


def test_a_struct_of_another_size_is_an_error() -> None:
    with pytest.raises(EmulationError, match="not the bytes of struct Params"):
        machine("sum").launch(bytes(8), 1, 32, 0, [])


def test_threads_launch_one_after_the_other() -> None:
    """What a library knows of its launch is the library's, and Python lets other threads go on meanwhile."""
    sums = [torch.empty(128) for _ in range(8)]

    def work(out: Tensor) -> None:
        for _ in range(20):
            launch("sum", torch.arange(128).half(), lse=out.zero_(), threads=128)
            assert out.tolist() == [127 * 64] * 128

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, sums))
