"""Is a kernel right? Each is compared with plain PyTorch once, on a tiny problem, before its first real call on a GPU.

The judge is the textbook formula in fp32 on the CPU, so it depends on no GPU kernel, and not on the caller's autocast,
default dtype, gradient or inference mode. What was found right is remembered beside the compiled kernel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import cache, loader
from flash_attn_compat.backends.fused.loader import KernelError, Target
from flash_attn_compat.backends.fused.variants import FP16, Kind, Variant
from flash_attn_compat.engine import append as engine_append
from flash_attn_compat.engine import dropout
from flash_attn_compat.engine.append import Append
from flash_attn_compat.engine.call import AttentionCall
from flash_attn_compat.engine.mask import Mask, Range, distance

# Two sequences, nothing a multiple of a tile; three tokens lie behind the last one.
_ROWS, _FEW_ROWS, _KEYS, _BEHIND = (19, 150), (3, 3), (45, 171), 3
_HEADS, _HEADS_K, _PAGE = 4, 2, 7
_DROPOUT, _SOFTCAP = 0.3, 2.0
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 4e-2}
_LSE_TOLERANCE = 2e-3

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
        wrong = problem()
        if wrong is not None:
            entries = " and ".join(variant.entry for variant in variants)
            error = KernelError(f"{entries} ({dict(variants[-1].macros)}) computes wrong numbers on this GPU: {wrong}")
            for variant in variants:
                loader.reject(variant, target.architecture, device, error)
            raise error
        cache.write(name, b"right")
    _right.add(key)


def _verdict_name(variants: tuple[Variant, ...], architecture: str, device: int) -> str:
    """A file for each kernel, GPU model and driver."""
    parts = [loader.cache_name(variant, architecture) for variant in variants]
    parts += [loader.device_name(device), str(loader.driver().version)]
    return f"tried-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:40]}"


class Problem(NamedTuple):
    """A tiny call on the GPU and the same sequences on the CPU."""

    call: AttentionCall
    q: list[Tensor]  # (rows, heads, head_dim) of each sequence
    k: list[Tensor]
    v: list[Tensor]
    rng_state: Tensor


def problem(kind: Kind, place: torch.device, few_rows: bool, needs_grad: bool) -> Problem:
    """A call that takes the kernels of ``kind``; few_rows: the decode kernel rather than the forward's."""
    generator = torch.Generator("cpu").manual_seed(0)
    dtype = torch.float16 if kind.type == FP16 else torch.bfloat16
    # The largest head dim of the kernel for q and k, one that needs padding for v; or neither on 16 bytes.
    dims = (kind.D, kind.D - 8) if kind.vec == 8 else (kind.D - 3, kind.D - 1)

    def tensors(lengths: tuple[int, ...], heads: int, dim: int) -> list[Tensor]:
        shapes = [(length, heads, dim) for length in lengths]
        return [
            torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype) for shape in shapes
        ]

    rows = _FEW_ROWS if few_rows else _ROWS
    q, k, v = tensors(rows, _HEADS, dims[0]), tensors(_KEYS, _HEADS_K, dims[0]), tensors(_KEYS, _HEADS_K, dims[1])
    narrow = kind.window is not None
    mask = Mask((30 if narrow else 100) if kind.local else None, 3 if kind.local else None)
    rng_state = torch.tensor([2**40 + 5, 7], dtype=torch.int64, device="cpu")

    def ints(*values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=place)

    call = AttentionCall(
        q=_on(place, _packed(q)),
        k=_on(place, _packed(k)),
        v=_on(place, _packed(v)),
        softmax_scale=dims[0] ** -0.5,
        mask=mask,
        max_seqlen_q=max(rows),
        max_seqlen_k=max(_KEYS),
        softcap=_SOFTCAP if kind.softcap else 0.0,
        dropout_p=_DROPOUT if kind.dropout else 0.0,
        alibi_slopes=_on(place, _slopes()) if kind.alibi else None,
        cu_seqlens_q=ints(0, rows[0], sum(rows)),
        cu_seqlens_k=ints(0, _KEYS[0], sum(_KEYS)),
        rng_state=_on(place, rng_state) if kind.dropout else None,
        is_dense=False,
        return_lse=True,
        needs_grad=needs_grad,
    )
    if kind.paged or few_rows:
        call = _over_a_cache(call, k, v, place, ints, kind.paged)
    if few_rows:
        call = call._replace(q=_on(place, torch.stack(q)), cu_seqlens_q=None)
    return Problem(call, q, k, v, rng_state)


def _over_a_cache(
    call: AttentionCall, k: list[Tensor], v: list[Tensor], place: torch.device, ints: Callable[..., Tensor], paged: bool
) -> AttentionCall:
    """The keys in slots of their own for each sequence, with NaN behind them; pages in reverse order."""
    pages = -(-max(_KEYS) // _PAGE)
    size = pages * _PAGE

    def cache_of(parts: list[Tensor]) -> Tensor:
        slots = parts[0].new_full((len(parts), size, *parts[0].shape[1:]), torch.nan)
        for row, part in zip(slots, parts):
            row[: part.shape[0]] = part
        return _on(place, slots.view(-1, _PAGE, *slots.shape[2:]).flip(0) if paged else slots)

    count = len(k) * pages
    table = ints(*([count - 1 - index * pages - page for page in range(pages)] for index in range(len(k))))
    return call._replace(
        k=cache_of(k), v=cache_of(v), cu_seqlens_k=None, seqused_k=ints(*_KEYS), block_table=table if paged else None
    )


def expected(
    problem: Problem, dout: list[Tensor] | None = None, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], ...]:
    """out (rows, heads, head_dim_v) and the true LSE (heads, rows) of each sequence; then dq, dk, dv for ``dout``.

    dtype: that of the whole computation
    """
    call = problem.call
    found: tuple[list[Tensor], ...] = ([], [], [], [], [])
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        for index, parts in enumerate(zip(problem.q, problem.k, problem.v)):
            leaves = [part.to(dtype).requires_grad_() for part in parts]
            out, lse = _attention(call, problem.rng_state, index, *leaves)
            found[0].append(out.detach())
            found[1].append(lse.detach())
            if dout is None:
                continue
            for gradients, gradient in zip(found[2:], torch.autograd.grad(out, leaves, dout[index].to(dtype))):
                gradients.append(gradient)
    return found


