"""A small call of every feature family, forward and backward: what must not depend on the caller's state.

tests/caller_state.py says what that state is; tests/sanitize.py runs the same calls under compute-sanitizer.
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
from tests import problems
from verify.problems import Problem

Found = dict[str, Tensor]


@dataclass(frozen=True)
class Prepared:
    """A call that is ready: its tensors, and what makes it. `written`: those it must write to, such as caches."""

    inputs: dict[str, Tensor]
    run: Callable[[], Found]
    written: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Row:
    """One call of the table.

    prepare: makes the tensors on a device, in whatever state nobody touched
    draws: it takes random numbers; casts: autocast changes it, as it changes the official one
    """

    name: str
    prepare: Callable[[torch.device], Prepared] = field(repr=False)
    draws: bool = False
    casts: bool = False


def gradients(out: Tensor, inputs: dict[str, Tensor], dout: Tensor) -> Found:
    """By name, where anything wants them: a caller under no_grad gets none."""
    if not out.requires_grad:
        return {}
    leaves = {name: x for name, x in inputs.items() if x.requires_grad}
    return {f"d{n}": g for n, g in zip(leaves, torch.autograd.grad(out, list(leaves.values()), dout), strict=True)}


# ---------------------------------------------------------------- the public functions, described as problems


def attention(problem: Problem) -> Callable[[torch.device], Prepared]:
    def prepare(device: torch.device) -> Prepared:
        call = problem.build(device)
        args = dict(call.args)
        if call.dout is not None:
            for name in {"q", "k", "v", "kv", "qkv"} & args.keys():
                args[name] = args[name].detach().requires_grad_()
        inputs = {name: x for name, x in args.items() if isinstance(x, Tensor)}
        written = frozenset({"k_cache", "v_cache"} & inputs.keys()) if "k" in args else frozenset()

        def run() -> Found:
            returned = getattr(flash_attn_interface, call.fn)(**args)
            returned = returned if isinstance(returned, tuple) else (returned,)
            found = {f"out {i}": x for i, x in enumerate(returned) if x is not None}
            if problem.kind == "private_varlen":
                found.pop("out 3", None)  # rng_state, which is a seed only where there is dropout
            found |= {name: inputs[name].clone() for name in written}
            return found if call.dout is None else found | gradients(returned[0], inputs, call.dout)

        return Prepared(inputs, run, written)

    return prepare


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
    f"{name}, {dtype}": replace(problems.PROBLEMS[name], dtype=dtype)
    for dtype, some in OF_DTYPE.items()
    for name in some
}


# ---------------------------------------------------------------- everything else

Prepare = Callable[[torch.device], Prepared]


def _normal(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 100 * sum(shape))).to(dtype)


def _several(count: int, *shape: int, dtype: torch.dtype = torch.float16) -> Iterator[Tensor]:
    return (_normal(*shape, dtype=dtype, seed=seed) for seed in range(count))


def _of(function: Callable[..., Any], leaves: dict[str, Tensor], fixed: dict[str, Tensor] | None = None) -> Prepare:
    """function(**leaves, **fixed): what it returns, and the gradients of the first result in the leaves."""

    def prepare(device: torch.device) -> Prepared:
        wanted = {name: x.clone().to(device).requires_grad_() for name, x in leaves.items()}
        inputs = wanted | {name: x.clone().to(device) for name, x in (fixed or {}).items()}
        return Prepared(inputs, lambda: _results(function(**inputs), inputs))

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
        return Prepared(inputs, lambda: _results(run(module, **tensors), inputs))

    return prepare


def _results(returned: Any, inputs: dict[str, Tensor]) -> Found:
    results = returned if isinstance(returned, (tuple, list)) else (returned,)
    found = {f"out {i}": x for i, x in enumerate(results) if isinstance(x, Tensor)}
    return found | gradients(results[0], inputs, torch.full_like(results[0], 0.5))


def _private(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """The dense private functions with dropout: the backward draws the forward's mask again."""
    rules = (0.1, 32**-0.5, True, -1, -1, 0.0, None)
    out, lse, _, rng_state = flash_attn_interface._flash_attn_forward(q, k, v, *rules, False)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    flash_attn_interface._flash_attn_backward(dout, q, k, v, out, lse, *grads, *rules, False, rng_state)
    return out, lse, *grads


def _unpadded(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """What BERT does: tokens out of their padding, attention, and back."""
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

TABLE: tuple[Row, ...] = (
    *(Row(name, attention(problem), draws=problem.dropout_p > 0) for name, problem in PROBLEMS.items()),
    Row("private dense, dropout", _of(_private, {}, _DENSE_CALL), draws=True),
    Row("out of padding and back", _of(
        _unpadded, {"x": _normal(3, 20, 64)}, {"mask": torch.arange(20) < torch.tensor([[20], [3], [11]])}
    )),
    Row("rotary of packed sequences", _of(_rotary, {"x": _normal(49, 2, 32)}, _TABLES)),
    Row("rotary module", _of_module(  # its tables are made at the first call
        lambda: RotaryEmbedding(16, scale_base=512.0), lambda module, qkv: module(qkv.clone(), seqlen_offset=3),
        qkv=_normal(2, 20, 3, 2, 32),
    )),
    Row("layer norm with dropout", _of(
        _layer_norm, {"x": _normal(4, 20, 64), "weight": _WEIGHT, "bias": _BIAS}, {"residual": _normal(4, 20, 64)}
    ), draws=True),
    Row("RMS norm", _of(
        lambda x, weight: rms_norm_fn(x, weight, None), {"x": _normal(4, 20, 64).bfloat16(), "weight": _WEIGHT}
    )),
    Row("cross entropy", _of(_cross_entropy, {"logits": _normal(20, 77)}, {"labels": torch.arange(20)})),
    Row("activations", _of(
        lambda x, y, bias: swiglu(x, y) + bias_gelu_impl(y, bias),
        {"x": _normal(9, 64), "y": _normal(9, 64, seed=1), "bias": _normal(64)},
    )),
    Row("attention module", _of_module(_mha, lambda module, x: module(x), x=_normal(2, 20, 64)), casts=True),
    Row("attention module decoding", _of_module(
        lambda: _mha(layer_idx=0), _decoding, x=_normal(2, 5, 64)
    ), casts=True),
    Row("inner attention module", _of_module(
        lambda: FlashSelfAttention(causal=True, alibi_slopes=torch.tensor([0.3, 0.7])), lambda module, qkv: module(qkv),
        qkv=_normal(2, 20, 3, 2, 32),
    )),
    Row("embeddings", _of_module(
        lambda: GPT2Embeddings(16, 50, 30), lambda module, tokens: module(tokens), tokens=torch.arange(40).view(2, 20)
    )),
    Row("gated MLP", _of_module(
        lambda: GatedMlp(64, 96, dtype=torch.float16), lambda module, x: module(x), x=_normal(9, 64)
    ), casts=True),
)  # fmt: skip
