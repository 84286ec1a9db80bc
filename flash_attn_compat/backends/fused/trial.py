"""Is a kernel right? Each is compared with plain PyTorch once, on a tiny problem, before its first real call on a GPU.

The judge is the reference backend on the CPU, so it depends on no GPU kernel, and not on the caller's autocast, default
dtype, gradient or inference mode. What was found right is remembered beside the compiled kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import cache, launcher, loader
from flash_attn_compat.backends.fused.loader import KernelError, Target
from flash_attn_compat.backends.fused.variants import FP16, Kind, Variant
from flash_attn_compat.backends.reference import Reference
from flash_attn_compat.engine import callers_state
from flash_attn_compat.engine.append import Append, by_operators
from flash_attn_compat.engine.call import AttentionCall, Result, Upstream
from flash_attn_compat.engine.mask import Mask

# Two sequences, nothing a multiple of a tile; three tokens lie behind the last one.
_ROWS, _FEW_ROWS, _KEYS, _BEHIND = (19, 150), (3, 3), (45, 171), 3
_HEADS, _HEADS_K, _PAGE = 4, 2, 7
_DROPOUT, _SOFTCAP = 0.3, 2.0
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 4e-2}
_LSE_TOLERANCE = 2e-3
_JUDGE = Reference()

Value = TypeVar("Value", AttentionCall, Append)

_right: set[tuple[tuple[Variant, ...], str, int]] = set()


def forget() -> None:
    _right.clear()


def check(variants: tuple[Variant, ...], target: Target, device: int, problem: Callable[[], str | None]) -> None:
    """Remember that ``problem`` finds nothing wrong with kernels that work together; raises KernelError where it does.

    A capture allows no look at results: kernels are tried at their first call after it.
    """
    key = variants, target.architecture, device
    if key in _right or loader.is_capturing(device):
        return
    name = _verdict_name(*key)
    if cache.read(name) is None:
        with callers_state.set_aside(torch.device("cpu")):
            wrong = problem()
        if wrong is not None:
            launcher.forget_workspaces()
            entries = " and ".join(variant.entry for variant in variants)
            error = KernelError(f"{entries} ({dict(variants[-1].macros)}) computes wrong numbers on this GPU: {wrong}")
            for variant in variants:
                loader.reject(variant, target.architecture, device, error)
            raise error
        cache.write(name, b"right")
    _right.add(key)


def _verdict_name(variants: tuple[Variant, ...], architecture: str, device: int) -> str:
    """A file for each kernel, GPU model and driver."""
    kernels = [loader.cache_name(variant, architecture) for variant in variants]
    return cache.name_of("tried", *kernels, loader.device_name(device), str(loader.driver().version))


class Problem(NamedTuple):
    """A tiny call on the GPU, the same on the CPU, and (rows, heads, head_dim) of each sequence there."""

    call: AttentionCall
    on_cpu: AttentionCall
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]


def problem(kind: Kind, place: torch.device, few_rows: bool, needs_grad: bool) -> Problem:
    """A call that takes the kernels of ``kind``; few_rows: the decode kernel rather than the forward's."""
    dtype = torch.float16 if kind.type == FP16 else torch.bfloat16
    # The largest head dim of the kernel for q and k, one that needs padding for v; or neither on 16 bytes.
    dim, dim_v = (kind.D, kind.D - 8) if kind.vec == 8 else (kind.D - 3, kind.D - 1)
    rows = _FEW_ROWS if few_rows else _ROWS
    q, k, v = (
        [_randn(seed + index, (length, heads, width), dtype) for index, length in enumerate(lengths)]
        for seed, lengths, heads, width in (
            (0, rows, _HEADS, dim),
            (2, _KEYS, _HEADS_K, dim),
            (4, _KEYS, _HEADS_K, dim_v),
        )
    )
    call = AttentionCall(
        q=_packed(q),
        k=_packed(k),
        v=_packed(v),
        softmax_scale=dim**-0.5,
        mask=Mask(100 if kind.window is None else 30, 3) if kind.local else Mask(None, None),
        max_seqlen_q=max(rows),
        max_seqlen_k=max(_KEYS),
        softcap=_SOFTCAP if kind.softcap else 0.0,
        dropout_p=_DROPOUT if kind.dropout else 0.0,
        alibi_slopes=_slopes() if kind.alibi else None,
        cu_seqlens_q=_ints(0, rows[0], sum(rows)),
        cu_seqlens_k=_ints(0, _KEYS[0], sum(_KEYS)),
        rng_state=torch.tensor([2**40 + 5, 7], dtype=torch.int64, device="cpu") if kind.dropout else None,
        is_dense=False,
        return_lse=True,
        needs_grad=needs_grad,
    )
    if kind.paged or few_rows:
        call = _over_a_cache(call, k, v, kind.paged)
    if few_rows:
        call = call._replace(q=torch.stack(q), cu_seqlens_q=None)
    return Problem(_each_tensor(call, lambda tensor: tensor.to(place, copy=True)), call, q, k, v)


