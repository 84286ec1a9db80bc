"""A table of calls in every state of the caller: no answer depends on it, and no call changes it; capture and exit."""

from __future__ import annotations

import ast
import atexit
import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_compat
from flash_attn_compat import flash_attn_func, flash_attn_with_kvcache, settings
from flash_attn_compat.backends import unwritten
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import Kind, Sizes
from flash_attn_compat.backends.fused.judging import self_test
from flash_attn_compat.core import cuda_capture
from flash_attn_compat.dispatch.pytorch import at_exit
from flash_attn_compat.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from tests import exits
from tests.answers import others_kernels
from tests.forms import caller_state
from tests.forms.caller_state import State, examine, same, states
from tests.forms.calls import PROBLEMS, TABLE, Call, Prepared
from tests.forms.inputs import UNSEEN, OnGpu, cumulative, qkv
from tests.forms.kinds import Operators
from tests.forms.plain import some
from tests.kernels import fused_on_cpu
from tests.tools.interpreters import forked

STATES = tuple(states())
DEVICES = [torch.device("cpu"), pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES, ids=str)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile returns the function itself: compiling takes minutes and depends on no state of the caller."""
    monkeypatch.setattr(torch, "compile", lambda function=None, **options: function)


@on_devices
@pytest.mark.parametrize("state", some(STATES, 2), ids=lambda state: state.name)
def test_no_answer_depends_on_the_state_and_the_state_stays(state: State, device: torch.device) -> None:
    if reason := caller_state.skip_reason(state, device):
        pytest.skip(reason)
    calls = list(TABLE.values())
    if not state.name.startswith("default"):  # each of these states sees half of the calls, by turns
        calls = calls[STATES.index(state) // 2 % 2 :: 2]
    assert not examine(state, device, calls)


AROUND = [state for state in STATES if state.name.startswith(("default dtype", "default device meta", "autocast"))]
# Problems for each backend of a GPU, whose kernels are stand-ins or emulated, and for those of any device.
CHOSEN = {
    **dict.fromkeys(others_kernels.BACKENDS, ("",)),
    "fused": ("dense: causal ALiBi by sequence", "packed: dropout", "cache: rotary, pairs"),
    **dict.fromkeys(("chunked", "sdpa"), (
        "dense: ALiBi, f", "dense: softcap", "dense: dropout under", "packed: window", "packed: tokens",
        "packed: pages", "packed: keys in use", "cache: left", "cache: rotary, halves", "cache: append to pages",
    )),
}  # fmt: skip


@pytest.mark.parametrize("backend", some(reversed(CHOSEN), 2))
def test_no_backends_answer_depends_on_the_state(backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if backend in others_kernels.BACKENDS:
        others_kernels.install(monkeypatch, backend, tmp_path)
    elif backend == "fused":
        fused_on_cpu.emulate(monkeypatch)
    monkeypatch.setenv(settings.BACKEND, backend)
    calls = [call for call in TABLE.values() if call.name in PROBLEMS and call.name.startswith(CHOSEN[backend])]
    assert len(calls) >= len(CHOSEN[backend])
    for index, state in enumerate(AROUND):
        assert not examine(state, torch.device("cpu"), calls[index % 2 :: 2]), state.name


@on_devices
@pytest.mark.parametrize("call", TABLE.values(), ids=lambda call: call.name)
def test_a_tensor_stays_the_callers(call: Call, device: torch.device) -> None:
    prepared = call.prepare(device)
    prepared.run()
    for name, x in prepared.inputs.items():
        assert isinstance(x, torch.nn.Parameter) or not vars(x), name
        file = io.BytesIO()
        torch.save(x, file)
        file.seek(0)
        copies = copy.deepcopy(x), pickle.loads(pickle.dumps(x)), torch.load(file, weights_only=True)
        assert all(same(each, x) for each in copies), name


def test_every_variable_that_calls_read_is_in_the_table() -> None:
    for name, variable in settings.VARIABLES.items():
        assert any(f"{name}=" in state.name for state in STATES) == (variable.read_by == "call"), name


def _with_deterministic_algorithms(x: Tensor) -> Tensor:
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())
    return x + 1


MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "default dtype": lambda x: x + torch.tensor(0.1, dtype=torch.get_default_dtype()),
    "random numbers": lambda x: x + 0 * torch.rand(1, dtype=torch.float32, device="cpu"),
    "input": lambda x: x.add_(1),
    "deterministic": _with_deterministic_algorithms,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_table_finds_a_planted_mistake(mistake: str) -> None:
    def of(change: Callable[[Tensor], Tensor]) -> Call:
        x = torch.arange(3.0)
        return Call(mistake, lambda device: Prepared({"x": x}, lambda x: (change(x),)))

    fp16 = STATES[0]
    try:
        assert examine(fp16, torch.device("cpu"), [of(MISTAKES[mistake])])
        assert not examine(fp16, torch.device("cpu"), [of(lambda x: x + 1)])
    finally:
        torch.use_deterministic_algorithms(False)


# ----------------------------------- the default device and dtype never reach our tensors: each factory call names both

PACKAGE = Path(flash_attn_compat.__file__).parent
# Tests of the caller's state see the stand-ins for kernels under it, too.
STAND_INS = Path(__file__).parents[1] / "answers" / "others_kernels.py"
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "zeros", "hann_window", "tril_indices",
    "triu_indices", "from_file", "normal", "empty_permuted",
}  # fmt: skip
# Whose dtype is that of whole numbers they are given, whatever the default is.
OF_WHOLE_NUMBERS = {"arange", "randint", "randperm", "tril_indices", "triu_indices"}


def test_every_tensor_factory_names_device_and_dtype() -> None:
    complaints = [
        f"{path}:{line}: {complaint}"
        for path in [*PACKAGE.rglob("*.py"), STAND_INS]
        for line, complaint in complaints_of(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("torch.empty(2, pin_memory=True)", 2),
        ("torch.empty(2, dtype=d)", 1),
        ("torch.tensor([1], device=d)", 1),
        ("torch.arange(3, device=d)", 0),
        ("torch.arange(3.0, device=d)", 1),
        ("make = torch.zeros\nmake(3)", 1),
        ("functools.partial(torch.arange, device=d)", 0),
        ("functools.partial(torch.zeros, device=d)", 1),
        ("torch.zeros_like(x)", 0),
    ],
)
def test_the_rule_finds_planted_violations(source: str, count: int) -> None:
    assert len(list(complaints_of(ast.parse(source)))) == count


def complaints_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    called, nodes = set(), list(ast.walk(tree))
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        function, *given = [call.func, *call.args]
        if isinstance(function, ast.Attribute) and function.attr == "partial" and given:
            function, *given = given
        called.add(function)
        name, keywords = _factory(function), {keyword.arg for keyword in call.keywords}
        if name is None or None in keywords:  # **what the caller of ours said
            continue
        if "device" not in keywords:
            yield call.lineno, f"torch.{name} without a device"
        is_whole = name in OF_WHOLE_NUMBERS and not any(_is_fraction(argument) for argument in given)
        if "dtype" not in keywords and not is_whole:
            yield call.lineno, f"torch.{name} without a dtype"
    for node in nodes:
        if node not in called and _factory(node) is not None:
            yield node.lineno, f"torch.{_factory(node)} under another name, where nobody sees what it is given"


def _factory(node: ast.AST) -> str | None:
    """The name of a factory of torch's, if ``node`` is one."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        return node.attr if node.attr in FACTORIES else None
    return None


