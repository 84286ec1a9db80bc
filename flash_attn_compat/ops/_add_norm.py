"""Dropout, add and normalise in one differentiable step: the arithmetic behind every norm of `ops`.

    h = drop(x * rowscale * colscale) + drop1(x1) + residual
    y = norm(h) * weight + bias,   y1 = norm(h) * weight1 + bias1

in fp32 (fp64 if an operand is fp64), from the unrounded h. The backward recomputes h from the inputs, so
nothing of fp32 size is kept. Public signatures and return shapes stay with the modules that mirror flash_attn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_attn_compat.ops._casting import cast


@dataclass(frozen=True)
class NormOptions:
    """The options of `add_norm`. residual_dtype: the dtype in which h is returned; None to leave h out"""

    eps: float
    is_rms_norm: bool
    out_dtype: torch.dtype
    residual_dtype: torch.dtype | None = None
    dropout_p: float = 0.0
    zero_centered_weight: bool = False


class NormInputs(NamedTuple):
    """Every tensor of the formula; (..., n) except rowscale (...), colscale, weights and biases (n,)."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    x1: Tensor | None = None
    weight1: Tensor | None = None
    bias1: Tensor | None = None
    rowscale: Tensor | None = None
    colscale: Tensor | None = None
    mask: Tensor | None = None
    mask1: Tensor | None = None


