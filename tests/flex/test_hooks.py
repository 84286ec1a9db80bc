"""flex_attention on our kernels, eager and compiled; declined calls are PyTorch's; and off again."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.nn.attention.flex_attention import flex_attention
from torch.torch_version import TorchVersion

from flash_attn_compat import backend_counts, explain, reset_backend_counts, settings
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.torch_flex import functions, graphs, inductor, operator, override
from flash_attn_compat.torch_flex.calls import FlexBackwardCall, FlexCall
from flash_attn_compat.torch_flex.operator import Switch
from flash_attn_compat.torch_flex.policy import Policy
from tests.flex import calls
from tests.flex.calls import OPERATOR, Answer, causal, make_mask, softcap, tensors
from tests.forms.plain import some
from tests.kernels.fused_on_cpu import LaunchRecord

HALF = torch.float16
BACKWARD = ["forward", "delta", "dkdv", "dq"]


def alibi(slopes: Tensor) -> calls.Mod:
    return lambda score, b, h, q, kv: score + slopes[h] * (kv - q)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.usefixtures("inductor_cache")
def test_a_call_and_its_gradients_are_computed_by_our_kernels(backend: str, served: LaunchRecord) -> None:
    qkv = tensors(2)
    documents = torch.sort(torch.randint(0, 3, (2, 130)))[0]
    mask = make_mask(lambda b, h, q, kv: (q >= kv) & (documents[b, q] == documents[b, kv]), *qkv[:2], per_head=True)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    found = calls.call(qkv, alibi(slopes), mask, backend=backend)
    assert served.entries == BACKWARD
    calls.assert_close(found, calls.in_fp32(qkv, alibi(slopes), mask), HALF)


@pytest.mark.parametrize("dtype", some([torch.bfloat16, HALF], 2), ids=str)
def test_a_soft_cap_without_a_block_mask(dtype: torch.dtype, served: LaunchRecord) -> None:
    qkv = tensors(rows=77, keys=201, dtype=dtype)
    found = calls.call(qkv, softcap)
    assert "forward" in served.entries and "dq" in served.entries
    calls.assert_close(found, calls.in_fp32(qkv, softcap), dtype)


def test_the_public_function_returns_lse_in_natural_units(served: LaunchRecord) -> None:
    q, k, v = tensors()
    with torch.no_grad():
        out, lse = torch.compile(flex_attention, backend="eager")(q, k, v, enable_gqa=True, return_lse=True)
    scores = q.float() @ k.float().repeat_interleave(2, 1).mT * 32**-0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    assert served.entries == ["forward"] and out.shape == q.shape


@pytest.mark.parametrize("order", some([(0, 1, 3, 2), (0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3)], 4))
def test_out_and_gradients_have_pytorchs_strides(order: tuple[int, ...], served: LaunchRecord) -> None:
    if order[-1] != 3 and TorchVersion(torch.__version__) < "2.11":
        pytest.skip("PyTorch 2.6 to 2.10 return channels that lie apart, as they lie in q; ours and 2.11 side by side")
    inverse = torch.argsort(torch.tensor(order)).tolist()
    qkv = [x.permute(order).contiguous().permute(inverse) for x in tensors(heads=2)]
    found, right = calls.call(qkv), calls.call([x.float() for x in qkv])
    assert found.out.stride() == right.out.stride()
    assert [x.stride() for x in found.gradients] == [x.stride() for x in right.gradients]
    calls.assert_close(found, right, HALF)


def test_the_gradient_of_the_lse_may_be_a_part_of_a_larger_tensor(served: LaunchRecord) -> None:
    def gradients(lse: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(torch.cat([lse, torch.zeros_like(lse)], -1).sin().sum(), leaves[:2])

    leaves, wide = ([x.to(dtype).requires_grad_() for x in tensors(rows=40)] for dtype in (HALF, torch.float32))
    found = gradients(torch.compile(calls.of_operator(leaves), backend="eager")(*leaves)[1], leaves)
    right = gradients(calls.COMPOSED(*wide, calls.identity, *calls.rest_of(wide), {}, (), ())[1], wide)
    assert served.entries == BACKWARD
    for x, y in zip(found, right):
        torch.testing.assert_close(x.float(), y, rtol=4e-3, atol=2e-3 * y.abs().max().item())


def test_values_of_another_head_dim_and_keys_of_one_batch(served: LaunchRecord) -> None:
    q, k, v = tensors(2, dim=64, dim_v=32)
    qkv = q, k[:1], v[:1]
    mask = make_mask(causal, *qkv[:2], per_head=True)
    found = calls.call(qkv, calls.identity, mask)
    assert served.entries == BACKWARD
    calls.assert_close(found, calls.in_fp32(qkv, calls.identity, mask), HALF)


@pytest.mark.parametrize("backend", some(["inductor", "aot_eager"], 2))
@pytest.mark.usefixtures("inductor_cache")
def test_blocks_of_16_rows_and_48_keys_are_served(backend: str, served: LaunchRecord) -> None:
    qkv = tensors()
    mask = make_mask(lambda b, h, q, kv: (q >= kv) & (q - kv < 50), *qkv[:2], block=(16, 48))
    found = calls.call(qkv, softcap, mask, backend=backend)
    assert served.entries == BACKWARD
    calls.assert_close(found, calls.in_fp32(qkv, softcap, mask), HALF)


def test_rows_without_keys_are_zero_and_their_lse_is_minus_infinity(served: LaunchRecord) -> None:
    qkv = tensors()
    mask = make_mask(lambda b, h, q, kv: (q >= 40) & (kv < 50), *qkv[:2])
    found = calls.call(qkv, softcap, mask)
    assert torch.equal(found.out[:, :, :40], torch.zeros_like(found.out[:, :, :40]))
    assert bool((found.lse[:, :, :40] == -torch.inf).all())
    calls.assert_close(found, calls.in_fp32(qkv, softcap, mask), HALF)


def test_a_number_in_the_cpus_memory_and_one_that_changes(served: LaunchRecord) -> None:
    qkv = tensors()
    offset = torch.tensor(17)
    mask = make_mask(lambda b, h, q, kv: q + offset >= kv, *qkv[:2])
    calls.assert_close(calls.call(qkv, mask=mask), calls.in_fp32(qkv, mask=mask), HALF)
    offset.fill_(90)
    mask = make_mask(mask.mask_mod, *qkv[:2])
    calls.assert_close(calls.call(qkv, mask=mask), calls.in_fp32(qkv, mask=mask), HALF)
    assert served.entries == 2 * BACKWARD


@pytest.mark.parametrize("backend", some(["eager", "inductor"], 2))
@pytest.mark.usefixtures("inductor_cache")
def test_one_text_serves_all_lengths_of_a_dynamic_graph(backend: str, served: LaunchRecord) -> None:
    offsets = torch.arange(300)

    def relative(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + offsets[q] * 0.01

    run, texts = calls.of_operator(tensors(), relative), set()
    compiled = torch.compile(run, backend=backend, dynamic=True)
    for rows in (60, 100, 130):
        qkv = tensors(rows=rows, keys=rows)
        with torch.no_grad():
            found = Answer(*compiled(*qkv)[:2])
        calls.assert_close(found, calls.in_fp32(qkv, relative, gradients=False), HALF)
        texts.add(served.last.variant.text)
    assert len(texts) == 1 and served.entries == ["forward"] * 3


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.usefixtures("inductor_cache")
def test_a_captured_integer_that_changes_is_a_number_of_the_call(backend: str, served: LaunchRecord) -> None:
    table = torch.randn(4, 600)

    lists = calls.rest_of(tensors())[0]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        length = q.shape[2]

        def relative(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return score + table[h, q - kv + length]

        return OPERATOR(q, k, v, relative, lists, 0.125, {"BACKEND": "AUTO"})

    compiled = torch.compile(run, backend=backend, dynamic=True)
    for rows in (60, 100):
        qkv = tensors(rows=rows, keys=rows)
        with torch.no_grad():
            found = Answer(*compiled(*qkv)[:2])
        right = calls.in_fp32(qkv, lambda s, b, h, q, kv: s + table[h, q - kv + rows], scale=0.125, gradients=False)
        calls.assert_close(found, right, HALF)
    assert served.entries == ["forward"] * 2


DECLINED: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "float32": (calls.identity, {"dtype": torch.float32}, {}),
    "special_i0": (lambda score, b, h, q, kv: score + torch.special.i0(score * 0), {}, {}),
    "max_scores": (calls.identity, {}, {"options": {"OUTPUT_MAX": True}}),
    "the backend FLASH": (calls.identity, {}, {"options": {"BACKEND": "FLASH"}}),
}  # fmt: skip


@pytest.mark.parametrize("name", DECLINED)
def test_declined_calls_match_pytorch_bit_for_bit(name: str, served: LaunchRecord) -> None:
    score_mod, shape, named = DECLINED[name]
    qkv = tensors(**shape)
    reset_backend_counts()
    found = calls.call(qkv, score_mod, gradients=False, **named)
    right = calls.composed(qkv, score_mod, gradients=False)
    assert backend_counts() == {"pytorch": 1} and not served.seen
    assert torch.equal(found.out, right.out) and torch.equal(found.lse, right.lse)


@pytest.mark.parametrize("size", [(2, 1, 20, 32), (2, 4, 9, 32)], ids=str)
def test_values_of_other_batches_heads_or_rows_than_keys_are_left_to_pytorch(
    size: tuple[int, ...], served: LaunchRecord
) -> None:
    q, k, v = (torch.randn(shape, dtype=HALF) for shape in ((2, 4, 20, 32), (2, 4, 20, 32), size))
    mask = calls.make_mask(calls.causal, q, k, block=16)
    if size[2] != k.shape[2]:
        with pytest.raises(RuntimeError):
            calls.call((q, k, v), mask=mask, gradients=False)
    else:
        found = calls.call((q, k, v), mask=mask, gradients=False)
        calls.assert_close(found, calls.composed((q, k, v), mask=mask, gradients=False), HALF)
    assert not served.seen


def test_a_captured_tensor_that_is_too_short_raises_pytorchs_error(served: LaunchRecord) -> None:
    short = torch.ones(100)
    with pytest.raises(IndexError):
        calls.call(tensors(), lambda score, b, h, q, kv: score + short[q], gradients=False)
    assert not served.seen


def explained(function: Any, *arguments: Any, **named: Any) -> list[str]:
    with torch.no_grad():
        return explain(torch.compile(function, backend="eager"), *arguments, **named).reasons["fused"]


def test_explain_says_who_serves_and_every_reason_against_us(served: LaunchRecord) -> None:
    qkv = tensors(heads_k=4)
    assert explained(flex_attention, *qkv, score_mod=softcap) == [] and not served.seen
    wide = [x.float() for x in qkv]
    score_mod, options = lambda score, b, h, q, kv: torch.special.i0(score), {"BACKEND": "TRITON_DECODE"}
    reasons = explained(calls.of_operator(wide, score_mod, options=options), *wide)
    for words in ("not float32", "TRITON_DECODE", "i0"):
        assert any(words in reason for reason in reasons)


def test_a_warm_call_neither_traces_nor_prepares(served: LaunchRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = tensors()
    run = torch.compile(calls.of_operator(qkv, softcap), backend="eager")
    with torch.no_grad():
        run(*qkv)
        monkeypatch.setattr(functions, "_print", None)
        monkeypatch.setattr("flash_attn_compat.backends.fused.flex.prepare", None)
        run(*qkv)
    assert served.entries == ["forward"] * 2


# ---- Warm calls: what changes between two calls of the same functions


@pytest.mark.parametrize("kernel", [calls.call_eagerly, calls.call_as_compiled])
def test_whatever_changes_in_a_warm_call_gets_its_own_answer(kernel: Any, served: LaunchRecord) -> None:
    with torch.no_grad():
        for name, change in [*calls.CHANGES.items(), *calls.CHANGES.items()]:
            for arguments in (calls.warm_call(**calls.BEFORE.get(name, dict)()), calls.warm_call(**change())):
                before, found = len(served.seen), Answer(*kernel(*arguments)[:2])
                assert len(served.seen) == before + 1, name
                wide = (x.float() for x in arguments[:3])
                calls.assert_close(found, Answer(*calls.COMPOSED(*wide, *arguments[3:])[:2]), HALF)


@pytest.mark.parametrize("size_of", [lambda table: table.shape[1], lambda table: torch.ops.aten.sym_size.int(table, 1)])
def test_a_graph_that_reads_a_captured_tensors_size_follows_it(size_of: Any, served: LaunchRecord) -> None:
    score_mod = torch.fx.symbolic_trace(lambda score, b, h, q, kv, table: score + table[h, kv % size_of(table)])
    with torch.no_grad():
        for size in (20, 30, 11):
            q, k, v, _, *rest = calls.warm_call(table=torch.randn(4, size))
            found = Answer(*calls.call_eagerly(q, k, v, score_mod, *rest)[:2])
            right = calls.COMPOSED(q.float(), k.float(), v.float(), score_mod, *rest)
            calls.assert_close(found, Answer(*right[:2]), HALF)
    assert served.entries == ["forward"] * 3


def test_a_lazily_negated_view_is_refused_behind_warm_calls_of_its_shape(served: LaunchRecord) -> None:
    kernel, (q, k, v) = OPERATOR.py_kernels[DispatchKey.CPU], tensors(rows=40, keys=40)
    for changed in ({"qkv": [torch._neg_view(q), k, v]}, {"table": torch._neg_view(torch.randn(4, 50))}):
        with torch.no_grad():
            kernel(*calls.warm_call())
            with pytest.raises(RuntimeError, match="must not be a lazily negated view"):
                kernel(*calls.warm_call(**changed))


@pytest.mark.parametrize("change", ["switch", "variable", "backend", "max_scores"])
def test_a_warm_call_follows_the_switch_the_settings_and_the_options(
    change: str, served: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, arguments, policy = OPERATOR.py_kernels[DispatchKey.CPU], calls.warm_call(), override.active_policy()
    assert policy is not None
    with torch.no_grad():
        for _ in range(3):
            kernel(*arguments)
        count, options = len(served.seen), {"max_scores": {"OUTPUT_MAX": True}}.get(change, {})
        with monkeypatch.context() as patches, settings.using_backend("sdpa" if change == "backend" else None):
            if change == "switch":
                override.release(policy)
            if change == "variable":
                patches.setenv(settings.FUSED, "0")
            kernel(*calls.warm_call(options=options))
            assert len(served.seen) == count
        if change == "switch":
            override.acquire(policy)
        OPERATOR.py_kernels[DispatchKey.CPU](*arguments)
        assert len(served.seen) == count + 1


def test_a_warm_backward_follows_what_wants_a_gradient_and_deterministic_mode(recorded: LaunchRecord) -> None:
    policy, forward = override.active_policy(), OPERATOR.py_kernels[DispatchKey.CPU]
    q, k, v, score, *rest = calls.warm_call()
    table = rest[3][0]
    assert policy is not None

    def gradients() -> Any:
        with torch.no_grad():
            out, lse, *_ = forward(q, k, v, score, *rest)
            call = FlexBackwardCall(q, k, v, out, lse, torch.ones_like(out), None, score, score, *rest)
            return operator._backward(policy, call)

    for wants in (False, False, True, True, False):
        table.requires_grad_(wants)
        assert [x is not None for x in gradients()[3]] == [wants]
    torch.use_deterministic_algorithms(True)
    try:
        assert gradients()[3] == (None,)
        table.requires_grad_()
        assert gradients() is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert recorded.entries == [*6 * BACKWARD, "forward"]


def test_prepared_calls_keep_no_tensors_and_no_graphs_alive(recorded: LaunchRecord) -> None:
    def run() -> list[weakref.ref[Any]]:
        score = torch.fx.symbolic_trace(lambda score, b, h, q, kv, table: score + table[h, kv])
        given = calls.warm_call()
        given = (*given[:3], score, *given[4:])
        with torch.no_grad():
            out, lse = [OPERATOR.py_kernels[DispatchKey.CPU](*given) for _ in range(3)][-1][:2]
            backward = torch.ops.higher_order.flex_attention_backward.py_kernels[DispatchKey.CPU]
            backward(*given[:3], out, lse, torch.ones_like(out), None, score, score, *given[4:])
        return [weakref.ref(x) for x in (*given[:3], score, *given[4][2:4], *given[7], out)]

    dead = run()
    gc.collect()
    assert recorded.entries == ["forward"] * 3 + BACKWARD[1:] and [x() for x in dead] == [None] * len(dead)


@pytest.mark.parametrize("what", calls.BEHIND)
def test_pytorchs_autograd_gets_all_calls_that_it_or_a_mode_must_see(what: str, served: LaunchRecord) -> None:
    is_ours, around, changed = calls.BEHIND[what]()
    kernel = operator.make_autograd_forward(Switch(override.active_policy()), lambda *arguments: ("pytorch",))
    arguments = calls.warm_call(**changed)
    with around:
        found = kernel(*arguments)
    assert (found[0] != "pytorch", served.entries) == (is_ours, ["forward"] * is_ours)


def test_vmap_stays_pytorchs(served: LaunchRecord) -> None:
    qkv = [x[None].expand(2, *x.shape) for x in tensors(heads_k=4)]
    with pytest.raises(Exception, match="Vmap"):
        torch.vmap(lambda q, k, v: calls.call((q, k, v), gradients=False).out)(*qkv)


# ---- On and off


def state() -> list[Any]:
    """Everything of PyTorch's that a policy may change, but for handlers of fake tensors, which stay wrapped."""
    operators = torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward
    lowerings = inductor._import_lowerings().lowerings
    return [(dict(each.py_kernels), lowerings.get(each)) for each in operators]


