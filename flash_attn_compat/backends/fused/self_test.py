"""Is a kernel right? Each is compared with plain PyTorch once, on a tiny problem, before its first real call on a GPU.

The judge is the reference backend on the CPU, so it depends on no GPU kernel, and not on the caller's autocast, default
dtype, gradient or inference mode. What was found right is remembered beside the compiled kernel.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from flash_attn_compat.backends.fused import cache, faults, launcher, nvrtc, variants
from flash_attn_compat.backends.fused.nvrtc import KernelError
from flash_attn_compat.backends.fused.variants import FP16, Kind, Variant
from flash_attn_compat.backends.reference import Reference
from flash_attn_compat.core import cuda_capture, torch_state
from flash_attn_compat.core.append import Append, by_operators
from flash_attn_compat.core.call import AttentionCall, Gradients, Upstream
from flash_attn_compat.core.mask import Mask

# Two sequences, nothing a multiple of a tile; three tokens lie behind the last one.
_ROWS, _FEW_ROWS, _KEYS, _UNUSED_TOKENS = (19, 150), 3, (45, 171), 3
_HEADS, _HEADS_K, _PAGE = 4, 2, 7
_DROPOUT, _SOFTCAP = 0.3, 2.0
# Of the last channel of a loud row, and of every fifth key: their product is no number of fp16's. The last, since
# tensor cores cut what is added to a large sum.
_LOUD_Q, _LOUD_K = 2000.0, 40.0
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 4e-2}
_LSE_TOLERANCE = 2e-3
_GRADIENTS = frozenset({"dq", "dk", "dv"})
_REFERENCE = Reference()
_CODE = Path(__file__).parent

Watch = Callable[[], contextlib.AbstractContextManager[None]]
Movable = TypeVar("Movable", AttentionCall, Append)

_passed: set[tuple[tuple[Variant, ...], str, int]] = set()


def check_kernels(variants: tuple[Variant, ...], device: int, wrong: Callable[[Watch], str | None]) -> None:
    """Try kernels that work together, once: raises KernelError with what ``wrong`` finds wrong, if anything.

    wrong: launches the kernels within the context that it is given
    Nothing is tried in a capture, where nobody can look at results, but at the first call after it. Raises KernelError
    too for kernels that have ended an earlier process, and ContextLost where they end this one's use of the GPU.
    """
    architecture = nvrtc.target(device).architecture
    key = variants, architecture, device
    if key in _passed or cuda_capture.is_capturing(device):
        return
    name = _result_name(variants, device)
    if cache.read(name) is None:
        kernels = _describe_kernels(variants)
        refused = faults.decline_reason(name)
        if refused is not None:
            raise _reject_kernels(variants, device, refused)
        driver = nvrtc.driver()
        with torch_state.set_aside(torch.device("cpu")):
            found = wrong(lambda: faults.watch_trial(name, kernels, lambda: driver.sticky_error(device)))
        if found is not None:
            launcher.discard_workspaces()
            raise _reject_kernels(variants, device, f"{kernels} computes wrong numbers on this GPU: {found}")
        cache.write(name, b"right")
    _passed.add(key)


def _describe_kernels(variants: tuple[Variant, ...]) -> str:
    """The kernels in words, with the macros of the last one."""
    macros = [f" ({dict(variant.macros)})" for variant in variants[-1:]]
    return " and ".join(variant.entry for variant in variants) + "".join(macros)


def _reject_kernels(variants: tuple[Variant, ...], device: int, reason: str) -> KernelError:
    """The error that each of them raises from now on."""
    error = KernelError(reason)
    for variant in variants:
        nvrtc.reject(variant, device, error)
    return error


def _result_name(variants: tuple[Variant, ...], device: int) -> str:
    """Other kernels, another GPU model, driver or trial: they are tried anew."""
    kernels = [nvrtc.cache_name(variant, nvrtc.target(device).architecture) for variant in variants]
    return cache.make_name("tried", *kernels, nvrtc.device_name(device), str(nvrtc.driver().version), *_test_digests())


@functools.cache
def _test_digests() -> tuple[str, ...]:
    """What a trial is made of: a kernel that passed an easier one has not passed this one."""
    return tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(_CODE.glob("*.py")))


def find_forward_error(
    kind: Kind,
    place: torch.device,
    run: Callable[..., dict[str, Tensor]],
    few_rows: bool,
    appends: bool,
    watch: Watch = contextlib.nullcontext,
) -> str | None:
    """What is wrong with a forward or an append, or with the cache that it wrote; None if all is right.

    run: takes a call, and an Append or None; returns out and softmax_lse, or the rotated q, by name
    few_rows: whether the kernel is one for few rows over a cache
    watch: entered while it runs
    """
    for new in _make_appends(kind) if appends else (None,):
        on_cpu = counted = _make_problem(kind, few_rows)
        if new is None:
            call = _copy_to(place, on_cpu)
            with watch():
                found = run(call, None)
        else:
            assert isinstance(new.cache_seqlens, Tensor)
            call, new_there = _copy_to(place, on_cpu._replace(seqused_k=new.cache_seqlens)), _copy_to(place, new)
            with watch():
                found = run(call, new_there)
            used = new.cache_seqlens + new.k.shape[1]
            counted = on_cpu._replace(q=by_operators(on_cpu, new), seqused_k=used)
        right = _REFERENCE.forward(_to_fp32(counted))
        expected = {"q": counted.q, "out": right.out, "softmax_lse": right.lse}
        pairs = [(name, _replace_infinity(got), _replace_infinity(expected[name])) for name, got in found.items()]
        # NaN lies behind the keys in use.
        pairs += [(name, *(getattr(one, name).nan_to_num(9.0) for one in (call, on_cpu))) for name in "kv"]
        wrong = _find_difference(pairs, call.q.dtype)
        if wrong is not None:
            return wrong
    return None


def _replace_infinity(result: Tensor) -> Tensor:
    """With 9 for the LSE of a row that sees nothing; NaN stays."""
    return result.masked_fill(result == torch.inf, 9.0)


def find_backward_error(
    kind: Kind,
    place: torch.device,
    run: Callable[[AttentionCall, Upstream, Gradients], Gradients],
    watch: Watch = contextlib.nullcontext,
) -> str | None:
    """What is wrong with gradients, computed from a right out and LSE; None if all is right."""
    on_cpu = _make_problem(kind, few_rows=False)._replace(needs_grad=True)
    exact, call = _to_fp32(on_cpu), _copy_to(place, on_cpu)
    right = _REFERENCE.forward(exact)
    dout = _randn(7, right.out.shape, call.q.dtype)
    dlse = _randn(8, right.lse.shape, torch.float32)
    given = Upstream(dout.float(), right.out, right.lse, exact.rng_state, dlse=dlse)
    expected = _REFERENCE.backward(exact, given, None)
    out, lse = right.out.to(dout.dtype).to(place), right.lse.float().contiguous().to(place)
    saved = () if kind.bias else (lse,)  # which is not the reported one where there are biases
    upstream = Upstream(dout.to(place), out, lse, call.rng_state, saved, dlse.to(place))
    with watch():
        found = run(call, upstream, Gradients(*map(torch.empty_like, call[:3])))
    return _find_difference([(f"d{n}", got, right) for n, got, right in zip("qkv", found, expected)], dout.dtype)


def _find_difference(pairs: Sequence[tuple[str, Tensor, Tensor]], dtype: torch.dtype) -> str | None:
    for name, got, right in pairs:
        tolerance = _LSE_TOLERANCE if name == "softmax_lse" else _TOLERANCE[dtype]
        size = right.float().abs()
        if name in _GRADIENTS:  # of rows: a loud one's rounding reaches all that it is multiplied by
            size = size.amax(tuple(range(size.dim() - 2)), keepdim=True)
        error = (got.to("cpu", torch.float32) - right.float()).abs() - tolerance * size
        worst = float(error.max())
        if not worst <= tolerance:  # NaN is wrong too
            return f"{name} is off by {worst:.2g}"
    return None


def _make_problem(kind: Kind, few_rows: bool) -> AttentionCall:
    """A tiny call on the CPU that takes the kernels of ``kind``. few_rows: over the slots of a cache

    Each sequence's last row has scores beyond fp16's numbers, before they are scaled. They come from the last channel,
    which no Append of ``_appends`` rotates.
    """
    (dim, dim_v), dtype, has_slots = _head_dims(kind), _dtype(kind), few_rows or kind.paged
    pages, is_dense = -(-max(_KEYS) // _PAGE), kind.bias > 0
    rows = (2, _FEW_ROWS) if few_rows else (sum(_ROWS) + _UNUSED_TOKENS,)
    keys = (2, pages * _PAGE) if has_slots else (sum(_KEYS) + _UNUSED_TOKENS,)
    if is_dense:
        rows, keys = (2, max(_ROWS)), (2, max(_KEYS) + kind.bias_pairs)
    k, v = (_randn(seed, (*keys, _HEADS_K, width), dtype) for seed, width in ((2, dim), (4, dim_v)))
    q = _randn(0, (*rows, _HEADS, dim), dtype)
    # In one head of each: the others' softmax stays as even as it was.
    for last_row in q[:, -1] if few_rows or is_dense else (q[_ROWS[0] - 1], q[sum(_ROWS) - 1]):
        last_row[0, -1] = _LOUD_Q
    k[..., ::5, 0, -1] = _LOUD_K
    slopes, table = [[0.02 * (head + 1 + 3 * index) for head in range(_HEADS)] for index in range(2)], None
    if has_slots:
        for sequence, length in enumerate(_KEYS):
            k[sequence, length:] = v[sequence, length:] = torch.nan
    if kind.paged:  # in reverse order
        k, v = (slots.view(-1, _PAGE, *slots.shape[2:]).flip(0) for slots in (k, v))
        table = torch.arange(2 * pages, dtype=torch.int32, device="cpu").flip(0).view(2, pages)
    return AttentionCall(
        q=q,
        k=k,
        v=v,
        softmax_scale=dim**-0.5,
        mask=Mask(100 if kind.window is None else 30, 3) if kind.local else Mask(None, None),
        max_seqlen_q=rows[1] if len(rows) == 2 else max(_ROWS),
        max_seqlen_k=keys[-1] if is_dense else max(_KEYS),
        softcap=_SOFTCAP if kind.softcap else 0.0,
        dropout_p=_DROPOUT if kind.dropout else 0.0,
        alibi_slopes=torch.tensor(slopes, dtype=torch.float32, device="cpu") if kind.alibi else None,
        cu_seqlens_q=None if few_rows or is_dense else _ints(0, _ROWS[0], sum(_ROWS)),
        cu_seqlens_k=None if has_slots or is_dense else _ints(0, _KEYS[0], sum(_KEYS)),
        seqused_k=_ints(*_KEYS) if has_slots else None,
        block_table=table,
        rng_state=torch.tensor([2**40 + 5, 7], dtype=torch.int64, device="cpu") if kind.dropout else None,
        bias=_make_mask(kind) if is_dense else None,
        is_dense=is_dense,
        return_lse=True,
    )


def _make_mask(kind: Kind) -> Tensor:
    """With tiles that hide all or nothing, a row that sees nothing, and one whose biases are all far below 0."""
    numbers = _randn(15, (2, _HEADS, max(_ROWS), max(_KEYS) + kind.bias_pairs), torch.float32)
    hidden = numbers > 0.5
    hidden[:, :, :70, 64:100] = True
    hidden[:, :, 128:, 64:128] = True
    hidden[:, :, 5] = True
    hidden[:, :, 64:, :64] = False
    if kind.bias == variants.BOOLEANS:
        return ~hidden
    numbers[:, :, 64:, :64] = 0.0
    numbers[:, :, 6] = -1000.0
    numbers = numbers.masked_fill(hidden, -torch.inf)
    return numbers if kind.bias == variants.FLOAT_BIAS else numbers.to(_dtype(kind))


def _make_appends(kind: Kind) -> Iterator[Append]:
    """New keys for the caches of ``_problem``, rotated in one way and in the other."""
    (dim, dim_v), dtype = _head_dims(kind), _dtype(kind)
    rotary = dim // 2 // 16 * 16
    cos, sin = (_randn(seed, (200, rotary // 2), dtype) if rotary else None for seed in (12, 13))
    for interleaved in (False, True):
        k, v = (_randn(seed + interleaved, (2, 2, _HEADS_K, width), dtype) for seed, width in ((10, dim), (14, dim_v)))
        yield Append(k, v, cos, sin, interleaved, _ints(8, 93), rows_have_own_position=interleaved)


def _head_dims(kind: Kind) -> tuple[int, int]:
    """The kernel's largest for q and k, one that needs padding for v; or neither on 16 bytes."""
    return (kind.D, kind.DV - 8) if kind.vec == 8 else (kind.D - 3, kind.DV - 1)


def _dtype(kind: Kind) -> torch.dtype:
    return torch.float16 if kind.type == FP16 else torch.bfloat16


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def _randn(seed: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def _to_fp32(call: AttentionCall) -> AttentionCall:
    return call._replace(q=call.q.float(), k=call.k.float(), v=call.v.float())


def _copy_to(place: torch.device, value: Movable) -> Movable:
    """A copy there of a call, or of what is appended."""
    tensors = {name: part for name, part in value._asdict().items() if isinstance(part, Tensor)}
    copies: dict[str, Any] = {name: tensor.to(place, copy=True) for name, tensor in tensors.items()}
    return value._replace(**copies)