def _over_a_cache(call: AttentionCall, k: list[Tensor], v: list[Tensor], paged: bool) -> AttentionCall:
    """The keys in slots of their own for each sequence, with NaN behind them; pages in reverse order."""
    pages = -(-max(_KEYS) // _PAGE)

    def cache_of(parts: list[Tensor]) -> Tensor:
        slots = parts[0].new_full((len(parts), pages * _PAGE, *parts[0].shape[1:]), torch.nan)
        for row, part in zip(slots, parts):
            row[: part.shape[0]] = part
        return slots.view(-1, _PAGE, *slots.shape[2:]).flip(0) if paged else slots

    count = len(k) * pages
    table = _ints(*([count - 1 - index * pages - page for page in range(pages)] for index in range(len(k))))
    return call._replace(
        k=cache_of(k), v=cache_of(v), cu_seqlens_k=None, seqused_k=_ints(*_KEYS), block_table=table if paged else None
    )


def of_forward(problem: Problem, run: Callable[[AttentionCall], tuple[Tensor, Tensor | None]]) -> str | None:
    """What is wrong with a forward's out and LSE, if anything."""
    out, lse = run(problem.call)
    assert lse is not None
    right = _JUDGE.forward(_in_fp32(problem.on_cpu))
    return _difference([("out", out, right.out), ("softmax_lse", lse, right.lse)], out.dtype)


def of_backward(problem: Problem, run: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> str | None:
    """What is wrong with gradients from a right out and LSE; ``run(call, dout, out, lse)`` computes them."""
    call, place = problem.on_cpu, problem.call.q.device
    right = _JUDGE.forward(_in_fp32(call))
    dout = _randn(7, right.out.shape, call.q.dtype)
    upstream = Upstream(dout.float(), right.out, right.lse, call.rng_state)
    gradients = _JUDGE.backward(_in_fp32(call), upstream, None)
    lse = right.lse.float().contiguous()
    given = (tensor.to(place, copy=True) for tensor in (dout, right.out.to(dout.dtype), lse))
    found = run(problem.call, *given)
    return _difference([(f"d{n}", got, right) for n, got, right in zip("qkv", found, gradients)], dout.dtype)


def _in_fp32(call: AttentionCall) -> AttentionCall:
    return call._replace(q=call.q.float(), k=call.k.float(), v=call.v.float())


def of_append(problem: Problem, run: Callable[[AttentionCall, Append], Tensor]) -> str | None:
    """What is wrong with a cache after keys were appended, and with the rotated q; ``run(call, new)`` appends."""
    return _of_append(problem, run, interleaved=False) or _of_append(problem, run, interleaved=True)


def _of_append(problem: Problem, run: Callable[[AttentionCall, Append], Tensor], interleaved: bool) -> str | None:
    call, place = problem.call, problem.call.q.device
    dtype, rotary = call.q.dtype, call.q.shape[-1] // 2 // 16 * 16
    cos, sin = (_randn(seed, (200, rotary // 2), dtype) if rotary else None for seed in (12, 13))
    new = Append(
        _randn(10 + interleaved, (2, 2, _HEADS_K, call.k.shape[-1]), dtype),
        _randn(14 + interleaved, (2, 2, _HEADS_K, call.v.shape[-1]), dtype),
        cos,
        sin,
        rotary_interleaved=interleaved,
        cache_seqlens=_ints(8, 93),
        rows_have_own_position=interleaved,
    )
    found = run(call, _each_tensor(new, lambda tensor: tensor.to(place, copy=True)))
    on_cpu = _each_tensor(problem.on_cpu, torch.Tensor.clone)
    right = by_operators(on_cpu, new)
    # What the cache held behind the keys in use is NaN.
    pairs = [("q", found, right), ("k_cache", call.k, on_cpu.k), ("v_cache", call.v, on_cpu.v)]
    return _difference([(name, got.nan_to_num(9.0), wanted.nan_to_num(9.0)) for name, got, wanted in pairs], dtype)


def of_step(problem: Problem, run: Callable[[AttentionCall, Append], Result]) -> str | None:
    """What is wrong with a step that appends and attends; ``run(call, new)`` computes it."""
    found: list[str | None] = []

    def stepped(call: AttentionCall, new: Append) -> Tensor:
        assert isinstance(new.cache_seqlens, Tensor)
        call = call._replace(seqused_k=new.cache_seqlens, seqlen_new=new.k.shape[1])
        on_cpu = _each_tensor(problem.on_cpu, torch.Tensor.clone)
        own = _each_tensor(new, lambda tensor: tensor.cpu())
        q = by_operators(on_cpu, own)
        assert isinstance(own.cache_seqlens, Tensor)
        counted = on_cpu._replace(q=q, seqused_k=own.cache_seqlens + own.k.shape[1])
        found.append(of_forward(problem._replace(call=call, on_cpu=counted), lambda call: run(call, new)[:2]))
        return q.to(call.q.device)

    wrong = of_append(problem, stepped)
    return next((one for one in found if one is not None), wrong)


def _difference(pairs: list[tuple[str, Tensor, Tensor]], dtype: torch.dtype) -> str | None:
    for name, got, right in pairs:
        tolerance = _LSE_TOLERANCE if name == "softmax_lse" else _TOLERANCE[dtype]
        error = (got.to("cpu", torch.float32) - right.float()).abs() - tolerance * right.float().abs()
        worst = float(error.max())
        if not worst <= tolerance:  # NaN is wrong too
            return f"{name} is off by {worst:.2g}"
    return None


def _packed(parts: list[Tensor]) -> Tensor:
    """Sequences end to end, and some tokens that belong to none."""
    return torch.cat([*parts, parts[0].new_zeros((_BEHIND, *parts[0].shape[1:]))])


def _slopes() -> Tensor:
    """(sequences, heads)"""
    slopes = [[0.02 * (head + 1 + 3 * index) for head in range(_HEADS)] for index in range(2)]
    return torch.tensor(slopes, dtype=torch.float32, device="cpu")


def _ints(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def _randn(seed: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def _each_tensor(value: Value, change: Callable[[Tensor], Tensor]) -> Value:
    """A call, or what is appended, with every tensor changed."""
    changed: dict[str, Any] = {name: change(one) for name, one in value._asdict().items() if isinstance(one, Tensor)}
    return value._replace(**changed)