def _is_fraction(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Constant) and isinstance(part.value, float) for part in ast.walk(node))


# ---------------------------------------------------------------- work on cu_seqlens without synchronisation


@pytest.mark.parametrize("where", [Tensor, OnGpu])
@pytest.mark.parametrize("how", UNSEEN)
def test_tokens_outside_follow_the_current_cu_seqlens_however_written(where: type[Tensor], how: str) -> None:
    cu_seqlens = cumulative(30, 50).as_subclass(where)
    for lengths in ((30, 50), (30, 50), (30, 20)):
        if lengths != (30, 50):
            UNSEEN[how](cu_seqlens, cumulative(*lengths))
        rows, lse = torch.ones(80, 2, 8), torch.ones(80, 3, 1)
        unwritten.clear(cu_seqlens, [rows, lse], 50)
        for cleared in (rows, lse):
            assert cleared[: sum(lengths)].all() and not cleared[sum(lengths) :].any()


@pytest.mark.parametrize("where", [Tensor, OnGpu])
@pytest.mark.parametrize("longest", [0, 1, 20, 30, 49, 50, 100])
def test_tokens_beyond_max_seqlen_count_as_outside(where: type[Tensor], longest: int) -> None:
    rows = torch.ones(90, 2, 8)
    unwritten.clear(cumulative(30, 0, 50).as_subclass(where), [rows], longest)
    written = [*range(min(longest, 30)), *range(30, 30 + min(longest, 50))]
    assert rows[written].all() and int(rows.any(2).any(1).sum()) == len(written)


@pytest.mark.parametrize("longest", [30, 100])
def test_unwritten_tokens_are_cleared_without_synchronisation(longest: int) -> None:
    starts = cumulative(30, 50).to("meta")  # which has none to wait for
    unwritten.clear(starts, [torch.ones(80, 2, 8, device="meta")], longest)


