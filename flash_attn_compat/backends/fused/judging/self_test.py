"""Self-tests: each kernel is compared with the reference backend once, on a tiny problem, before its first real call.

The reference runs on the CPU and so depends on no GPU kernel. The caller's autocast, default dtype, gradient mode and
inference mode have no effect. A passed self-test is recorded in a file beside the compiled kernel.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from flash_attn_compat.backends.fused.building import kernel_files, nvrtc
from flash_attn_compat.backends.fused.building.nvrtc import KernelError
from flash_attn_compat.backends.fused.choosing.kinds import BOOLEANS, FLOAT_BIAS, FP16, Kind
from flash_attn_compat.backends.fused.choosing.variants import Variant
from flash_attn_compat.backends.fused.judging import faults
from flash_attn_compat.backends.fused.launching import workspaces
from flash_attn_compat.backends.fused.launching.eight_bit import DTYPES as EIGHT_BIT_DTYPES
from flash_attn_compat.backends.reference import Reference
from flash_attn_compat.core import cuda_capture, eight_bit, torch_state
from flash_attn_compat.core.append import Append, by_operators
from flash_attn_compat.core.call import AttentionCall, BackwardInputs, Gradients
from flash_attn_compat.core.features import Feature
from flash_attn_compat.core.mask import Mask

# The tiny problem: two sequences whose lengths are no multiples of a tile, and three unused tokens after them.
_ROWS, _FEW_ROWS, _KEYS, _UNUSED_TOKENS = (19, 150), 3, (45, 171), 3
_HEADS, _HEADS_K, _PAGE = 4, 2, 7
_DROPOUT, _SOFTCAP = 0.3, 2.0
# Values in the last channel of some rows and of every fifth key, to test large scores: their product exceeds fp16's
# range. They are in the last channel, because tensor cores truncate terms that are added to a large sum.
_LOUD_Q, _LOUD_K = 2000.0, 40.0
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 4e-2}
_TOLERANCES = {"softmax_lse": 2e-3}
# A kernel may round a rotated key in another way, and so write the neighbouring 8-bit number.
_CACHE_TOLERANCES = {torch.float8_e4m3fn: {"k": 0.13, "v": 0.0}, torch.float8_e5m2: {"k": 0.26, "v": 0.0}}
_GRADIENTS = frozenset({"dq", "dk", "dv"})
_REFERENCE = Reference()
_CODE = Path(__file__).parents[1]

Watch = Callable[[], contextlib.AbstractContextManager[None]]
Movable = TypeVar("Movable", AttentionCall, Append)

_passed: set[tuple[tuple[Variant, ...], str, int]] = set()


def check_kernels(variants: tuple[Variant, ...], device: int, find_error: Callable[[Watch], str | None]) -> None:
    """Self-test the kernels of one plan, once. In a capture results cannot be read, so a later call runs the test.

    find_error: launches the kernels inside the context that it gets; returns their error as a text, or None
    Raises KernelError if the kernels fail now, failed before, or ended an earlier process in their test; ContextLost if
    they break the GPU's context.
    """
    architecture = nvrtc.target(device)
    key = variants, architecture, device
    if key in _passed or cuda_capture.is_capturing(device):
        return
    name = _result_name(variants, device)
    if kernel_files.read(name) is None:
        kernels = f"{' and '.join(variant.entry for variant in variants)} ({dict(variants[-1].macros)})"
        reason = faults.decline_reason(name)
        if reason is not None:
            raise _reject_kernels(variants, device, reason)
        driver = nvrtc.driver()
        with torch_state.set_aside(torch.device("cpu")):
            error = find_error(lambda: faults.watch_trial(name, kernels, lambda: driver.sticky_error(device)))
        if error is not None:
            workspaces.discard()
            raise _reject_kernels(variants, device, f"{kernels} computes wrong numbers on this GPU: {error}")
        kernel_files.write(name, b"right")
    _passed.add(key)


def _reject_kernels(variants: tuple[Variant, ...], device: int, reason: str) -> KernelError:
    """Make every later request for these kernels raise a KernelError with ``reason``; return that error."""
    error = KernelError(reason)
    for variant in variants:
        nvrtc.reject(variant, device, error)
    return error


def _result_name(variants: tuple[Variant, ...], device: int) -> str:
    """Return the file name of a passed test: a hash of kernels, GPU model, driver and test code, which it holds for."""
    kernels = [nvrtc.cache_name(variant, nvrtc.target(device)) for variant in variants]
    return kernel_files.make_name(
        "tried", *kernels, nvrtc.device_name(device), str(nvrtc.driver().version), *_test_digests()
    )


@functools.cache
def _test_digests() -> tuple[str, ...]:
    """Return digests of the self-test's code, because a kernel that passed an older test must pass this one, too."""
    return tuple(hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(_CODE.rglob("*.py")))


