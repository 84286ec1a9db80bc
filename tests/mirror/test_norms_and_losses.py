"""Fused norms (both families) and cross entropy against their formulas: values, dtypes, gradients, masks, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat.losses.cross_entropy import CrossEntropyLoss
from flash_attn_compat.ops import layer_norm as ln
from flash_attn_compat.ops import rms_norm as rn
from flash_attn_compat.ops.triton import cross_entropy, layernorm
from flash_attn_compat.ops.triton import layer_norm as triton_norms
from flash_attn_compat.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn_compat.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn
from tests.forms.inputs import randn
from tests.forms.plain import check_function, pairwise
from tests.forms.support import close, in_group

B, S, D = 2, 5, 24
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5


def norm(h: Tensor, weight: Tensor, bias: Tensor | None, rms: bool, eps: float = EPS) -> Tensor:
    weight = weight.to(h.dtype)
    if not rms:
        return F.layer_norm(h, h.shape[-1:], weight, None if bias is None else bias.to(h.dtype), eps)
    y = h / torch.sqrt(h.pow(2).mean(-1, keepdim=True) + eps) * weight
    return y if bias is None else y + bias


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def dropped(x: Tensor, mask: Tensor | None, dropout_p: float) -> Tensor:
    return x if mask is None else x * mask / (1 - dropout_p)


def inputs(dtype: torch.dtype, weight_dtype: torch.dtype, names: tuple[str, ...]) -> list[Tensor]:
    """All different; residuals are in fp32."""
    shapes = dict.fromkeys(("x", "x0", "x1", "residual"), (B, S, D)) | {"rowscale": (B, S)}
    kinds = dict.fromkeys(("x", "x0", "x1", "rowscale"), dtype) | {"residual": torch.float32}
    return [
        randn(*shapes.get(name, (D,)), seed=seed, dtype=kinds.get(name, weight_dtype))
        for seed, name in enumerate(names)
    ]


TRITON = layer_norm_fn, rms_norm_fn
# name: (functions of the layer norm and of the RMS norm, what they are given)
FORMS: dict[str, tuple[tuple[Any, Any], tuple[str, ...]]] = {
    "dropout_add": (
        (ln.dropout_add_layer_norm, rn.dropout_add_rms_norm),
        ("x0", "residual", "weight", "bias", "rowscale", "layerscale"),
    ),
    "parallel": (
        (ln.dropout_add_layer_norm_parallel_residual, rn.dropout_add_rms_norm_parallel_residual),
        ("x0", "x1", "residual", "weight0", "bias0", "weight1", "bias1"),
    ),
    "plain": (TRITON, ("x", "weight")),
    "bias": (TRITON, ("x", "weight", "bias")),
    "residual": (TRITON, ("x", "weight", "bias", "residual")),
    "rowscale": (TRITON, ("x", "weight", "residual", "rowscale")),
    "x1 and residual": (TRITON, ("x", "weight", "bias", "residual", "x1", "weight1", "bias1")),
    "x1": (TRITON, ("x", "weight", "x1", "weight1")),
}


@pytest.mark.parametrize(
    ("form", "dtype", "weight_dtype", "rms", "dropout_p"),
    pairwise(FORMS, DTYPES, DTYPES, (False, True), (0.0, 0.3)),
)
def test_a_fused_norm_is_scales_dropout_sum_and_norm(
    form: str, dtype: torch.dtype, weight_dtype: torch.dtype, rms: bool, dropout_p: float
) -> None:
    """Triton's functions with weights centred at zero."""
    functions, names = FORMS[form]
    is_triton, masks = functions is TRITON, [None, None]
    number = 2 if is_triton or form == "parallel" else 1
    options: dict[str, Any] = dict(dropout_p=dropout_p, prenorm=True, return_dropout_mask=True)
    options |= dict(eps=EPS, zero_centered_weight=True) if is_triton else dict(epsilon=EPS)

    def ours(*values: Tensor) -> Any:
        given: dict[str, Any] = {"bias": None} if is_triton else {}
        outputs = functions[rms](**given | dict(zip(names, values, strict=True)), **options)
        masks[:number] = outputs[-number:]
        for mask, x in zip(masks, ("x", "x1")):
            if is_triton:
                assert (mask is None) == (dropout_p == 0 or (x == "x1" and x not in names))
            elif mask is not None:
                assert mask.dtype == torch.uint8 and (dropout_p > 0 or mask.all())
        return outputs[:-number]

    def plain(*values: Tensor) -> Any:
        given = dict(zip(names, values, strict=True))
        h = wide(values[0])
        h = h * given["rowscale"][..., None] if "rowscale" in given else h
        h = dropped(h * given.get("layerscale", 1.0), masks[0], dropout_p)
        h = h + dropped(wide(given["x1"]), masks[1], dropout_p) if "x1" in given else h
        h = h + given.get("residual", 0.0)
        pairs = [(f"weight{i}", f"bias{i}") for i in ("", 0, 1) if f"weight{i}" in given]
        normed = [norm(h, given[w] + is_triton, given.get(b), rms).to(values[0].dtype) for w, b in pairs]
        return [*normed, h if "residual" in given else h.to(values[0].dtype)]

    check_function(ours, plain, *inputs(dtype, weight_dtype, names), rounds_once=True)


