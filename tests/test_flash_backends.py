"""The backends around FlashAttention-2's kernels, PyTorch's and flash-attn's, which are acted out on a CPU."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_attn_compat
from flash_attn_compat import (
    BackendNotSupported,
    explain,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    use_backend,
)
from flash_attn_compat.backends import base, official_trial, torch_flash
from flash_attn_compat.engine import outside
from flash_attn_compat.flash_attn_interface import _flash_attn_varlen_backward, _flash_attn_varlen_forward
from flash_attn_compat.serving import dispatch
from tests import flash_kernels
from tests.support import cumulative, qkv
from verify.drawing import random_problem
from verify.examination import Examination
from verify.problems import KINDS, Problem

HALF = torch.float16
OF_HALF: dict[str, Any] = {"dtype": HALF}
GENUINE = "from tests.flash_kernels import bwd, fwd, varlen_bwd, varlen_fwd\n"
RAISES = "    raise RuntimeError('no kernel image')\n"
# The extension's source, flash-attn's version, words of the reason.
USELESS: list[tuple[str | None, str, tuple[str, ...]]] = [
    ("raise ImportError('undefined symbol: _ZN3c104cuda9SetDeviceEi')", "2.8.3", ("loading", "ImportError")),
    ("raise SystemError('initialization failed')", "2.8.3", ("loading", "SystemError")),
    ("def fwd(*arguments): ...\n", "2.8.3", ("loading", "AttributeError")),
    (None, "2.8.3", ("flash_attn_2_cuda is missing",)),
    (f"def fwd(*arguments):\n{RAISES}bwd = varlen_fwd = varlen_bwd = fwd\n", "2.8.3",
     ("calling it raises RuntimeError: no kernel image",)),
    *((GENUINE, version, (version[:3],)) for version in ("2.6.3", "1.0.9", "3.0.0")),
]  # fmt: skip
REST = "bwd, varlen_fwd, varlen_bwd = f.bwd, f.varlen_fwd, f.varlen_bwd\n"
NO_DROPOUT = "def fwd(q, k, v, out, slopes, p, *rest):\n    return f.fwd(q, k, v, out, slopes, 0.0, *rest)\n"
HALVES = (
    "def fwd(q, *rest):\n    out, *more = f.fwd(q, *rest)\n    return [out * (1 if q.shape[-1] < 65 else 0.5), *more]\n"
)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Lay a flash-attn at the front of sys.path: install(extension's source, version)."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    flash_kernels.pretend_gpu(monkeypatch)
    monkeypatch.setattr(official_trial, "_device", lambda capability: torch.device("cpu"))
    dispatch.forget_decisions()
    flash_kernels.calls.clear()

    def lay(extension: str | None = GENUINE, version: str = "2.8.3") -> None:
        package = tmp_path / "flash_attn"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text(
            f"__version__ = '{version}'\nraise ImportError('the wrapper is not needed')\n"
        )
        if extension is not None:
            (tmp_path / "flash_attn_2_cuda.py").write_text(extension)
        importlib.invalidate_caches()
        monkeypatch.syspath_prepend(str(tmp_path))

    yield lay
    flash_attn_compat.unpatch()
    dispatch.forget_decisions()


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A backend's name, once it can serve; "older torch_flash" pads the LSE of packed rows."""
    if request.param == "official":
        request.getfixturevalue("install")()
        yield "official"
        return
    with contextlib.contextmanager(flash_kernels.install_operators)(monkeypatch, request.param.startswith("older")):
        yield "torch_flash"


NEWEST, VERSIONS = ["official", "torch_flash"], ["official", "torch_flash", "older torch_flash"]