def find_forward_error(
    kind: Kind, place: torch.device, run: Callable[..., dict[str, Tensor]], few_rows: bool, appends: bool,
    watch: Watch = contextlib.nullcontext,
) -> str | None:  # fmt: skip
    """Return the error of a forward or an append, including the cache that it wrote; None if all results are right.

    run: computes a call, with an Append or None; returns out and softmax_lse, or the rotated q, by name
    few_rows: whether the kernel is one for few rows over a cache; watch: the context of each run
    """
    for new in _make_appends(kind) if appends else (None,):
        on_cpu = counted = _make_problem(kind, few_rows)
        if new is None:
            call = _copy_to(place, on_cpu)
            with watch():
                results = run(call, None)
        else:
            assert isinstance(new.cache_seqlens, Tensor)
            call, moved = _copy_to(place, on_cpu._replace(seqused_k=new.cache_seqlens)), _copy_to(place, new)
            with watch():
                results = run(call, moved)
            used = new.cache_seqlens + new.k.shape[1]
            counted = on_cpu._replace(q=by_operators(on_cpu, new), seqused_k=used)
        if kind.features.cache:  # take the kernel's own 8-bit keys, which it may round in another way
            counted = counted._replace(k=call.k.cpu(), v=call.v.cpu())
        exact = _REFERENCE.forward(_to_fp32(counted))
        expected = {"q": counted.q, "out": exact.out, "softmax_lse": exact.lse}
        pairs = [(name, _replace_infinity(got), _replace_infinity(expected[name])) for name, got in results.items()]
        # The cache holds NaN after the keys in use. 9 stands for NaN in the comparison.
        pairs += [
            (name, *(getattr(one, name).to(call.q.dtype).nan_to_num(9.0) for one in (call, on_cpu))) for name in "kv"
        ]
        error = _find_difference(pairs, call.q.dtype, _TOLERANCES | _CACHE_TOLERANCES.get(call.k.dtype, {}))
        if error is not None:
            return error
    return None


def _replace_infinity(result: Tensor) -> Tensor:
    """Replace +inf, the LSE of a row without keys, by 9, so that differences are finite; keep NaN."""
    return result.masked_fill(result == torch.inf, 9.0)


def find_backward_error(
    kind: Kind,
    place: torch.device,
    run: Callable[[AttentionCall, BackwardInputs, Gradients], Gradients],
    watch: Watch = contextlib.nullcontext,
) -> str | None:
    """Return the error of gradients that kernels compute from the reference's out and LSE; None if they are right."""
    on_cpu = _make_problem(kind, few_rows=False)._replace(use=Feature.BACKWARD)
    exact, call = _to_fp32(on_cpu), _copy_to(place, on_cpu)
    right = _REFERENCE.forward(exact)
    dout = _randn(7, right.out.shape, call.q.dtype)
    dlse = _randn(8, right.lse.shape, torch.float32)
    exact_upstream = BackwardInputs(dout.float(), right.out, right.lse, exact.rng_state, dlse=dlse)
    expected = _REFERENCE.backward(exact, exact_upstream, None)
    out, lse = right.out.to(dout.dtype).to(place), right.lse.float().contiguous().to(place)
    saved = () if kind.features.bias else (lse,)  # with a dense mask the kernels take the reported LSE
    upstream = BackwardInputs(dout.to(place), out, lse, call.rng_state, saved, dlse.to(place))
    with watch():
        gradients = run(call, upstream, Gradients(*map(torch.empty_like, call[:3])))
    return _find_difference([(f"d{n}", got, right) for n, got, right in zip("qkv", gradients, expected)], dout.dtype)


