"""torch.ops.flash_attn.* under the name: flash-attn's schemas, our answers, and a real package's precedence."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import flash_attn_compat
from flash_attn_compat import flash_attn_interface as ours
from flash_attn_compat.dropin import patch, unpatch
from tests.forms.inputs import cumulative, qkv, randn
from tests.forms.kinds import CALLS, Operators, check
from tests.tools.interpreters import forked

OPERATORS = [f"_flash_attn_{kind}" for kind in ("forward", "varlen_forward", "backward", "varlen_backward")]
SCALE = 0.3
OPTIONS: tuple[Any, ...] = (SCALE, True, 4, 0, 0.0, None)  # scale to alibi_slopes
CU_SEQLENS = cumulative(3, 4)


@pytest.fixture
def operators() -> Any:
    assert ours._torch_custom_op_wrapper is torch.library.custom_op
    assert ours._torch_register_fake_wrapper is torch.library.register_fake
    patch()
    import flash_attn  # noqa: F401

    return torch.ops.flash_attn


def arguments(name: str, namespace: Any, dropout_p: float = 0.0) -> tuple[Any, ...]:
    """Return an operator's arguments; a backward's include the results of the forward in ``namespace``."""
    tensors: tuple[Tensor, ...] = qkv()
    lengths: tuple[Any, ...] = ()
    if "varlen" in name:
        tensors, lengths = tuple(t.flatten(0, 1)[:7] for t in tensors), (CU_SEQLENS, CU_SEQLENS, 4, 4)
    forward = (*tensors, *lengths, dropout_p, *OPTIONS, dropout_p > 0.0)
    if name.endswith("forward"):
        return forward
    out, lse, _, rng_state = getattr(namespace, name.replace("backward", "forward"))(*forward)
    grads = (torch.full_like(t, 7.0) for t in tensors)
    return (randn(*out.shape, seed=9), *tensors, out, lse, *grads, *lengths, dropout_p, *OPTIONS, False, rng_state)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_the_operator_answers_as_the_function_of_its_name(operators: Any, name: str, dropout_p: float) -> None:
    results = []
    for namespace in (ours, operators):
        torch.manual_seed(0)
        given = arguments(name, namespace, dropout_p)
        found = getattr(namespace, name)(*given)
        results.append((*([found] if isinstance(found, Tensor) else found), *given))  # gradients are written into it
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_fake_results_match_real_ones(operators: Any, name: str, dropout_p: float) -> None:
    given = arguments(name, operators, dropout_p)
    if dropout_p == 0.0 and name.endswith("forward"):
        given = (given[0].transpose(-3, -2).contiguous().transpose(-3, -2), *given[1:])  # strided
    checks = ("test_schema", "test_faketensor")
    if name.endswith("forward"):
        wider = (*given[:2], torch.cat([given[2]] * 2, dim=-1), *given[3:])  # values of another head_dim
        torch.library.opcheck(getattr(operators, name).default, wider, test_utils=checks[int(dropout_p > 0) :])
    # Its first check runs the operator twice, which draws different dropout.
    torch.library.opcheck(getattr(operators, name).default, given, test_utils=checks[int(dropout_p > 0) :])


def test_the_operator_takes_num_splits_and_refuses_as_the_function_does(operators: Any) -> None:
    given = arguments("_flash_attn_varlen_forward", operators)
    for found, expected in zip(
        operators._flash_attn_varlen_forward(*given, num_splits=2), ours._flash_attn_varlen_forward(*given), strict=True
    ):
        assert torch.equal(found, expected)
    k, v = (t.unsqueeze(0) for t in given[1:3])
    paged = (given[0], k, v, *given[3:])
    table = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported"):
        operators._flash_attn_varlen_forward(*paged, block_table=table, num_splits=2)
    torch.library.opcheck(
        operators._flash_attn_varlen_forward.default, paged, {"block_table": table, "num_splits": 1},
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def test_gradients_through_an_operator_are_refused_as_in_flash_attn(operators: Any) -> None:
    q, k, v = (t.requires_grad_() for t in qkv())
    out, *_ = operators._flash_attn_forward(q, k, v, 0.0, *OPTIONS, False)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        out.sum().backward()


IN_A_PROCESS = {
    # Imported as flash_attn_compat, the name of the operators is left free.
    "nothing is registered without the name": """
        import torch, flash_attn_compat
        assert not hasattr(torch.ops.flash_attn, "_flash_attn_forward")
        """,
    "what is registered already is left alone": """
        import torch, flash_attn_compat
        @torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
        def theirs(q: torch.Tensor) -> torch.Tensor:
            return q + 1
        flash_attn_compat.patch()
        import flash_attn
        assert torch.ops.flash_attn._flash_attn_forward(torch.zeros(1)) == 1
        assert hasattr(torch.ops.flash_attn, "_flash_attn_backward")
        """,
    "a package imported later registers over ours": """
        import torch, flash_attn_compat
        flash_attn_compat.patch()
        import flash_attn
        flash_attn_compat.unpatch()
        @torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
        def theirs(q: torch.Tensor) -> torch.Tensor:
            return q + 1
        assert torch.ops.flash_attn._flash_attn_forward(torch.zeros(1)) == 1
        """,
    "patching again changes nothing": """
        import torch, flash_attn_compat
        for _ in range(2):
            with flash_attn_compat.patched():
                import flash_attn
        q = torch.ones(1, 2, 1, 8)
        out, *_ = torch.ops.flash_attn._flash_attn_forward(q, q, q, 0.0, 1.0, False, -1, -1, 0.0, None, False)
        assert torch.equal(out, q)
        """,
}


@pytest.mark.parametrize("case", IN_A_PROCESS)
def test_registration(case: str) -> None:
    done = forked(textwrap.dedent(IN_A_PROCESS[case]))
    assert done.returncode == 0, done.stderr[-2000:]


# ---------------------------------------------------------------- what modes see of the public functions


def dense(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    return ours.flash_attn_func(q, k, v, dropout_p, causal=True, window_size=(3, 0))  # type: ignore[return-value]


def attend_packed(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    q, k, v = (x.flatten(0, 1)[:7] for x in (q, k, v))
    starts = CU_SEQLENS, CU_SEQLENS, 4, 4
    return ours.flash_attn_varlen_func(q, k, v, *starts, dropout_p, causal=True)  # type: ignore[return-value]


def together(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    return ours.flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), dropout_p)  # type: ignore[return-value]


WAYS = "forward", "backward"
PUBLIC = {"dense": (dense, ""), "packed": (attend_packed, "varlen_"), "together": (together, "")}


def gradients_of(function: Any, *options: Any) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    inputs = [x.requires_grad_() for x in qkv()]
    return torch.autograd.grad(function(*inputs, *options).cos().sum(), inputs)


def attention_operators(seen: list[str]) -> list[str]:
    return [name for name in seen if not name.startswith("aten.")]


@pytest.mark.parametrize("case", PUBLIC)
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_modes_see_flash_attns_operators_under_its_name(operators: Any, case: str, dropout_p: float) -> None:
    function, kind = PUBLIC[case]
    expected = gradients_of(function, dropout_p)
    with Operators() as mode:
        found = gradients_of(function, dropout_p)
    assert attention_operators(mode.seen) == [f"flash_attn._flash_attn_{kind}{way}.default" for way in WAYS]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_modes_see_our_own_operators_once_the_name_is_given_back(operators: Any) -> None:
    unpatch()
    with Operators() as mode:
        gradients_of(dense)
    assert attention_operators(mode.seen) == [
        f"flash_attn_compat.{name}.default" for name in ("attention", "attention_backward")
    ]


@pytest.mark.parametrize("case", PUBLIC)
def test_a_policy_that_names_the_operators_saves_the_attention(operators: Any, case: str) -> None:
    checkpoint = pytest.importorskip("torch.utils.checkpoint")
    if not hasattr(checkpoint, "create_selective_checkpoint_contexts"):
        pytest.skip("PyTorch has checkpointing policies from 2.5 on")
    function, _ = PUBLIC[case]
    saved = [operators._flash_attn_forward.default, operators._flash_attn_varlen_forward.default]

    def selectively(*inputs: Tensor) -> Any:
        contexts = checkpoint.create_selective_checkpoint_contexts
        return checkpoint.checkpoint(function, *inputs, use_reentrant=False, context_fn=lambda: contexts(saved))

    expected = gradients_of(function)
    flash_attn_compat.reset_backend_counts()
    found = gradients_of(selectively)
    # One forward, which was not computed again, and one backward, which counts as a private function does.
    assert sum(flash_attn_compat.backend_counts().values()) == 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_gradient_of_the_lse_counts_under_a_mode_too(operators: Any) -> None:
    def with_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse, _ = ours.flash_attn_func(q, k, v, return_attn_probs=True)
        return out.sum() + lse.square().sum()

    expected = gradients_of(with_lse)
    with Operators():
        found = gradients_of(with_lse)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_lengths_that_tensors_hold_go_to_our_own_operator(operators: Any) -> None:
    q, k, v = (x.flatten(0, 1)[:7] for x in qkv())
    with Operators() as mode:
        ours.flash_attn_varlen_func(q, k, v, CU_SEQLENS, CU_SEQLENS, torch.tensor(4), torch.tensor(4))
    assert attention_operators(mode.seen) == ["flash_attn_compat.attention.default"]


@pytest.mark.parametrize("case", PUBLIC)
def test_operations_are_counted_the_same_under_the_name(operators: Any, case: str) -> None:
    counts = []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            gradients_of(PUBLIC[case][0])
        counts.append(counter.get_total_flops())
        unpatch()
    assert counts[0] == counts[1] > 0


MODES = (
    "dispatch mode",
    "two dispatch modes",
    "FlopCounterMode",
    "selective checkpointing",
    "make_fx",
    "fake",
    "wrapper",
)


@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize("name", CALLS)
def test_every_mode_is_right_under_the_name(operators: Any, kind: str, name: str) -> None:
    check(kind, name, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float64])
def test_calls_under_modes_can_be_differentiated_twice_and_in_batches(operators: Any, dtype: torch.dtype) -> None:
    def derivatives() -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in qkv()]
        out = flash_attn_compat.flash_attn_func(*inputs, causal=True)
        assert isinstance(out, Tensor)
        first = torch.autograd.grad(out.sin().sum(), inputs, create_graph=True)
        upstream = torch.stack([out.detach().sin(), out.detach().cos()])
        batched = torch.autograd.grad(out, inputs, upstream, is_grads_batched=True, retain_graph=True)
        return [*batched, *torch.autograd.grad(sum(x.square().sum() for x in first), inputs)]

    right = derivatives()
    with Operators() as mode:
        found = derivatives()
    assert "flash_attn._flash_attn_forward.default" in mode.seen
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("name", OPERATORS)
def test_the_operators_refuse_tangents_and_transforms(operators: Any, name: str) -> None:
    given = arguments(name, operators)

    def call(q: Tensor) -> Any:
        found = getattr(operators, name)(q, *given[1:])
        return (found if isinstance(found, Tensor) else found[0]).sum()

    for transform in (torch.func.grad, torch.func.vmap, torch.func.jacfwd):
        with pytest.raises(RuntimeError, match="cannot be combined with forward-mode derivatives"):
            transform(call)(given[0] if transform is not torch.func.vmap else given[0][None])
