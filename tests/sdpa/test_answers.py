"""An answer is PyTorch's own kind of tensor: no view, at version 0, and writable before its backward."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.forms.plain import pairwise
from tests.kernels.fused_on_cpu import LaunchRecord
from tests.sdpa.originals import counted
from tests.sdpa.test_attention import Case, mask, qkv

sdpa, aten = F.scaled_dot_product_attention, torch.ops.aten


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
@pytest.mark.parametrize("rows", [1, 40])
def test_an_answer_may_be_written_to(rows: int, heads: tuple[int, int], served: LaunchRecord) -> None:
    """Like PyTorch's output, it is no view: autograd refuses writes into views made without gradients."""
    q, k, v = (x.detach() for x in qkv(Case(lengths=(rows, 40), heads=heads)))
    more = torch.ones_like(q).requires_grad_()
    with torch.no_grad():
        out = sdpa(q, k, v, torch.ones(rows, 40, dtype=torch.bool), enable_gqa=True)
    out += more
    assert out.requires_grad and counted() == {"fused": 1}


SEEN = torch.ones(1, 40, dtype=torch.bool)
OWN: dict[str, tuple[Case, dict[str, Any]]] = {
    "a call": (Case(), {}),
    "grouped heads": (Case(heads=(4, 2)), {"enable_gqa": True}),
    "a causal call of more keys": (Case(lengths=(33, 70)), {"is_causal": True}),
    "channels that are copied": (Case(head_dim=20, layout="unaligned"), {}),
    "one row under a mask": (Case(lengths=(1, 40), heads=(4, 2)), {"enable_gqa": True, "attn_mask": SEEN}),
    "one row of one group": (Case(lengths=(1, 40), heads=(4, 1)), {"enable_gqa": True, "attn_mask": SEEN}),
    "dropout": (Case(), {"dropout_p": 0.5}),
}


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("name", OWN)
def test_an_answer_is_a_tensor_of_its_own_at_version_0(name: str, wants: bool, served: LaunchRecord) -> None:
    case, options = OWN[name]
    out = sdpa(*(x.detach().requires_grad_(wants) for x in qkv(case)), **options)
    assert (out._version, out._base, out._is_view(), out.requires_grad) == (0, None, False, wants)
    assert out.transpose(1, 2).is_contiguous() and counted() == {"fused": 1}
    assert not out.detach_().requires_grad


def doubled(out: Tensor, how: str) -> Tensor:
    """Twice ``out``, in its own memory or another."""
    if how == "in place":
        return out.mul_(2)
    if how == "elsewhere":
        return out * 2
    rows = out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1).mul_(2)
    return rows.unflatten(-1, (out.shape[1], -1)).transpose(1, 2)


OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "dropout": {"dropout_p": 0.3}, "mask": {"attn_mask": mask()}}


@pytest.mark.parametrize(
    ("options", "how", "under"),
    pairwise(OPTIONS, ("in place", "reshaped"), ("nothing", "hooks", "a checkpoint", "create_graph")),
)
def test_an_answer_may_be_written_to_before_its_backward(
    options: str, how: str, under: str, served: LaunchRecord
) -> None:
    """Like the output of the plain formula, which PyTorch uses for grouped heads and bf16 on Turing."""
    inputs = qkv(Case(heads=(4, 2)))

    def gradients(how: str) -> tuple[Tensor, ...]:
        def attend(*inputs: Tensor) -> Tensor:
            return doubled(sdpa(*inputs, **OPTIONS[options], enable_gqa=True), how)

        torch.manual_seed(3)
        with torch.autograd.graph.save_on_cpu() if under == "hooks" else contextlib.nullcontext():
            out: Any = checkpoint(attend, *inputs, use_reentrant=False) if under == "a checkpoint" else attend(*inputs)
        return torch.autograd.grad(out.square().sum(), inputs, create_graph=under == "create_graph")

    assert all(map(torch.equal, gradients(how), gradients("elsewhere")))


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_the_answers_of_the_operator_below_are_their_own(is_packed: bool, wants: bool, served: LaunchRecord) -> None:
    q = qkv(Case())[0].transpose(1, 2).contiguous().detach()
    starts: tuple[Any, ...] = (None,) * 4
    if is_packed:
        q = q.flatten(0, 1)[None]
        starts = torch.tensor([0, 40, 80], dtype=torch.int32), torch.tensor([0, 40, 80], dtype=torch.int32), 40, 40
    found = aten._efficient_attention_forward(q.requires_grad_(wants), q, q, None, *starts, 0.0, 0, True)[:2]
    assert counted() == {"fused": 1}
    assert [(x._version, x._base) for x in found] == [(0, None)] * 2