def test_off_again_everything_is_as_before(served: LaunchRecord) -> None:
    policy = override.active_policy()
    assert policy is not None
    override.release(policy)
    before = state()
    with override.applied(policy):
        calls.call(tensors(), backend="aot_eager")
        inductor.replace(policy)
        during = state()
        assert all(found != was for found, was in zip(during, before))
    assert state() == before and override.active_policy() is None
    override.acquire(policy)


def test_a_call_that_found_our_kernel_before_the_switch_went_off_is_pytorchs(served: LaunchRecord) -> None:
    """As calls of other threads may."""
    policy, kernel, qkv = override.active_policy(), OPERATOR.py_kernels[DispatchKey.CPU], tensors(rows=9, keys=9)
    assert policy is not None
    override.release(policy)
    found = Answer(*kernel(*qkv, softcap, *calls.rest_of(qkv), {}, (), ())[:2])
    override.acquire(policy)
    right = calls.composed(qkv, softcap, gradients=False)
    assert not served.seen and torch.equal(found.out, right.out) and torch.equal(found.lse, right.lse)


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.7", reason="inductor of PyTorch 2.6 refuses fp16 on CPUs")
@pytest.mark.usefixtures("inductor_cache")
def test_a_compiled_function_follows_the_switch(served: LaunchRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    def lower_as_pytorch(*arguments: Any) -> Any:
        raise NotImplementedError("this is PyTorch's lowering")

    policy = override.active_policy()
    assert policy is not None
    override.release(policy)
    monkeypatch.setitem(inductor._import_lowerings().lowerings, OPERATOR, lower_as_pytorch)
    override.acquire(policy)
    qkv = tensors()
    run = torch.compile(calls.of_operator(qkv))
    with torch.no_grad():
        run(*qkv)
        assert served.entries == ["forward"]
        override.release(policy)
        with pytest.raises(Exception, match="this is PyTorch's lowering"):
            run(*qkv)
        assert served.entries == ["forward"]
        override.acquire(policy)
        found = run(*qkv)
    torch.testing.assert_close(found[0], calls.composed(qkv, gradients=False).out, rtol=4e-3, atol=4e-3)
    assert served.entries == ["forward"] * 2


@pytest.mark.usefixtures("served")
def test_the_keys_of_graphs_on_disk_hold_the_switch() -> None:
    config: Any = getattr(torch.compiler, "config", None)
    if TorchVersion(torch.__version__) < "2.7" or not isinstance(getattr(config, "cache_key_tag", None), str):
        pytest.skip("PyTorch 2.7 brought marks of cache keys")
    qkv = tensors(rows=9, keys=9)
    run = torch.compile(calls.of_operator(qkv), backend="eager")
    with torch.no_grad():
        run(*qkv)
        assert f"|flash_attn_compat.flex={graphs._state()}" in config.cache_key_tag
        policy = override.active_policy()
        assert policy is not None
        override.release(policy)
        run(*qkv)
        assert "flash_attn_compat.flex" not in config.cache_key_tag
        override.acquire(policy)


def test_policies_nest_and_the_widest_is_active() -> None:
    with override.applied(Policy("cpu")):
        with override.applied(Policy("cpu", always=True)):
            assert override.active_policy() == Policy("cpu", always=True)
        assert override.active_policy() == Policy("cpu")
    assert override.active_policy() is None


def test_the_operators_table_has_ours_in_front_of_pytorchs_composition_and_autograd(served: LaunchRecord) -> None:
    kernels = torch.ops.higher_order.flex_attention.py_kernels
    assert kernels[DispatchKey.CPU] is not kernels[DispatchKey.CompositeExplicitAutograd] is calls.COMPOSED
    assert kernels[DispatchKey.AutogradCPU] is not kernels[DispatchKey.Autograd]


def test_an_old_pytorch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.5.1+cu121")
    with pytest.raises(RuntimeError, match=r"flex needs PyTorch 2\.6 or newer, and this is 2\.5\.1"):
        override.acquire(Policy())
    assert override.active_policy() is None


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.7", reason="inductor of PyTorch 2.6 refuses fp16 on CPUs")
@pytest.mark.usefixtures("inductor_cache")
@pytest.mark.parametrize("backend", some(["eager", "inductor"], 2))
def test_a_kernel_that_does_not_compile_leaves_the_call_to_pytorch_with_a_warning(
    backend: str, served: LaunchRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(variant: object, device: int) -> None:
        raise nvrtc.KernelError("refused")

    monkeypatch.setattr(nvrtc, "kernel", fail)
    qkv = tensors(rows=40, keys=40)
    run = torch.compile(lambda q, k, v: flex_attention(q, k, v, score_mod=softcap, enable_gqa=True), backend=backend)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="flex_attention failed, and PyTorch's serve: refused"):
        out = run(*qkv)
    assert not served.seen
    torch.testing.assert_close(out, calls.composed(qkv, softcap, gradients=False).out, rtol=4e-3, atol=4e-3)


def test_a_captured_subclass_and_a_tensor_inside_of_a_graph_are_left_to_pytorch(served: LaunchRecord) -> None:
    q, k, v = tensors(heads_k=4)
    table = torch.ones(4).as_subclass(calls.Marked)
    mask = make_mask(causal, q, k).as_tuple()
    graph = torch.fx.symbolic_trace(lambda score, b, h, q, kv: score * 2)
    graph.register_buffer("factor", torch.tensor(3.0))
    with graph.graph.inserting_before(next(node for node in graph.graph.nodes if node.op == "call_function")):
        graph.graph.get_attr("factor")
    everywhere = torch.fx.symbolic_trace(lambda b, h, q, kv: q >= kv)
    indexed = torch.fx.symbolic_trace(lambda score, b, h, q, kv, t: score + t[h])
    for score_mod, captured in ((indexed, (table,)), (graph, ())):
        reasons = _reasons_of((q, k, v, score_mod, (*mask[:-1], everywhere), 0.1, {}, captured, ()))
        assert len(reasons) == 1 and ("plain tensors" in reasons[0] or "of its own" in reasons[0])


def _reasons_of(arguments: tuple[Any, ...]) -> list[str]:
    policy = override.active_policy()
    assert policy is not None
    return list(operator._all_reasons(policy, FlexCall(*arguments)))
