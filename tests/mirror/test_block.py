"""Transformer blocks against dropout, add, norm, mixer and MLP written out."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_attn_compat.modules.block import Block, ParallelBlock, StochasticDepth
from flash_attn_compat.modules.mha import MHA
from flash_attn_compat.modules.mlp import Mlp
from flash_attn_compat.ops.triton.layer_norm import RMSNorm
from tests.forms.inputs import randn
from tests.forms.plain import Parameters, check_module, pairwise

D = 8
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NORMS = {"layer": nn.LayerNorm, "rms": RMSNorm, "centred": partial(RMSNorm, zero_centered_weight=True)}
PARTS: dict[str, Any] = {"mixer_cls": partial(nn.Linear, out_features=D), "mlp_cls": partial(nn.Linear, out_features=D)}


def scrambled(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Random parameters, norms included: ones and zeros would hide a forgotten weight or bias."""
    for index, parameter in enumerate(module.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(index))
    return module.to(dtype)


def norm(params: Parameters, name: str, kind: str, x: Tensor) -> Tensor:
    weight = params[f"{name}.weight"]
    if kind == "layer":
        return F.layer_norm(x, (D,), weight, params[f"{name}.bias"], 1e-5)
    root = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return x * root * (1 + weight if kind == "centred" else weight)


def linear(params: Parameters, name: str, x: Tensor) -> Tensor:
    return F.linear(x, params[f"{name}.weight"], params[f"{name}.bias"])