def _find_difference(
    pairs: Sequence[tuple[str, Tensor, Tensor]], dtype: torch.dtype, tolerances: Mapping[str, float] = _TOLERANCES
) -> str | None:
    """Return which result differs too much, as a text; None if none does. pairs: (name, result, correct result)

    tolerances: by name, for results that have another tolerance than that of ``dtype``
    """
    for name, got, right in pairs:
        tolerance = tolerances.get(name, _TOLERANCE[dtype])
        size = right.float().abs()
        if name in _GRADIENTS:  # rounding in rows with large values affects all gradients that they contribute to
            size = size.amax(tuple(range(size.dim() - 2)), keepdim=True)
        error = (got.to("cpu", torch.float32) - right.float()).abs() - tolerance * size
        worst = float(error.max())
        if not worst <= tolerance:  # NaN fails, too
            return f"{name} is off by {worst:.2g}"
    return None


def _make_problem(kind: Kind, few_rows: bool) -> AttentionCall:
    """Return a tiny call on the CPU that takes the kernels of ``kind``. few_rows: whether it is over a cache

    The last row of each sequence has unscaled scores beyond fp16's range. The last channel makes them; no Append of
    ``_make_appends`` rotates that channel.
    """
    (dim, dim_v), dtype, has_slots = _head_dims(kind), _dtype(kind), few_rows or kind.features.paged
    lengths = _key_lengths(kind)
    pages, is_dense = -(-max(lengths) // _PAGE), kind.features.bias > 0
    rows = (2, _FEW_ROWS) if few_rows else (sum(_ROWS) + _UNUSED_TOKENS,)
    keys = (2, pages * _PAGE) if has_slots else (sum(lengths) + _UNUSED_TOKENS,)
    if is_dense:
        rows, keys = (2, max(_ROWS)), (2, max(lengths) + kind.features.bias_pairs)
    k, v = (_randn(seed, (*keys, _HEADS_K, width), dtype) for seed, width in ((2, dim), (4, dim_v)))
    q = _randn(0, (*rows, _HEADS, dim), dtype)
    # Only one head gets large values, so that the softmax of the other heads is not dominated by one key.
    for last_row in q[:, -1] if few_rows or is_dense else (q[_ROWS[0] - 1], q[sum(_ROWS) - 1]):
        last_row[0, -1] = _LOUD_Q
    k[..., ::5, 0, -1] = _LOUD_K
    slopes, table = [[0.02 * (head + 1 + 3 * index) for head in range(_HEADS)] for index in range(2)], None
    if has_slots:
        for sequence, length in enumerate(lengths):
            k[sequence, length:] = v[sequence, length:] = torch.nan
    descales: dict[str, Any] = {}
    if kind.features.cache:
        k, v = k.to(EIGHT_BIT_DTYPES[kind.features.cache]), v.to(EIGHT_BIT_DTYPES[kind.features.cache])
        descales = {"k_descale": torch.tensor([[0.5, 1.25], [2.0, 0.75]], dtype=torch.float32, device="cpu")}
        descales |= {"v_descale": descales["k_descale"].flip(0)[:, :1], "k_factor": 0.8, "v_factor": 1.5}
    if kind.features.paged:  # store the pages in reverse order
        k, v = (slots.view(-1, _PAGE, *slots.shape[2:]).flip(0) for slots in (k, v))
        table = torch.arange(2 * pages, dtype=torch.int32, device="cpu").flip(0).view(2, pages)
    return AttentionCall(
        q=q,
        k=k,
        v=v,
        softmax_scale=dim**-0.5,
        mask=Mask.of_kernel_rule(kind.features.local, kind.sizes.window is not None),
        max_seqlen_q=rows[1] if len(rows) == 2 else max(_ROWS),
        max_seqlen_k=keys[-1] if is_dense else max(lengths),
        softcap=_SOFTCAP if kind.features.softcap else 0.0,
        dropout_p=_DROPOUT if kind.features.dropout else 0.0,
        alibi_slopes=torch.tensor(slopes, dtype=torch.float32, device="cpu") if kind.features.alibi else None,
        cu_seqlens_q=None if few_rows or is_dense else _ints(0, _ROWS[0], sum(_ROWS)),
        cu_seqlens_k=None if has_slots or is_dense else _ints(0, lengths[0], sum(lengths)),
        seqused_k=_ints(*lengths) if has_slots else None,
        block_table=table,
        rng_state=torch.tensor([2**40 + 5, 7], dtype=torch.int64, device="cpu") if kind.features.dropout else None,
        bias=_make_mask(kind) if is_dense else None,
        is_dense=is_dense,
        use=Feature.LSE,
        **descales,
    )


def _key_lengths(kind: Kind) -> tuple[int, int]:
    """Return the number of keys of each sequence. The larger is odd, so a mask with one more key has aligned pairs."""
    return (kind.hints.few_keys - 13, kind.hints.few_keys - 1) if kind.hints.few_keys else _KEYS


def _make_mask(kind: Kind) -> Tensor:
    """Return a mask with tiles that hide everything or nothing, a row without keys, and a row of biases far below 0."""
    numbers = _randn(15, (2, _HEADS, max(_ROWS), max(_key_lengths(kind)) + kind.features.bias_pairs), torch.float32)
    hidden = numbers > 0.5
    hidden[:, :, :70, 64:100] = True
    hidden[:, :, 128:, 64:128] = True
    hidden[:, :, 5] = True
    hidden[:, :, 64:, :64] = False
    if kind.features.bias == BOOLEANS:
        return ~hidden
    numbers[:, :, 64:, :64] = 0.0
    numbers[:, :, 6] = -1000.0
    numbers = numbers.masked_fill(hidden, -torch.inf)
    return numbers if kind.features.bias == FLOAT_BIAS else numbers.to(_dtype(kind))


def _make_appends(kind: Kind) -> Iterator[Append]:
    """Yield new keys for the caches of ``_make_problem``, with both kinds of rotation."""
    (dim, dim_v), dtype = _head_dims(kind), _dtype(kind)
    rotary = dim // 2 // 16 * 16
    cos, sin = (_randn(seed, (200, rotary // 2), dtype) if rotary else None for seed in (12, 13))
    for interleaved in (False, True):
        k, v = (_randn(seed + interleaved, (2, 2, _HEADS_K, width), dtype) for seed, width in ((10, dim), (14, dim_v)))
        yield Append(k, v, cos, sin, interleaved, _ints(8, 93), rows_have_own_position=interleaved)


def _head_dims(kind: Kind) -> tuple[int, int]:
    """Return head dims of q and v to test: the kernel's largest and a smaller, padded one; or two unaligned ones."""
    if kind.sizes.vec != 8:
        return kind.D - 3, kind.DV - 1
    chunk = 16 if kind.features.cache else 8  # elements in 16 bytes: rows must be a multiple of that long
    return kind.D, kind.DV - chunk if chunk < kind.DV else kind.DV


def _dtype(kind: Kind) -> torch.dtype:
    return torch.float16 if kind.type == FP16 else torch.bfloat16


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cpu")


def _randn(seed: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def _to_fp32(call: AttentionCall) -> AttentionCall:
    """Return the call with its tensors in fp32, except 8-bit keys and values, which the reference converts itself."""
    q, k, v = (x if eight_bit.is_eight_bit(x) else x.float() for x in call[:3])
    return call._replace(q=q, k=k, v=v)


def _copy_to(place: torch.device, value: Movable) -> Movable:
    """Return a copy of a call or an Append on the device ``place``."""
    tensors = {name: part for name, part in value._asdict().items() if isinstance(part, Tensor)}
    copies: dict[str, Any] = {name: tensor.to(place, copy=True) for name, tensor in tensors.items()}
    return value._replace(**copies)
