"""Set tokens that PyTorch's and flash-attn's kernels leave unwritten to 0, in one launch instead of fourteen operators.

The backends of those kernels get the function by ``Fused.choose_clear``. backends/unwritten.py has the operators.
"""

from __future__ import annotations

import functools
import struct
import warnings
from typing import NamedTuple

import torch

from flash_attn_compat.backends import unwritten
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.choosing.variants import Variant
from flash_attn_compat.backends.fused.judging import self_test
from flash_attn_compat.backends.fused.launching import calls, launcher, params
from flash_attn_compat.backends.unwritten import Clear, PackedResults
from flash_attn_compat.core import cuda_capture
from flash_attn_compat.core.call import AttentionCall
from flash_attn_compat.core.mask import Mask

VARIANT = Variant("clear", "clear.cu", (), 1, 256, 0)
# One block for so many bytes of the results, so that a small call gets few blocks.
_BYTES_PER_BLOCK = 2**16

_Strides = tuple[torch.Size, tuple[int, ...]]


class _Layout(NamedTuple):
    """The part of a launch that depends only on shapes and strides."""

    blocks: int
    head: struct.Struct
    rest: bytes


def find_clear(device: int) -> Clear | None:
    """Return the function that clears in one launch; None if its kernel failed, or cannot be tested in a capture."""
    if cuda_capture.is_capturing(device):
        return None
    try:
        kernel = nvrtc.kernel(VARIANT, device)
        self_test.check_kernels((VARIANT,), device, functools.partial(_find_error, kernel, device))
        return functools.partial(_clear, nvrtc.kernel(VARIANT, device))
    except nvrtc.KernelError as error:
        warnings.warn(f"packed calls launch fourteen operators more: {error}", RuntimeWarning, stacklevel=2)
        return None


def _clear(kernel: nvrtc.Kernel, call: AttentionCall, results: PackedResults) -> None:
    starts_q, starts_k = call.cu_seqlens_q, call.cu_seqlens_k
    assert starts_q is not None and starts_k is not None  # the call is packed
    longest_q, longest_k = min(call.max_seqlen_q, call.q.shape[0]), min(call.max_seqlen_k, call.k.shape[0])
    shapes = [None if x is None else (x.shape, x.stride()) for x in results]
    layout = _find_layout(starts_q.get_device(), starts_q.shape[0] - 1, longest_q, *shapes)
    if layout is None:
        unwritten.clear_by_operators(call, results)
    else:
        tensors = [tensor for tensor in (starts_q, starts_k, *results) if tensor is not None]
        launcher.launch_over(tensors, kernel, layout.blocks, layout.head, layout.rest, longest_k)


@functools.lru_cache(4096)
def _find_layout(
    device: int, batch: int, longest: int, rows: _Strides | None, lse: _Strides | None, dk: _Strides | None,
    dv: _Strides | None,
) -> _Layout | None:  # fmt: skip
    """Return the launch over results of these shapes and strides; None if the kernel cannot write one of them."""
    given = {"out": rows, "dk": dk, "dv": dv}
    named = {name: one for name, one in given.items() if one is not None}
    widths = {shape[2] for shape, _ in named.values()}
    if len(widths) > 1 or not all(_is_writable(strides) for _, strides in named.values()):
        return None
    if any(width % 8 for width in widths) or (lse is not None and lse[1][1] != 1 and lse[0][1] > 1):
        return None
    fields: dict[str, params.Value] = {"batch": batch, "seqlen_q": longest, "head_dim": max(widths, default=0)}
    fields |= {f"{name}_s": (0, strides[0], strides[1]) for name, (_, strides) in named.items()}
    if rows is not None:
        fields |= {"total_q": rows[0][0], "nheads": rows[0][1]}
    if lse is not None:
        fields |= {"total_q": lse[0][1], "nheads": lse[0][0], "lse_head": lse[1][0]}
    if dk is not None:
        fields |= {"total_k": dk[0][0], "nheads_k": dk[0][1]}
    size = 2 * sum(shape.numel() for shape, _ in named.values()) + (4 * lse[0].numel() if lse is not None else 0)
    blocks = max(1, min(-(-size // _BYTES_PER_BLOCK), 4 * calls.count_multiprocessors(device)))
    names = ["cu_seqlens_q", "cu_seqlens_k", *(["out"] if rows else []), *(["lse"] if lse else [])]
    return _Layout(blocks, params.head_struct([*names, *(["dk", "dv"] if dk else [])]), params.pack_rest(fields))


def _is_writable(strides: tuple[int, ...]) -> bool:
    row, head, channel = strides
    return channel == 1 and row % 8 == 0 and head % 8 == 0 and max(row, head) < 2**31


def _find_error(kernel: nvrtc.Kernel, device: int, watch: self_test.Watch) -> str | None:
    """Return the kernel's error on a tiny problem; None if it clears the same tokens as the operators do."""
    place = torch.device("cuda", device) if device >= 0 else torch.device("cpu")
    half = functools.partial(torch.ones, dtype=torch.float16, device="cpu")
    lse = torch.ones(2, 40, dtype=torch.float32, device="cpu")
    right = PackedResults(half(40, 2, 16), lse, half(33, 1, 16), half(33, 1, 16))
    starts = [torch.tensor(x, dtype=torch.int32, device="cpu") for x in ([3, 9, 9, 30], [0, 20, 25, 31])]
    got = PackedResults(*[x.to(place, copy=True) for x in right if x is not None])
    q, k = half(40, 2, 16), half(33, 1, 16)
    call = AttentionCall(q, k, k, 1.0, Mask(None, None), 10, 12, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])
    unwritten.clear_by_operators(call, right)
    with watch():
        _clear(kernel, call._replace(cu_seqlens_q=starts[0].to(place), cu_seqlens_k=starts[1].to(place)), got)
    same = [torch.equal(x.cpu(), y) for x, y in zip(got, right) if x is not None and y is not None]
    return None if all(same) else "it clears other tokens than those that no kernel has written"
