"""A small call of every feature family, forward and backward: what must not depend on the caller's state.

tests/caller_state.py says what that state is; tests/sanitize.py runs the same calls under compute-sanitizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flash_attn_compat import bert_padding, flash_attn_2_cuda, flash_attn_interface
from flash_attn_compat.layers.rotary import RotaryEmbedding, apply_rotary_emb
from flash_attn_compat.losses.cross_entropy import CrossEntropyLoss
from flash_attn_compat.modules.embedding import GPT2Embeddings
from flash_attn_compat.modules.mha import MHA, FlashSelfAttention
from flash_attn_compat.modules.mlp import GatedMlp
from flash_attn_compat.ops.activations import bias_gelu_impl, swiglu
from flash_attn_compat.ops.layer_norm import dropout_add_layer_norm
from flash_attn_compat.ops.triton.layer_norm import rms_norm_fn
from flash_attn_compat.utils.generation import InferenceParams
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
            if problem.gap != (0, 0):
                first, *_, last = args["cu_seqlens_q"].tolist()
                found["out 1"] = found["out 1"][:, first:last]  # flash-attn's own has -inf outside, we have 0
            if problem.kind == "private_varlen":
                found.pop("out 3", None)  # rng_state, which is a seed only where there is dropout
            found |= {name: inputs[name].clone() for name in written}
            return found if call.dout is None else found | gradients(returned[0], inputs, call.dout)

        return Prepared(inputs, run, written)

    return prepare


_DENSE: dict[str, Any] = dict(seqlens_q=(33, 33), seqlens_k=(47, 47), nheads_k=2, head_dim=32)
_PACKED: dict[str, Any] = dict(kind="varlen", seqlens_q=(9, 0, 40), seqlens_k=(20, 7, 40), nheads_k=2, head_dim=32)
_EVEN: dict[str, Any] = dict(seqlens_q=(16, 30), seqlens_k=(16, 30), head_dim=32, nheads_k=2)
_CACHE: dict[str, Any] = dict(
    kind="kvcache", seqlens_q=(1, 1), seqlens_k=(50, 7), capacity=64, nheads_k=2, group=2, head_dim=64, causal=True
)
_HALF = "float16"

PROBLEMS: dict[str, Problem] = {
    "dense causal GQA": Problem(**_DENSE, group=2, causal=True, dtype=_HALF),
    "dense bf16": Problem(**_DENSE, dtype="bfloat16"),
    "dense fp32 window on both sides": Problem(**_DENSE, window=(9, 4)),
    "dense window on both sides": Problem(**_DENSE, window=(9, 4), dtype=_HALF),
    "dense causal window": Problem(**_DENSE, window=(9, 0), causal=True, dtype="bfloat16"),
    "dense softcap": Problem(**_DENSE, softcap=5.0, dtype=_HALF),
    "dense fp32 softcap": Problem(**_DENSE, softcap=5.0, causal=True),
    "dense ALiBi": Problem(**_DENSE, alibi="bh", dtype=_HALF),
    "dense causal ALiBi": Problem(**_DENSE, alibi="h", causal=True, dtype="bfloat16"),
    "dense dropout": Problem(**_DENSE, dropout_p=0.17, dtype=_HALF),
    "dense fp32 dropout": Problem(**_DENSE, dropout_p=0.5, alibi="h"),
    "dense deterministic": Problem(**_DENSE, deterministic=True, group=2, dtype=_HALF),
    "dense fp64": Problem(**_DENSE, dtype="float64", causal=True),
    "dense odd head_dim": Problem(**_DENSE | {"head_dim": 13}, head_dim_v=24, dtype=_HALF),
    "keys and values in one": Problem("kvpacked", **_DENSE, window=(-1, 3), dtype=_HALF),
    "all in one": Problem("qkvpacked", **_EVEN | {"seqlens_q": (30, 30), "seqlens_k": (30, 30)}, dtype="bfloat16"),
    "packed causal": Problem(**_PACKED, group=2, causal=True, dtype=_HALF),
    "packed window on both sides": Problem(**_PACKED, window=(5, 3), dtype=_HALF),
    "packed fp32 softcap": Problem(**_PACKED, softcap=5.0),
    "packed with tokens outside": Problem(**_PACKED, gap=(3, 2), poison="nan", dtype="bfloat16"),
    "packed ALiBi dropout": Problem(**_PACKED, alibi="h", dropout_p=0.1, causal=True, dtype=_HALF),
    "packed equal lengths causal window": Problem("varlen", **_EVEN, causal=True, window=(7, 0), dtype=_HALF),
    "packed keys and values in one": Problem("varlen_kvpacked", **_EVEN, causal=True, dtype=_HALF),
    "packed all in one": Problem("varlen_qkvpacked", **_EVEN, alibi="h", dtype="bfloat16"),
    "packed pages": Problem(**_PACKED | {"kind": "paged"}, page_size=16, causal=True, dtype=_HALF),
    "private packed forward": Problem(**_PACKED | {"kind": "private_varlen"}, seqused=(11, 7, 33), dtype=_HALF),
    "cache": Problem(**_CACHE, dtype=_HALF),
    "cache of an int length": Problem(**_CACHE | {"seqlens_k": (50, 50)}, lengths_as="int", dtype="bfloat16"),
    "cache append rotary": Problem(**_CACHE, new_keys=1, rotary_dim=32, dtype=_HALF),
    "cache append rotary halves fp32": Problem(
        **_CACHE | {"seqlens_q": (3, 3)}, new_keys=3, rotary_dim=64, rotary_interleaved=False
    ),
    "cache pages append": Problem(**_CACHE, page_size=16, new_keys=1, poison="nan", dtype="bfloat16"),
    "cache ALiBi window splits leftpad": Problem(
        **_CACHE, alibi="bh", window=(20, 0), num_splits=3, leftpad=(3, 0), dtype=_HALF
    ),
}


# ---------------------------------------------------------------- everything else


def _normal(device: torch.device, *shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 100 * sum(shape))
    return torch.randn(shape, generator=generator).to(device, dtype)


def _of(device: torch.device, *values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device)


def _private(device: torch.device) -> Prepared:
    """The dense private functions with dropout: the backward draws the forward's mask again."""
    q, k, v, dout = (_normal(device, 2, 20, 2, 32, seed=i) for i in range(4))
    inputs = {"q": q, "k": k, "v": v, "dout": dout}

    def run() -> Found:
        rules = (0.1, 32**-0.5, True, -1, -1, 0.0, None)
        out, lse, _, rng_state = flash_attn_interface._flash_attn_forward(q, k, v, *rules, False)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        flash_attn_interface._flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, *rules, False, rng_state)
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}

    return Prepared(inputs, run)


