"""The emulator of the CUDA kernels computes like the instructions, and reports forbidden actions."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from flash_attn_compat.backends.fused.launching import params
from tests.kernels import emulate
from tests.kernels.emulate import EmulationError, Kernel, Rules, compile_kernel

pytestmark = pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())

RULES = Rules()


def machine(entry: str) -> Kernel:
    return compile_kernel(emulate.HERE / "machine.cu", entry, {})


def launch(
    entry: str,
    threads: int = 32,
    blocks: int = 1,
    shared: int = 1024,
    rules: Rules = RULES,
    fields: Mapping[str, params.Value] = MappingProxyType({}),
    **tensors: Tensor,
) -> int:
    """tensors, fields: what struct Params has under these names, where params.py says; all else is 0."""
    given = [name for name, _ in params.HEAD_FIELDS if name in tensors]
    head = params.head_struct(given).pack(*(tensors[name].data_ptr() for name in given), 0)
    return machine(entry).launch(
        head + params.pack_rest(dict(fields)), blocks, threads, shared, list(tensors.values()), rules
    )


def test_mma_multiplies() -> None:
    q, product = torch.randn(24, 8).half(), torch.empty(16, 8)
    launch("multiply_k8", q=q, lse=product)
    torch.testing.assert_close(product, q[:16].float() @ q[16:].float().T, rtol=1e-6, atol=1e-6)


def cut(x: Fraction, grid: Fraction) -> Fraction:
    """Towards zero, to a multiple of the grid."""
    return math.trunc(x / grid) * grid


def finest(x: Fraction) -> Fraction:
    """The last bit of a number of 24 bits, of which the first one is as large as that of ``x``."""
    return Fraction(2) ** (math.frexp(float(x))[1] - 24)


def truncated(a: Tensor, b: Tensor) -> float:
    """The dot product as Turing's tensor cores add it: four products and the sum at once, in exact fractions."""
    total = Fraction(0)
    for begin in range(0, len(a), 4):
        terms = [
            Fraction(x) * Fraction(y) for x, y in zip(a[begin : begin + 4].tolist(), b[begin : begin + 4].tolist())
        ]
        grid = max((finest(term) for term in (*terms, total) if term), default=Fraction(1))
        total = sum((cut(term, grid) for term in (*terms, total)), Fraction(0))
        total = cut(total, finest(total)) if total else total
    return float(total)


@pytest.mark.parametrize("spread", [0, 4, 12])
def test_tensor_cores_that_truncate_cut_four_products_and_the_sum_to_24_bits(spread: int) -> None:
    """spread: of the operands' powers of two"""
    q, product = torch.randn(24, 8), torch.empty(16, 8)
    q = (q * 2.0 ** torch.randint(-spread, spread + 1, q.shape)).half()
    q[3] = q[16] = 0.0
    launch("multiply_k8", q=q, lse=product, rules=RULES._replace(truncates=True))
    assert product.tolist() == [[truncated(row, column) for column in q[16:]] for row in q[:16]]
    assert not torch.equal(product, (q[:16].double() @ q[16:].double().T).float())


def test_truncating_tensor_cores_propagate_nonfinite_values() -> None:
    q, product = torch.ones(24, 8).half(), torch.empty(16, 8)
    q[0, 0], q[1, 5] = torch.inf, torch.nan
    launch("multiply_k8", q=q, lse=product, rules=RULES._replace(truncates=True))
    assert product[0].tolist() == [torch.inf] * 8 and product[1].isnan().all() and product[2:].eq(8.0).all()


def test_ldmatrix_hands_out_rows_and_columns() -> None:
    q, out = torch.randn(4, 8, 8).half(), torch.empty(2, 4, 8, 8, dtype=torch.float16)
    launch("matrices", q=q, out=out)
    assert torch.equal(out[0], q)
    assert torch.equal(out[1], q.transpose(1, 2))


@pytest.mark.parametrize(("apart", "lanes"), [(1, 0), (2, 4), (3, 0), (4, 6), (5, 0), (8, 7)])
def test_lanes_that_ask_one_bank_for_different_things_are_counted(apart: int, lanes: int) -> None:
    """lanes: of 8 lanes, the lanes whose bank another lane reads already"""
    assert launch("banks", fields={"page_size": apart}, q=torch.zeros(1)) == 2 * 4 * lanes


