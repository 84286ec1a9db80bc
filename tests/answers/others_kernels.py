"""CPU stand-ins for the kernels of PyTorch and flash-attn: strict about inputs, careless where the real kernels are.

They are those of flash-attn's extension and of two pairs of PyTorch's operators. Tokens outside of all sequences come
back as NaN, and so do those of a sequence behind the longest length that is stated. Windows are clamped to the longest
key length, and single rows of grouped heads are taken for one in each sequence. So a backend that relies on more than
the kernels promise fails here. The reference backend computes.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.backends import base, official, smoke_test, torch_efficient, torch_flash
from flash_attn_compat.backends.reference import Reference
from flash_attn_compat.core import checks
from flash_attn_compat.core.arguments import checked_call
from flash_attn_compat.core.call import AttentionCall, BackwardInputs, Gradients
from flash_attn_compat.core.features import Feature
from flash_attn_compat.core.inputs import DenseInputs, Options, PackedInputs
from flash_attn_compat.core.mask import Mask
from flash_attn_compat.dispatch import call_cache

calls: list[str] = []  # what was called since the list was cleared
# The kernels' arguments in their order; those of no interest here are _.
SIGNATURES = {
    "fwd": "q k v _ slopes dropout_p scale causal left right softcap _ _",
    "varlen_fwd": "q k v _ cu_q cu_k _ _ _ slopes max_q max_k dropout_p scale zeroes causal left right softcap _ _",
    "bwd": "dout q k v out lse dq dk dv slopes dropout_p scale causal left right softcap _ _ state",
    "varlen_bwd": "dout q k v out lse dq dk dv cu_q cu_k slopes max_q max_k dropout_p scale zeroes causal left "
    "right softcap _ _ state",
    "_flash_attention_forward": "q k v cu_q cu_k max_q max_k dropout_p causal _",
    "_flash_attention_backward": "dout q k v out lse cu_q cu_k max_q max_k dropout_p causal state _",
    "_efficient_attention_forward": "q k v _ cu_q cu_k max_q max_k dropout_p mask _",
    "_efficient_attention_backward": "dout q k v _ out cu_q cu_k max_q max_k lse dropout_p state _ mask _",
}
KEYWORDS = {"window_size_left": "left", "window_size_right": "right", "num_splits_key": "_"}


class Launch(NamedTuple):
    """A kernel's arguments; packed tensors are (total, heads, head_dim), and a window's side of -1 is open."""

    q: Tensor
    k: Tensor
    v: Tensor
    dropout_p: float
    scale: float | None = None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    max_q: int = 0
    max_k: int = 0
    slopes: Tensor | None = None
    causal: bool = False
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    zeroes: bool = False
    mask: int = 0
    dout: Any = None
    out: Any = None
    lse: Any = None
    state: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None


def given_to(name: str, arguments: tuple[Any, ...], keywords: dict[str, Any] | None = None) -> Launch:
    calls.append(name)
    given = dict(zip(SIGNATURES[name].split(), arguments, strict=True))
    given |= {KEYWORDS.get(keyword, keyword): value for keyword, value in (keywords or {}).items()}
    given.pop("_", None)
    return Launch(**given)


# ---------------------------------------------------------------- FlashAttention-2


def extension_forward(name: str, *arguments: Any) -> list[Tensor | None]:
    check_signs(arguments)
    out, lse, state = forward(as_flash_reads(given_to(name, arguments)))
    return [out, lse, None, state]


def extension_backward(name: str, *arguments: Any) -> None:
    check_signs(arguments)
    given = as_flash_reads(given_to(name, arguments))
    for place, gradient in zip((given.dq, given.dk, given.dv), backward(given)):
        check_alignment(place)
        place.copy_(gradient)


def check_signs(arguments: tuple[Any, ...]) -> None:
    """Refuse lazily negated views: PyTorch resolves them for its own operators, not for kernels that read addresses."""
    assert not any(isinstance(x, Tensor) and x.is_neg() for x in arguments)


fwd, varlen_fwd = (functools.partial(extension_forward, name) for name in ("fwd", "varlen_fwd"))
bwd, varlen_bwd = (functools.partial(extension_backward, name) for name in ("bwd", "varlen_bwd"))


def flash_forward(pads_lse: bool, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
    given = as_flash_reads(given_to("_flash_attention_forward", arguments, keywords))
    out, lse, state = forward(given)
    return out, padded_lse(lse, given) if pads_lse else lse, state, None, None


def flash_backward(pads_lse: bool, *arguments: Any, **keywords: Any) -> Gradients:
    given = as_flash_reads(given_to("_flash_attention_backward", arguments, keywords))
    return backward(given._replace(lse=packed_lse(given.lse, given)) if pads_lse else given)


def as_flash_reads(given: Launch) -> Launch:
    """With the window as it is clamped, and single rows of grouped heads as they are folded."""
    q, k = given.q, given.k
    assert q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] == k.shape[-1] == given.v.shape[-1] <= 256
    assert q.shape[0] > 0 and q.shape[-2] % k.shape[-2] == 0
    assert given.slopes is None or given.slopes.stride(-1) == 1
    assert not (given.dropout_p and given.softcap)
    longest = k.shape[1] if given.cu_q is None else given.max_k
    left, right = (-1 if side >= longest else side for side in (given.left, 0 if given.causal else given.right))
    left, right = longest if left < 0 < right else left, longest if right < 0 <= left else right
    folds = given.max_q == 1 and q.shape[-2] > k.shape[-2] and left == -1 and right <= 0
    if given.cu_q is not None and folds and not given.dropout_p and given.slopes is None:
        sequences = given.cu_q.shape[0] - 1
        assert q.shape[0] == sequences, "folded rows cannot be reshaped"
        given = given._replace(cu_q=torch.arange(sequences + 1, dtype=torch.int32, device=q.device))
    return given._replace(left=left, right=right)


# ---------------------------------------------------------------- the memory-efficient kernel


def efficient_forward(*arguments: Any, **keywords: Any) -> tuple[Any, ...]:
    given = as_efficient_reads(given_to("_efficient_attention_forward", arguments, keywords))
    out, lse, state = forward(given)
    leave_unwritten(given, out, lse.t() if given.cu_q is not None else None)
    out, lse = (out, lse) if given.cu_q is None else (out[None], padded_lse(lse, given))
    return out, F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf), state, None, None, None


def efficient_backward(*arguments: Any, **keywords: Any) -> tuple[Tensor | None, ...]:
    given = as_efficient_reads(given_to("_efficient_attention_backward", arguments, keywords))
    lse = given.lse
    assert given.out.is_contiguous() and lse.is_contiguous() and lse.shape[-1] % 32 == 0
    if given.cu_q is None:
        return *backward(given._replace(lse=lse[:, :, : given.q.shape[1]].contiguous())), None
    given = given._replace(dout=given.dout[0], out=given.out[0], lse=packed_lse(lse, given))
    dq, dk, dv = backward(given)
    leave_unwritten(given, dq)
    leave_unwritten(given._replace(cu_q=given.cu_k, cu_k=given.cu_q), dk, dv)
    return *(gradient[None] for gradient in (dq, dk, dv)), None


def leave_unwritten(given: Launch, *tensors: Tensor | None) -> None:
    """NaN in queries of sequences without keys."""
    if given.cu_q is None or given.cu_k is None:
        return
    for start, stop, keys in zip(given.cu_q.tolist(), given.cu_q[1:].tolist(), given.cu_k.diff().tolist()):
        for tensor in tensors:
            if tensor is not None and not keys:
                tensor[start:stop] = torch.nan


def as_efficient_reads(given: Launch) -> Launch:
    q, k, v = given.q, given.k, given.v
    assert q.dim() == 4 and q.shape[2] == k.shape[2] == v.shape[2]
    causal = given.mask == torch_efficient.CAUSAL_BOTTOM_RIGHT
    if given.cu_q is None:
        assert not causal or q.shape[1] <= k.shape[1], "wrong for more queries than keys"
    else:
        assert given.cu_k is not None and q.shape[0] == 1 and 0 < given.max_q <= q.shape[1]
        lengths_q, lengths_k = given.cu_q.diff(), given.cu_k.diff()
        assert not causal or ((lengths_q <= lengths_k) | (lengths_k == 0)).all(), "wrong for rows without a key"
        assert lengths_k.max() <= given.max_k
        given = given._replace(q=q[0], k=k[0], v=v[0])
    return given._replace(right=0 if causal else -1)


# ---------------------------------------------------------------- what they have in common


def forward(given: Launch) -> tuple[Tensor, Tensor, Tensor]:
    """out, LSE and the dropout's state; NaN in unwritten tokens, or 0 and -inf where that is asked for."""
    result = Reference().forward(as_call(given))
    leave(0.0 if given.zeroes else torch.nan, result.out, given.cu_q, given.max_q)
    leave(-torch.inf if given.zeroes else torch.nan, result.lse.mT, given.cu_q, given.max_q)
    return result.out, result.lse, given.q.new_zeros(2) if result.rng_state is None else result.rng_state