# ---------------------------------------------------------------- a capture asks of the GPU it is about


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("capturing", [0, 1])
def test_a_capture_is_seen_on_the_device_that_is_asked_about(
    monkeypatch: pytest.MonkeyPatch, current: int, capturing: int
) -> None:
    entered = [current]

    @contextlib.contextmanager
    def device(other: int) -> Iterator[None]:
        entered.append(other)
        yield
        entered.pop()

    cuda = SimpleNamespace(
        is_available=lambda: True, device=device, is_current_stream_capturing=lambda: entered[-1] == capturing
    )
    fast = SimpleNamespace(_cuda_isCurrentStreamCapturing=lambda: current == capturing)
    monkeypatch.setattr(cuda_capture, "torch", SimpleNamespace(cuda=cuda, _C=fast))
    monkeypatch.setattr(cuda_capture, "current_device", lambda: current)
    for index in (0, 1):
        assert cuda_capture.is_capturing(index) == (index == capturing)
    assert not cuda_capture.is_capturing(-1)


@pytest.mark.parametrize("device", [0, 1])
def test_kernels_are_tried_unless_their_own_gpus_work_is_captured(monkeypatch: pytest.MonkeyPatch, device: int) -> None:
    fused_on_cpu.record(monkeypatch, tried=True)
    monkeypatch.setattr(cuda_capture, "is_capturing", lambda asked: asked == 1)
    tries: list[int] = []
    self_test.check_kernels((variants.delta(Kind(75, 0, Sizes(64))),), device, lambda watch: tries.append(device))
    assert tries == ([0] if device == 0 else [])
    assert bool(self_test._passed) == (device == 0)


@pytest.mark.gpu
def test_lengths_that_would_be_read_during_a_capture_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.zeros(2, length, 1, 16, device="cuda") for length in (1, 8, 8))
    lengths = torch.tensor([3, 5], dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="seqused_k is on the GPU and must be read"), torch.cuda.graph(graph):
        flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)


# -------------------------------------- a process that ends right after a backward on a GPU waits for autograd's thread

needs_stand_in = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this PyTorch has no devices made in Python",
)


def _on(index: int) -> Any:
    return SimpleNamespace(get_device=lambda: index, device=torch.device("cuda", max(index, 0)))


@needs_stand_in
def test_a_device_is_waited_for_once_and_a_cpu_never(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[tuple[Any, ...]] = []
    monkeypatch.setattr(atexit, "register", lambda *given: registered.append(given))
    monkeypatch.setattr(at_exit, "_seen", {at_exit._CPU})
    for tensor in (torch.ones(1), _on(1), _on(0), torch.ones(1), _on(1), _on(0)):
        at_exit.wait_for_autograd(tensor)
    assert [device for _, device in registered] == [torch.device("cuda", 1), torch.device("cuda", 0)]


def _dense(create_graph: bool = False) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    torch.autograd.grad(flash_attn_func(q, k, v).square().sum(), q, create_graph=create_graph)


def _by_the_operator() -> None:
    with Operators():
        _dense()


def _private() -> None:
    q, k, v = qkv()
    options = (0.0, 0.2, True, -1, -1, 0.0, None)
    out, lse, _, rng_state = _flash_attn_forward(q, k, v, *options, False)
    assert not waits
    _flash_attn_backward(out, q, k, v, out, lse, *map(torch.empty_like, (q, k, v)), *options, False, rng_state)


waits: list[torch.Tensor] = []


@needs_stand_in
@pytest.mark.parametrize("run", [_dense, partial(_dense, create_graph=True), _by_the_operator, _private])
def test_every_backward_is_waited_for_and_no_forward(run: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    waits.clear()
    monkeypatch.setattr(at_exit, "wait_for_autograd", waits.append)
    flash_attn_func(*(x.requires_grad_() for x in qkv()))
    assert not waits
    run()
    assert waits


_SLOW = """
import threading, time
from flash_attn_compat.dispatch.pytorch import at_exit

started, done = threading.Event(), []

def slowly(gradient):
    started.set()
    time.sleep(0.3)
    done.append(threading.current_thread())

q = torch.empty(4, device="stand_in", requires_grad=True)
q.register_hook(slowly)
caller = threading.Thread(target=lambda: q.backward(q.detach()))
caller.start()
started.wait()
at_exit._pass_through_its_thread(q.device)
assert done and done[0] is not caller, done
caller.join()
"""


@needs_stand_in
def test_exit_waits_for_the_devices_thread() -> None:
    answer = forked(f"import torch\n{exits._ON_STAND_IN}{_SLOW}")
    assert answer.returncode == 0, answer.stderr


@needs_stand_in
def test_a_device_that_fails_or_is_not_there_ends_no_process_badly() -> None:
    at_exit._pass_through_its_thread(torch.device("cuda", 99))


@needs_stand_in
@pytest.mark.thorough  # a new interpreter takes seconds; the copy above waits for the same thread
def test_processes_that_end_right_after_a_backward_end_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits.main(["--runs", "1", "--device", "stand_in", "--only", "bare, mended"]) == 0
    assert '"well": 1' in capsys.readouterr().out
