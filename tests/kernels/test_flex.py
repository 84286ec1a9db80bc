"""FlexAttention's kernels in the emulator, with functions written by hand, against the same formulas in fp64."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from flash_attn_compat.backends.fused import flex, small_blocks
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.choosing.kinds import Kind, Sizes
from flash_attn_compat.backends.fused.flex import BlockLists, Blocks, FlexInputs, FlexUpstream, Mods
from flash_attn_compat.backends.fused.launching import calls, layouts, params
from tests.forms import plain as plain_tests
from tests.kernels import emulate, fused_on_cpu, offline

pytestmark = pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())

SAME = "DEVICE float flex_{}(const FlexParams &f, float score, int b, int h, int q, int kv) {{ return {}; }}\n"
ALL = "DEVICE bool flex_mask(const FlexParams &f, int b, int h, int q, int kv) {{ return {}; }}\n"

Score = Callable[..., Tensor]


class Case(NamedTuple):
    """Functions as C++ and as PyTorch: of (score, captured, b, h, q, kv), which broadcast."""

    score: str | None = None
    slope: str = "1.f"
    mask: str | None = None
    score_mod: Score = lambda score, captured, b, h, q, kv: score
    mask_mod: Score = lambda captured, b, h, q, kv: torch.ones((), dtype=torch.bool)
    captured: Callable[[], tuple[Tensor, ...]] = tuple
    numbers: tuple[int, ...] = ()

    @property
    def mods(self) -> Mods:
        text = SAME.format("score", self.score or "score") + SAME.format("slope", self.slope)
        return Mods(text + ALL.format(self.mask or "true"), self.score is not None, self.mask is not None)


DOCUMENTS = "flex_i64(f, 0, (i64)b * f.stride[0][0] + (i64){} * f.stride[0][1])"
CASES = {
    "as they are": Case(),
    "causal": Case(mask="q >= kv", mask_mod=lambda captured, b, h, q, kv: q >= kv),
    "documents": Case(
        mask=f"(q >= kv) & ({DOCUMENTS.format('q')} == {DOCUMENTS.format('kv')})",
        mask_mod=lambda captured, b, h, q, kv: (q >= kv) & (captured[0][b, q] == captured[0][b, kv]),
        captured=lambda: (torch.arange(400).div(70, rounding_mode="floor").repeat(2, 1),),
    ),
    "softcap": Case(
        "5.f * flex_tanh(score * 0.2f)", "1.f - flex_tanh(score * 0.2f) * flex_tanh(score * 0.2f)",
        score_mod=lambda score, captured, b, h, q, kv: 5 * torch.tanh(score / 5),
    ),
    "a bias and a number of rows": Case(
        "score + flex_half(f, 0, (i64)b * f.stride[0][0] + (i64)h * f.stride[0][1] + (i64)q * f.stride[0][2] + kv)",
        mask="kv <= q + (int)f.numbers[0]",
        score_mod=lambda score, captured, b, h, q, kv: score + captured[0][b, h, q, kv],
        mask_mod=lambda captured, b, h, q, kv: kv <= q + 9,
        captured=lambda: (torch.randn(2, 4, 400, 400, dtype=torch.float16),), numbers=(9,),
    ),
    "scores times three, hidden where far": Case(
        "(q > kv ? q - kv : kv - q) <= 40 ? score * 3.f : NEG_INF", "(q > kv ? q - kv : kv - q) <= 40 ? 3.f : 0.f",
        score_mod=lambda score, captured, b, h, q, kv: torch.where((q - kv).abs() <= 40, score * 3, -math.inf),
    ),
    "few rows with keys": Case(
        mask="(q >= 40) & (q < 90) & (kv < 50)",
        mask_mod=lambda captured, b, h, q, kv: (q >= 40) & (q < 90) & (kv < 50),
    ),
}  # fmt: skip


def blocks_of(
    case: Case, captured: tuple[Tensor, ...], shape: tuple[int, int, int, int], size: tuple[int, int]
) -> Blocks:
    """A BlockMask of the case's mask_mod, with blocks of ``size`` rows and keys."""
    batch, heads, rows, keys = shape
    visible = visible_of(case, captured, shape)
    high, wide = min(size[0], 512), min(size[1], 512)  # as one larger block of any sequence here
    padded = torch.zeros(batch, heads, -(-rows // high) * high, -(-keys // wide) * wide, dtype=torch.bool)
    padded[:, :, :rows, :keys] = visible
    tiles = padded.unflatten(3, (-1, wide)).unflatten(2, (-1, high)).sum((3, 5))
    full = tiles == size[0] * size[1]
    return Blocks(*size, lists(tiles > 0, full), lists((tiles > 0).mT, full.mT))


def lists(some: Tensor, full: Tensor) -> BlockLists:
    found = []
    for which in (some & ~full, full):
        found += [which.sum(-1, dtype=torch.int32), which.int().argsort(dim=-1, descending=True, stable=True).int()]
    return BlockLists(*found)


def places(shape: tuple[int, int, int, int]) -> tuple[Tensor, ...]:
    batch, heads, rows, keys = shape
    return (
        torch.arange(batch)[:, None, None, None], torch.arange(heads)[:, None, None], torch.arange(rows)[:, None],
        torch.arange(keys),
    )  # fmt: skip


def visible_of(case: Case, captured: tuple[Tensor, ...], shape: tuple[int, int, int, int]) -> Tensor:
    return case.mask_mod(captured, *places(shape)).expand(shape)


def plain(case: Case, inputs: FlexInputs, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Out and LSE of the formula in ``dtype``."""
    q, k, v = (x.to(dtype) for x in inputs[:3])
    group = q.shape[1] // k.shape[1]
    k, v = (x.expand(q.shape[0], -1, -1, -1).repeat_interleave(group, 1) for x in (k, v))
    shape = (*q.shape[:3], k.shape[2])
    scores = case.score_mod(q @ k.mT * scale, inputs.captured, *places(shape))
    scores = scores.to(dtype).masked_fill(~visible_of(case, inputs.captured, shape), -math.inf)
    lse = scores.double().logsumexp(-1)
    probabilities = torch.where(lse[..., None] == -math.inf, 0.0, (scores.double() - lse[..., None]).exp()).to(dtype)
    return probabilities @ v, lse / math.log(2)


class Shape(NamedTuple):
    """dim_v: None for dim; batch_k: None for batch; rows_first: (batch, rows, heads, dim) in memory"""

    batch: int
    heads: int
    rows: int
    keys: int
    dim: int = 32
    dim_v: int | None = None
    heads_k: int = 2
    batch_k: int | None = None
    rows_first: bool = False

    @property
    def scores(self) -> tuple[int, int, int, int]:
        return self[:4]


def make_inputs(case: Case, shape: Shape, dtype: torch.dtype) -> FlexInputs:
    generator = torch.Generator().manual_seed(1)

    def made(batch: int, heads: int, rows: int, width: int) -> Tensor:
        of_shape = (batch, rows, heads, width) if shape.rows_first else (batch, heads, rows, width)
        x = torch.randn(of_shape, generator=generator).to(dtype)
        return x.transpose(1, 2) if shape.rows_first else x

    of_keys = shape.batch_k or shape.batch, shape.heads_k, shape.keys
    q, k = made(*shape[:3], shape.dim) * 2, made(*of_keys, shape.dim)
    return FlexInputs(q, k, made(*of_keys, shape.dim_v or shape.dim), case.captured(), case.numbers)


USUAL = Shape(1, 2, 150, 201, heads_k=1)


def check(
    case: Case,
    shape: Shape = USUAL,
    dtype: torch.dtype = torch.float16,
    size: tuple[int, int] | None = (128, 128),
    scale: float = 0.3,
) -> None:
    """Forward and backward have at most twice the error of the formula in the inputs' dtype."""
    inputs = make_inputs(case, shape, dtype)
    if size is not None:
        inputs = inputs._replace(blocks=blocks_of(case, inputs.captured, shape.scores, size))
    assert small_blocks.decline_reason(case.mods, inputs, True) is None
    out, lse = small_blocks.prepare(case.mods, inputs, scale)(inputs)
    assert out.shape == (*shape[:3], inputs.v.shape[-1]) and out.dtype == dtype
    assert (out.transpose(1, 2) if shape.rows_first else out).is_contiguous()
    upstream = FlexUpstream(out, lse, torch.randn(out.shape).to(dtype), torch.where(lse == -math.inf, 0.0, lse.sin()))
    exact, exact_lse, exact_gradients = differentiated(case, inputs, scale, upstream, torch.float64)
    rough, _, rough_gradients = differentiated(case, inputs, scale, upstream, dtype)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-3, rtol=1e-3)
    gradients = small_blocks.prepare_backward(case.mods, inputs, scale, upstream)(inputs, upstream)
    judged = ("out", "dq", "dk", "dv"), (out, *gradients), (rough, *rough_gradients), (exact, *exact_gradients)
    for name, found, rough_one, exact_one in zip(*judged, strict=True):
        assert found.shape == exact_one.shape and found.dtype == dtype
        error, allowed = (found.double() - exact_one).abs().max(), (rough_one.double() - exact_one).abs().max()
        assert error <= 2 * allowed + 1e-4 * exact_one.abs().max(), f"{name}: {error} beside {allowed}"


def differentiated(
    case: Case, inputs: FlexInputs, scale: float, upstream: FlexUpstream, dtype: torch.dtype
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return out, LSE and gradients of the formula in ``dtype``."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs[:3])
    out, lse = plain(case, inputs._replace(q=q, k=k, v=v), scale, dtype)
    assert upstream.dlse is not None
    loss = (out.double() * upstream.dout.double()).sum()
    loss = loss + (torch.where(lse == -math.inf, 0.0, lse) * upstream.dlse.double()).sum()
    return out.detach(), lse.detach(), torch.autograd.grad(loss, (q, k, v))


@pytest.mark.parametrize(("name", "size"), plain_tests.in_turns(CASES, ((128, 128), None)))
def test_functions_match_their_formula(
    name: str, size: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused_on_cpu.emulate(monkeypatch)
    check(CASES[name], size=size)


@pytest.mark.parametrize("name", plain_tests.some(["documents", "scores times three, hidden where far", "softcap"], 3))
def test_functions_match_their_formula_in_bf16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused_on_cpu.emulate(monkeypatch)
    check(CASES[name], dtype=torch.bfloat16)


SHAPES = {
    "64": Shape(2, 4, 70, 140, 64), "64 of values": Shape(1, 2, 70, 150, 64, 64, 1, None, True),
    "96": Shape(1, 2, 140, 160, 96), "128": Shape(1, 2, 140, 290, 128), "160": Shape(1, 2, 70, 140, 160),
    "192 and 128": Shape(1, 2, 70, 140, 192, 128), "256": Shape(1, 2, 70, 140, 256),
    "unaligned": Shape(2, 4, 77, 201, 36), "unaligned rows first": Shape(1, 2, 77, 140, 36, 20, 2, None, True),
    "keys of one sequence": USUAL._replace(batch=2, batch_k=1),
    "one key": Shape(1, 4, 130, 1),
}  # fmt: skip
BOTH = CASES["documents"]._replace(
    score=CASES["softcap"].score, slope=CASES["softcap"].slope, score_mod=CASES["softcap"].score_mod
)


@pytest.mark.parametrize("name", plain_tests.some(SHAPES, 4))
def test_shapes_match_the_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused_on_cpu.emulate(monkeypatch)
    check(BOTH, SHAPES[name])


@pytest.mark.parametrize(
    "size", plain_tests.some([(64, 64), (256, 64), (32, 32), (192, 128), (64, 512), (128, 1 << 30), (48, 80)], 4)
)
def test_block_sizes_match_the_formula(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    fused_on_cpu.emulate(monkeypatch)
    check(BOTH, size=size)


def test_small_blocks_in_no_list_stay_hidden_without_a_mask_mod(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_on_cpu.emulate(monkeypatch)
    checkered = Case(mask_mod=lambda captured, b, h, q, kv: (q // 16 + kv.div(48, rounding_mode="floor") + h) % 3 != 0)
    check(checkered, size=(16, 48))


def test_one_row_over_many_keys_is_split_and_matches_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.emulate(monkeypatch)
    check(CASES["softcap"], Shape(1, 2, 1, 1500, heads_k=1))
    assert launches.seen[0].fields["splits"] > 2


def test_a_newer_gpu_matches_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_on_cpu.emulate(monkeypatch, number=90)
    check(BOTH, Shape(1, 2, 140, 210, 64, heads_k=1))


def test_a_scale_below_zero_matches_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_on_cpu.emulate(monkeypatch)
    check(CASES["causal"], scale=-0.2)


def test_a_large_copied_unaligned_call_matches_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_on_cpu.emulate(monkeypatch)
    monkeypatch.setattr(layouts, "MAX_SCALAR_LOADS", 0)
    check(BOTH, SHAPES["unaligned"])


# Block i writes the tile that it takes, counted over all heads.
ORDER = """
#include "scores/flex.cuh"
KERNEL(32, 1) order(const Params p) {
  typedef ListLengths<64, 64, false> Lengths;
  const bool is_ranked = Lengths::are_ranked(p, KV_LISTS);
  const TileScheduler scheduled(p, blockIdx.x, p.tiles, is_ranked);
  const int b = scheduled.batch_head / p.nheads, h = scheduled.batch_head % p.nheads;
  const int place = is_ranked ? Lengths(p, KV_LISTS, b, h).place_of(scheduled.tile) : scheduled.tile;
  if (threadIdx.x == 0) global_store(p.counters + blockIdx.x, scheduled.batch_head * p.tiles + place);
}
"""


def order_of(num: Tensor, full_num: Tensor, folder: Path, resident: int = 1) -> list[int]:
    """Return the tile of each block, counted over all heads. num, full_num: (batch, heads, tiles)"""
    (batch, heads, tiles), source = num.shape, folder / "order.cu"
    source.write_text(ORDER)
    macros = {"FLEX": 2, "FLEX_BLOCK_Q": 64, "FLEX_BLOCK_K": 64}
    kernel = emulate.compile_kernel(source, "order", macros, CASES["causal"].mods.text)
    fields: dict[str, params.Value] = {"tiles": tiles, "nheads": heads, "resident": resident}
    for name, x in (("kv", num), ("full_kv", full_num)):
        fields |= {f"{name}_num": x.data_ptr(), f"{name}_list": (*x.stride(), 0, 0, 0, 0, tiles, 1000)}
    found = torch.empty(batch * heads * tiles, dtype=torch.int32)
    head = params.head_struct(["counters"]).pack(found.data_ptr(), 0)
    kernel.launch(head + params.pack_rest(fields, True), len(found), 32, 0, (found, num, full_num))
    return found.tolist()


def test_tiles_with_the_longest_lists_of_all_heads_start_first(tmp_path: Path) -> None:
    """Four tiles of a head are neighbours. Of lists that differ by less than an eighth, the first starts first."""
    generator = torch.Generator().manual_seed(1)
    num, full_num = (torch.randint(0, most, (2, 3, 75), generator=generator).int() for most in (60, 30))
    num[0, 0, 70], num[1, 2] = 200, 7
    lengths, expected = (num + full_num).flatten(0, 1).tolist(), []
    ranked = []
    for head, of_head in enumerate(lengths):
        unit = 1 << max(0, max(of_head).bit_length() - 4)
        ranked.append(sorted(range(head * 75, head * 75 + 75), key=lambda at: -(of_head[at % 75] // unit)))
    for first in range(0, 75, 4):
        expected += [tile for of_head in ranked for tile in of_head[first : first + 4]]
    assert order_of(num, full_num, tmp_path) == expected


@pytest.mark.parametrize("tiles", [1, 9, 64, 512, 513])
def test_garbage_lists_leave_each_tile_one_block(tiles: int, tmp_path: Path) -> None:
    num, full_num = (torch.randint(-(2**31), 2**31, (2, 1, tiles)).int() for _ in range(2))
    num[0, 0, ::2] %= 900
    broadcast = num[:1].expand(2, -1, -1), full_num[:1].expand(2, -1, -1)
    for lists_of in ((num, full_num), broadcast, (num * 0, full_num * 0)):
        assert sorted(order_of(*lists_of, tmp_path)) == list(range(2 * tiles))


@pytest.mark.parametrize(("tiles", "resident"), [(513, 1), (40, 80)])
def test_many_tiles_or_blocks_that_all_run_at_once_are_not_ranked(tiles: int, resident: int, tmp_path: Path) -> None:
    num = torch.arange(2 * tiles, dtype=torch.int32).view(1, 2, tiles)
    of_heads = torch.arange(2 * tiles).view(2, tiles)
    expected = of_heads if resident == 1 else of_heads.T
    assert order_of(num, num, tmp_path, resident=resident) == expected.flatten().tolist()


EVEN = {
    "causal": (range(70, 0, -1), True), "a step": ([5] * 32 + [4] * 38, True), "all equal": ([3] * 70, True),
    "little longer": ([40] * 32 + [41] * 38, True), "the last of a group": ([5] * 31 + [9] + [5] * 38, False),
    "the first of a group": ([5] * 32 + [9] + [5] * 37, False),
}  # fmt: skip


@pytest.mark.parametrize("name", EVEN)
def test_tiles_are_ranked_only_if_a_list_is_longer_than_the_one_before(name: str, tmp_path: Path) -> None:
    """As causal lists of queries for keys: these start with the first key."""
    lengths, is_even = EVEN[name]
    num = torch.tensor(lengths, dtype=torch.int32).expand(1, 3, 70)
    assert (order_of(num, num * 0, tmp_path) == list(range(210))) is is_even


def test_every_kernel_starts_with_the_longest_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """score_mod writes the number of the block that calls it. Six blocks have queries, nine have keys."""
    fused_on_cpu.emulate(monkeypatch)
    monkeypatch.setattr(calls, "count_resident", lambda call, variant: 1)
    written = torch.full((2, 600), -1, dtype=torch.int32)
    store = "(((int *)f.captured[0])[gridDim.x == 6 ? q : 600 + kv] = (int)blockIdx.x, score)"
    begins, ends = torch.tensor([[0, 128, 64, 0, 0, 192], [64, 512, 128, 0, 576, 256]])
    case = Case(
        store, mask_mod=lambda captured, b, h, q, kv: (begins[q // 64] <= kv) & (kv < ends[q // 64]),
        captured=lambda: (written,),
    )  # fmt: skip
    inputs = make_inputs(case, Shape(1, 1, 384, 576, heads_k=1), torch.float16)
    inputs = inputs._replace(blocks=blocks_of(case, inputs.captured, (1, 1, 384, 576), (64, 64)))
    out, lse = flex.prepare(case.mods, inputs, 0.3)(inputs)
    of_rows = [4, 1, 3, -1, 0, 2]
    assert written[0, :384:64].tolist() == of_rows
    written.fill_(-1)
    upstream = FlexUpstream(out, lse, torch.ones_like(out))
    flex.prepare_backward(case.mods, inputs, 0.3, upstream)(inputs, upstream)
    assert written[0, :384:64].tolist() == of_rows
    assert written[1, :576:64].tolist() == [1, 2, 3, 0, 4, 5, 6, 7, 8]


UNEVEN = torch.repeat_interleave(torch.arange(6), torch.tensor([1, 200, 2, 65, 40, 22]))  # documents
UNEVEN_CASE = Case(
    "score * 0.5f", "0.5f",
    mask=f"({DOCUMENTS.format('q')} == {DOCUMENTS.format('kv')}) & ((h % 2 == 0) | (q >= kv)) & (q < 310)",
    score_mod=lambda score, captured, b, h, q, kv: score * 0.5,
    mask_mod=lambda captured, b, h, q, kv: (captured[0][b, q] == captured[0][b, kv]) & ((h % 2 == 0) | (q >= kv))
    & (q < 310),
    captured=lambda: (torch.stack([UNEVEN, UNEVEN.flip(0)]),),
)  # fmt: skip


blocks_of_heads = blocks_of


def of_one_head(blocks: Blocks) -> Blocks:
    """Return the lists of the first head, which then hold for all heads."""
    assert blocks.of_keys is not None
    found = (BlockLists(*(x if x is None else x[:, :1] for x in of)) for of in (blocks.of_rows, blocks.of_keys))
    return Blocks(*blocks[:2], *found)


@pytest.mark.parametrize(("broadcast", "size"), [(False, 64), (True, 128)])
def test_very_uneven_lists_match_the_formula(broadcast: bool, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row's document beside one of 200 rows, rows without keys, lists of each head or of all heads."""
    fused_on_cpu.emulate(monkeypatch)
    monkeypatch.setattr(calls, "count_resident", lambda call, variant: 1)
    case = UNEVEN_CASE
    if broadcast:
        case = case._replace(
            mask=f"{DOCUMENTS.format('q')} == {DOCUMENTS.format('kv')}",
            mask_mod=lambda captured, b, h, q, kv: captured[0][b, q] == captured[0][b, kv],
        )
        monkeypatch.setattr(f"{__name__}.blocks_of", lambda *call: of_one_head(blocks_of_heads(*call)))
    check(case, Shape(2, 2, 330, 320, heads_k=1), size=(size, size))


@pytest.mark.parametrize("size", [128, 16])
def test_garbage_in_lists_and_captured_tensors_reaches_no_other_memory(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator allows no access outside of the call's tensors."""
    fused_on_cpu.emulate(monkeypatch)
    wild = "flex_within((int)(flex_i64(f, 0, (i64)q * f.stride[0][1])), f.size[0][1])"
    case = BOTH._replace(mask=f"flex_i64(f, 0, (i64){wild} * f.stride[0][1]) == kv")
    inputs = make_inputs(case, USUAL, torch.float16)
    blocks = blocks_of(BOTH, inputs.captured, USUAL.scores, (size, size))
    for lists_of in (blocks.of_rows, blocks.of_keys or blocks.of_rows):
        for i, x in enumerate(lists_of):
            assert x is not None
            x.copy_(torch.randint(-(2**31), 2**31, x.shape).int() if i % 2 else torch.randint(-9, 9, x.shape))
    inputs.captured[0].random_(-(2**40), 2**40)
    inputs = inputs._replace(blocks=blocks)
    out, lse = small_blocks.prepare(case.mods, inputs, 0.3)(inputs)
    upstream = FlexUpstream(out, lse, torch.ones_like(out))
    assert small_blocks.prepare_backward(case.mods, inputs, 0.3, upstream)(inputs, upstream)[0].shape == inputs.q.shape


@pytest.mark.parametrize("broken", ["dtype", "rows", "batch", "half", "dims"])
def test_lists_that_do_not_fit_are_refused(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused_on_cpu.record(monkeypatch)
    inputs = make_inputs(BOTH, USUAL, torch.float16)
    blocks = blocks_of(BOTH, inputs.captured, USUAL.scores, (128, 128))
    num, indices, *full = blocks.of_rows
    of_rows = {
        "dtype": BlockLists(num.long(), indices, *full), "rows": BlockLists(num[:, :, :1], indices[:, :, :1], *full),
        "batch": BlockLists(num.repeat(2, 1, 1), indices.repeat(2, 1, 1, 1), *full),
        "half": BlockLists(num, indices, full[0], None), "dims": BlockLists(num[0], indices, *full),
    }[broken]  # fmt: skip
    with pytest.raises(ValueError, match="BlockMask"):
        small_blocks.prepare(BOTH.mods, inputs._replace(blocks=blocks._replace(of_rows=of_rows)), 0.3)


def test_calls_that_no_kernel_serves_are_declined_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_on_cpu.record(monkeypatch)
    inputs = make_inputs(BOTH, USUAL, torch.float16)
    blocks = blocks_of(BOTH, inputs.captured, USUAL.scores, (16, 16))
    far = torch.empty_strided((2, 1, 1, 1), (2**31, 1, 1, 1), dtype=torch.int32, device="meta")
    for reason, changed in {
        "all be fp16": inputs._replace(q=inputs.q.float()),
        "multiples of 16": inputs._replace(blocks=blocks._replace(rows=24)),
        "captured tensor of torch.float64": inputs._replace(captured=(torch.ones(2).double(),)),
        "more than 16": inputs._replace(captured=(torch.ones(2),) * 17),
        "lists of a BlockMask with": inputs._replace(blocks=Blocks(128, 128, BlockLists(far[..., 0], far))),
    }.items():  # fmt: skip
        assert reason in (small_blocks.decline_reason(BOTH.mods, changed, False) or "")


FITTING = [(75, 0, 128, "dkdv"), (75, 0, 64, "forward"), (75, 2, 128, "dkdv"), (75, 2, 128, "dq"), (90, 1, 64, "dq")]


@pytest.mark.parametrize(("number", "type", "head_dim", "entry"), plain_tests.some_of(FITTING, 5))
def test_functions_compile_for_a_gpu_and_fit_its_registers(number: int, type: int, head_dim: int, entry: str) -> None:
    if not offline.compilers():
        pytest.skip("no NVRTC here: it comes with the test extra on x86-64 Linux")
    compiler = list(offline.compilers().values())[-1]
    blocks = Blocks(128, 128, BlockLists(torch.empty(0), torch.empty(0)))
    variant = flex.make_variant(entry, Kind(number, type, Sizes(head_dim)), BOTH.mods, blocks)
    found = offline.compiled(compiler, variant, f"sm_{number}")
    assert list(offline.complaints(variant, found, number)) == []
    assert found.spilled <= offline.allowed_spills(variant)


def test_variants_of_different_texts_have_files_of_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "compiler", lambda: types.SimpleNamespace(version=(13, 0)))
    kind = Kind(75, 0, Sizes(64))
    names = {
        nvrtc.cache_name(flex.make_variant("forward", kind, case.mods, None), "sm_75")
        for case in (CASES["causal"], CASES["few rows with keys"], CASES["causal"])
    }
    assert len(names) == 2