def backward(given: Launch) -> Gradients:
    assert given.lse.is_contiguous() and given.lse.dtype == torch.float32
    check_alignment(given.dout)
    check_alignment(given.out)
    upstream = BackwardInputs(given.dout, given.out, given.lse, given.state if given.dropout_p else None)
    found = Reference().backward(as_call(given), upstream, None)
    own = (given.cu_q, given.max_q), (given.cu_k, given.max_k), (given.cu_k, given.max_k)
    for gradient, (starts, longest) in zip(found, own):
        leave(0.0 if given.zeroes else torch.nan, gradient, starts, longest)
    return found


def as_call(given: Launch) -> AttentionCall:
    tensors = given.q, given.k, given.v
    for tensor in tensors:
        check_alignment(tensor)
    assert given.scale is None or given.scale > 0
    options = Options(given.dropout_p, given.scale, softcap=given.softcap, use=Feature.LSE)
    if given.cu_q is None or given.cu_k is None:
        call = checked_call(DenseInputs(*tensors, given.slopes), options)
    else:
        options = options._replace(max_seqlen_q=given.max_q, max_seqlen_k=given.max_k)
        call = checked_call(PackedInputs(*tensors, given.slopes, given.cu_q, given.cu_k), options)
    return call._replace(mask=Mask(*(None if side < 0 else side for side in (given.left, given.right))))