def _private_packed(device: torch.device) -> Prepared:
    q, k, v, dout = (_normal(device, 49, 2, 32, seed=i) for i in range(4))
    cu = _of(device, 0, 9, 49)

    def run() -> Found:
        where, rules = (cu, cu, 40, 40), (0.0, 32**-0.5, True, 7, 0, 0.0, None)
        out, lse, *_ = flash_attn_interface._flash_attn_varlen_forward(q, k, v, *where, *rules)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        flash_attn_interface._flash_attn_varlen_backward(dout, q, k, v, out, lse, dq, dk, dv, *where, *rules, False)
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}

    return Prepared({"q": q, "k": k, "v": v, "dout": dout, "cu_seqlens": cu}, run)


def _raw_module(device: torch.device) -> Prepared:
    q, k, v, dout = (_normal(device, 2, 20, 2, 32, seed=i, dtype=torch.bfloat16) for i in range(4))

    def run() -> Found:
        rules = (0.0, 32**-0.5, False, 4, 4, 0.0)
        out, lse, *_ = flash_attn_2_cuda.fwd(q, k, v, None, None, *rules, False, None)
        grads = flash_attn_2_cuda.bwd(dout, q, k, v, out, lse, None, None, None, None, *rules, False, None, None)
        return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads[:3], strict=True))}

    return Prepared({"q": q, "k": k, "v": v, "dout": dout}, run)


