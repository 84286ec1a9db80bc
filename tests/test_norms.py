"""Fused norms (both families) against fp64: values, dtypes, gradients, masks and return shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.ops import layer_norm as ln
from flash_attn_compat.ops import rms_norm as rn
from flash_attn_compat.ops.triton.layer_norm import (
    RMSNorm,
    layer_norm_fn,
    layer_norm_linear_fn,
    layer_norm_ref,
    rms_norm_fn,
    rms_norm_ref,
)
from tests.plain import check_function

B, S, D = 2, 5, 24
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def norm64(h: Tensor, weight: Tensor, bias: Tensor | None, rms: bool, eps: float = EPS) -> Tensor:
    if not rms:
        return F.layer_norm(h, h.shape[-1:], weight, bias, eps)
    y = h / torch.sqrt(h.pow(2).mean(-1, keepdim=True) + eps) * weight
    return y if bias is None else y + bias


def tensors(dtype: torch.dtype, **present: bool) -> dict[str, Tensor]:
    """x and weight, and whichever of the others is asked for."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "x": ((B, S, D), dtype),
        "weight": ((D,), torch.float32),
        "bias": ((D,), torch.float32),
        "residual": ((B, S, D), torch.float32),
        "x1": ((B, S, D), dtype),
        "weight1": ((D,), torch.float32),
        "bias1": ((D,), torch.float32),
        "rowscale": ((B, S), dtype),
    }
    wanted = {"x": True, "weight": True} | present
    return {
        name: randn(*shape, dtype=kind, seed=seed)
        for seed, (name, (shape, kind)) in enumerate(shapes.items())
        if wanted.get(name)
    }


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    atol = max(1e-5, eps * expected.abs().max().item())
    torch.testing.assert_close(actual.double(), expected.double(), rtol=2 * eps, atol=atol)


