"""Dense masks in PyTorch's operators: every kind and layout, rows that see nothing, and tiles that are left out."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat import explain
from flash_attn_compat.backends.fused import Fused
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.choosing import enumeration
from flash_attn_compat.backends.fused.choosing.kinds import WIDEST_TILE, choose_tile
from flash_attn_compat.backends.fused.launching import grids
from flash_attn_compat.backends.fused.tuning import candidates
from flash_attn_compat.torch_sdpa.policy import check_mask
from tests.forms.inputs import randn
from tests.forms.plain import some, some_of
from tests.kernels import fused_on_cpu
from tests.kernels.fused_on_cpu import LaunchRecord
from tests.kernels.test_backend import mutated
from tests.sdpa import originals
from tests.sdpa.originals import counted, stand_in_backward, stand_in_forward
from tests.sdpa.test_attention import Case as Inputs
from tests.sdpa.test_attention import check, leaves_of, plainly, with_gradients

sdpa, aten = F.scaled_dot_product_attention, torch.ops.aten
HALF, BF16 = torch.float16, torch.bfloat16
CHOOSE_ONE_TILE = grids.choose_one_tile  # which ``served`` replaces


def mask(kind: str, *shape: int, dtype: torch.dtype = HALF) -> Tensor:
    """Booleans, or biases of "own" dtype or fp32: a third of the keys is hidden, and the first row sees none."""
    numbers = randn(*shape, seed=7)
    hidden = numbers > 0.5
    hidden[..., :1, :] |= shape[-2] > 1
    return ~hidden if kind == "bool" else numbers.masked_fill(hidden, -torch.inf).to({"own": dtype}.get(kind))


@pytest.mark.parametrize("kind", ["bool", "own", "fp32"])
@pytest.mark.parametrize("shape", [(150, 130), (4, 150, 130), (2, 4, 20, 600), (1, 4, 40, 40), (2, 1, 1, 600)])
def test_the_mask_pass_reads_each_value_in_memory_once(
    shape: tuple[int, ...], kind: str, recorded: LaunchRecord
) -> None:
    """Booleans once for both directions: the backward takes the results of the forward's pass."""
    inputs = leaves_of(Inputs(lengths=(max(shape[-2], 20), shape[-1])))
    with_gradients(functools.partial(sdpa, attn_mask=mask(kind, *shape)), inputs)
    *slabs, rows, keys = shape
    blocks = math.prod(slabs) * -(-rows // 64) * -(-keys // 512)
    assert counted() == {"fused": 1}
    passes = [launch.blocks for launch in recorded.seen if launch.variant.entry == "mask"]
    assert passes == [blocks] * (1 if kind == "bool" else 2)


def bytes_as_truths(keys: int) -> Tensor:
    """Return booleans as C programs and NumPy views leave them: bytes of 0 or any other value."""
    numbers = torch.randint(1, 256, (40, keys), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return (numbers * (randn(40, keys, seed=2) > 0)).view(torch.bool)


def diagonals() -> Tensor:
    """A bias of distances, each number in many places."""
    return randn(4, 89, seed=3, dtype=HALF).as_strided((1, 4, 40, 50), (0, 89, 1, 1))


ODD: dict[str, Callable[[], Tensor]] = {
    "bytes": lambda: bytes_as_truths(50),
    "bytes, keys apart": lambda: bytes_as_truths(100)[:, ::2],
    "diagonals": diagonals,
    "one for all": lambda: randn(1, 1, seed=4),
    "one truth for all": lambda: torch.ones(1, 1, dtype=torch.bool),
    "one for all keys": lambda: randn(2, 4, 40, 1, seed=4, dtype=HALF),
    "one truth for all keys": lambda: randn(2, 4, 40, 1, seed=4) > 0,
    "begins amid a row of odd length": lambda: randn(2, 4, 41, 53, seed=5, dtype=HALF)[:, :, 1:, 3:],
    "truths that begin so": lambda: (randn(2, 4, 41, 53, seed=5) > 0)[:, :, 1:, 3:],
    "rows of odd length in fp32": lambda: randn(2, 4, 40, 51, seed=6)[..., 1:],
    "biases, keys apart": lambda: mask("own", 4, 40, 100)[..., ::2],
    "keys first": lambda: mask("fp32", 50, 40).mT,
    "a slice of keys": lambda: mask("bool", 2, 1, 40, 100)[..., :50],
    "heads first": lambda: randn(4, 2, 40, 50, seed=6, dtype=HALF).transpose(0, 1),
    "smallest numbers": lambda: randn(40, 50, seed=6, dtype=HALF) * 6e-8,
    "nothing seen": lambda: torch.zeros(40, 50, dtype=torch.bool),
    "nothing seen, as numbers": lambda: torch.full((40, 50), -torch.inf),
    "negated lazily": lambda: torch._neg_view(randn(40, 50, seed=6, dtype=HALF)),
}


@pytest.mark.parametrize("name", ODD)
def test_masks_of_odd_layouts_and_values_are_right(name: str, served: LaunchRecord) -> None:
    inputs, bias = leaves_of(Inputs(HALF, (40, 50), (4, 2))), ODD[name]()
    attend = functools.partial(sdpa, attn_mask=bias, enable_gqa=True)
    plain = bias.view(torch.uint8) != 0 if bias.dtype == torch.bool else bias
    check(with_gradients(attend, inputs), functools.partial(plainly, bias=plain, scale=None), inputs)
    assert counted() == {"fused": 1}


@pytest.mark.parametrize("name", some(ODD, 4))
def test_one_kernel_finds_all_gradients_of_few_keys_under_a_mask(
    name: str, served: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grids, "choose_one_tile", CHOOSE_ONE_TILE)
    test_masks_of_odd_layouts_and_values_are_right(name, served)
    assert served.entries[-1] == "dkdv"


PAIRS: dict[str, tuple[Callable[[torch.dtype], Tensor], bool]] = {
    "rows of even length": (lambda dtype: randn(40, 50, seed=1, dtype=dtype), True),
    "keys apart, so a copy": (lambda dtype: randn(40, 100, seed=1, dtype=dtype)[:, ::2], True),
    "one row of odd stride": (lambda dtype: randn(1, 61, seed=1, dtype=dtype)[:, :50], True),
    "an odd number of keys": (lambda dtype: randn(40, 52, seed=1, dtype=dtype)[:, :49], False),
    "rows of odd stride": (lambda dtype: randn(40, 51, seed=1, dtype=dtype)[:, :50], False),
    "from an odd one on": (lambda dtype: randn(40, 52, seed=1, dtype=dtype)[:, 1:51], False),
    "truths": (lambda dtype: randn(40, 50, seed=1) > 0, False),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_two_biases_are_loaded_at_once_where_all_pairs_are_aligned(
    name: str, dtype: torch.dtype, recorded: LaunchRecord
) -> None:
    make, has_pairs = PAIRS[name]
    bias = make(dtype)
    q, k, v = leaves_of(Inputs(HALF, (40, bias.shape[-1])))
    sdpa(q, k, v, attn_mask=bias).sum().backward()
    found = {launch.variant.entry for launch in recorded.seen if ("BIAS_PAIRS", 1) in launch.variant.macros}
    assert found == ({"forward", "dq"} if has_pairs else set())


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_nonfinite_bias_makes_its_row_nan_alone(value: float, served: LaunchRecord) -> None:
    """As in PyTorch: a softmax over +inf or NaN is NaN. Other rows are as they were."""
    q, k, v = (x.detach() for x in leaves_of(Inputs(HALF, (70, 150))))
    bias = torch.zeros(70, 150)
    without = sdpa(q, k, v, attn_mask=bias)
    bias[5, 3] = bias[69, 149] = value
    out = sdpa(q, k, v, attn_mask=bias)
    assert out[:, :, [5, 69]].isnan().all() and counted() == {"fused": 2}
    others = [row for row in range(70) if row not in (5, 69)]
    torch.testing.assert_close(out[:, :, others], without[:, :, others], rtol=0, atol=1e-3)


@pytest.mark.parametrize(("keys", "kind"), some_of(itertools.product((64, 32, 256, 512), ("bool", "own", "fp32")), 7))
def test_keys_beyond_the_last_have_no_weight(kind: str, keys: int, served: LaunchRecord) -> None:
    """Where a mask hides nothing, a tile that reaches beyond the keys has to be known for it all the same."""
    inputs = leaves_of(Inputs(HALF, (70, keys)))
    bias = torch.zeros(70, keys, dtype={"own": HALF}.get(kind, torch.float32))
    found = with_gradients(functools.partial(sdpa, attn_mask=bias == 0 if kind == "bool" else bias), inputs)
    for got, right in zip(found, with_gradients(functools.partial(plainly, bias=bias, scale=None), inputs)):
        torch.testing.assert_close(got, right, rtol=0, atol=8e-3)


def test_no_tile_is_wider_than_a_pass_over_a_mask_expects() -> None:
    """Of the tables and, where ``tune`` found them the fastest, of its candidates."""
    found, candidate_tiles = set(), functools.cache(candidates.candidate_tiles)
    for number in (75, 80):
        kinds = [kind for kind in enumeration.every_kind(number) if kind.features.bias]
        for kind, entry in itertools.product(kinds, ("forward", "dkdv", "dq")):
            tuned = [((entry, tile),) for tile in candidate_tiles(entry, number, kind.D)]
            found |= {choose_tile(entry, kind.replace(tiles=tiles)) for tiles in ((), *tuned)}
    assert found
    assert all(WIDEST_TILE % tile.streamed_rows == 0 for tile in found)
    assert all(WIDEST_TILE % tile.rows == 0 for tile in found)


@pytest.mark.parametrize(
    ("shape", "dtype", "writes", "create_graph"),
    [
        ((40, 150), HALF, False, False), ((2, 1, 40, 150), BF16, False, True), ((1, 4, 1, 150), HALF, True, True),
        ((40, 150), BF16, True, False),
    ],
)  # fmt: skip
def test_booleans_may_be_refilled_before_the_backward(
    shape: tuple[int, ...], dtype: torch.dtype, writes: bool, create_graph: bool, served: LaunchRecord
) -> None:
    """Programs with static buffers refill masks; the backward uses the forward's mask."""
    inputs = leaves_of(Inputs(dtype, (40, 150), (4, 2)))
    bias = mask("bool", *shape)

    def gradients(refills: bool) -> tuple[Tensor, ...]:
        seen = bias.clone()
        out = sdpa(*inputs, attn_mask=seen, enable_gqa=True)
        result = out.mul_(2) if writes else out * 2
        if refills:
            seen.logical_not_()
        return torch.autograd.grad(result.float().square().sum(), inputs, create_graph=create_graph)

    assert all(map(torch.equal, gradients(True), gradients(False)))


@pytest.mark.parametrize("kind", ["bool", "own", "fp32"])
def test_masks_that_change_before_the_backward_are_an_error_where_nobody_kept_them(
    kind: str, recorded: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fused, "saved_mask", lambda *_: None)
    bias = mask(kind, 40, 40)
    out = sdpa(*leaves_of(Inputs()), attn_mask=bias)
    bias.zero_()
    words = r"attn_mask .*modified by an inplace operation.*give the forward a copy" if kind == "bool" else "an inplace"
    with pytest.raises(RuntimeError, match=words):
        out.sum().backward()


@pytest.mark.parametrize(("kind", "dim"), some_of(itertools.product(("bool", "own", "fp32"), (-4, -3, -2)), 2))
def test_a_mask_may_reach_farther_than_32_bits(kind: str, dim: int, served: LaunchRecord) -> None:
    inputs = leaves_of(Inputs(HALF, (40, 50), (4, 4)))
    near = mask(kind, 2, 4, 40, 50)
    strides = list(near.stride())
    strides[dim] = 2**32 if dim == -4 else 2**32 // (near.shape[dim] - 1) // 8 * 8
    last = sum((size - 1) * stride for size, stride in zip(near.shape, strides))
    far = fused_on_cpu.sparse(last + 1, near.dtype).as_strided(near.shape, strides).copy_(near)
    found, expected = (with_gradients(functools.partial(sdpa, attn_mask=bias), inputs) for bias in (far, near))
    assert all(map(torch.equal, found, expected)) and counted() == {"fused": 2}


@pytest.mark.parametrize(
    ("shape", "strides", "is_served"),
    [
        ((1, 1, 2**15, 2**17), (2**32, 2**32, 2**17, 1), True),
        ((1, 2, 2**15, 2**16), (2**32, 2**31, 2**16, 1), False),
        ((1, 2, 2**15, 2**16), (0, 1, 2, 2**16), False),  # which would be copied
        ((2, 2**15, 2**15, 2), (2**31, 2**16, 2, 1), False),
    ],
)
def test_masks_beyond_32_bit_strides_are_declined(
    shape: tuple[int, ...], strides: tuple[int, ...], is_served: bool
) -> None:
    large = torch.empty_strided(shape, strides, dtype=HALF, device="meta")
    reason = check_mask(large, large, shape)
    assert reason is None if is_served else "too large" in str(reason)


@pytest.mark.parametrize(
    ("value", "dtype"),
    some_of(itertools.product((-torch.inf, -1000.0, -65504.0, -1e9, torch.finfo(BF16).min), (HALF, BF16)), 5),
)
def test_a_row_whose_biases_are_all_of_one_magnitude(dtype: torch.dtype, value: float, served: LaunchRecord) -> None:
    """Expected is PyTorch's fp32 result, where such a row's scores lose digits below the bias's last one."""
    q, k, v = (x.detach().requires_grad_() for x in leaves_of(Inputs(dtype, (70, 150))))
    bias = torch.zeros(70, 150)
    bias[5], bias[64:, :70], bias[6, 3:] = value, value, -torch.inf
    found = with_gradients(functools.partial(sdpa, attn_mask=bias), [q, k, v])
    in_fp32 = [x.detach().float().requires_grad_() for x in (q, k, v)]
    right = with_gradients(functools.partial(plainly, bias=bias, scale=None), in_fp32)
    for got, expected in zip(found, right):
        assert float((got.float() - expected).abs().max()) <= 4 * torch.finfo(dtype).eps * float(expected.abs().max())
    assert bool(found[0][:, :, 5].any()) == (value > -torch.inf) and counted() == {"fused": 1}


def test_tiles_that_a_mask_hides_are_not_computed(served: LaunchRecord) -> None:
    """Rows and keys of the second block are NaN: computing with them would spread NaN to the first block."""
    q, k, v = (x.detach() for x in leaves_of(Inputs(HALF, (256, 256))))
    for x in (q, k, v):
        x[:, :, 128:] = torch.nan
    block = torch.arange(256) // 128
    attend = functools.partial(sdpa, attn_mask=block[:, None] == block)
    for found in with_gradients(attend, [x.requires_grad_() for x in (q, k, v)]):
        assert found[:, :, :128].isfinite().all() and found[:, :, 128:].isnan().all()


def test_the_same_bits_come_back_and_a_kept_call_takes_another_mask(served: LaunchRecord) -> None:
    q, k, v = (x.detach() for x in leaves_of(Inputs()))
    first, second = (randn(40, 40, seed=seed) > 0 for seed in (1, 2))
    found = [sdpa(q, k, v, attn_mask=seen) for seen in (first, second, first)]
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


@pytest.mark.parametrize("shape", [(2, 3, 40, 50), (1, 1, 40, 50)])
def test_the_efficient_operators_take_a_bias(shape: tuple[int, ...], served: LaunchRecord) -> None:
    """Its gradients start from PyTorch's forward too, whose LSE is 0 in rows without visible keys."""
    q, k, v, dout = (randn(2, n, 3, 32, seed=i, dtype=HALF) for i, n in enumerate((40, 50, 50, 40)))
    bias = randn(*shape, seed=9).masked_fill(randn(*shape, seed=8) > 0.5, -torch.inf).half()
    bias[..., 5, :] = -torch.inf
    bias = bias.expand(2, 3, 40, 50)
    options = bias, None, None, None, None, 0.0, 0
    out, lse, *_ = aten._efficient_attention_forward(q, k, v, *options, True)
    right = stand_in_forward(q, k, v, *options, True)
    torch.testing.assert_close(out, right[0], rtol=0, atol=4e-3)
    torch.testing.assert_close(lse, right[1], rtol=1e-4, atol=1e-3)
    seed = torch.zeros((), dtype=torch.int64)
    rest = 40, 50, right[1], 0.0, seed, seed, 0, False
    given = dout, q, k, v, bias, right[0], None, None
    for got, exact in zip(aten._efficient_attention_backward(*given, *rest)[:3], stand_in_backward(*given, *rest)[:3]):
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-2)
    assert counted() == {"fused": 1}
    inner = [x.transpose(1, 2) for x in (q, k, v)]
    above = aten._scaled_dot_product_efficient_attention(*inner, bias, True)[0]
    assert torch.equal(above, out.transpose(1, 2)) and counted() == {"fused": 2}


LEFT: dict[str, tuple[dict[str, object], str]] = {
    "a mask that wants a gradient": ({"attn_mask": torch.zeros(40, 40, dtype=HALF).requires_grad_()}, "gradient"),
    "a mask of inference mode": ({"attn_mask": torch.inference_mode()(torch.zeros)(40, 40)}, "inference"),
    "another shape": ({"attn_mask": torch.zeros(1, 1, 1, 40, 40, dtype=HALF)}, "does not broadcast"),
    "another dtype": ({"attn_mask": torch.zeros(40, 40, dtype=BF16)}, "bfloat16"),
    "causal too": ({"attn_mask": torch.zeros(40, 40, dtype=HALF), "is_causal": True}, "both attn_mask and is_causal"),
}


@pytest.mark.parametrize("name", LEFT)
def test_declined_masks_have_a_reason(name: str, served: LaunchRecord) -> None:
    options, why = LEFT[name]
    (reason,) = explain(sdpa, *leaves_of(Inputs()), **options).reasons["fused"]
    assert why in reason


def test_a_grouped_row_reads_its_keys_once(served: LaunchRecord) -> None:
    """The heads of a group become rows of one tile, as the steps of a padded batch want it."""
    q, k, v = (x.detach() for x in leaves_of(Inputs(lengths=(1, 130), heads=(8, 2))))
    seen = torch.arange(130) >= torch.tensor([[3], [90]])
    out = sdpa(q, k, v, attn_mask=seen[:, None, None], enable_gqa=True)
    torch.testing.assert_close(out, plainly(q, k, v, seen[:, None, None], None), rtol=0, atol=4e-3)
    fields = served.last.fields
    assert (fields["nheads"], fields["seqlen_q"]) == (2, 4) and out.stride() == sdpa(q, q, q).stride()


# ---- kernels are tried with a mask of their kind first


def tried(
    monkeypatch: pytest.MonkeyPatch, sources: Path = nvrtc.SOURCES, kind: str = "bool", one_tile: bool = False
) -> None:
    fused_on_cpu.emulate(monkeypatch, tried=True, sources=sources, one_tile=one_tile)
    keys = 39 if "odd" in kind else 40
    seen = randn(40, keys, seed=1) > 0
    bias = seen if kind == "bool" else seen.to(HALF)
    with originals.override_on():
        with_gradients(functools.partial(sdpa, attn_mask=bias), leaves_of(Inputs(lengths=(40, keys))))


@pytest.mark.parametrize(
    ("kind", "one_tile"),
    [
        ("bool", False), ("own", False), ("own, odd", False), ("bool", True),
        pytest.param("own", True, marks=pytest.mark.thorough),
    ],
)  # fmt: skip
def test_right_kernels_pass_their_trial(kind: str, one_tile: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tried(monkeypatch, kind=kind, one_tile=one_tile)


@pytest.mark.parametrize(
    ("kind", "file", "before", "after"),
    [
        ("bool", "mask.cu", "x[r][n] == 0.f) << n", "true) << n"),
        ("bool", "scores/mask.cuh", "& (KEYS < 64 ? 1 :", "& (KEYS < 128 ? 1 :"),
        ("own, odd", "gradients/backward_scores.cuh", "mask.at(p, row,", "mask.at(p, row + 1,"),
        pytest.param(
            "own", "gradients/backward_scores.cuh", "? e ? bias[m][r].y", "? e ? bias[m][r].x",
            marks=pytest.mark.thorough,
        ),
        ("own", "scores/mask.cuh", "bits_to_float((u16)(both >> 16))", "bits_to_float((u16)both)"),
    ],
)  # fmt: skip
def test_a_wrong_kernel_is_caught(
    kind: str, file: str, before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(RuntimeWarning, match="computes wrong numbers on this GPU"):
        tried(monkeypatch, mutated(tmp_path, file, before, after), kind)