def _attention(
    call: AttentionCall, rng_state: Tensor, index: int, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    rows, keys, offset = Range(0, q.shape[0]), Range(0, k.shape[0]), k.shape[0] - q.shape[0]
    cpu = torch.device("cpu")
    k, v = (part.repeat_interleave(_HEADS // _HEADS_K, dim=1) for part in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * call.softmax_scale
    if call.softcap:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if call.alibi_slopes is not None:
        scores = scores - _slopes()[index].to(q.dtype)[:, None, None] * distance(rows, keys, offset, cpu).abs()
    hidden = call.mask.hidden(rows, keys, offset, cpu)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    probabilities = torch.exp(scores - lse[..., None])
    if call.dropout_p:
        counted = [torch.arange(size, device=cpu) for size in (_HEADS, rows.stop, keys.stop)]
        sequence = torch.tensor([index], dtype=torch.int64, device=cpu)
        keep = dropout.keep_tile(rng_state, call.dropout_p, sequence, counted[0], counted[1][None], counted[2][None])[0]
        probabilities = probabilities * keep.to(q.dtype) / (1.0 - call.dropout_p)
    return torch.einsum("hij,jhd->ihd", probabilities, v), lse


def of_forward(problem: Problem, run: Callable[[AttentionCall], tuple[Tensor, Tensor | None]]) -> str | None:
    """What is wrong with a forward's out and LSE, if anything."""
    out, lse = run(problem.call)
    assert lse is not None
    outs, lses, *_ = expected(problem)
    if problem.call.cu_seqlens_q is None:
        pairs = [("out", out, torch.stack(outs)), ("softmax_lse", lse, torch.stack(lses))]
    else:
        nothing = torch.zeros(_HEADS, _BEHIND, dtype=torch.float32, device="cpu")
        pairs = [("out", out, _packed(outs)), ("softmax_lse", lse, torch.cat([*lses, nothing], dim=1))]
    return _difference(pairs, out.dtype)


def of_backward(problem: Problem, run: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> str | None:
    """What is wrong with gradients from a right out and LSE; ``run(call, dout, out, lse)`` computes them."""
    call = problem.call
    place, dtype = call.q.device, call.q.dtype
    generator = torch.Generator("cpu").manual_seed(1)
    dims = problem.v[0].shape[-1]
    dout = [
        torch.randn((part.shape[0], _HEADS, dims), generator=generator, dtype=torch.float32, device="cpu").to(dtype)
        for part in problem.q
    ]
    outs, lses, *gradients = expected(problem, dout)
    nothing = torch.zeros(_HEADS, _BEHIND, dtype=torch.float32, device="cpu")
    lse = torch.cat([*lses, nothing], dim=1).float().contiguous()
    found = run(call, _on(place, _packed(dout)), _on(place, _packed(outs).to(dtype)), _on(place, lse))
    return _difference([(f"d{n}", got, _packed(right)) for n, got, right in zip("qkv", found, gradients)], dtype)


def of_append(problem: Problem, run: Callable[[AttentionCall, Append], Tensor]) -> str | None:
    """What is wrong with a cache after keys were appended, and with the rotated q; ``run(call, new)`` appends."""
    return _of_append(problem, run, interleaved=False) or _of_append(problem, run, interleaved=True)


def _of_append(problem: Problem, run: Callable[[AttentionCall, Append], Tensor], interleaved: bool) -> str | None:
    call = problem.call
    place, dtype = call.q.device, call.q.dtype
    generator = torch.Generator("cpu").manual_seed(2 + interleaved)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)

    rotary = call.q.shape[-1] // 2 // 16 * 16
    new = Append(
        k=randn(2, 2, _HEADS_K, call.k.shape[-1]),
        v=randn(2, 2, _HEADS_K, call.v.shape[-1]),
        rotary_cos=randn(200, rotary // 2) if rotary else None,
        rotary_sin=randn(200, rotary // 2) if rotary else None,
        rotary_interleaved=interleaved,
        cache_seqlens=torch.tensor([8, 93], dtype=torch.int32, device="cpu"),
        rows_have_own_position=interleaved,
    )
    table = call.block_table
    q, k, v = (tensor.to("cpu", copy=True) for tensor in call[:3])
    with torch.no_grad():
        right = engine_append.by_operators(
            call._replace(q=q, k=k, v=v, block_table=None if table is None else table.cpu()), new
        )
    tensors: dict[str, Any] = {name: value for name, value in new._asdict().items() if isinstance(value, Tensor)}
    found = run(call, new._replace(**{name: tensor.to(place) for name, tensor in tensors.items()}))
    # What the cache held behind the keys in use is NaN.
    pairs = [("q", found, right), ("k_cache", call.k, k), ("v_cache", call.v, v)]
    return _difference([(name, got.nan_to_num(9.0), wanted.nan_to_num(9.0)) for name, got, wanted in pairs], dtype)


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


def _on(place: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(place, copy=True)