def add_norm(inputs: NormInputs, options: NormOptions) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (y, y1, h), differentiable in every floating input, by the formula at the top of this module.

    y1 is None without weight1, h is None without residual_dtype.
    """
    _check(inputs)
    added_to_x = (inputs.residual, inputs.x1, inputs.rowscale, inputs.colscale, inputs.mask)
    if options.residual_dtype == inputs.x.dtype and all(t is None for t in added_to_x):
        y, y1, _ = add_norm(inputs, replace(options, residual_dtype=None))
        return y, y1, inputs.x
    # No None among the results: torch 2.11's compiler mixes up the gradients around a None.
    outputs = iter(_AddNorm.apply(options, *inputs))
    y = next(outputs)
    y1 = None if inputs.weight1 is None else next(outputs)
    return y, y1, None if options.residual_dtype is None else next(outputs)


def dropout_mask(x: Tensor, dropout_p: float) -> Tensor | None:
    """Return a bool mask of x's shape, True with probability 1 - dropout_p, drawn from torch's default generator."""
    if dropout_p <= 0.0:
        return None
    return torch.rand(x.shape, device=x.device, dtype=torch.float32) >= dropout_p


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: NormOptions, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        inputs = NormInputs(*tensors)  # type: ignore[arg-type]  # x and weight are not None
        h = _add(inputs, options)
        normed, _ = _normalise(h, options)
        outputs = [_affine(normed, inputs.weight, inputs.bias, options)]
        if inputs.weight1 is not None:
            outputs.append(_affine(normed, inputs.weight1, inputs.bias1, options))
        if options.residual_dtype is not None:
            outputs.append(cast(h, options.residual_dtype))
        ctx.options = options
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        options: NormOptions = ctx.options
        inputs = NormInputs(*ctx.saved_tensors)
        dy = grads[0]
        dy1 = None if inputs.weight1 is None else grads[1]
        dh_out = None if options.residual_dtype is None else grads[-1]
        normed, rstd = _normalise(_add(inputs, options), options)

        weight_grads: list[Tensor | None] = []
        dnormed: Tensor | None = None
        for grad, weight, bias in ((dy, inputs.weight, inputs.bias), (dy1, inputs.weight1, inputs.bias1)):
            if grad is None or weight is None:
                weight_grads += [None, None]
                continue
            grad = grad.to(normed.dtype)
            through = grad * _full_weight(weight, grad.dtype, options)
            dnormed = through if dnormed is None else dnormed + through
            weight_grads.append(_sum_rows(grad * normed).to(weight.dtype))
            weight_grads.append(None if bias is None else _sum_rows(grad).to(bias.dtype))
        dweight, dbias, dweight1, dbias1 = weight_grads

        if dnormed is None:
            dh = torch.zeros_like(normed)
        else:
            along = (dnormed * normed).mean(dim=-1, keepdim=True)
            offset = 0.0 if options.is_rms_norm else dnormed.mean(dim=-1, keepdim=True)
            # In place, since normed is not needed any more.
            dh = normed.mul_(-along).add_(dnormed).sub_(offset).mul_(rstd)
        if dh_out is not None:
            dh.add_(dh_out)
        dx, drowscale, dcolscale = _scale_backward(dh, inputs, options, ctx.needs_input_grad)
        dresidual = None if inputs.residual is None else dh.to(inputs.residual.dtype)
        dx1 = None if inputs.x1 is None else _drop(dh, inputs.mask1, options).to(inputs.x1.dtype)
        # In the order of options and NormInputs; the two masks have no gradient.
        return None, dx, dweight, dbias, dresidual, dx1, dweight1, dbias1, drowscale, dcolscale, None, None


def _add(inputs: NormInputs, options: NormOptions) -> Tensor:
    tensors = [inputs.x, *(t for t in (inputs.x1, inputs.residual) if t is not None)]
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    h = _drop(_scale(inputs.x.to(dtype), inputs), inputs.mask, options)
    if inputs.x1 is not None:
        h = h + _drop(inputs.x1.to(dtype), inputs.mask1, options)
    if inputs.residual is not None:
        h = h + inputs.residual
    return h


def _scale(x: Tensor, inputs: NormInputs) -> Tensor:
    if inputs.rowscale is not None:
        x = x * inputs.rowscale[..., None].to(x.dtype)
    if inputs.colscale is not None:
        x = x * inputs.colscale.to(x.dtype)
    return x


def _drop(x: Tensor, mask: Tensor | None, options: NormOptions) -> Tensor:
    if mask is None:
        return x
    # p >= 1 drops everything; 1 / (1 - p) must not turn that into nan.
    scale = 1.0 / (1.0 - options.dropout_p) if options.dropout_p < 1.0 else 0.0
    return torch.where(mask, x * scale, 0.0)


def _normalise(h: Tensor, options: NormOptions) -> tuple[Tensor, Tensor]:
    if options.is_rms_norm:
        rstd = torch.rsqrt(h.square().mean(dim=-1, keepdim=True) + options.eps)
        return h * rstd, rstd
    centred = h - h.mean(dim=-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + options.eps)
    return centred * rstd, rstd


def _full_weight(weight: Tensor, dtype: torch.dtype, options: NormOptions) -> Tensor:
    weight = weight.to(dtype)
    return weight + 1.0 if options.zero_centered_weight else weight


def _affine(normed: Tensor, weight: Tensor, bias: Tensor | None, options: NormOptions) -> Tensor:
    y = normed * _full_weight(weight, normed.dtype, options)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return cast(y, options.out_dtype)


def _scale_backward(
    dh: Tensor, inputs: NormInputs, options: NormOptions, needs_input_grad: tuple[bool, ...]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, rowscale and colscale from the gradient of drop(x * rowscale * colscale)."""
    dscaled = _drop(dh, inputs.mask, options)
    needed = dict(zip(NormInputs._fields, needs_input_grad[1:]))
    drowscale = dcolscale = None
    if inputs.rowscale is not None and needed["rowscale"]:
        without = _scale(inputs.x.to(dh.dtype), inputs._replace(rowscale=None))
        drowscale = (dscaled * without).sum(dim=-1).to(inputs.rowscale.dtype)
    if inputs.colscale is not None and needed["colscale"]:
        without = _scale(inputs.x.to(dh.dtype), inputs._replace(colscale=None))
        dcolscale = _sum_rows(dscaled * without).to(inputs.colscale.dtype)
    return _scale(dscaled, inputs).to(inputs.x.dtype), drowscale, dcolscale


def _sum_rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1]).sum(dim=0)


def _check(inputs: NormInputs) -> None:
    shape, features = tuple(inputs.x.shape), inputs.x.shape[-1]
    for name in ("residual", "x1", "mask", "mask1"):
        tensor = getattr(inputs, name)
        assert tensor is None or tuple(tensor.shape) == shape, (
            f"x has shape {shape}, {name} has shape {tuple(tensor.shape)}, expected {name} of shape {shape}"
        )
    for name in ("weight", "bias", "weight1", "bias1", "colscale"):
        tensor = getattr(inputs, name)
        assert tensor is None or tuple(tensor.shape) == (features,), (
            f"x has shape {shape}, {name} has shape {tuple(tensor.shape)}, expected {name} of shape ({features},)"
        )
    assert inputs.rowscale is None or tuple(inputs.rowscale.shape) == shape[:-1], (
        f"x has shape {shape}, rowscale has shape {tuple(inputs.rowscale.shape)}, "
        f"expected rowscale of shape {shape[:-1]}"
    )