def test_all_warps_meet_at_a_barrier() -> None:
    q, sums = torch.arange(128).half(), torch.empty(128)
    launch("sum", q=q, lse=sums, threads=128)
    assert sums.tolist() == [127 * 64] * 128


def test_shared_memory_starts_as_nan() -> None:
    lse = torch.zeros(32)
    launch("uninitialised", lse=lse)
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
        ("wrong_write_of_what_is_read_only", "a write at .*, which ld.global.nc reads"),
        ("wrong_read_only_of_what_is_written", "ld.global.nc at .*, which this block wrote"),
        ("wrong_load_of_what_others_write", "through L1, .* before another block wrote"),
        ("wrong_write_of_what_others_write", "something else than another block wrote"),
        ("wrong_write_of_what_atomics_write", "something else than atomics wrote"),
        ("wrong_far_away", "belong to no tensor"),
    ],
)
def test_a_mistake_is_an_error(entry: str, said: str) -> None:
    tensors = {"q": torch.zeros(256).half(), "out": torch.zeros(256).half(), "lse": torch.zeros(64)}
    together = 2 if "others" in entry else 1
    with pytest.raises(EmulationError, match=rf"{entry}: block \d, thread .*{said}"):
        launch(
            entry,
            threads=64 if "barrier" in entry else 32,
            blocks=together,
            fields={"k_s": (0, -(2**12), 0)},
            counters=torch.zeros(1, dtype=torch.int32),
            **tensors,
        )


def test_blocks_may_read_fresh_writes_of_others_and_write_equal_bits() -> None:
    lse, counters = torch.zeros(64), torch.zeros(1, dtype=torch.int32)
    launch("fresh_load_of_what_others_write", blocks=2, lse=lse, counters=counters)
    launch("same_write_of_what_others_write", blocks=2, lse=lse)
    assert lse[:32].tolist() == [1.0] * 32
    launch("wrong_write_of_what_others_write", blocks=2, lse=lse, rules=RULES._replace(rows_overlap=True))


@pytest.mark.parametrize("blocks", [3, 40])
def test_blocks_come_between_the_atomics_of_another(blocks: int) -> None:
    """A count that is right for blocks one after the other is wrong here."""
    found = []
    for entry, seed in itertools.product(("count", "count_in_two_steps"), range(8)):
        counters = torch.zeros(1, dtype=torch.int32)
        launch(entry, blocks=blocks, counters=counters, rules=RULES._replace(seed=seed))
        found.append(int(counters))
    assert found[:8] == [32 * blocks] * 8
    assert min(found[8:]) < blocks and len(set(found[8:])) > 1


@pytest.mark.parametrize(("number", "most"), [(75, 64 * 1024), (80, 163 * 1024), (90, 227 * 1024)])
def test_a_block_gets_no_more_shared_memory_than_its_architecture_has(number: int, most: int) -> None:
    sums, rules = torch.empty(128), RULES._replace(number=number)
    for shared in (most, most + 16):
        raises = contextlib.nullcontext() if shared == most else pytest.raises(EmulationError, match="more shared")
        with raises:
            launch("sum", q=torch.arange(128).half(), lse=sums.zero_(), threads=128, shared=shared, rules=rules)
        assert bool(sums.any()) == (shared == most)


def test_a_tensor_without_memory_is_an_error() -> None:
    with pytest.raises(EmulationError, match="meta"):
        machine("sum").launch(b"", 1, 32, 0, [torch.empty(4, device="meta")])


def test_a_struct_of_another_size_is_an_error() -> None:
    with pytest.raises(EmulationError, match="not the bytes of struct Params"):
        machine("sum").launch(bytes(8), 1, 32, 0, [])


def test_threads_launch_one_after_the_other() -> None:
    """A library holds the state of one launch, and Python runs other threads during it."""
    sums = [torch.empty(128) for _ in range(8)]

    def work(out: Tensor) -> None:
        for _ in range(20):
            launch("sum", q=torch.arange(128).half(), lse=out.zero_(), threads=128)
            assert out.tolist() == [127 * 64] * 128

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, sums))