def check_alignment(tensor: Tensor) -> None:
    unit = 16 // tensor.element_size()
    assert tensor.shape[-1] % 8 == 0 and tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0
    assert all(stride % unit == 0 for stride in tensor.stride()[:-1]), tensor.stride()


def leave(value: float, tensor: Tensor, starts: Tensor | None, longest: int) -> None:
    """Before the first sequence, behind the last, and in each from ``longest`` tokens on."""
    if starts is not None:
        tensor[: starts[0]] = value
        tensor[starts[-1] :] = value
        for start, stop in itertools.pairwise(starts.tolist()):
            tensor[min(start + longest, stop) : stop] = value


def padded_lse(lse: Tensor, given: Launch) -> Tensor:
    """(heads, total) as (batch, heads, max_q), +inf behind the end of a sequence; of dense rows as it is."""
    if given.cu_q is None:
        return lse
    found = lse.new_full((given.cu_q.shape[0] - 1, lse.shape[0], given.max_q), torch.inf)
    for index, (start, stop) in enumerate(itertools.pairwise(given.cu_q.tolist())):
        rows = min(stop - start, given.max_q)
        found[index, :, :rows] = lse[:, start : start + rows]
    return found


def packed_lse(lse: Tensor, given: Launch) -> Tensor:
    """The way back."""
    if given.cu_q is None:
        return lse
    found = lse.new_full((lse.shape[1], given.q.shape[0]), torch.nan)
    for index, (start, stop) in enumerate(itertools.pairwise(given.cu_q.tolist())):
        rows = min(stop - start, lse.shape[2])
        found[:, start : start + rows] = lse[index, :, :rows]
    return found


# ---------------------------------------------------------------- in place of the real ones

GENUINE = "from tests.answers.others_kernels import bwd, fwd, varlen_bwd, varlen_fwd\n"
BACKENDS: dict[str, type[base.Backend]] = {
    "official": official.Official,
    "torch_flash": torch_flash.TorchFlash,
    "torch_efficient": torch_efficient.TorchEfficient,
}


def install(patch: pytest.MonkeyPatch, name: str, folder: Path, pads_lse: bool = False) -> None:
    """Let a backend serve CPU tensors. folder: for the flash-attn of ``official``; pads_lse: as before version 2.6."""
    anywhere = dataclasses.replace(BACKENDS[name].capabilities, devices=None, min_capability=None, max_capability=None)
    patch.setattr(BACKENDS[name], "capabilities", anywhere)
    patch.setattr(call_cache, "_current", call_cache.empty_tables())
    patch.setattr(checks, "may_read", lambda tensor: False)  # as on a GPU
    calls.clear()
    if name == "official":
        lay_flash_attn(patch, folder)
        return
    operators = {
        "_flash_attention_forward": functools.partial(flash_forward, pads_lse),
        "_flash_attention_backward": functools.partial(flash_backward, pads_lse),
        "_efficient_attention_forward": efficient_forward,
        "_efficient_attention_backward": efficient_backward,
    }
    for module in (torch_flash, torch_efficient):
        patch.setattr(module, "aten_operator", operators.__getitem__)
    patch.setattr(torch_flash, "_pads_lse", functools.cache(torch_flash._pads_lse.__wrapped__))


def lay_flash_attn(
    patch: pytest.MonkeyPatch, folder: Path, extension: str | None = GENUINE, version: str = "2.8.3"
) -> None:
    """A flash-attn at the front of sys.path, of which the extension alone can be imported; its source, if any."""
    patch.setattr(sys, "dont_write_bytecode", True)
    patch.setattr(smoke_test, "find_device", lambda capability: torch.device("cpu"))
    patch.setattr(smoke_test, "_run_once", functools.cache(smoke_test._run_once.__wrapped__))
    package = folder / "flash_attn"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(f"__version__ = '{version}'\nraise ImportError('the wrapper is not needed')\n")
    (folder / "flash_attn_2_cuda.py").unlink(missing_ok=True)
    if extension is not None:
        (folder / "flash_attn_2_cuda.py").write_text(extension)
    importlib.invalidate_caches()
    patch.syspath_prepend(str(folder))