REFERENCES = triton_norms.layer_norm_ref, triton_norms.rms_norm_ref


@pytest.mark.parametrize(("form", "rms", "dropout_p"), pairwise(list(FORMS)[2:], (False, True), (0.0, 0.3)))
def test_reference_norms_match_the_fused_norm(form: str, rms: bool, dropout_p: float) -> None:
    names = FORMS[form][1]
    given: dict[str, Any] = {"bias": None} | dict(zip(names, inputs(torch.float32, torch.float32, names)))
    options: dict[str, Any] = dict(eps=EPS, prenorm=True, zero_centered_weight=True, dropout_p=dropout_p)
    *expected, mask, mask1 = TRITON[rms](**given, **options, return_dropout_mask=True)
    for upcast in (False, True):
        found = REFERENCES[rms](**given, **options, dropout_mask=mask, dropout_mask1=mask1, upcast=upcast)
        torch.testing.assert_close(found, tuple(expected))


def test_a_reference_rounds_to_its_inputs_dtype_unless_it_is_asked_to_upcast() -> None:
    x, weight = (t.bfloat16() for t in (randn(3, D), randn(D, seed=1)))
    for reference in REFERENCES:
        assert reference(x, weight, None, residual=x, prenorm=True)[1].dtype == torch.bfloat16
        out, h = reference(x, weight, None, residual=x, prenorm=True, upcast=True)
        assert (out.dtype, h.dtype) == (torch.bfloat16, torch.float32)


def test_the_old_name_of_the_module_takes_eps_behind_the_residual() -> None:
    x, residual, weight = randn(3, D), randn(3, D, seed=1), randn(D, seed=2)
    for index, old in enumerate((layernorm.layer_norm_fn, layernorm.rms_norm_fn)):
        torch.testing.assert_close(
            old(x, weight, None, residual, 0.5), norm(x + residual, weight, None, bool(index), 0.5)
        )
        y, h, mask = old(x, weight, None, residual, 0.5, 0.3, True, return_dropout_mask=True)
        reference = (layernorm.layer_norm_ref, layernorm.rms_norm_ref)[index]
        torch.testing.assert_close((y, h), reference(x, weight, None, residual, 0.5, 0.3, True, mask))