def _unpadded(device: torch.device) -> Prepared:
    """What BERT does: tokens out of their padding, attention, and back."""
    x, dout = (_normal(device, 3, 20, 64, seed=i) for i in range(2))
    mask = (torch.arange(20)[None, :] < torch.tensor([[20], [3], [11]])).to(device)
    inputs = {"x": x.requires_grad_(), "mask": mask, "dout": dout}

    def run() -> Found:
        tokens, indices, cu, longest, used = bert_padding.unpad_input(x, mask)
        heads = tokens.view(-1, 2, 32)
        attended = flash_attn_interface.flash_attn_varlen_func(heads, heads, heads, cu, cu, longest, longest)
        out = bert_padding.pad_input(attended.flatten(1), indices, 3, 20)
        return {"out": out, "cu": cu, "used": used, **gradients(out, inputs, dout)}

    return Prepared(inputs, run)


def _rotary(device: torch.device) -> Prepared:
    x, dout = (_normal(device, 49, 2, 32, seed=i) for i in range(2))
    angles = torch.rand(60, 8, generator=torch.Generator().manual_seed(0)) * 6
    inputs = {
        "x": x.requires_grad_(), "dout": dout, "cos": angles.cos().half().to(device), "cu": _of(device, 0, 9, 49),
        "sin": angles.sin().half().to(device), "offsets": _of(device, 2, 11),
    }  # fmt: skip

    def run() -> Found:
        out = apply_rotary_emb(
            x, inputs["cos"], inputs["sin"], seqlen_offsets=inputs["offsets"], cu_seqlens=inputs["cu"], max_seqlen=40
        )
        return {"out": out, **gradients(out, inputs, dout)}

    return Prepared(inputs, run)


def _rotary_module(device: torch.device) -> Prepared:
    """Its tables are made at the first call."""
    rotary = RotaryEmbedding(16, scale_base=512.0, device=device)
    qkv = _normal(device, 2, 20, 3, 2, 32)

    def run() -> Found:
        return {"out": rotary(qkv.clone(), seqlen_offset=3)}

    return Prepared({"qkv": qkv}, run)


def _layer_norm(device: torch.device) -> Prepared:
    x, residual, dout = (_normal(device, 4, 20, 64, seed=i) for i in range(3))
    weight, bias = (_normal(device, 64, seed=i, dtype=torch.float32).requires_grad_() for i in range(2))
    inputs = {"x": x.requires_grad_(), "residual": residual, "weight": weight, "bias": bias, "dout": dout}

    def run() -> Found:
        out, total = dropout_add_layer_norm(x, residual, weight, bias, 0.1, 1e-5, prenorm=True, residual_in_fp32=True)
        return {"out": out, "total": total, **gradients(out, inputs, dout)}

    return Prepared(inputs, run)


def _rms_norm(device: torch.device) -> Prepared:
    x, dout = (_normal(device, 4, 20, 64, seed=i, dtype=torch.bfloat16) for i in range(2))
    weight = _normal(device, 64, dtype=torch.float32).requires_grad_()
    inputs = {"x": x.requires_grad_(), "weight": weight, "dout": dout}

    def run() -> Found:
        out = rms_norm_fn(x, weight, None, prenorm=False)
        return {"out": out, **gradients(out, inputs, dout)}

    return Prepared(inputs, run)


def _cross_entropy(device: torch.device) -> Prepared:
    logits = _normal(device, 20, 77).requires_grad_()
    labels = torch.arange(20).to(device)
    inputs = {"logits": logits, "labels": labels}

    def run() -> Found:
        loss, z = CrossEntropyLoss(label_smoothing=0.1, lse_square_scale=1e-2, return_z_loss=True)(logits, labels)
        return {"loss": loss, "z": z, **gradients(loss, inputs, torch.ones_like(loss))}

    return Prepared(inputs, run)