def on(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("backend", names, indirect=True)


def reasons(backend: str, function: Any = flash_attn_func, *args: Any, **kwargs: Any) -> list[str]:
    return explain(function, *(args or qkv(**OF_HALF)), **kwargs).reasons[backend]


def packed(**shapes: Any) -> list[torch.Tensor]:
    return [x.flatten(0, 1) for x in qkv(**OF_HALF, **shapes)]


# ---------------------------------------------------------------- what they compute


@on(*VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_agrees_with_the_oracle_wherever_it_serves(backend: str, kind: str) -> None:
    served = 0
    for seed in range(400):
        problem = random_problem(seed, (kind,), ("float16", "bfloat16"))
        if problem.dropout_p:  # which only the kernel that drew a mask can repeat
            continue
        verdict = Examination(problem).judge(backend)
        assert not verdict.failures, (problem, verdict.failures)
        served += not verdict.refused
        if served == 6 or (seed == 40 and not served):
            break
    # Where there is nothing to compute, anyone serves.
    assert served == 6 and bool(flash_kernels.calls) == (kind != "paged")


# Queries far before the first key, under windows that end on one side only: the kernels clamp the other side, or the
# window itself, to the longest key length.
FAR = Problem(seqlens_q=(40,), seqlens_k=(5,), nheads_k=1, group=2, head_dim=16, dtype="float16")
FORMS: list[dict[str, Any]] = [
    {}, {"kind": "varlen", "seqlens_q": (40, 3), "seqlens_k": (5, 4)}, {"kind": "kvcache", "capacity": 6}
]  # fmt: skip


@on(*NEWEST)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [(3, -1), (0, -1), (-1, 10), (2, 20)])
def test_an_open_window_is_open_to_rows_far_before_the_keys(
    backend: str, form: dict[str, Any], window: tuple[int, int]
) -> None:
    problem = replace(FAR, window=window, **form)
    verdict = Examination(problem).judge(backend)
    assert verdict.failures == [] and bool(verdict.refused) == (problem.kind != "varlen")


@on(*NEWEST)
def test_single_rows_outside_of_all_sequences_do_not_pass_for_a_row_in_each(backend: str) -> None:
    lengths = (0, 1, 0, 0)
    problem = Problem("varlen", lengths, lengths, group=3, dtype="bfloat16", causal=True, gap=(3, 0))
    verdict = Examination(problem).judge(backend)
    assert verdict.failures == [] and not verdict.refused


@on(*VERSIONS)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (4, 5)])
def test_its_backward_takes_an_lse_that_another_forward_left(backend: str, window: tuple[int, int]) -> None:
    q, k, v = packed(b=3, sq=11, sk=11, h=4, hk=2)
    lengths, options = (cumulative(11, 2, 20), cumulative(9, 11, 13), 20, 13), (0.0, 0.25, False, *window, 0.0, None)
    with use_backend("reference"):
        out, lse, *_ = _flash_attn_varlen_forward(q, k, v, *lengths, *options)
    dout = torch.randn_like(out)
    found = {}
    for name in ("reference", backend):
        found[name] = [torch.empty_like(x) for x in (q, k, v)]
        with use_backend(name):
            _flash_attn_varlen_backward(dout, q, k, v, out, lse, *found[name], *lengths, *options, False)
    for ours, right in zip(found[backend], found["reference"]):
        torch.testing.assert_close(ours.float(), right.float(), rtol=2e-3, atol=4e-3)


@on(*NEWEST)
def test_the_dropout_mask_of_the_forward_is_handed_to_the_backward(backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(b=1, sq=1, sk=400, h=1, **OF_HALF))
    with torch.no_grad():
        k.zero_()
    assert explain(flash_attn_func, q, k, v, dropout_p=0.5).backend == backend
    out = flash_attn_func(q, k, v, dropout_p=0.5)
    (dv,) = torch.autograd.grad(out.sum(), v)
    kept = dv[0, :, 0, 0] > 0
    assert 100 < kept.sum() < 300
    assert torch.allclose((v[0, :, 0] * kept[:, None]).float().sum(0) / 200, out[0, 0, 0].float(), atol=5e-3)