@pytest.mark.parametrize("rms", [False, True])
def test_the_function_of_the_extension_is_served_by_its_apply(rms: bool) -> None:
    x, residual, weight, scale = randn(3, D), randn(3, D, seed=1), randn(D, seed=2), randn(D, seed=3)

    def ours(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        apply = ln.DropoutAddLayerNormFn.apply
        return apply(x, residual, weight, None, None, scale, 0.0, EPS, False, True, rms)

    def plain(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor) -> Any:
        h = x * scale + residual
        return norm(h, weight, None, rms), h

    check_function(ours, plain, x, residual, weight, scale)


def test_an_unused_output_costs_no_gradient() -> None:
    names = "x", "residual", "weight", "bias"
    x, residual, weight, bias = (t.requires_grad_() for t in inputs(torch.float32, torch.float32, names))
    _, h = layer_norm_fn(x, weight, bias, residual=residual, prenorm=True)
    assert torch.autograd.grad(h.sum(), (weight, bias), allow_unused=True) == (None, None)  # type: ignore[union-attr]


@pytest.mark.parametrize("residual_dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("residual_in_fp32", [False, True])
def test_the_residual_keeps_its_dtype(residual_dtype: torch.dtype | None, residual_in_fp32: bool) -> None:
    x, weight = randn(3, D, dtype=torch.bfloat16), torch.ones(D)
    residual = None if residual_dtype is None else randn(3, D, seed=1, dtype=residual_dtype)
    expected = residual_dtype or (torch.float32 if residual_in_fp32 else torch.bfloat16)
    for y, h in (
        layer_norm_fn(x, weight, None, residual=residual, prenorm=True, residual_in_fp32=residual_in_fp32),
        ln.dropout_add_layer_norm(x, residual, weight, None, 0.0, EPS, None, None, True, residual_in_fp32),
    ):
        assert isinstance(y, Tensor) and isinstance(h, Tensor)
        assert y.dtype == torch.bfloat16 and h.dtype == expected


def test_the_number_of_results_follows_the_flags() -> None:
    x, weight = randn(3, D), torch.ones(D)
    assert isinstance(layer_norm_fn(x, weight, None), Tensor)
    assert layer_norm_fn(x, weight, None, prenorm=True)[1] is x  # nothing was added
    assert len(layer_norm_fn(x, weight, None, weight1=weight)) == 2
    assert len(layer_norm_fn(x, weight, None, weight1=weight, prenorm=True)) == 3
    assert layer_norm_fn(x, weight, None, return_dropout_mask=True)[1:] == (None, None)
    five = layer_norm_fn(x, weight, None, None, x, weight, None, dropout_p=0.5, prenorm=True, return_dropout_mask=True)
    assert [t.dtype for t in five[3:]] == [torch.bool, torch.bool] and not torch.equal(five[3], five[4])


def test_out_and_out_dtype_decide_where_and_how_results_are_stored() -> None:
    x, weight = randn(3, D, dtype=torch.bfloat16).requires_grad_(), torch.ones(D)
    out, residual_out = torch.empty(3, D), torch.empty(3, D)
    y, h = rms_norm_fn(
        x, weight, None, residual=x.detach(), prenorm=True, out_dtype=torch.float32, out=out, residual_out=residual_out
    )
    assert y is out and h is residual_out
    close(out.detach(), norm(2 * x.detach().double(), weight, None, rms=True, eps=1e-6))
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16


def test_dropout_keeps_the_stated_share_follows_the_seed_and_may_drop_everything() -> None:
    x, weight = torch.ones(200, 100), torch.ones(100)
    torch.manual_seed(0)
    _, h, mask, _ = layer_norm_fn(x, weight, None, dropout_p=0.25, prenorm=True, return_dropout_mask=True)
    torch.manual_seed(0)
    again = layer_norm_fn(x, weight, None, dropout_p=0.25, return_dropout_mask=True)[1]
    assert mask is not None and h is not None and again is not None
    assert torch.equal(mask, again) and abs(mask.float().mean().item() - 0.75) < 0.01
    torch.testing.assert_close(h, mask / 0.75)
    bias, x = randn(100), x.requires_grad_()
    nothing = layer_norm_fn(x, weight, bias, dropout_p=1.0)
    assert isinstance(nothing, Tensor) and torch.equal(nothing.detach(), bias.expand(200, 100))
    nothing.sum().backward()
    assert x.grad is not None and x.grad.abs().sum() == 0


# The rest of the dropout_layer_norm family


def test_without_a_second_weight_the_parallel_form_has_one_output() -> None:
    x, weight = randn(3, D), randn(D)
    z, none = ln.dropout_add_layer_norm_parallel_residual(x, x, None, weight, None, None, None, 0.0, EPS)
    assert none is None and z is not None
    close(z, norm(2 * x.double(), weight, None, rms=False))


def test_modules_hold_the_parameters_of_flash_attn_and_drop_in_training_only() -> None:
    x, residual, weight = randn(3, D), randn(3, D, seed=1), torch.ones(D)
    layer, rms, plain = ln.DropoutAddLayerNorm(D, prenorm=True, p=0.5), rn.DropoutAddRMSNorm(D, p=0.5), rn.RMSNorm(D)
    triton = triton_norms.RMSNorm(D, dropout_p=0.5, zero_centered_weight=True)
    names = [set(m.state_dict()) for m in (layer, rms, plain, triton)]
    assert names == [{"weight", "bias"}, {"weight"}, {"weight"}, {"weight"}]
    assert triton.eps == 1e-5 and triton.bias is None and triton.weight.abs().sum() == 0
    z, h = layer.eval()(x, residual)
    torch.testing.assert_close(h, x + residual)
    torch.testing.assert_close(z, F.layer_norm(x + residual, (D,), eps=1e-5))
    for y in (rms.eval()(x), plain(x), rn.rms_norm(x, weight, 1e-5), triton.eval()(x)):
        torch.testing.assert_close(y, norm(x, weight, None, rms=True))
    torch.testing.assert_close(ln.layer_norm(x, weight, weight, EPS), norm(x, weight, weight, rms=False))
    assert rms.bias is None and (rms.train()(x) == 0).any() and (triton.train()(x) == 0).any()


# ---------------------------------------------------------------- cross entropy, its memory and its vocab-parallel form

N, V = 12, 37
LOGIT_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1},
    {"logit_scale": 0.7},
    {"lse_square_scale": 1e-2},
    {"label_smoothing": 0.2, "logit_scale": 1.5, "lse_square_scale": 1e-2},
]