class Pair(nn.Linear):
    """A branch with a residual of its own."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), 2 * x


def plain_prenorm(kind: str, fp32: bool, params: Parameters, hidden: Tensor, residual: Tensor | None = None) -> Any:
    dtype = params["norm1.weight"].dtype
    halves = [("norm1", "mixer"), ("norm2", "mlp")] if "mlp.weight" in params else [("norm1", "mixer")]
    for norm_name, part in halves:
        residual = hidden if residual is None else hidden + residual
        hidden = linear(params, part, norm(params, norm_name, kind, residual.to(dtype)))
        residual = residual.float() if fp32 and dtype != torch.float64 else residual
    return hidden, residual


def plain_postnorm(kind: str, kept: int, params: Parameters, hidden: Tensor) -> Tensor:
    hidden = norm(params, "norm1", kind, linear(params, "mixer", hidden) + kept * hidden)
    return norm(params, "norm2", kind, linear(params, "mlp", hidden) + kept * hidden)


def plain_parallel(kind: str, tied: bool, params: Parameters, first: Tensor, *rest: Tensor) -> Any:
    residual = first + (sum(rest) if rest else 0)
    total = residual.to(params["norm1.weight"].dtype)
    normed = norm(params, "norm1", kind, total)
    second = normed if tied else norm(params, "norm2", kind, total)
    return linear(params, "mixer", normed), linear(params, "mlp", second), residual


PAIRS: dict[str, Any] = {name: partial(Pair, out_features=D) for name in PARTS}
# name: (class, options, plain with the kind of norm and one more, that one, numbers of inputs)
FORMS: dict[str, tuple[Any, dict[str, Any], Any, Any, tuple[int, ...]]] = {
    "adds, then normalises": (Block, {}, plain_prenorm, False, (1, 2)),
    "the residual in fp32": (Block, {"residual_in_fp32": True}, plain_prenorm, True, (1, 2)),
    "fp32 inputs": (Block, {"fused_dropout_add_ln": False}, plain_prenorm, False, (2,)),
    "no MLP": (Block, {"mlp_cls": nn.Identity}, plain_prenorm, False, (1, 2)),
    "normalises after each branch": (Block, {"prenorm": False}, plain_postnorm, 1, (1,)),
    "branches that return what they are added to": (
        Block, {"prenorm": False, "return_residual": True, **PAIRS}, plain_postnorm, 2, (1,)
    ),
    "parallel": (ParallelBlock, {}, plain_parallel, False, (1, 3)),
    "parallel, one norm": (ParallelBlock, {"tied_norm": True}, plain_parallel, True, (1, 3)),
}  # fmt: skip


@pytest.mark.parametrize(("form", "dtype", "kind", "fused"), pairwise(FORMS, DTYPES, NORMS, (False, True)))
def test_a_block_is_sums_norms_and_branches(form: str, dtype: torch.dtype, kind: str, fused: bool) -> None:
    block_cls, options, plain, more, numbers = FORMS[form]
    block = block_cls(D, **{"norm_cls": NORMS[kind], "fused_dropout_add_ln": fused, **PARTS, **options})
    of_hidden = torch.float32 if form == "fp32 inputs" else dtype
    of_residual = torch.float32 if form in ("fp32 inputs", "the residual in fp32") else dtype
    for number in numbers:
        kinds = [of_hidden, *[of_residual] * (number - 1)]
        inputs = [randn(2, 5, D, seed=seed, dtype=each) for seed, each in enumerate(kinds)]
        check_module(scrambled(block, dtype), partial(plain, kind, more), *inputs)


@pytest.mark.parametrize("block_cls", [Block, ParallelBlock])
def test_the_default_parts_are_attention_with_heads_of_64_and_a_fourfold_mlp(block_cls: Any) -> None:
    block = block_cls(128)
    assert isinstance(block.mixer, MHA) and block.mixer.num_heads == 2
    assert isinstance(block.mlp, Mlp) and block.mlp.fc1.out_features == 512
    assert set(block.state_dict()) == {
        f"{part}.{name}"
        for part in ("mixer.Wqkv", "mixer.out_proj", "norm1", "mlp.fc1", "mlp.fc2", "norm2")
        for name in ("weight", "bias")
    }
    assert block(randn(1, 3, 128))[-1].shape == (1, 3, 128)
    assert block.allocate_inference_cache(2, 7).shape == (2, 7, 2, 2, 64)


def test_a_mixer_subset_cuts_the_residual_and_the_callers_options_stay_as_they_are() -> None:
    block = Block(64, partial(MHA, num_heads=1, cross_attn=True), nn.Identity)
    options: dict[str, Any] = {}
    hidden, residual = block(randn(2, 5, 64), mixer_subset=torch.tensor([0, 3]), mixer_kwargs=options)
    assert hidden.shape == residual.shape == (2, 2, 64) and options == {}


class Ones(nn.Module):
    """A branch of ones."""

    def __init__(self, dim: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)


BRANCHES = [
    # options, and what the sum may be: twos of the first branch, ones of the second, and a residual of 10
    ({"resid_dropout1": 0.5}, {11, 15}),
    ({"resid_dropout2": 0.5}, {12, 14}),
    ({"resid_dropout1": 0.5, "resid_dropout2": 0.5}, {10, 12, 14, 16}),
    ({"drop_path1": 0.5}, {11, 15}),
    ({"drop_path2": 0.5}, {12, 14}),
]


@pytest.mark.parametrize(
    ("block_cls", "options", "drawn"),
    [(Block, *branches) for branches in BRANCHES] + [(ParallelBlock, *branches) for branches in BRANCHES[:3]],
)
@pytest.mark.parametrize("fused", [False, True])
def test_each_branch_has_its_own_dropout_and_drop_path_in_training_only(
    block_cls: Any, fused: bool, options: dict[str, float], drawn: set[int]
) -> None:
    block = block_cls(D, Ones, Ones, fused_dropout_add_ln=fused, **options)
    x = torch.ones(64, 4, D)
    given = (2 * x, x, 10 * x) if block_cls is ParallelBlock else (2 * x, 10 * x)
    torch.manual_seed(0)
    *_, total = block(*given)
    assert set(total.unique().tolist()) == drawn
    by_sample = (total == total[:, :1, :1]).all()
    assert by_sample == any(name.startswith("drop_path") for name in options)
    *_, total = block.eval()(*given)
    assert (total == 13).all()


def test_stochastic_depth_draws_for_each_row_or_once() -> None:
    torch.manual_seed(0)
    x = torch.ones(100, 3)
    by_row = StochasticDepth(0.25, "row")(x)
    assert set(by_row.unique().tolist()) == {0.0, float(torch.tensor(1.0) / 0.75)}
    assert (by_row == by_row[:, :1]).all() and 60 < (by_row[:, 0] > 0).sum() < 90
    assert len(StochasticDepth(0.5, "batch")(x).unique()) == 1
    assert StochasticDepth(0.5, "row").eval()(x) is x
    assert (StochasticDepth(1.0, "row")(x) == 0).all()


@pytest.mark.parametrize("block_cls", [Block, ParallelBlock])
def test_norms_are_marked_for_sequence_parallel_training(block_cls: Any) -> None:
    block = block_cls(D, sequence_parallel=True, mark_shared_params=True, **PARTS)
    marked = {name for name, p in block.named_parameters() if getattr(p, "_sequence_parallel", False)}
    shared = {name for name, p in block.named_parameters() if getattr(p, "_shared_params", False)}
    assert marked == shared == {"norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"}
    plain = block_cls(D, **PARTS)
    assert not any(hasattr(p, "_sequence_parallel") or hasattr(p, "_shared_params") for p in plain.parameters())