@on(*VERSIONS)
def test_the_lse_of_tokens_outside_of_all_sequences_is_zero(backend: str) -> None:
    starts, q = torch.tensor([2, 5, 9], dtype=torch.int32), packed()
    with use_backend(backend):
        _, lse, _ = flash_attn_varlen_func(*q, starts, starts, 4, 4, return_attn_probs=True)
    assert lse[:, 2:9].all() and not lse[:, :2].any() and not lse[:, 9:].any()


@on("official")
def test_slopes_are_read_through_their_strides(backend: str) -> None:
    q, k, v = qkv(**OF_HALF)
    slopes = torch.tensor([0.3, 9.0, 0.1, 9.0])[::2]
    found = flash_attn_func(q, k, v, alibi_slopes=slopes)
    with use_backend("reference"):
        assert torch.equal(found, flash_attn_func(q, k, v, alibi_slopes=slopes.contiguous()))
    assert flash_kernels.calls


# ---------------------------------------------------------------- what they refuse

BOTH = ("official", "torch_flash")
LENGTHS = torch.tensor([3, 2], dtype=torch.int32)
REFUSED: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str]] = [
    (BOTH, dict(d=264), {}, "256"),
    (BOTH, dict(dtype=torch.float32), {}, "does not compute float32"),
    (BOTH, {}, dict(softmax_scale=0.0), "softmax_scale that is not positive"),
    (BOTH, {}, dict(softmax_scale=-0.3), "softmax_scale that is not positive"),
    (BOTH, {}, dict(dropout_p=0.1, return_attn_probs=True), "S_dmask"),
    (("official",), {}, dict(softcap=3.0, dropout_p=0.1), "softcap"),
    (("torch_flash",), {}, dict(softcap=3.0), "softcap"),
    (("torch_flash",), {}, dict(alibi_slopes=torch.ones(2), causal=True), "ALiBi"),
]


@pytest.mark.parametrize(
    ("backend", "shapes", "options", "word"),
    [(name, *case) for names, *case in REFUSED for name in names],
    indirect=["backend"],
)
def test_what_the_kernels_lack_is_a_reason(
    backend: str, shapes: dict[str, Any], options: dict[str, Any], word: str
) -> None:
    assert any(word in reason for reason in reasons(backend, flash_attn_func, *qkv(**OF_HALF | shapes), **options))
    assert not reasons(backend)


@on(*NEWEST)
def test_lengths_over_a_cache_and_new_keys_are_another_backends(backend: str) -> None:
    q, k, v = qkv(**OF_HALF)
    for given, word in (((None, None), "seqused_k"), ((k[:, :1], v[:, :1]), "new keys")):
        lengths = LENGTHS if given[0] is None else 3
        found = reasons(backend, flash_attn_with_kvcache, q, k, v, *given, cache_seqlens=lengths)
        assert any(word in reason for reason in found)
    assert reasons(backend, flash_attn_with_kvcache, q, k, v, cache_seqlens=3) == []