def problem(v: int = V, n: int = N) -> tuple[Tensor, Tensor]:
    """Row 1 is ignored, rows 2 and 3 have a label that is no class."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(n, v, generator=generator) * 4
    labels = torch.randint(0, v, (n,), generator=generator)
    labels[1], labels[2], labels[3] = -100, v, -1
    return logits, labels


def plain_losses(
    logits: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor]:
    """Torch's cross entropy, smoothing and the z-loss; a label that is no class has the first one's gradient alone."""
    kept, known = labels != ignore_index, (labels >= 0) & (labels < logits.shape[1])
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    z = z.masked_fill(~kept[:, None], 0.0)
    lse = z.logsumexp(-1)
    entropy = F.cross_entropy(z, torch.where(known & kept, labels, -100).long(), reduction="none")
    losses = (1 - label_smoothing) * torch.where(known, entropy, lse - lse.detach())
    if label_smoothing:
        losses = losses + label_smoothing * (lse - z.mean(-1))
    z_losses = lse_square_scale * lse**2
    return torch.where(kept, losses + z_losses, 0.0), torch.where(kept, z_losses, 0.0).detach()


@pytest.mark.parametrize(
    ("dtype", "options", "inplace_backward", "block", "integers", "ignore_index"),
    pairwise(LOGIT_DTYPES, OPTIONS, (False, True), (2**25, 5 * V), (torch.int64, torch.int32), (-100, 3)),
)
def test_losses_z_losses_and_gradients(
    dtype: torch.dtype, options: dict[str, Any], inplace_backward: bool, block: int, integers: Any, ignore_index: int,
    monkeypatch: Any,
) -> None:  # fmt: skip
    """Over blocks of rows that hold everything, and of five."""
    monkeypatch.setattr(cross_entropy, "_BLOCK_ELEMENTS", block)
    logits, labels = problem()
    labels = torch.where(labels == -100, ignore_index, labels).to(integers)
    options = {**options, "ignore_index": ignore_index}
    check_function(
        lambda x: cross_entropy_loss(x, labels, inplace_backward=inplace_backward, **options),
        lambda x: plain_losses(x, labels, **options),
        logits.to(dtype),
        epsilons=16,
        rounds_once=True,
    )


def test_no_fp32_copy_of_all_half_precision_logits_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, Tensor) and tensor.dtype in (torch.float32, torch.float64):
                    self.elements = max(self.elements, tensor.numel())
            return out

    monkeypatch.setattr(cross_entropy, "_BLOCK_ELEMENTS", 4 * V)
    logits, labels = problem(n=64)
    logits = logits.bfloat16().requires_grad_()
    with Largest() as largest:
        cross_entropy_loss(logits, labels, label_smoothing=0.1)[0].sum().backward()
    assert 0 < largest.elements <= 4 * V


def test_inplace_backward_alone_writes_over_the_logits_and_makes_a_second_backward_an_error() -> None:
    logits, labels = problem()
    x = logits.clone().requires_grad_()
    y = x * 1.0
    loss = CrossEntropyLoss(reduction="sum", inplace_backward=True)(y, labels)
    loss.backward(retain_graph=True)
    assert x.grad is not None and torch.equal(y.detach(), x.grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = CrossEntropyLoss(reduction="sum")(x, labels)
    for times in (2, 3):
        loss.backward(retain_graph=True)
        assert torch.equal(x.detach(), logits) and torch.equal(x.grad, times * y.detach())


def test_masked_classes_and_the_logits_of_ignored_rows_poison_nothing() -> None:
    logits, labels = problem()
    labels[labels >= V - 3] = 0
    logits[:, V - 3 :] = float("-inf")
    expected, _ = plain_losses(logits[:, : V - 3], labels)
    logits[1] = float("nan")
    x = logits.clone().requires_grad_()
    losses, z_losses = cross_entropy_loss(x, labels)
    losses.sum().backward()
    torch.testing.assert_close(losses.detach(), expected, rtol=1e-5, atol=1e-5)
    assert losses[1] == z_losses[1] == 0 and not z_losses.requires_grad
    assert x.grad is not None and x.grad.isfinite().all() and x.grad[:, V - 3 :].abs().sum() == x.grad[1].sum() == 0


def test_a_precomputed_lse_is_used_only_without_scale_and_smoothing() -> None:
    logits, labels = problem()
    shifted = logits.logsumexp(-1) + 1
    known = (labels >= 0) & (labels < V)
    expected = plain_losses(logits, labels)[0] + known
    for loss in (lambda *given: cross_entropy_loss(*given)[0], CrossEntropyLoss(reduction="none")):
        torch.testing.assert_close(loss(logits, labels, shifted), expected)
    for options in ({"label_smoothing": 0.1}, {"logit_scale": 0.5}):
        found = cross_entropy_loss(logits, labels, shifted, **options)[0]
        assert torch.equal(found, cross_entropy_loss(logits, labels, **options)[0])


@pytest.mark.parametrize(("reduction", "return_z_loss"), [("mean", True), ("sum", False), ("none", True)])
def test_the_module_reduces_like_torch(reduction: str, return_z_loss: bool) -> None:
    logits, labels = problem()
    labels[1] = 3
    options = {"lse_square_scale": 1e-2, "ignore_index": 3}
    module = CrossEntropyLoss(reduction=reduction, return_z_loss=return_z_loss, **options)
    counts = {"mean": (labels != 3).sum(), "sum": 1}

    def expected(x: Tensor) -> Any:
        both = plain_losses(x, labels, **options)
        reduced = [t if reduction == "none" else t.sum() / counts[reduction] for t in both]
        return reduced if return_z_loss else reduced[0]

    check_function(lambda x: module(x, labels), expected, logits, epsilons=16)
    none = CrossEntropyLoss(reduction=reduction)(logits, torch.full_like(labels, -100))
    assert none.isnan() if reduction == "mean" else not none.any()


def _vocab_parallel_worker(rank: int) -> None:
    logits, labels = problem(2 * V)
    labels[4] = 0
    masked = logits.clone()
    masked[4, V:] = -torch.inf  # all that a rank has of a row
    weight = torch.linspace(0.5, 2, N)
    for options, with_lse in [*((options, False) for options in OPTIONS), ({}, True)]:
        leaf = (logits if "label_smoothing" in options else masked).clone().requires_grad_()
        x = leaf.detach().chunk(2, dim=-1)[rank].clone().requires_grad_()
        lse = x.detach().logsumexp(-1) if with_lse else None
        losses, z_losses = cross_entropy_loss(x, labels, lse, process_group=dist.group.WORLD, **options)
        by_module = CrossEntropyLoss(reduction="none", process_group=dist.group.WORLD, **options)(x, labels, lse)
        assert torch.equal(by_module, losses)
        expected, expected_z = plain_losses(leaf, labels, **options)
        (losses * weight).sum().backward()
        (expected * weight).sum().backward()
        assert x.grad is not None and leaf.grad is not None
        pairs = (losses, expected), (z_losses, expected_z), (x.grad, leaf.grad.chunk(2, dim=-1)[rank])
        for found, right in pairs:
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def test_vocab_parallel_ranks_agree_with_one_process() -> None:
    in_group(_vocab_parallel_worker)