COMBINATIONS: list[dict[str, bool]] = [
    {"bias": True},
    {},
    {"bias": True, "residual": True},
    {"residual": True, "rowscale": True},
    {"bias": True, "residual": True, "x1": True, "weight1": True, "bias1": True},
    {"x1": True, "weight1": True},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("present", COMBINATIONS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_values_and_gradients_agree_with_fp64(
    dtype: torch.dtype, rms: bool, present: dict[str, bool], dropout_p: float
) -> None:
    given = {name: t.requires_grad_() for name, t in tensors(dtype, **present).items()}
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    function = rms_norm_fn if rms else layer_norm_fn
    given.setdefault("bias", None)  # type: ignore[arg-type]
    torch.manual_seed(3)
    results = function(
        **given, eps=EPS, dropout_p=dropout_p, prenorm=True, return_dropout_mask=True, zero_centered_weight=True
    )
    assert isinstance(results, tuple)
    *outputs, mask, mask1 = results

    scale = 1 / (1 - dropout_p)
    h = exact["x"] * (exact["rowscale"][..., None] if "rowscale" in exact else 1.0)
    h = h if mask is None else h * mask * scale
    if "x1" in exact:
        h = h + (exact["x1"] if mask1 is None else exact["x1"] * mask1 * scale)
    h = h + exact.get("residual", 0.0)
    expected = [norm64(h, exact["weight"] + 1, exact.get("bias"), rms)]
    if "weight1" in exact:
        expected.append(norm64(h, exact["weight1"] + 1, exact.get("bias1"), rms))
    expected.append(h)

    assert (mask is None) == (dropout_p == 0) and (mask1 is None) == (dropout_p == 0 or "x1" not in exact)
    assert [t.dtype for t in outputs] == [dtype] * (len(expected) - 1) + [
        torch.float32 if "residual" in exact else dtype
    ]
    for actual, wanted in zip(outputs, expected, strict=True):
        close(actual, wanted, actual.dtype)
    upstream = [randn(*t.shape, seed=20 + i, dtype=t.dtype) for i, t in enumerate(outputs)]
    torch.autograd.backward(outputs, upstream)
    torch.autograd.backward(expected, [t.double() for t in upstream])
    for name, wanted in exact.items():
        assert given[name].grad is not None, name
        close(given[name].grad, wanted.grad, given[name].dtype)


@pytest.mark.parametrize("rms", [False, True])
def test_gradients_match_finite_differences(rms: bool) -> None:
    given = tensors(torch.float64, bias=True, residual=True, x1=True, weight1=True, bias1=True)
    names = list(given)
    small = (t[:1, :2] if t.ndim == 3 else t for t in given.values())
    leaves = tuple(t.double().clone().requires_grad_() for t in small)
    function = rms_norm_fn if rms else layer_norm_fn
    assert torch.autograd.gradcheck(
        lambda *args: function(**dict(zip(names, args, strict=True)), prenorm=True), leaves, atol=1e-6
    )


def test_half_outputs_are_rounded_once_from_the_unrounded_sum() -> None:
    x, residual, weight = randn(64, D, dtype=torch.bfloat16), randn(64, D, seed=1, dtype=torch.bfloat16), torch.ones(D)
    expected = norm64(x.double() + residual.double(), weight.double(), None, rms=False, eps=1e-6).to(torch.bfloat16)
    y, h = layer_norm_fn(x, weight, None, residual=residual, prenorm=True)
    from_rounded = layer_norm_fn(h, weight, None)
    assert isinstance(y, Tensor) and isinstance(from_rounded, Tensor)
    assert (y != expected).float().mean() < 0.01 < (from_rounded != expected).float().mean()


@pytest.mark.parametrize(
    ("residual_dtype", "residual_in_fp32", "expected"),
    [
        (None, False, torch.bfloat16),
        (None, True, torch.float32),
        (torch.bfloat16, True, torch.bfloat16),
        (torch.float32, False, torch.float32),
    ],
)
def test_the_residual_keeps_its_dtype(
    residual_dtype: torch.dtype | None, residual_in_fp32: bool, expected: torch.dtype
) -> None:
    x, weight = randn(3, D, dtype=torch.bfloat16), torch.ones(D)
    residual = None if residual_dtype is None else randn(3, D, seed=1, dtype=residual_dtype)
    for y, h in (
        layer_norm_fn(x, weight, None, residual=residual, prenorm=True, residual_in_fp32=residual_in_fp32),
        ln.dropout_add_layer_norm(x, residual, weight, None, 0.0, EPS, None, None, True, residual_in_fp32),
    ):
        assert isinstance(y, Tensor) and isinstance(h, Tensor)
        assert y.dtype == torch.bfloat16 and h.dtype == expected


def test_with_nothing_added_the_returned_residual_is_x_itself() -> None:
    x = randn(3, D)
    assert layer_norm_fn(x, torch.ones(D), None, prenorm=True)[1] is x


def test_the_number_of_results_follows_the_flags() -> None:
    x, weight = randn(3, D), torch.ones(D)
    assert isinstance(layer_norm_fn(x, weight, None), Tensor)
    assert len(layer_norm_fn(x, weight, None, prenorm=True)) == 2
    assert len(layer_norm_fn(x, weight, None, weight1=weight)) == 2
    assert len(layer_norm_fn(x, weight, None, weight1=weight, prenorm=True)) == 3
    _, mask, mask1 = layer_norm_fn(x, weight, None, return_dropout_mask=True)
    assert mask is None and mask1 is None
    five = layer_norm_fn(x, weight, None, None, x, weight, None, dropout_p=0.5, prenorm=True, return_dropout_mask=True)
    assert [t.dtype for t in five[3:]] == [torch.bool, torch.bool] and not torch.equal(five[3], five[4])


def test_out_and_out_dtype_decide_where_and_how_results_are_stored() -> None:
    x, weight = randn(3, D, dtype=torch.bfloat16).requires_grad_(), torch.ones(D)
    out, residual_out = torch.empty(3, D), torch.empty(3, D)
    y, h = rms_norm_fn(
        x, weight, None, residual=x.detach(), prenorm=True, out_dtype=torch.float32, out=out, residual_out=residual_out
    )
    assert y is out and h is residual_out
    expected = norm64(2 * x.detach().double(), weight.double(), None, rms=True, eps=1e-6)
    torch.testing.assert_close(out.detach().double(), expected, rtol=1e-5, atol=1e-6)
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16


def test_dropout_keeps_the_stated_share_and_follows_the_seed() -> None:
    x, weight = torch.ones(200, 100), torch.ones(100)
    torch.manual_seed(0)
    _, h, mask, _ = layer_norm_fn(x, weight, None, dropout_p=0.25, prenorm=True, return_dropout_mask=True)
    torch.manual_seed(0)
    again = layer_norm_fn(x, weight, None, dropout_p=0.25, return_dropout_mask=True)[1]
    assert mask is not None and h is not None and again is not None
    assert torch.equal(mask, again) and abs(mask.float().mean().item() - 0.75) < 0.01
    torch.testing.assert_close(h, mask / 0.75)


def test_dropping_everything_leaves_the_bias() -> None:
    x, bias = randn(3, D).requires_grad_(), randn(D, seed=1)
    y = layer_norm_fn(x, torch.ones(D), bias, dropout_p=1.0)
    assert isinstance(y, Tensor) and torch.equal(y.detach(), bias.expand(3, D))
    y.sum().backward()
    assert x.grad is not None and x.grad.abs().sum() == 0


def test_shapes_that_do_not_fit_are_named() -> None:
    x, weight = randn(3, D), torch.ones(D)
    with pytest.raises(AssertionError, match=r"residual has shape \(2, 24\)"):
        layer_norm_fn(x, weight, None, residual=randn(2, D))
    with pytest.raises(AssertionError, match=r"weight has shape \(23,\)"):
        layer_norm_fn(x, weight[1:], None)
    with pytest.raises(AssertionError, match="rowscale is not supported with parallel LayerNorm"):
        layer_norm_fn(x, weight, None, x1=x, rowscale=torch.ones(3))


@pytest.mark.parametrize("rms", [False, True])
def test_the_reference_functions_agree_with_the_fused_ones(rms: bool) -> None:
    given = tensors(torch.bfloat16, bias=True, residual=True, x1=True, weight1=True, bias1=True)
    fused, ref = (rms_norm_fn, rms_norm_ref) if rms else (layer_norm_fn, layer_norm_ref)
    torch.manual_seed(0)
    *outputs, mask, mask1 = fused(**given, dropout_p=0.2, prenorm=True, return_dropout_mask=True)
    expected = ref(**given, dropout_p=0.2, prenorm=True, dropout_mask=mask, dropout_mask1=mask1, upcast=True)
    for actual, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(actual.to(wanted.dtype), wanted, rtol=1e-2, atol=1e-3)
    plain = ref(given["x"].float(), given["weight"], None)
    torch.testing.assert_close(fused(given["x"].float(), given["weight"], None), plain)


@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("prenorm", [False, True])
def test_norm_then_linear(rms: bool, prenorm: bool) -> None:
    x, residual = randn(B, S, D).requires_grad_(), randn(B, S, D, seed=1)
    weight, bias, matrix, offset = randn(D, seed=2), randn(D, seed=3), randn(7, D, seed=4), randn(7, seed=5)
    result = layer_norm_linear_fn(x, weight, bias, matrix, offset, residual, EPS, prenorm, is_rms_norm=rms)
    h = x.detach().double() + residual.double()
    expected = F.linear(norm64(h, weight.double(), bias.double(), rms), matrix.double(), offset.double())
    out = result[0] if prenorm else result
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
    if prenorm:
        torch.testing.assert_close(result[1].double(), h)
    out.sum().backward()
    assert x.grad is not None


def test_the_triton_rms_norm_module_drops_only_in_training() -> None:
    module = RMSNorm(D, dropout_p=0.5, zero_centered_weight=True)
    x = randn(3, D)
    expected = norm64(x.double(), torch.ones(D).double(), None, rms=True)
    assert module.eps == 1e-5 and module.bias is None and module.weight.abs().sum() == 0
    module.eval()
    torch.testing.assert_close(module(x).double(), expected, rtol=1e-5, atol=1e-6)
    module.train()
    assert (module(x) == 0).any()


# The dropout_layer_norm family


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_dropout_add_norm_agrees_with_fp64(dtype: torch.dtype, rms: bool, dropout_p: float) -> None:
    names = ("x0", "residual", "weight", "bias", "rowscale", "layerscale")
    shapes = ((B, S, D), (B, S, D), (D,), (D,), (B, S), (D,))
    kinds = (dtype, torch.float32, torch.float32, torch.float32, dtype, torch.float32)
    given = {
        name: randn(*shape, dtype=kind, seed=i).requires_grad_()
        for i, (name, shape, kind) in enumerate(zip(names, shapes, kinds, strict=True))
    }
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    function = rn.dropout_add_rms_norm if rms else ln.dropout_add_layer_norm
    z, x, mask = function(**given, dropout_p=dropout_p, epsilon=EPS, prenorm=True, return_dropout_mask=True)
    assert isinstance(z, Tensor) and isinstance(x, Tensor) and isinstance(mask, Tensor)
    assert mask.dtype == torch.uint8 and mask.shape == (B, S, D) and (dropout_p > 0 or mask.all())
    scaled = exact["x0"] * exact["rowscale"][..., None] * exact["layerscale"]
    h = scaled * mask / (1 - dropout_p) + exact["residual"]
    expected = norm64(h, exact["weight"], exact["bias"], rms)
    close(z, expected, dtype)
    close(x, h, torch.float32)
    upstream = (randn(B, S, D, seed=11, dtype=dtype), randn(B, S, D, seed=12))
    torch.autograd.backward((z, x), upstream)
    torch.autograd.backward((expected, h), tuple(t.double() for t in upstream))
    for name, wanted in exact.items():
        close(given[name].grad, wanted.grad, given[name].dtype)


@pytest.mark.parametrize("rms", [False, True])
def test_the_subset_form_drops_whole_samples(rms: bool) -> None:
    function = rn.dropout_add_rms_norm_subset if rms else ln.dropout_add_layer_norm_subset
    kept0, kept1 = torch.tensor([True, False, True, True]), torch.tensor([False, True, True, False])

    def numbers(kept: Tensor) -> Tensor:
        rows = kept.repeat_interleave(S)
        return torch.cumsum(rows, 0, dtype=torch.int32).masked_fill(~rows, 0).reshape(4, S)

    full, residual = randn(4, S, D), randn(4, S, D, seed=1)
    weight, bias, layerscale = randn(D, seed=2), randn(D, seed=3), randn(D, seed=4)
    x0 = full[kept0].clone().requires_grad_()
    z, x, mask = function(
        x0, residual, weight, bias, 0.4, EPS, layerscale, numbers(kept0), numbers(kept1), 1.25, 2 * S, True,
        return_dropout_mask=True,
    )  # fmt: skip
    assert isinstance(z, Tensor) and isinstance(x, Tensor) and isinstance(mask, Tensor)
    exact = full[kept0].double().requires_grad_()
    branch = exact * 1.25 * layerscale.double() * mask / 0.6
    h = residual.double().index_add(0, kept0.nonzero().flatten(), branch)
    expected = norm64(h, weight.double(), bias.double(), rms)[kept1]
    assert z.shape == (2, S, D) and x.shape == (4, S, D) and mask.shape == (3, S, D)
    close(z, expected, torch.float32)
    close(x, h, torch.float32)
    upstream = randn(2, S, D, seed=7)
    z.backward(upstream)
    expected.backward(upstream.double())
    assert x0.grad is not None and exact.grad is not None
    close(x0.grad, exact.grad, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("scaled", [False, True])
def test_the_subset_forms_factors_are_not_rounded_to_the_weights_dtype(
    dtype: torch.dtype, weight_dtype: torch.dtype, scaled: bool
) -> None:
    """Values and gradients; a factor of 1 / 0.9 in bf16 would be off by 4e-3."""
    factor = 1 / 0.9
    weight, bias = randn(D, dtype=weight_dtype, seed=1), randn(D, dtype=weight_dtype, seed=2)
    layerscale = randn(D, dtype=weight_dtype, seed=3) if scaled else None
    x0, residual = randn(B * S, D, dtype=dtype, seed=4), randn(B * S, D, seed=5)

    def ours(x0: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, layerscale: Tensor | None) -> Any:
        return ln.dropout_add_layer_norm_subset(
            x0, residual, weight, bias, 0.0, EPS, layerscale, rowscale_const=factor, prenorm=True
        )

    def plain(x0: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, layerscale: Tensor | None) -> Any:
        x = (x0 if layerscale is None else x0 * layerscale) * factor + residual
        return F.layer_norm(x, (D,), weight.to(x.dtype), bias.to(x.dtype), EPS).to(x0.dtype), x

    check_function(ours, plain, x0, residual, weight, bias, layerscale)


def test_without_subsets_the_subset_form_is_the_plain_one() -> None:
    x0, weight, bias = randn(B, S, D), randn(D, seed=1), randn(D, seed=2)
    actual = ln.dropout_add_layer_norm_subset(x0, None, weight, bias, 0.0, EPS)
    expected = ln.dropout_add_layer_norm(x0, None, weight, bias, 0.0, EPS)
    assert isinstance(actual, Tensor) and isinstance(expected, Tensor)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(expected, ln.layer_norm(x0, weight, bias, EPS))


@pytest.mark.parametrize("rms", [False, True])
def test_the_parallel_residual_form_gives_two_norms_of_one_sum(rms: bool) -> None:
    function = rn.dropout_add_rms_norm_parallel_residual if rms else ln.dropout_add_layer_norm_parallel_residual
    x0, x1, residual = (randn(B, S, D, seed=i) for i in range(3))
    weight0, bias0, weight1, bias1 = (randn(D, seed=i) for i in range(3, 7))
    z0, z1, x, mask0, mask1 = function(
        x0, x1, residual, weight0, bias0, weight1, bias1, 0.2, EPS, prenorm=True, return_dropout_mask=True
    )
    h = x0.double() * mask0 / 0.8 + x1.double() * mask1 / 0.8 + residual.double()
    assert not torch.equal(mask0, mask1)
    close(z0, norm64(h, weight0.double(), bias0.double(), rms), torch.float32)
    close(z1, norm64(h, weight1.double(), bias1.double(), rms), torch.float32)
    close(x, h, torch.float32)
    only, none = function(x0, x1, residual, weight0, bias0, None, None, 0.0, EPS)
    assert none is None and only is not None


def test_the_modules_hold_the_parameters_of_flash_attn() -> None:
    x, residual = randn(3, D), randn(3, D, seed=1)
    layer, rms = ln.DropoutAddLayerNorm(D, prenorm=True, p=0.5), rn.DropoutAddRMSNorm(D, p=0.5)
    assert set(layer.state_dict()) == {"weight", "bias"} and set(rms.state_dict()) == {"weight"} and rms.bias is None
    z, h = layer.eval()(x, residual)
    torch.testing.assert_close(h, x + residual)
    torch.testing.assert_close(z, F.layer_norm(x + residual, (D,), eps=1e-5))
    plain = rn.RMSNorm(D)
    torch.testing.assert_close(rms.eval()(x), plain(x))
    torch.testing.assert_close(plain(x), rn.rms_norm(x, torch.ones(D), 1e-5))
    assert set(plain.state_dict()) == {"weight"} and (rms.train()(x) == 0).any()


def test_norms_compile_in_one_graph() -> None:
    eager, residual, weight = randn(3, D).requires_grad_(), randn(3, D, seed=1), randn(D, seed=2)
    compiled = eager.detach().clone().requires_grad_()

    def function(x: Tensor) -> Tensor:
        y: Any
        y, h = layer_norm_fn(x, weight, None, residual=residual, prenorm=True)
        return y + h + rn.rms_norm(x, weight, EPS)

    torch._dynamo.reset()
    function(eager).square().sum().backward()
    torch.compile(function, backend="aot_eager", fullgraph=True)(compiled).square().sum().backward()
    torch.testing.assert_close(compiled.grad, eager.grad)
