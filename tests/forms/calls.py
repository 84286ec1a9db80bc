"""The calls that several test files make, in one table by name: problems of the public functions, and all others.

tests/forms/kinds.py makes five of them with every kind of tensor and in every mode, tests/forms/caller_state.py all of
them in every state of their caller, tests/sanitize.py under compute-sanitizer. tests/warm.py makes those that
differ from an earlier one by one of CHANGES.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from flash_attn_compat import bert_padding, flash_attn_interface
from flash_attn_compat.layers.rotary import RotaryEmbedding, apply_rotary_emb
from flash_attn_compat.losses.cross_entropy import CrossEntropyLoss
from flash_attn_compat.modules.embedding import GPT2Embeddings
from flash_attn_compat.modules.mha import MHA, FlashSelfAttention
from flash_attn_compat.modules.mlp import GatedMlp
from flash_attn_compat.ops.activations import bias_gelu_impl, swiglu
from flash_attn_compat.ops.layer_norm import dropout_add_layer_norm
from flash_attn_compat.ops.triton.layer_norm import rms_norm_fn
from flash_attn_compat.utils.generation import InferenceParams
from tests.forms import inputs
from tests.forms.inputs import DENSE, PACKED, SQUARE, STEP, ints, randn
from verify.call import DIFFERENTIABLE
from verify.call import Call as VerifyCall
from verify.problems import FUNCTIONS, Problem

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Prepared:
    """A call and its tensors.

    inputs: the tensors by name; the floating ones have gradients if dout is one for the first result
    function: the call, of the inputs in their order; it returns the results, with the tensors that it writes to behind
    written: the names of these
    """

    inputs: dict[str, Tensor]
    function: Callable[..., tuple[Any, ...]]
    dout: Callable[[Tensor], Tensor] | None = None
    written: tuple[str, ...] = ()

    def run(self) -> Results:
        """Return the results, the tensors that the call writes to and the gradients, by name."""
        found = self.function(*self.inputs.values())
        count = len(found) - len(self.written)
        results = {f"out {i}": x for i, x in enumerate(found[:count]) if isinstance(x, Tensor)}
        results |= {name: x.clone() for name, x in zip(self.written, found[count:])}
        return results if self.dout is None else results | gradients(found[0], self.inputs, self.dout(found[0]))


@dataclass(frozen=True)
class Call:
    """One call of the table.

    prepare: draws the tensors for a device
    fn: the public function, if the call is one call of one
    draws: whether it takes random numbers; casts: whether autocast changes it, as it changes flash-attn's
    """

    name: str
    prepare: Callable[[torch.device], Prepared] = field(repr=False)
    fn: str = ""
    draws: bool = False
    casts: bool = False


def gradients(out: Tensor, inputs: dict[str, Tensor], dout: Tensor) -> Results:
    """Return the gradients by name; none if autograd recorded nothing, as under no_grad."""
    if not out.requires_grad:
        return {}
    leaves = {name: x for name, x in inputs.items() if x.requires_grad}
    return {f"d{n}": g for n, g in zip(leaves, torch.autograd.grad(out, list(leaves.values()), dout), strict=True)}


# ---------------------------------------------------------------- the public functions, described as problems


def of_problem(name: str, problem: Problem) -> Call:
    """Return the call of a problem; its tensors are the arguments that are tensors."""

    def prepare(device: torch.device) -> Prepared:
        call = problem.build(device)
        inputs = {name: x for name, x in call.args.items() if isinstance(x, Tensor)}
        if call.dout is not None:
            inputs |= {name: inputs[name].detach().requires_grad_() for name in DIFFERENTIABLE if name in inputs}
        written = tuple(name for name in call.caches if "k" in inputs)

        def function(*tensors: Tensor) -> tuple[Any, ...]:
            given = dict(zip(inputs, tensors, strict=True))
            returned = getattr(flash_attn_interface, call.fn)(**{**call.args, **given})
            returned = returned if isinstance(returned, tuple) else (returned,)
            if problem.kind == "private_varlen":
                returned = returned[:3]  # the fourth is rng_state, which is a seed only if there is dropout
            return *returned, *(given[name] for name in written)

        return Prepared(inputs, function, None if call.dout is None else lambda out: call.dout, written)

    return Call(name, prepare, FUNCTIONS[problem.kind], draws=problem.dropout_p > 0)


OF_DTYPE: dict[str, tuple[str, ...]] = {
    "float16": (
        "dense: query heads share key heads in consecutive groups", "dense: values of another head_dim",
        "dense: window rows that see no key", "dense: softcap before ALiBi and mask", "dense: ALiBi by sequence",
        "dense: dropout", "dense: deterministic", "dense: rows anywhere", "dense: keys and values in one",
        "packed: causal, by each one's own lengths", "packed: window", "packed: dropout",
        "packed: keys and values in one", "packed: pages", "packed: keys in use", "cache: rows of their own length",
        "cache: rotary, pairs of 16 channels, causal", "cache: slopes by sequence of chosen rows",
        "cache: one row, splits", "cache: append behind an int to chosen rows",
    ),
    "bfloat16": (
        "dense: causal ALiBi by sequence", "dense: causal ALiBi in a window", "dense: all in one",
        "packed: tokens outside", "packed: all in one", "cache: an int for every row", "cache: append to pages",
        "cache: left padding",
    ),
    "float32": (
        "dense: ALiBi", "dense: softcap before ALiBi and mask", "dense: dropout under ALiBi", "packed: softcap",
        "packed: causal ALiBi", "cache: rotary, halves of 16 channels, window",
    ),
    "float64": ("dense: causal rows that see no key",),
}  # fmt: skip
PROBLEMS = {
    f"{name}, {dtype}": replace(inputs.PROBLEMS[name], dtype=dtype) for dtype, some in OF_DTYPE.items() for name in some
}


# ---------------------------------------------------------------- everything else

Prepare = Callable[[torch.device], Prepared]


def _normal(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 100 * sum(shape))).to(dtype)


def _several(count: int, *shape: int, dtype: torch.dtype = torch.float16) -> Iterator[Tensor]:
    return (_normal(*shape, dtype=dtype, seed=seed) for seed in range(count))


def _of(function: Callable[..., Any], leaves: dict[str, Tensor], fixed: dict[str, Tensor] | None = None) -> Prepare:
    """Prepare function(**leaves, **fixed), with the gradients of the first result in the leaves."""

    def prepare(device: torch.device) -> Prepared:
        inputs = {name: x.clone().to(device).requires_grad_() for name, x in leaves.items()}
        inputs |= {name: x.clone().to(device) for name, x in (fixed or {}).items()}
        return Prepared(inputs, lambda *tensors: _tuple(function(**dict(zip(inputs, tensors)))), _halves)

    return prepare


def _of_module(make: Callable[[], nn.Module], run: Callable[..., Any], **given: Tensor) -> Prepare:
    """run(module, **given); its parameters, drawn in fp64 for every device alike, count as inputs."""

    def prepare(device: torch.device) -> Prepared:
        module, generator = make().to(device), torch.Generator().manual_seed(0)
        tensors = {name: x.clone().to(device).requires_grad_(x.is_floating_point()) for name, x in given.items()}
        inputs = dict(tensors)
        for name, parameter in module.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * parameter.shape[-1] ** -0.5
            parameter.data.copy_(drawn)
            inputs[f"parameter {name}"] = parameter
        return Prepared(inputs, lambda *_: _tuple(run(module, **tensors)), _halves)

    return prepare


def _tuple(returned: Any) -> tuple[Any, ...]:
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)


def _halves(out: Tensor) -> Tensor:
    return torch.full_like(out, 0.5)


def private(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None, places: Any = (None,) * 3, dropout_p: float = 0.0,
    scale: float = 0.2, causal: bool = True, slopes: Tensor | None = None, return_softmax: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """The dense private functions: the forward's four results, the backward's one, and the places of the gradients.

    The upstream gradient is out unless given. With dropout, the backward draws the forward's mask again.
    """
    options = dropout_p, scale, causal, -1, -1, 0.0, slopes
    out, lse, s_dmask, rng_state = flash_attn_interface._flash_attn_forward(q, k, v, *options, return_softmax)
    upstream = out if dout is None else dout
    softmax_d = flash_attn_interface._flash_attn_backward(
        upstream, q, k, v, out, lse, *places, *options, False, rng_state
    )
    return out, lse, s_dmask, rng_state, softmax_d, *places


def _private(q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None, **options: Any) -> tuple[Tensor, ...]:
    out, lse, _, _, softmax_d, *grads = private(q, k, v, dout, [x.new_empty(x.shape) for x in (q, k, v)], **options)
    return out, lse, softmax_d, *grads


def _private_dropout(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    return _private(q, k, v, dout, dropout_p=0.1, scale=32**-0.5)


def _backward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    with torch.inference_mode(False), torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flash_attn_interface.flash_attn_func(*inputs, causal=True)
        return torch.autograd.grad(out, inputs, torch.ones_like(out))


def _unpadded(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Attend as BERT does: unpad the tokens, attend, pad the output."""
    tokens, indices, cu, longest, used = bert_padding.unpad_input(x, mask)
    heads = tokens.view(-1, 2, 32)
    attended = flash_attn_interface.flash_attn_varlen_func(heads, heads, heads, cu, cu, longest, longest)
    return bert_padding.pad_input(attended.flatten(1), indices, 3, 20), cu, used


