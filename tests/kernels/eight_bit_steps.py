"""Steps over caches of 8-bit floats by our kernels, compared with fp64 attention over the dequantised values."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat import flash_attn_with_kvcache, use_backend
from flash_attn_compat.backends.fused.choosing.kinds import E5M2, FP16, Kind
from flash_attn_compat.ops.triton.rotary import apply_rotary
from tests.forms.inputs import ints, randn

NAN = 0x7F  # of both dtypes


class Step(NamedTuple):
    """A call over a cache.

    lengths: keys in use of each sequence, before the append; capacity: slots; page: slots of a page, 0 without pages
    heads_first: whether slots of a head are adjacent; new: keys to append; options: of flash_attn_with_kvcache
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    half: torch.dtype = torch.float16
    head_dim: int = 64
    head_dim_v: int | None = None
    rows: int = 1
    lengths: tuple[int, ...] = (150, 33)
    capacity: int = 170
    nheads_k: int = 2
    group: int = 4
    page: int = 0
    heads_first: bool = False
    new: int = 0
    rotary_dim: int = 0
    options: dict[str, Any] = {}  # noqa: RUF012  # never written

    @property
    def dims(self) -> tuple[int, int]:
        return self.head_dim, self.head_dim_v or self.head_dim


def draw_cache(step: Step, head_dim: int, seed: int) -> Tensor:
    """A (batch, capacity, heads, head_dim) cache with subnormal numbers, and NaN behind the keys in use."""
    numbers = randn(len(step.lengths), step.capacity, step.nheads_k, head_dim, seed=seed)
    numbers[:, ::3] *= 2.0**-7 if step.dtype == torch.float8_e4m3fn else 2.0**-15
    found = numbers.to(step.dtype).view(torch.uint8)
    for sequence, length in enumerate(step.lengths):
        found[sequence, length:] = NAN
    return found.view(step.dtype)


def into_pages(step: Step, cache: Tensor) -> tuple[Tensor, Tensor]:
    """The cache as pages of NaN around its slots, in reverse order, and their table."""
    batch, capacity, heads, head_dim = cache.shape
    count = -(-capacity // step.page)
    slots = torch.full((batch, count * step.page, heads, head_dim), NAN, dtype=torch.uint8)
    slots[:, :capacity] = cache.view(torch.uint8)
    pages = slots.view(batch * count, step.page, heads, head_dim).flip(0).contiguous()
    return pages.view(step.dtype), torch.arange(batch * count, dtype=torch.int32).flip(0).view(batch, count)


def arguments(step: Step) -> dict[str, Any]:
    batch, (dim, dim_v) = len(step.lengths), step.dims
    k, v = draw_cache(step, dim, 1), draw_cache(step, dim_v, 2)
    found: dict[str, Any] = {"q": randn(batch, step.rows, step.nheads_k * step.group, dim, dtype=step.half)}
    if step.page:
        (k, found["block_table"]), (v, _) = into_pages(step, k), into_pages(step, v)
    if step.heads_first:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    found |= {"k_cache": k, "v_cache": v, "cache_seqlens": ints(*step.lengths), **step.options}
    found["k_descale"] = 0.3 + torch.arange(batch * step.nheads_k).view(batch, -1) % 7 / 8
    found["v_descale"] = torch.arange(step.nheads_k).view(1, -1) % 3 + 0.7
    if step.new:
        new = (20 * randn(batch, step.new, step.nheads_k, width, seed=3, dtype=step.half) for width in (dim, dim_v))
        found |= dict(zip("kv", new))
    if step.rotary_dim:
        angles = randn(step.capacity + 40, step.rotary_dim // 2, seed=5)
        found |= {"rotary_cos": angles.cos().to(step.half), "rotary_sin": angles.sin().to(step.half)}
    return found


def check(step: Step, place: torch.device | None = None) -> None:
    """Raise unless out is right within twice the error of PyTorch in q's dtype, and the cache as operators leave it."""
    given = {name: x.to(place or "cpu") if isinstance(x, Tensor) else x for name, x in arguments(step).items()}
    by_operators = {name: x.clone() if isinstance(x, Tensor) else x for name, x in given.items()}
    with use_backend("reference"):
        flash_attn_with_kvcache(**by_operators)
    with use_backend("fused"):
        out = flash_attn_with_kvcache(**given)
    assert isinstance(out, Tensor)
    for name in ("k_cache", "v_cache"):
        written, expected = given[name].float(), by_operators[name].float()
        assert torch.equal(written.isnan(), expected.isnan())
        if step.rotary_dim and name == "k_cache":  # a rotation may round otherwise
            torch.testing.assert_close(written, expected, rtol=0.26, atol=1e-6, equal_nan=True)
        else:
            assert torch.equal(written.nan_to_num(), expected.nan_to_num())
    exact, plain = (attend(step, given, dtype) for dtype in (torch.float64, step.half))
    allowed = (plain.double() - exact).abs().max() + torch.finfo(step.half).eps * exact.abs().max()
    assert (out.double() - exact).abs().max() <= 2 * allowed


def attend(step: Step, given: dict[str, Any], dtype: torch.dtype, **options: Any) -> Tensor:
    """Attention in ``dtype`` over the cache as it is after the call, times its descales."""
    caches = {}
    for name in "kv":
        cache, descale = given[f"{name}_cache"].to(torch.float64), given[f"{name}_descale"]
        if step.page:
            cache = cache[given["block_table"].long()].flatten(1, 2)
        caches[f"{name}_cache"] = (cache * descale.double()[:, None, :, None]).to(dtype)
    q, lengths = given["q"], given["cache_seqlens"]
    if step.rotary_dim:
        interleaved = step.options.get("rotary_interleaved", True)
        q = apply_rotary(q, given["rotary_cos"], given["rotary_sin"], lengths, interleaved=interleaved)
    options |= {name: given[name] for name in step.options}
    with use_backend("reference"):
        out = flash_attn_with_kvcache(q.to(dtype), **caches, cache_seqlens=lengths + step.new, **options)
    assert isinstance(out, Tensor)
    return out


def steps(kind: Kind) -> dict[str, Step]:
    """Return steps of that kind, by the kernel that they launch."""
    aligned = kind.sizes.vec == 8
    options: dict[str, Any] = {"softcap": 2.0} if kind.features.softcap else {}
    if kind.features.local:
        options["window_size"] = (30, 3)
    if kind.features.alibi:
        options["alibi_slopes"] = torch.linspace(0.1, 0.8, 4)
    step = Step(
        torch.float8_e5m2 if kind.features.cache == E5M2 else torch.float8_e4m3fn,
        torch.float16 if kind.type == FP16 else torch.bfloat16,
        kind.D if aligned else kind.D - 3,
        kind.DV if aligned else kind.DV - 1,
        group=2,
        rows=3,
        page=7 * kind.features.paged,
        options=options,
    )
    return {
        "forward": step._replace(rows=150),
        "decode": step,
        "decode_append": step._replace(new=2),
        "append": step._replace(new=20, capacity=180),
    }
