"""PyTorch's packed attention and torch.ops.flash_attn.* under the name: schemas, answers, precedence."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import flash_attn_compat
from flash_attn_compat import flash_attn_interface as ours
from flash_attn_compat.dropin import patch, unpatch
from tests.dropin.test_detection import CALL
from tests.forms.inputs import cumulative, qkv, randn
from tests.forms.kinds import CALLS, Operators, check
from tests.forms.plain import attention, check_function
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
def test_the_operator_answers_as_the_function_of_its_name(operators: Any, name: str) -> None:
    for dropout_p in (0.0, 0.5):
        results = []
        for namespace in (ours, operators):
            torch.manual_seed(0)
            given = arguments(name, namespace, dropout_p)
            found = getattr(namespace, name)(*given)
            results.append((*([found] if isinstance(found, Tensor) else found), *given))  # gradients are written there
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("name", OPERATORS)
def test_fake_results_match_real_ones(operators: Any, name: str) -> None:
    for dropout_p in (0.0, 0.5):
        given = arguments(name, operators, dropout_p)
        if dropout_p == 0.0 and name.endswith("forward"):
            given = (given[0].transpose(-3, -2).contiguous().transpose(-3, -2), *given[1:])  # strided
        # The check of the schema runs the operator twice, which draws different dropout.
        checks = ("test_schema", "test_faketensor")[int(dropout_p > 0) :]
        if name.endswith("forward"):
            wider = (*given[:2], torch.cat([given[2]] * 2, dim=-1), *given[3:])  # values of another head_dim
            torch.library.opcheck(getattr(operators, name).default, wider, test_utils=checks)
        torch.library.opcheck(getattr(operators, name).default, given, test_utils=checks)


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


THEIRS = """
@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def theirs(q: torch.Tensor) -> torch.Tensor:
    return q + 1
"""
IN_A_PROCESS = {
    "what is registered already is left alone": f"""{THEIRS}
flash_attn_compat.patch()
import flash_attn
assert torch.ops.flash_attn._flash_attn_forward(torch.zeros(1)) == 1
assert hasattr(torch.ops.flash_attn, "_flash_attn_backward")
""",
    "patching again changes nothing, and a package imported later registers over ours": f"""
assert not hasattr(torch.ops.flash_attn, "_flash_attn_forward")  # not without the name
for _ in range(2):
    with flash_attn_compat.patched():
        import flash_attn