@on("torch_flash")
def test_deterministic_gradients_are_another_backends(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator asks PyTorch's switch, which belongs to the whole process: nobody touches it."""
    leaves = [x.requires_grad_() for x in qkv(**OF_HALF)]
    assert any("same to the bit" in reason for reason in reasons(backend, flash_attn_func, *leaves, deterministic=True))
    with use_backend("torch_flash"), pytest.raises(BackendNotSupported):
        flash_attn_func(*leaves, deterministic=True)
    monkeypatch.setattr(torch._C, "_set_deterministic_algorithms", lambda *args, **kwargs: pytest.fail("switched"))
    flash_attn_func(*leaves).sum().backward()
    with torch.no_grad():
        assert not reasons(backend, flash_attn_func, *qkv(**OF_HALF), deterministic=True)


@on("torch_flash")
def test_an_operator_without_windows_is_of_no_use(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "arguments_of", lambda operator: frozenset())
    assert len(reasons(backend)) == 2 and all("window_size_left" in reason for reason in reasons(backend))


@on("torch_flash")
@pytest.mark.parametrize(("head_dim", "refused"), [(192, False), (200, True), (256, False)])
def test_a_gpu_with_less_shared_memory_lacks_some_backwards(
    backend: str, head_dim: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash_kernels.pretend_gpu(monkeypatch, (8, 6))
    leaves = [x.requires_grad_() for x in qkv(d=head_dim, **OF_HALF)]
    assert any("shared memory" in reason for reason in reasons(backend, flash_attn_func, *leaves)) == refused
    assert not reasons(backend, flash_attn_func, *qkv(d=head_dim, **OF_HALF))


def test_the_installed_pytorch_has_the_operators_in_a_known_form() -> None:
    assert torch_flash.TorchFlash().unavailable_reasons() == []
    q, starts = torch.zeros(7, 2, 16, **OF_HALF), cumulative(3, 4)
    assert reasons("torch_flash", flash_attn_varlen_func, q, q, q, starts, starts, 4, 4) == ["runs on CUDA GPUs only"]


# ---------------------------------------------------------------- the flash-attn that is installed


def test_without_flash_attn_it_says_so() -> None:
    if importlib.util.find_spec("flash_attn_2_cuda") is not None:
        pytest.skip("a flash-attn is installed here")
    assert "flash-attn is not installed" in reasons("official")


@pytest.mark.parametrize(("extension", "version", "words"), USELESS)
def test_a_flash_attn_that_is_of_no_use_is_a_reason(
    install: Any, extension: str | None, version: str, words: tuple[str, ...]
) -> None:
    install(extension, version)
    (reason,) = reasons("official")
    assert all(word in reason for word in words)


def test_loading_is_tried_once_and_only_for_calls_it_could_take(install: Any) -> None:
    install("import tests.flash_kernels as f\nf.calls.append('loaded')\nraise OSError('no')\n")
    assert reasons("official", flash_attn_func, *qkv()) == ["does not compute float32"]
    assert flash_kernels.calls == []
    for _ in range(2):
        reasons("official")
        dispatch.forget_decisions()
    assert flash_kernels.calls == ["loaded"]


def test_the_environment_variable_switches_it_off(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setenv("FLASH_ATTN_COMPAT_DISABLE_OFFICIAL", "1")
    assert reasons("official") == ["FLASH_ATTN_COMPAT_DISABLE_OFFICIAL is set"]
    monkeypatch.delenv("FLASH_ATTN_COMPAT_DISABLE_OFFICIAL")
    assert reasons("official") == []


@pytest.mark.parametrize(
    ("fault", "options", "shape", "words"),
    [(HALVES, {}, {"d": 96}, "head_dim 96"), (NO_DROPOUT, {"dropout_p": 0.1}, {}, "wrong answer")],
)
def test_a_build_that_answers_wrong_is_not_used_for_what_it_gets_wrong(
    install: Any, fault: str, options: dict[str, Any], shape: dict[str, int], words: str
) -> None:
    install(f"import tests.flash_kernels as f\n{fault}{REST}")
    assert reasons("official", flash_attn_func, *qkv(d=64, **OF_HALF)) == []
    assert words in reasons("official", flash_attn_func, *qkv(**OF_HALF, **shape), **options)[0]


@contextlib.contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


STATES: dict[str, Callable[[], Any]] = {
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another device": lambda: torch.device("meta"),
    "fp16": lambda: default(torch.float16),
    "fp64": lambda: default(torch.float64),
}
SLOPES = torch.tensor([0.1, 0.2])


@pytest.mark.parametrize("state", STATES)
def test_the_trial_ends_well_in_every_state_of_the_callers(install: Any, state: str) -> None:
    install()
    official_trial._tried.cache_clear()
    tensors = qkv(**OF_HALF)
    with STATES[state]():
        assert not reasons("official", flash_attn_func, *tensors)
        assert not reasons("official", flash_attn_func, *tensors, alibi_slopes=SLOPES)


@pytest.mark.parametrize(("capability", "index"), [((8, 0), 1), ((9, 0), 0), ((7, 5), 2), ((6, 1), 1)])
def test_the_trial_is_made_on_a_gpu_of_the_calls_kind(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], index: int
) -> None:
    gpus = [(9, 0), (8, 0), (7, 5), (8, 0)]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpus[device.index])
    assert official_trial._device(capability) == torch.device("cuda", index)


def test_loading_it_leaves_the_name_to_whoever_has_it(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    stand_in = type(sys)("flash_attn_2_cuda")
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", stand_in)
    flash_attn_func(*qkv(**OF_HALF))
    assert sys.modules["flash_attn_2_cuda"] is stand_in and "flash_attn" not in sys.modules


def test_a_real_package_that_runs_on_our_functions_is_not_asked(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setattr("flash_attn_compat.installed._swapped", object())
    assert reasons("official") == ["the installed flash-attn runs on this package at present"]


@pytest.mark.parametrize("change", [flash_attn_compat.patch, flash_attn_compat.unpatch])
def test_patching_and_unpatching_make_dispatch_decide_anew(change: Callable[[], None]) -> None:
    (flash_attn_compat.unpatch if change is flash_attn_compat.patch else flash_attn_compat.patch)()
    with use_backend("reference"):
        flash_attn_func(*qkv())
    assert dispatch._decisions
    change()
    assert not dispatch._decisions
    flash_attn_compat.unpatch()


# ---------------------------------------------------------------- on a GPU

needs_gpu = pytest.mark.gpu(capability=(8, 0))  # PyTorch's flash kernels


def on_gpu(*lengths: int, spare: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    total = sum(lengths) + spare
    tensors = [torch.randn(total, 2, 64, dtype=HALF, device="cuda") for _ in range(3)]
    return tensors, cumulative(*lengths).cuda()


@needs_gpu
@pytest.mark.parametrize("name", ["torch_flash", "official"])
@pytest.mark.parametrize("spare", [0, 20])
def test_tokens_outside_of_all_sequences_are_zero_at_the_first_look_and_later(spare: int, name: str) -> None:
    if name == "official" and importlib.util.find_spec("flash_attn_2_cuda") is None:
        pytest.skip("needs flash-attn")
    tensors, starts = on_gpu(30, 50, spare=spare)
    for tensor in tensors:
        tensor[80:] = torch.nan
        tensor.requires_grad_()
    for _ in range(3):
        torch.full((400, 2, 64), torch.nan, dtype=HALF, device="cuda")  # what freed memory holds
        with use_backend(name):
            out = flash_attn_varlen_func(*tensors, starts, starts, 50, 50, causal=True)
        gradients = torch.autograd.grad(out, tensors, torch.ones_like(out))
        for result in (out, *gradients):
            assert result.isfinite().all() and not result[80:].any()
        torch.cuda.synchronize()
    assert outside.may_exist(starts, 80 + spare) == (spare > 0)


@needs_gpu
def test_lengths_that_change_in_place_are_looked_at_again() -> None:
    _, starts = on_gpu(30, 50, spare=0)
    outside.may_exist(starts, 80)
    torch.cuda.synchronize()
    assert not outside.may_exist(starts, 80)
    starts.copy_(cumulative(30, 20))
    assert outside.may_exist(starts, 80)
    torch.cuda.synchronize()
    assert outside.may_exist(starts, 80) and not outside.may_exist(starts, 50)


@needs_gpu
def test_a_captured_call_serves_other_lengths_at_its_replay() -> None:
    tensors, starts = on_gpu(30, 70, spare=0)

    def call() -> torch.Tensor:
        return flash_attn_varlen_func(*tensors, starts, starts, 70, 70, causal=True)

    with torch.no_grad(), use_backend("torch_flash"):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        starts.copy_(cumulative(50, 20))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, call()) and not out[70:].any()


@needs_gpu
def test_deterministic_gradients_are_the_same_every_time() -> None:
    leaves = [torch.randn(2, 1500, 4, 64, dtype=HALF, device="cuda", requires_grad=True) for _ in range(3)]
    runs = [
        torch.autograd.grad(flash_attn_func(*leaves, causal=True, deterministic=True).sum(), leaves) for _ in range(8)
    ]
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0]))
