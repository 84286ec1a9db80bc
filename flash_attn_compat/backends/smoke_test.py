"""Smoke tests of kernels that are not ours: compare a small call of each kind with ``reference`` before the first one.

flash-attn can be built with fewer head dims or features, and then silently gives wrong answers. A binary for another
GPU raises. PyTorch's kernels for AMD's GPUs were never run during the development of this package.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flash_attn_compat import installed
from flash_attn_compat.backends.base import Backend
from flash_attn_compat.backends.reference import Reference
from flash_attn_compat.core import cuda_capture, torch_state
from flash_attn_compat.core.arguments import checked_call
from flash_attn_compat.core.call import AttentionCall, BackwardInputs
from flash_attn_compat.core.features import Feature, Traits
from flash_attn_compat.core.inputs import DenseInputs, Options

Lengths = tuple[int, int]  # of queries and keys
_LENGTHS: Lengths = 20, 33
# Features that select another kernel or another memory layout.
_TESTED_FEATURES = (
    Feature.CAUSAL | Feature.WINDOW_LEFT | Feature.WINDOW_RIGHT | Feature.SOFTCAP | Feature.ALIBI | Feature.DROPOUT
    | Feature.GQA | Feature.BACKWARD | Feature.GIVEN_LSE
)  # fmt: skip
_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-4, torch.float64: 1e-9}


def decline_reason(backend: Backend, binary: object, traits: Traits, lengths: Lengths = _LENGTHS) -> str | None:
    """Return the reason to decline calls with these traits, cached by ``binary``; None if the smoke test passes."""
    device = find_device(traits.capability)
    if device.type == "cuda" and cuda_capture.is_capturing(device.index):
        return None  # in a capture no results can be read: test later
    head_dim, features = traits.head_dim + -traits.head_dim % 8, traits.features & _TESTED_FEATURES
    kind = traits._replace(head_dim=head_dim, head_dim_v=head_dim, sq_vs_sk="<", features=features)
    return _run_once(backend, binary, kind, lengths)


@functools.cache
def _run_once(backend: Backend, binary: object, kind: Traits, lengths: Lengths) -> str | None:
    try:
        with torch_state.set_aside(find_device(kind.capability)):
            if _matches_reference(backend, kind, lengths):
                return None
    except Exception as error:  # noqa: BLE001  a build for other GPUs may raise any exception
        return f"calling it raises {installed.format_error(error)}"
    return f"its build gives a wrong answer for head_dim {kind.head_dim} with these features on this GPU"


def _matches_reference(backend: Backend, kind: Traits, lengths: Lengths) -> bool:
    call, dout = _make_problem(kind, lengths)
    results, expected = (_compute_results(one, call, dout) for one in (backend, Reference()))
    tolerance = _TOLERANCE[kind.dtype]
    is_close = all(torch.allclose(one, other, rtol=tolerance, atol=tolerance) for one, other in zip(results, expected))
    return is_close and (not kind.features & Feature.DROPOUT or _applies_dropout(backend, call))


def _compute_results(backend: Backend, call: AttentionCall, dout: Tensor) -> list[Tensor]:
    """Return [out], or [out, dq, dk, dv] if the call needs gradients."""
    result = backend.forward(call)
    if not call.use & Feature.BACKWARD:
        return [result.out]
    upstream = BackwardInputs(dout, result.out, result.softmax_lse, None, result.saved)
    return [result.out, *backend.backward(call, upstream, None)]


def _applies_dropout(backend: Backend, call: AttentionCall) -> bool:
    """Whether a kernel applies dropout: the probabilities of a row then no longer add up to 1."""
    devices = [call.q.device] if call.q.is_cuda else []
    with torch.random.fork_rng(devices):
        out = backend.forward(call._replace(v=torch.ones_like(call.v), dropout_p=0.5)).out
    return bool((out - 1).abs().max() > 0.1)


def _make_problem(kind: Traits, lengths: Lengths) -> tuple[AttentionCall, Tensor]:
    """Return a small call with the traits ``kind``, and a gradient of its out."""
    device, features = find_device(kind.capability), kind.features
    rows, keys = (lengths[0], 2), (lengths[1], 1 if features & Feature.GQA else 2)
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    q, k, v, dout = (draw(1, *shape, kind.head_dim).to(device, kind.dtype) for shape in (rows, keys, keys, rows))
    slopes = torch.tensor([0.3, 0.1], dtype=torch.float32, device=device) if features & Feature.ALIBI else None
    options = Options(
        causal=bool(features & Feature.CAUSAL),
        window_size_left=5 if features & Feature.WINDOW_LEFT else -1,
        window_size_right=3 if features & Feature.WINDOW_RIGHT else -1,
        softcap=2.0 if features & Feature.SOFTCAP else 0.0,
        use=Feature.BACKWARD if kind.needs_backward else 0,
    )
    return checked_call(DenseInputs(q, k, v, slopes), options), dout


def find_device(capability: tuple[int, int] | None) -> torch.device:
    """Return the current GPU if it has this compute capability, else the first one that has, else the current one."""
    current = torch.device("cuda", torch.cuda.current_device())
    others = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    matching = (device for device in (current, *others) if torch.cuda.get_device_capability(device) == capability)
    return next(matching, current)