q = torch.ones(1, 2, 1, 8)
out, *_ = torch.ops.flash_attn._flash_attn_forward(q, q, q, 0.0, 1.0, False, -1, -1, 0.0, None, False)
assert torch.equal(out, q)
{THEIRS}
assert torch.ops.flash_attn._flash_attn_forward(torch.zeros(1)) == 1
""",
}


@pytest.mark.parametrize("case", IN_A_PROCESS)
def test_registration(case: str) -> None:
    done = forked(f"import torch, flash_attn_compat\n{IN_A_PROCESS[case]}")
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


def under_a_mode(function: Any, *options: Any) -> tuple[tuple[Tensor, ...], list[str]]:
    """The gradients, and the operators of attention that a mode sees."""
    with Operators() as mode:
        found = gradients_of(function, *options)
    return found, [name for name in mode.seen if not name.startswith("aten.")]


@pytest.mark.parametrize("case", PUBLIC)
def test_modes_see_flash_attns_operators_under_its_name(operators: Any, case: str) -> None:
    function, kind = PUBLIC[case]
    for dropout_p in (0.0, 0.5):
        found, seen = under_a_mode(function, dropout_p)
        assert seen == [f"flash_attn._flash_attn_{kind}{way}.default" for way in WAYS]
        torch.testing.assert_close(found, gradients_of(function, dropout_p))


def test_modes_see_our_own_operators_once_the_name_is_given_back(operators: Any) -> None:
    unpatch()
    names = "attention", "attention_backward"
    assert under_a_mode(dense)[1] == [f"flash_attn_compat.{name}.default" for name in names]


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
    torch.testing.assert_close(found, expected)


def test_a_gradient_of_the_lse_counts_under_a_mode_too(operators: Any) -> None:
    def with_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse, _ = ours.flash_attn_func(q, k, v, return_attn_probs=True)
        return out.sum() + lse.square().sum()

    torch.testing.assert_close(under_a_mode(with_lse)[0], gradients_of(with_lse))


def test_lengths_that_tensors_hold_go_to_our_own_operators(operators: Any) -> None:
    def with_lengths(q: Tensor, k: Tensor, v: Tensor) -> Any:
        q, k, v = (x.flatten(0, 1)[:7] for x in (q, k, v))
        return ours.flash_attn_varlen_func(q, k, v, CU_SEQLENS, CU_SEQLENS, torch.tensor(4), torch.tensor(4))

    assert under_a_mode(with_lengths)[1][0] == "flash_attn_compat.attention.default"


def test_operations_are_counted_the_same_under_the_name(operators: Any) -> None:
    counts: list[list[int]] = []
    for _ in range(2):
        counts.append([])
        for function, _ in PUBLIC.values():
            with FlopCounterMode(display=False) as counter:
                gradients_of(function)
            counts[-1].append(counter.get_total_flops())
        unpatch()
    assert counts[0] == counts[1] and min(counts[0]) > 0


MODES = (
    "dispatch mode",
    "two dispatch modes",
    "FlopCounterMode",
    "selective checkpointing",
    "make_fx",
    "fake",
    "wrapper",
)


@pytest.mark.parametrize("kind", [*MODES, "wrapper"])
def test_every_mode_is_right_under_the_name(operators: Any, kind: str) -> None:
    for name in CALLS:
        check(kind, name, torch.device("cpu"))


def test_calls_under_modes_can_be_differentiated_twice_and_in_batches(operators: Any) -> None:
    def derivatives() -> list[Tensor]:
        inputs = [x.double().requires_grad_() for x in qkv()]
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


def test_the_operators_refuse_tangents_and_transforms(operators: Any) -> None:
    for name, transform in itertools.product(OPERATORS, (torch.func.grad, torch.func.vmap, torch.func.jacfwd)):
        given = arguments(name, operators)

        def call(q: Tensor, name: str = name, given: tuple[Any, ...] = given) -> Any:
            found = getattr(operators, name)(q, *given[1:])
            return (found if isinstance(found, Tensor) else found[0]).sum()

        with pytest.raises(RuntimeError, match="cannot be combined with forward-mode derivatives"):
            transform(call)(given[0] if transform is not torch.func.vmap else given[0][None])


# ------------------------------------------------------------- torch.nn.attention.varlen, against attention written out

HOME = "torch.nn.attention.varlen"
varlen: Any = importlib.import_module(HOME) if importlib.util.find_spec(HOME) else None
has_varlen = pytest.mark.skipif(varlen is None, reason=f"{HOME} came with torch 2.10")
varlen_attn: Any = getattr(varlen, "varlen_attn", None)

H, HK, D = 4, 2, 16
LENGTHS = (3, 6, 1)
STARTS = cumulative(*LENGTHS)
varlen_arguments = inspect.signature(varlen_attn).parameters if varlen else {}


def needs(*names: str) -> Any:
    missing = [name for name in names if name not in varlen_arguments]
    return pytest.mark.skipif(bool(missing), reason=f"this torch's varlen_attn has no {missing}")


def served(test: Any) -> Any:
    return has_varlen(pytest.mark.usefixtures("varlen_served")(test))


@pytest.fixture
def varlen_served() -> None:
    patch(varlen_attn=True)


def each(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    parts = zip(*(t[None].split(LENGTHS, dim=1) for t in (q, k, v)))
    return torch.cat([attention(*part, **options)[0] for part in parts])


def packed_inputs(dtype: torch.dtype = torch.float32, heads_k: int = H) -> tuple[Tensor, Tensor, Tensor]:
    total = sum(LENGTHS)
    return tuple(randn(total, h, D, seed=s, dtype=dtype) for s, h in enumerate((H, heads_k, heads_k)))  # type: ignore[return-value]


@has_varlen
def test_varlen_attn_is_served_from_the_asking_to_unpatch() -> None:
    for options in ({}, {"varlen_attn": True}):
        patch(**options)
        with contextlib.nullcontext() if options else pytest.raises(NotImplementedError, match="_attention_forward"):
            varlen_attn(*packed_inputs(torch.float16), STARTS, STARTS, 6, 6)
    unpatch()
    with pytest.raises(NotImplementedError):
        varlen_attn(*packed_inputs(torch.float16), STARTS, STARTS, 6, 6)


# options of varlen_attn, and of attention; causal is a window of (-1, 0) here
VARLEN_OPTIONS: list[Any] = [
    ({}, {}),
    *(
        pytest.param({"window_size": window}, {"window": window}, marks=needs("window_size"))
        for window in ((-1, 0), (2, 0), (1, 2))
    ),
    pytest.param({"scale": 0.3, "enable_gqa": True}, {"scale": 0.3}, marks=needs("enable_gqa")),
]


@served
@pytest.mark.parametrize(("options", "plain"), VARLEN_OPTIONS)
def test_values_and_gradients(options: dict[str, Any], plain: dict[str, Any]) -> None:
    def ours(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return varlen_attn(q, k, v, STARTS, STARTS, 6, 6, **options)

    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        given = packed_inputs(dtype, HK if "enable_gqa" in options else H)
        check_function(ours, lambda *given: each(*given, **plain), *given, epsilons=4)


@served
def test_the_log_sum_exp_comes_along() -> None:
    q, k, v = packed_inputs()
    out, lse = varlen_attn(q, k, v, STARTS, STARTS, 6, 6, return_aux=varlen.AuxRequest(lse=True))
    parts = zip(q.split(LENGTHS), k.split(LENGTHS))
    expected = [torch.einsum("thd,shd->hts", a, b).mul(D**-0.5).logsumexp(-1) for a, b in parts]
    torch.testing.assert_close(lse, torch.cat(expected, dim=1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out, each(q, k, v), rtol=1e-4, atol=1e-5)


@served
@needs("block_table")
@pytest.mark.parametrize("with_starts", [False, True])
def test_pages_and_used_lengths_are_read(with_starts: bool) -> None:
    page, used = 256, torch.tensor([5, 300], dtype=torch.int32)
    q = randn(3, H, D)
    keys, values = randn(4, page, H, D, seed=1), randn(4, page, H, D, seed=2)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    starts_q, starts_k = cumulative(1, 2), cumulative(5, 300) if with_starts else None
    out = varlen_attn(
        q, keys, values, starts_q, starts_k, 2, 300, window_size=(-1, 0), seqused_k=used, block_table=table
    )
    for i, rows in enumerate(q.split((1, 2))):
        k, v = (t[table[i]].flatten(0, 1)[None, : used[i]] for t in (keys, values))
        right = attention(rows[None], k, v, window=(-1, 0))[0]
        torch.testing.assert_close(out.split((1, 2))[i], right, rtol=1e-4, atol=1e-5)


@served
@pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="this torch has no varlen_attn_out")
def test_a_given_output_is_written_unless_it_overlaps_itself() -> None:
    q, k, v = packed_inputs()
    out = torch.full_like(q, 7.0)
    assert varlen.varlen_attn_out(out, q, k, v, STARTS, STARTS, 6, 6) is out
    torch.testing.assert_close(out, each(q, k, v), rtol=1e-4, atol=1e-5)
    out = torch.zeros_like(q)
    out = out.as_strided(out.shape, (out.stride(0) - 1, *out.stride()[1:]))
    with pytest.raises(RuntimeError, match="out must not overlap itself"):
        varlen.varlen_attn_out(out, q, k, v, STARTS, STARTS, 6, 6)
    assert not out.any()


@served
def test_a_compiled_graph_holds_the_operator() -> None:
    leaves = [t.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for t in packed_inputs()]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return varlen_attn(q, k, v, STARTS, STARTS, 6, 6).sin().sum()

    expected = torch.autograd.grad(each(*leaves).sin().sum(), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for found, right in zip(torch.autograd.grad(compiled(*leaves), leaves), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


@served
@needs("num_splits")
def test_a_promise_that_we_do_not_keep_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="does not promise the same bits in every batch"):
        varlen_attn(*packed_inputs(), STARTS, STARTS, 6, 6, num_splits=1)


@has_varlen
@pytest.mark.parametrize("variables", [{}, {"FLASH_ATTN_COMPAT_VARLEN_ATTN": "1"}], ids=["asked", "by the variable"])
def test_it_is_served_where_it_is_imported_later(variables: dict[str, str]) -> None:
    answer = forked(f"import flash_attn_compat as c; c.patch(varlen_attn={not variables}); {CALL}", **variables)
    assert answer.stdout.strip() == "16.0", answer.stderr