def _rotary(x: Tensor, **tables: Tensor) -> Tensor:
    return apply_rotary_emb(x, **tables, max_seqlen=40)


def _layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return dropout_add_layer_norm(x, residual, weight, bias, 0.1, 1e-5, prenorm=True, residual_in_fp32=True)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Any:
    return CrossEntropyLoss(label_smoothing=0.1, lse_square_scale=1e-2, return_z_loss=True)(logits, labels)


def _decoding(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        past = InferenceParams(max_seqlen=16, max_batch_size=2)
        parts = [module(x[:, :4], inference_params=past)]
        past.seqlen_offset = 4
        return torch.cat([*parts, module(x[:, 4:], inference_params=past)], 1)


def _mha(**options: Any) -> nn.Module:
    return MHA(64, 2, causal=True, rotary_emb_dim=16, use_flash_attn=True, dtype=torch.float16, **options)


_DENSE_CALL = dict(zip(("q", "k", "v", "dout"), _several(4, 2, 20, 2, 32)))
_STARTS = torch.tensor([0, 9, 49], dtype=torch.int32)
_ANGLES = torch.rand(60, 8, generator=torch.Generator().manual_seed(0)) * 6
_TABLES = {
    "cos": _ANGLES.cos().half(), "sin": _ANGLES.sin().half(), "cu_seqlens": _STARTS,
    "seqlen_offsets": torch.tensor([2, 11], dtype=torch.int32),
}  # fmt: skip
_WEIGHT, _BIAS = _several(2, 64, dtype=torch.float32)

_QKV = {name: _DENSE_CALL[name] for name in "qkv"}
_HALF: dict[str, Any] = dict(dtype="float16", head_dim=32, causal=True, return_attn_probs=False)

TABLE: dict[str, Call] = {call.name: call for call in (
    of_problem("dense", replace(SQUARE, **_HALF)),
    of_problem("varlen", replace(PACKED, **_HALF, seqlens_q=(3, 5), seqlens_k=(3, 5))),
    of_problem("cache", replace(STEP, **_HALF, seqlens_q=(1, 1), new_keys=1, poison="")),
    Call("private", _of(_private, {}, _QKV), "_flash_attn_forward"),
    Call("backward", _of(_backward, {}, _QKV), "flash_attn_func"),
    *(of_problem(name, problem) for name, problem in PROBLEMS.items()),
    Call("private dense, dropout", _of(_private_dropout, {}, _DENSE_CALL), draws=True),
    Call("out of padding and back", _of(
        _unpadded, {"x": _normal(3, 20, 64)}, {"mask": torch.arange(20) < torch.tensor([[20], [3], [11]])}
    )),
    Call("rotary of packed sequences", _of(_rotary, {"x": _normal(49, 2, 32)}, _TABLES)),
    Call("rotary module", _of_module(  # its tables are made at the first call
        lambda: RotaryEmbedding(16, scale_base=512.0), lambda module, qkv: module(qkv.clone(), seqlen_offset=3),
        qkv=_normal(2, 20, 3, 2, 32),
    )),
    Call("layer norm with dropout", _of(
        _layer_norm, {"x": _normal(4, 20, 64), "weight": _WEIGHT, "bias": _BIAS}, {"residual": _normal(4, 20, 64)}
    ), draws=True),
    Call("RMS norm", _of(
        lambda x, weight: rms_norm_fn(x, weight, None), {"x": _normal(4, 20, 64).bfloat16(), "weight": _WEIGHT}
    )),
    Call("cross entropy", _of(_cross_entropy, {"logits": _normal(20, 77)}, {"labels": torch.arange(20)})),
    Call("activations", _of(
        lambda x, y, bias: swiglu(x, y) + bias_gelu_impl(y, bias),
        {"x": _normal(9, 64), "y": _normal(9, 64, seed=1), "bias": _normal(64)},
    )),
    Call("attention module", _of_module(_mha, lambda module, x: module(x), x=_normal(2, 20, 64)), casts=True),
    Call("attention module decoding", _of_module(
        lambda: _mha(layer_idx=0), _decoding, x=_normal(2, 5, 64)
    ), casts=True),
    Call("inner attention module", _of_module(
        lambda: FlashSelfAttention(causal=True, alibi_slopes=torch.tensor([0.3, 0.7])), lambda module, qkv: module(qkv),
        qkv=_normal(2, 20, 3, 2, 32),
    )),
    Call("embeddings", _of_module(
        lambda: GPT2Embeddings(16, 50, 30), lambda module, tokens: module(tokens), tokens=torch.arange(40).view(2, 20)
    )),
    Call("gated MLP", _of_module(
        lambda: GatedMlp(64, 96, dtype=torch.float16), lambda module, x: module(x), x=_normal(9, 64)
    ), casts=True),
)}  # fmt: skip


# ---------------------------------------------------------------- changes of a function's first call


FIRST = {"flash_attn_func": DENSE, "flash_attn_varlen_func": PACKED, "flash_attn_with_kvcache": STEP}
SCALE, SLOPES = {"softmax_scale": torch.tensor(0.5)}, torch.tensor([0.5, 0.1, 0.3, 0.2])
APART = torch.stack([SLOPES, SLOPES], -1)[:, 0]  # which are copied
CHANGES: dict[str, list[dict[str, Any]]] = {
    "flash_attn_func": [
        SCALE, {"return_attn_probs": False}, {"q": randn(2, 7, 16, 4).transpose(2, 3)},
        {"q": randn(1 + 2 * 7 * 4 * 16)[1:].view(2, 7, 4, 16)}, {"q": torch._neg_view(randn(2, 7, 4, 16))},
        {"alibi_slopes": SLOPES}, {"alibi_slopes": APART},
        {"q": randn(1 + 2 * 7 * 4 * 16)[1:].view(2, 7, 4, 16), "alibi_slopes": APART},
        {"window_size": (1, 1)}, {"window_size": (1.0, 1)}, {"window_size": 3}, {"k": randn(2, 11, 3, 16)},
        {"v": randn(2, 11, 2, 16).double()},
        {"q": None}, {"k": torch.empty(2, 11, 2, 16, device="meta")}, {"alibi_slopes": SLOPES[:3]},
        {"alibi_slopes": SLOPES.double()}, {"softmax_scale": "wide"}, {"dropout_p": 1.5}, {"softmax_scale": [1.0]},
    ],
    "flash_attn_varlen_func": [
        SCALE, {"return_attn_probs": False}, {"cu_seqlens_q": ints(0, 5, 22, 23, 30)},
        {"cu_seqlens_k": ints(0, 11, 13, 43, 52)},
        {"cu_seqlens_q": ints(0, 5, 22, 23, 32).long()}, {"cu_seqlens_k": ints(0, 1, 9, 2, 13, 3, 43, 4, 52)[::2]},
        {"max_seqlen_q": 17.0}, {"cu_seqlens_k": ints(0, 52)}, {"cu_seqlens_q": [0, 5, 22, 23, 32]},
        {"max_seqlen_k": 2**31}, {"max_seqlen_q": 16},
        *({"k": randn(32, 2, 16), "v": randn(32, 2, 16), "cu_seqlens_k": ints(0, n, 22, 23, 32)} for n in (5, 6)),
    ],
    "flash_attn_with_kvcache": [
        SCALE, {"cache_seqlens": ints(29, 0)}, {"cache_seqlens": 7}, {"rotary_interleaved": False},
        *({"k": None, "v": None, "cache_seqlens": length} for length in (None, 0, 7)),
        {"cache_seqlens": 29}, {"k": randn(2, 2, 3, 32).transpose(1, 2)}, {"q": randn(2, 3, 4, 32)[:, :2]},
        {"q": randn(1 + 2 * 3 * 4 * 32)[1:].view(2, 3, 4, 32)}, {"k": randn(1 + 2 * 3 * 2 * 32)[1:].view(2, 3, 2, 32)},
        {"cache_seqlens": ints(4, 30)}, {"cache_seqlens": ints(4, -1)}, {"cache_seqlens": 30}, {"cache_seqlens": 4.0},
        {"cache_seqlens": ints(4, 9).long()}, {"num_splits": 200}, {"rotary_sin": randn(32, 8)}, {"v": None},
        {"k": randn(2, 3, 2, 8)}, {"rotary_cos": randn(19, 8), "rotary_sin": randn(19, 8)}, {"window_size": (1.0, 1)},
        {"v_cache": randn(2, 32, 2, 32).bfloat16()}, {"k": randn(2, 3, 2, 32).double()},
        {"rotary_cos": randn(32, 8), "rotary_sin": randn(32, 8).bfloat16()}, {"cache_leftpad": ints(1, 3).long()},
        {"rotary_cos": randn(32, 16)[:, ::2], "rotary_sin": randn(32, 8)},
        {"rotary_cos": randn(1 + 32 * 8)[1:].view(32, 8), "rotary_sin": randn(32, 8)},
        {"v": torch.empty(2, 3, 2, 32, device="meta")},
    ],
}  # fmt: skip


def changed(call: VerifyCall, change: dict[str, Any]) -> VerifyCall:
    """Return the call with other arguments, and with its upstream gradient if out keeps its shape."""
    lasts = "q" not in change and "return_attn_probs" not in change
    args = {name: _of_dtype(name, x, call.dtype) for name, x in change.items()}
    return VerifyCall(call.fn, call.args | args, call.dout if lasts else None)


def _of_dtype(name: str, x: Any, dtype: torch.dtype) -> Any:
    """Return data in another dtype and as it lies in memory; other arguments stay."""
    if not isinstance(x, Tensor) or x.dtype != torch.float32 or x.is_neg():
        return x
    if name in ("alibi_slopes", "softmax_scale"):
        return x
    memory = x.new_empty(0).set_(x.untyped_storage()).to(dtype)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())
