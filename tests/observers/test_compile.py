"""Compiled calls match eager ones, and five calls are right with every kind of tensor and in every mode."""

from __future__ import annotations

import itertools
import multiprocessing
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import flash_attn_compat
from flash_attn_compat import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    use_backend,
)
from flash_attn_compat.backends import chunked
from flash_attn_compat.backends.compilation import OptionallyCompiled
from flash_attn_compat.core.features import Feature
from flash_attn_compat.core.inputs import Options, PackedInputs
from flash_attn_compat.dispatch import ops
from flash_attn_compat.layers.rotary import RotaryEmbedding, apply_rotary_emb
from flash_attn_compat.losses.cross_entropy import CrossEntropyLoss
from flash_attn_compat.ops import activations as act
from flash_attn_compat.ops.rms_norm import rms_norm
from flash_attn_compat.ops.triton.layer_norm import layer_norm_fn
from tests.forms.inputs import cumulative, ints, packed, qkv, randn
from tests.forms.kinds import CALLS, KINDS, Operators, Pending, Tensors, check, compare
from tests.forms.plain import some, some_of
from tests.forms.support import GENERAL, RecordingReference, close
from tests.kernels import fused_on_cpu
from tests.tools.interpreters import CAN_FORK
from verify.drawing import random_problem
from verify.examination import Examination
from verify.problems import Problem

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def compiled(function: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
    """A graph break anywhere is an error."""
    return torch.compile(function, fullgraph=True, backend="aot_eager", **kwargs)


def both(function: Callable[..., Any], inputs: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    """Output and gradients."""
    torch.manual_seed(0)
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves, *args, **kwargs)
    return [out, *torch.autograd.grad((out * out.detach().cos()).sum(), leaves)]


def of_a_mask(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Attend as models do that derive the lengths from a mask."""
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return flash_attn_varlen_func(q, k, v, cu, cu, lengths.max(), lengths.max(), causal=True)


def norms(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    y: Any
    y, h = layer_norm_fn(x, weight, None, residual=residual, prenorm=True)
    return y + h + rms_norm(x, weight, 1e-5)


DENSE, PACKED = list(qkv(sq=5, sk=9)), packed((3, 5), (4, 7))
TABLES = {"cos": randn(9, 5).cos(), "sin": randn(9, 5).sin(), "seqlen_offsets": torch.tensor([1, 3])}
ROTARY, LOSS = RotaryEmbedding(8), CrossEntropyLoss(label_smoothing=0.1)
Case = tuple[Callable[..., Any], list[Tensor], tuple[Any, ...], dict[str, Any]]
COMPILED: dict[str, Case] = {
    "dense ALiBi": (flash_attn_func, DENSE, (), dict(causal=True, alibi_slopes=torch.tensor([0.3, 0.1]))),
    "dense softcap": (flash_attn_func, DENSE, (), dict(softcap=2.0, softmax_scale=0.3)),
    "attention sinks": (
        lambda q, k, v, sinks: flash_attn_func(q, k, v, causal=True, s_aux=sinks), [*DENSE, randn(2)], (), {}
    ),
    "varlen window": (flash_attn_varlen_func, *PACKED, dict(window_size=(3, 1), deterministic=True)),
    "varlen, lengths of a mask": (of_a_mask, [randn(8, 2, 16, seed=s) for s in range(3)], (torch.tensor([3, 5]),), {}),
    "dropout": (flash_attn_func, DENSE, (), dict(dropout_p=0.4)),
    "qkv": (flash_attn_varlen_qkvpacked_func, [randn(8, 3, 2, 16)], (cumulative(3, 5), 5), dict(causal=True)),
    "rotary": (lambda x: apply_rotary_emb(x * 2, **TABLES), [randn(2, 5, 3, 16)], (), {}),
    "rotary of packed sequences in place": (
        lambda x, **options: apply_rotary_emb(x * 2, **TABLES, **options), [randn(10, 3, 16)], (),
        dict(inplace=True, cu_seqlens=cumulative(4, 6), max_seqlen=6),
    ),
    "rotary module": (lambda x: ROTARY(x * 1.0), [randn(2, 5, 3, 3, 16)], (), {}),
    "norms": (norms, [randn(3, 24), randn(3, 24, seed=1), randn(24)], (), {}),
    "cross entropy": (lambda x, labels: LOSS(x * 1.0, labels), [randn(4, 7)], (torch.tensor([1, 4, -100, 0]),), {}),
    "activations": (
        lambda x, y, b: act.swiglu(x, y) + act.bias_gelu_impl(x, b) + act.fast_gelu_impl(y),
        [randn(4, 8), randn(4, 8, seed=1), randn(8)], (), {},
    ),
}  # fmt: skip


# What these compile, others of the table do too.
SPARE = "dense softcap", "attention sinks", "varlen window", "qkv", "rotary", "rotary of packed sequences in place"


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.thorough] * (x in SPARE)) for x in COMPILED])
def test_compiled_output_and_gradients_match_the_eager_call(name: str) -> None:
    if name == "rotary module" and TorchVersion(torch.__version__) < "2.6":
        pytest.skip("before 2.6, PyTorch traces no .data in a backward, by which the rotation writes into its input")
    function, inputs, args, options = COMPILED[name]
    found, expected = (both(each, inputs, *args, **options) for each in (compiled(function), function))
    for ours, right in zip(found, expected, strict=True):
        close(ours, right, 4)


@pytest.mark.parametrize("longest", [(5, 7), (5, torch.tensor(130))])
def test_s_dmask_has_its_eager_shape_however_the_longest_lengths_are_given(longest: tuple[Any, Any]) -> None:
    if isinstance(longest[1], Tensor) and TorchVersion(torch.__version__) < "2.6":
        pytest.skip(
            "before 2.6, PyTorch compiles shapes that a tensor decides with capture_dynamic_output_shape_ops only"
        )
    (q, k, v), (cu_q, cu_k, *_) = PACKED

    def probabilities(*lengths: Any) -> tuple[Tensor, int]:
        s_dmask = flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, *lengths, dropout_p=0.3, causal=True, return_attn_probs=True
        )[2]
        return s_dmask.abs() + 1, s_dmask.shape[-1]  # a kernel that was compiled for a shape

    torch.manual_seed(0)
    right, keys = probabilities(*longest)
    torch.manual_seed(0)
    ours, compiled_keys = compiled(probabilities)(*longest)
    assert ours.shape == right.shape and compiled_keys == keys
    close(ours, right)


@pytest.mark.parametrize(("mode", "needs_grad"), [
    (torch.enable_grad, True), (torch.no_grad, True),
    pytest.param(torch.enable_grad, False, marks=pytest.mark.thorough),
    pytest.param(torch.inference_mode, True, marks=pytest.mark.thorough),
])  # fmt: skip
def test_a_compiled_call_needs_gradients_if_its_eager_one_does(
    asked: RecordingReference, needs_grad: bool, mode: Any
) -> None:
    """Over pages, some backends serve only calls without gradients and LSE."""
    q, k, v = randn(5, 2, 16).requires_grad_(needs_grad), randn(4, 4, 2, 16, seed=1), randn(4, 4, 2, 16, seed=2)
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    results = []
    with mode():
        needs_grad &= torch.is_grad_enabled()
        for function in (flash_attn_varlen_func, compiled(flash_attn_varlen_func)):
            results.append(function(q, k, v, cumulative(2, 3), cumulative(6, 3), 3, 6, block_table=table))
        compiled(flash_attn_with_kvcache)(q.detach()[:2, None], k, v, cache_seqlens=3)
    close(*results)
    assert [bool(call.use & Feature.BACKWARD) for call in asked.computed] == [needs_grad, needs_grad, False]
    assert [bool(call.use & Feature.LSE) for call in asked.computed] == [False, needs_grad, False]


def step(call: Callable[..., Any], cache: list[Tensor], length: int | Tensor, **options: Any) -> tuple[Tensor, ...]:
    q, k, v = randn(2, 3, 4, 16, seed=1), randn(2, 3, 2, 16, seed=2), randn(2, 3, 2, 16, seed=3)
    return call(q, *cache, k, v, cache_seqlens=length, causal=True, return_softmax_lse=True, **options)


ROTATED = {"rotary_cos": randn(20, 8, seed=4).cos(), "rotary_sin": randn(20, 8, seed=4).sin()}


@pytest.mark.parametrize(("lengths", "options"), [([ints(4, 9)], ROTATED), ([4, 7, 10, 17], {})])
def test_steps_that_append_write_the_same_cache_and_an_int_length_may_grow(lengths: Any, options: Any) -> None:
    call, caches = compiled(flash_attn_with_kvcache), [[randn(2, 20, 2, 16, seed=s) for s in (5, 6)] for _ in range(2)]
    for length in lengths:
        found, right = (step(c, cache, length, **options) for c, cache in zip((call, flash_attn_with_kvcache), caches))
        for x, y in zip((*found, *caches[0]), (*right, *caches[1]), strict=True):
            close(x, y)
    with pytest.raises(RuntimeError, match="exceeds the capacity"):
        step(call, caches[0], 20)


def test_a_graph_holds_one_node_per_call_and_serves_other_lengths() -> None:
    graphs = []

    def keeping(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    attention = torch.compile(flash_attn_func, fullgraph=True, backend=keeping, dynamic=True)
    for seqlen in (5, 9, 17, 33):
        q, k, v = qkv(sq=seqlen, sk=seqlen)
        close(attention(q, k, v, causal=True), flash_attn_func(q, k, v, causal=True))
    assert len(graphs) <= 2
    targets = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("flash_attn_compat" in target for target in targets) == 1
    assert not any(target.startswith("flash_attn.") for target in targets)


def test_eager_calls_do_not_pass_through_custom_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((ops, "_forward_op"), (ops, "backward_op"), (ops, "_kvcache_op")):
        monkeypatch.setattr(module, name, None)
    q, k, v = (x.requires_grad_() for x in qkv())
    cu = cumulative(7, 7)
    flash_attn_func(q, k, v).sum().backward()
    flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), cu, cu, 7, 7)
    flash_attn_with_kvcache(q.detach(), k.detach(), v.detach(), cache_seqlens=3)
    with pytest.raises(TypeError), TorchDispatchMode():
        flash_attn_func(q, k, v)


OPTIONS = {"plain": Options(causal=True), "dropout": Options(dropout_p=0.3)}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("layout", ["dense", "heads first", "packed"])
def test_the_fake_kernels_know_shapes_dtypes_and_strides(option: str, layout: str) -> None:
    dtype = torch.float16 if option == "plain" else torch.float32
    (q, k, v), options, starts = qkv(sq=5, sk=9, dtype=dtype), OPTIONS[option], ()
    if layout == "heads first":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    if layout == "packed":
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        starts, options = (cumulative(3, 7), cumulative(9, 9)), options._replace(max_seqlen_q=7, max_seqlen_k=9)
    arguments = ops._flatten(PackedInputs(q, k, v, None, *starts), options)
    checks = ("test_schema", "test_faketensor")
    rng_state = torch.tensor([5, 7]) if option == "dropout" else None
    asked = True, option == "dropout", True, rng_state
    torch.library.opcheck(ops._forward_op, (*arguments, *asked), test_utils=checks)
    out, lse, _, rng_state = ops._forward_op(*arguments, *asked)
    for dlse in (None, torch.ones_like(lse)):
        given = (torch.ones_like(out), out, lse, rng_state, dlse, *arguments)
        torch.library.opcheck(ops.backward_op, given, test_utils=checks)


# ------------------------- the step of `chunked`: off by default, as right as the plain one, given up after one failure


def test_nothing_is_compiled_unless_the_user_says_so(monkeypatch):
    monkeypatch.delenv("FLASH_ATTN_COMPAT_COMPILE", raising=False)
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: pytest.fail("compiled"))
    assert OptionallyCompiled(torch.neg)(torch.ones(1)).item() == -1


@pytest.fixture
def compiled_step(monkeypatch):
    """Counts its runs."""
    step, runs = chunked._fused_weights._function, []
    monkeypatch.setenv("FLASH_ATTN_COMPAT_COMPILE", "1")
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: lambda *args: runs.append(1) or function(*args))
    monkeypatch.setattr(chunked, "_fused_weights", OptionallyCompiled(step))
    return runs


@pytest.mark.parametrize("first", some((9000, 9012), 2))
def test_random_problems_are_right_with_the_compiled_step(compiled_step, first):
    long = Problem(seqlens_q=(1100,), seqlens_k=(1100,), head_dim=16, causal=True, dtype="float64")
    problems = [random_problem(first + number, dtypes=("float32", "float64")) for number in range(12)]
    for problem in (*problems, *(replace(long, window=(left, 0)) for left in (12, 200))):
        verdict = Examination(problem).judge("chunked")
        assert not verdict.failures, (problem, verdict)
    assert compiled_step


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_step_that_fails_warns_once_is_not_tried_again_and_changes_no_answer(
    monkeypatch: pytest.MonkeyPatch, at_the_end: bool
) -> None:
    tried: list[int] = []

    def compiled(function: Callable[..., object], **options: object) -> Callable[..., object]:
        def fails(*args: object) -> None:
            tried.append(1)
            if at_the_end:
                function(*args)
            raise RuntimeError("no compiler here")

        return fails

    q = torch.randn(1, 40, 2, 16)
    with use_backend("chunked"):
        right = flash_attn_func(q, q, q)
        monkeypatch.setenv("FLASH_ATTN_COMPAT_COMPILE", "1")
        monkeypatch.setattr(torch, "compile", compiled)
        monkeypatch.setattr(chunked, "_fused_weights", OptionallyCompiled(chunked._fused_weights._function))
        with pytest.warns(RuntimeWarning, match="no compiler here"):
            out = flash_attn_func(q, q, q)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again = flash_attn_func(q, q, q)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(again, right)
    assert tried == [1]


# ------------------------------------------------------------------------------------------ kinds of tensors, and modes


# Those that look into what a backend does; the others meet all backends alike.
LOOKING = ("wrapper", "jit.trace", "dispatch mode", "selective checkpointing", "threads")


@pytest.fixture(autouse=True, scope="module")
def _the_compiler_knows_pytorch() -> None:
    """The compiler lists PyTorch's functions at its first call, before the emulator replaces some."""
    torch.compile(lambda: torch.empty_like(torch.empty(1)), backend="eager")()


def cells(kinds: Any = KINDS, every: int = 1) -> Any:
    return pytest.mark.parametrize(("kind", "name"), some_of(itertools.product(kinds, CALLS), every))


def skip_unless_possible(kind: str, name: str) -> None:
    if kind == "fake, on a GPU" and name in ("private", "backward") and not torch.backends.cuda.is_built():
        pytest.skip("PyTorch without CUDA cannot compute these even in thought")
    lacks_driver = torch.backends.cuda.is_built() and not torch.cuda.is_available()
    if (kind, name) == ("fake, on a GPU", "backward") and lacks_driver:
        pytest.skip("autograd of PyTorch with CUDA looks for a driver before it computes this")


@cells((kind for kind in KINDS if kind != "meta"), 7)  # which our kernels do not serve
def test_fused_kernels_receive_only_tensors_with_memory(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_unless_possible(kind, name)
    launches = fused_on_cpu.emulate(monkeypatch)
    check(kind, name, torch.device("cpu"))
    assert launches.seen


@pytest.mark.parametrize(
    ("backend", "kind", "name"),
    [
        pytest.param(backend, kind, name, marks=[pytest.mark.thorough] if (i + j + k) % 3 else [])
        for (i, backend), (j, kind), (k, name) in itertools.product(*map(enumerate, (GENERAL, LOOKING, CALLS)))
    ],
)
def test_every_backend_is_right_or_gives_one_clear_error(backend: str, kind: str, name: str) -> None:
    with use_backend(backend):
        check(kind, name, torch.device("cpu"))


@cells(["meta"])
def test_calls_on_the_meta_device_return_meta_tensors(kind: str, name: str) -> None:
    check(kind, name, torch.device("cpu"))


def test_packed_calls_on_the_meta_device_have_gradients_and_an_s_dmask() -> None:
    q, k, v, starts, _ = (x.to("meta") for x in CALLS["varlen"].make())
    inputs = [x.requires_grad_() for x in (q, k, v)]
    rules: dict[str, Any] = dict(dropout_p=0.1, return_attn_probs=True)
    out, lse, s_dmask = flash_attn_varlen_func(*inputs, starts, starts, 5, 130, **rules)
    assert lse.shape == out.shape[1::-1] and s_dmask.shape == (starts.shape[0] - 1, out.shape[1], 128, 256)
    compare(torch.autograd.grad(out.sum(), inputs), (q, k, v), are_fake=True)


@cells()
@pytest.mark.gpu
def test_a_gpu_is_right_or_gives_one_clear_error(kind: str, name: str) -> None:
    check(kind, name, torch.device("cuda"))


def _in_another_process(given: dict[str, Tensors]) -> dict[str, Tensors]:
    return {name: CALLS[name].function(*tensors) for name, tensors in given.items()}


def test_another_process_computes_on_shared_tensors() -> None:
    given = {name: call.make() for name, call in CALLS.items()}
    method = "fork" if CAN_FORK and not torch.cuda.is_initialized() else "spawn"
    with multiprocessing.get_context(method).Pool(1) as pool:
        found = pool.apply(_in_another_process, (given,))
    for name, call in CALLS.items():
        compare(found[name], call.function(*call.make()))


def test_an_upstream_gradient_that_is_pending_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Awaited(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> Tensor:
            return Pending(dout)

    def gradients(last: Callable[[Tensor], Tensor]) -> Tensors:
        inputs = [x.requires_grad_() for x in CALLS["dense"].make()]
        return torch.autograd.grad(last(flash_attn_func(*inputs, causal=True)).float().cos().sum(), inputs)

    fused_on_cpu.emulate(monkeypatch)
    compare(gradients(Awaited.apply), gradients(lambda x: x))


def test_lengths_without_memory_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_on_cpu.emulate(monkeypatch)
    q, k, v, starts, _ = CALLS["varlen"].make()
    with pytest.raises(RuntimeError, match=r"cu_seqlens_q must be a tensor with memory of its own; got Pending"):
        flash_attn_varlen_func(q, k, v, Pending(starts), Pending(starts), 5, 5)


def test_modes_see_one_operator_each_for_a_call_and_for_its_backward() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    with Operators() as operators:
        flash_attn_func(q, k, v).backward(torch.ones_like(q))
        flash_attn_with_kvcache(q.detach(), k.detach(), v.detach(), cache_seqlens=3)
    autograds = {"aten.detach.default", "aten.ones_like.default"}
    ours = [name for name in operators.seen if name not in autograds]
    assert ours == [f"flash_attn_compat.{name}.default" for name in ("attention", "attention_backward", "kvcache")]


@pytest.mark.parametrize("backend", GENERAL)
def test_a_checkpoint_policy_for_flash_attn_saves_the_attention(backend: str) -> None:
    if not hasattr(checkpoint, "create_selective_checkpoint_contexts"):
        pytest.skip("PyTorch has checkpointing policies from 2.5 on")

    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> checkpoint.CheckpointPolicy:
        has_window = any(argument.name == "window_size_left" for argument in operator._schema.arguments)
        is_ours = "flash_attn" in str(operator) and has_window
        return checkpoint.CheckpointPolicy.MUST_SAVE if is_ours else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    def gradients(function: Callable[..., Tensor]) -> Tensors:
        inputs = [x.requires_grad_() for x in qkv()]
        return torch.autograd.grad(function(*inputs).cos().sum(), inputs)

    def selectively(*inputs: Tensor) -> Tensor:
        found: Tensor = checkpoint.checkpoint(
            flash_attn_func, *inputs, use_reentrant=False,
            context_fn=lambda: checkpoint.create_selective_checkpoint_contexts(policy),
        )  # fmt: skip
        return found

    with use_backend(backend):
        right = gradients(flash_attn_func)
        flash_attn_compat.reset_backend_counts()
        found = gradients(selectively)
    assert flash_attn_compat.backend_counts() == {backend: 1}
    for x, y in zip(found, right, strict=True):
        assert torch.equal(x, y)


def test_operations_are_counted_as_pytorch_counts_its_own_attention() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(b=2, sq=5, sk=9, h=4, hk=2, d=16))
    with FlopCounterMode(display=False) as counter:
        out = flash_attn_func(q, k, v, causal=True)
        forward = counter.get_total_flops()
        out.sum().backward()
    by_heads = (2, 4, 5, 16), (2, 4, 9, 16), (2, 4, 9, 16)  # grouped heads count as if there were a key head for each
    assert forward == sdpa_flop_count(*by_heads)
    assert counter.get_total_flops() - forward == sdpa_backward_flop_count(by_heads[0], *by_heads)
    assert forward == 2 * 2 * 2 * 4 * 5 * 9 * 16

    cache, new, counts = [x.detach() for x in (q, k, v)], randn(2, 1, 2, 16), []
    for run in (
        lambda: flash_attn_varlen_func(*(x[0, :5] for x in (q, k, v)), cumulative(2, 3), cumulative(1, 4), 3, 4),
        lambda: flash_attn_with_kvcache(*cache, cache_seqlens=ints(3, 7)),
        lambda: flash_attn_with_kvcache(*cache, new, new, cache_seqlens=3),
    ):
        with FlopCounterMode(display=False) as counter:
            run()
        counts.append(counter.get_total_flops() / (2 * 2 * 4 * 16))
    assert counts == [2 * 1 + 3 * 4, 5 * (3 + 7), 2 * 5 * 4]