def _activations(device: torch.device) -> Prepared:
    x, y, bias, dout = (_normal(device, *shape, seed=i) for i, shape in enumerate(((9, 64), (9, 64), (64,), (9, 64))))
    inputs = {"x": x.requires_grad_(), "y": y.requires_grad_(), "bias": bias.requires_grad_(), "dout": dout}

    def run() -> Found:
        out = swiglu(x, y) + bias_gelu_impl(y, bias)
        return {"out": out, **gradients(out, inputs, dout)}

    return Prepared(inputs, run)


def _of_module(
    module: nn.Module, inputs: dict[str, Tensor], run: Callable[[], Tensor], device: torch.device
) -> Prepared:
    """Its parameters, drawn in fp64 for every device alike, count as inputs."""
    module.to(device)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * parameter.shape[-1] ** -0.5
        parameter.data.copy_(drawn)
        inputs[f"parameter {name}"] = parameter

    def both() -> Found:
        out = run()
        return {"out": out, **gradients(out, inputs, torch.ones_like(out))}

    return Prepared(inputs, both)


def _mha(device: torch.device) -> Prepared:
    x = _normal(device, 2, 20, 64).requires_grad_()
    module = MHA(64, 2, causal=True, rotary_emb_dim=16, use_flash_attn=True, dtype=torch.float16)
    return _of_module(module, {"x": x}, lambda: module(x), device)


def _mha_decoding(device: torch.device) -> Prepared:
    x = _normal(device, 2, 5, 64)
    module = MHA(64, 2, causal=True, rotary_emb_dim=16, use_flash_attn=True, dtype=torch.float16, layer_idx=0)

    def run() -> Tensor:
        with torch.no_grad():
            past = InferenceParams(max_seqlen=16, max_batch_size=2)
            parts = [module(x[:, :4], inference_params=past)]
            past.seqlen_offset = 4
            return torch.cat([*parts, module(x[:, 4:], inference_params=past)], 1)

    return _of_module(module, {"x": x}, run, device)


def _flash_self_attention(device: torch.device) -> Prepared:
    qkv = _normal(device, 2, 20, 3, 2, 32).requires_grad_()
    slopes = _normal(device, 2, dtype=torch.float32).abs()
    module = FlashSelfAttention(causal=True, alibi_slopes=slopes)
    return _of_module(module, {"qkv": qkv, "slopes": slopes}, lambda: module(qkv), device)


def _embeddings(device: torch.device) -> Prepared:
    tokens = torch.arange(40).view(2, 20).to(device)
    module = GPT2Embeddings(16, 50, 30)
    return _of_module(module, {"tokens": tokens}, lambda: module(tokens), device)


def _gated_mlp(device: torch.device) -> Prepared:
    x = _normal(device, 9, 64).requires_grad_()
    module = GatedMlp(64, 96, dtype=torch.float16)
    return _of_module(module, {"x": x}, lambda: module(x), device)


TABLE: tuple[Row, ...] = (
    *(Row(name, attention(problem), draws=problem.dropout_p > 0) for name, problem in PROBLEMS.items()),
    Row("private dense, dropout", _private, draws=True),
    Row("private packed", _private_packed),
    Row("raw module", _raw_module),
    Row("out of padding and back", _unpadded),
    Row("rotary of packed sequences", _rotary),
    Row("rotary module", _rotary_module),
    Row("layer norm with dropout", _layer_norm, draws=True),
    Row("RMS norm", _rms_norm),
    Row("cross entropy", _cross_entropy),
    Row("activations", _activations),
    Row("attention module", _mha, casts=True),
    Row("attention module decoding", _mha_decoding, casts=True),
    Row("inner attention module", _flash_self_attention),
    Row("embeddings", _embeddings),
    Row("gated MLP", _gated_mlp, casts=True),
)
