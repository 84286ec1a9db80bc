"""The official backend around a flash-attn that is acted out on a CPU: what it calls, refuses and survives."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_attn_compat
from flash_attn_compat import explain, flash_attn_func, flash_attn_varlen_func, use_backend
from flash_attn_compat.backends import official_trial
from flash_attn_compat.engine.call import AttentionCall
from flash_attn_compat.serving import dispatch
from tests import flash_kernels
from tests.flash_kernels import judge_first_served
from tests.support import cumulative, qkv
from verify.examination import Examination
from verify.problems import KINDS, Problem

GENUINE = "from tests.flash_kernels import bwd, fwd, varlen_bwd, varlen_fwd\n"
RAISES = "    raise RuntimeError('no kernel image')\n"
# The extension's source, flash-attn's version, words of the reason.
USELESS: list[tuple[str | None, str, tuple[str, ...]]] = [
    ("raise ImportError('undefined symbol: _ZN3c104cuda9SetDeviceEi')", "2.8.3", ("loading", "ImportError")),
    ("raise OSError('libcudart.so.12: cannot open shared object file')", "2.8.3", ("loading", "OSError")),
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
HALF = torch.float16
TENSORS, SLOPES = qkv(dtype=HALF), torch.tensor([0.1, 0.2])


@pytest.fixture(autouse=True)
def a_gpu_by_pretence(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls on CPU tensors count as calls on a GPU of compute capability 9.0."""
    true_traits = AttentionCall.traits
    monkeypatch.setattr(
        AttentionCall, "traits", lambda call: true_traits(call)._replace(device_type="cuda", capability=(9, 0))
    )
    monkeypatch.setattr(official_trial, "_device", lambda capability: torch.device("cpu"))
    dispatch.forget_decisions()
    flash_kernels.calls.clear()
    yield
    flash_attn_compat.unpatch()
    dispatch.forget_decisions()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Lay a flash-attn at the front of sys.path: install(extension's source, version)."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def lay(extension: str | None = GENUINE, version: str = "2.8.3") -> Path:
        package = tmp_path / "flash_attn"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text(
            f"__version__ = '{version}'\nraise ImportError('the wrapper is not needed')\n"
        )
        if extension is not None:
            (tmp_path / "flash_attn_2_cuda.py").write_text(extension)
        importlib.invalidate_caches()
        monkeypatch.syspath_prepend(str(tmp_path))
        return tmp_path

    return lay


def reasons(function: Any = flash_attn_func, *args: Any, **kwargs: Any) -> list[str]:
    return explain(function, *(args or qkv(dtype=HALF)), **kwargs).reasons["official"]


# ---------------------------------------------------------------- what it calls


@pytest.mark.parametrize("kind", KINDS)
def test_it_agrees_with_the_oracle_wherever_it_serves(install, kind: str) -> None:
    install()
    served, complaints = judge_first_served("official", kind, enough=6)
    assert not complaints, "\n".join(complaints)
    # Where there is nothing to compute, anyone serves.
    assert served == 6 and bool(flash_kernels.calls) == (kind != "paged")


@pytest.mark.parametrize("problem", flash_kernels.FAR_BEFORE_THE_KEYS, ids=repr)
def test_an_open_window_is_open_to_rows_far_before_the_keys(install, problem: Problem) -> None:
    install()
    verdict = Examination(problem).judge("official")
    assert verdict.failures == [] and bool(verdict.refused) == (problem.kind != "varlen")


def test_single_rows_outside_of_all_sequences_do_not_pass_for_a_row_in_each(install) -> None:
    install()
    lengths = (0, 1, 0, 0)
    problem = Problem("varlen", lengths, lengths, group=3, dtype="bfloat16", causal=True, gap=(3, 0))
    verdict = Examination(problem).judge("official")
    assert verdict.failures == [] and not verdict.refused


def test_a_dense_call_reaches_fwd_and_bwd_and_a_packed_one_their_varlen_forms(install) -> None:
    install()
    leaves = [x.requires_grad_() for x in qkv(dtype=HALF)]
    starts = cumulative(7, 7)
    explain(flash_attn_func, *leaves)  # the trial calls are over
    explain(flash_attn_varlen_func, *(x.flatten(0, 1) for x in leaves), starts, starts, 7, 7)
    flash_kernels.calls.clear()
    flash_attn_func(*leaves).sum().backward()
    flash_attn_varlen_func(*(x.flatten(0, 1) for x in leaves), starts, starts, 7, 7).sum().backward()
    assert [name for name, _ in flash_kernels.calls] == ["fwd", "bwd", "varlen_fwd", "varlen_bwd"]


def test_the_dropout_mask_of_the_forward_is_handed_to_the_backward(install) -> None:
    install()
    q, k, v = (x.requires_grad_() for x in qkv(b=1, sq=1, sk=400, h=1, dtype=HALF))
    with torch.no_grad():
        k.zero_()
    out = flash_attn_func(q, k, v, dropout_p=0.5)
    (dv,) = torch.autograd.grad(out.sum(), v)
    kept = dv[0, :, 0, 0] > 0
    assert explain(flash_attn_func, q, k, v, dropout_p=0.5).backend == "official" and 100 < kept.sum() < 300
    assert torch.allclose((v[0, :, 0] * kept[:, None]).float().sum(0) / 200, out[0, 0, 0].float(), atol=5e-3)


@contextlib.contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


STATES = {
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "another device": lambda: torch.device("meta"),
    "fp16": lambda: default(torch.float16),
    "fp64": lambda: default(torch.float64),
}


@pytest.mark.parametrize("state", STATES)
def test_the_trial_ends_well_in_every_state_of_the_callers(install, state: str) -> None:
    install()
    official_trial._tried.cache_clear()
    with STATES[state]():
        assert not reasons(flash_attn_func, *TENSORS)
        assert not reasons(flash_attn_func, *TENSORS, alibi_slopes=SLOPES)


@pytest.mark.parametrize(("capability", "index"), [((8, 0), 1), ((9, 0), 0), ((7, 5), 2), ((6, 1), 1)])
def test_the_trial_is_made_on_a_gpu_of_the_calls_kind(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], index: int
) -> None:
    monkeypatch.undo()
    gpus = [(9, 0), (8, 0), (7, 5), (8, 0)]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpus[device.index])
    assert official_trial._device(capability) == torch.device("cuda", index)


# ---------------------------------------------------------------- what it refuses


def test_without_flash_attn_it_says_so() -> None:
    if importlib.util.find_spec("flash_attn_2_cuda") is not None:
        pytest.skip("a flash-attn is installed here")
    assert reasons() == ["flash-attn is not installed"]


@pytest.mark.parametrize(("extension", "version", "words"), USELESS)
def test_a_flash_attn_that_is_of_no_use_is_a_reason(
    install, extension: str | None, version: str, words: tuple[str, ...]
) -> None:
    install(extension, version)
    (reason,) = reasons()
    assert all(word in reason for word in words)


def test_loading_is_tried_once_and_only_for_calls_it_could_take(install) -> None:
    install("import tests.flash_kernels as f\nf.calls.append(('loaded', ()))\nraise OSError('no')\n")
    assert reasons(flash_attn_func, *qkv()) == ["does not compute float32"]
    assert flash_kernels.calls == []
    reasons()
    dispatch.forget_decisions()
    reasons()
    assert [name for name, _ in flash_kernels.calls] == ["loaded"]


def test_the_environment_variable_switches_it_off(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setenv("FLASH_ATTN_COMPAT_DISABLE_OFFICIAL", "1")
    assert reasons() == ["FLASH_ATTN_COMPAT_DISABLE_OFFICIAL is set"]
    monkeypatch.delenv("FLASH_ATTN_COMPAT_DISABLE_OFFICIAL")
    assert reasons() == []


@pytest.mark.parametrize(
    ("shapes", "kwargs", "word"),
    [
        (dict(d=264), {}, "256"),
        ({}, dict(softcap=3.0, dropout_p=0.1), "softcap"),
        ({}, dict(softmax_scale=0.0), "softmax_scale that is not positive"),
        ({}, dict(softmax_scale=-0.3), "softmax_scale that is not positive"),
    ],
)
def test_what_flash_attn_rejects_is_a_reason(
    install, shapes: dict[str, int], kwargs: dict[str, Any], word: str
) -> None:
    install()
    assert any(word in reason for reason in reasons(flash_attn_func, *qkv(dtype=HALF, **shapes), **kwargs))


# ---------------------------------------------------------------- builds that answer wrongly


@pytest.mark.parametrize(
    ("fault", "options", "shape", "words"),
    [(HALVES, {}, {"d": 96}, "head_dim 96"), (NO_DROPOUT, {"dropout_p": 0.1}, {}, "wrong answer")],
)
def test_a_build_that_answers_wrong_is_not_used_for_what_it_gets_wrong(
    install, fault: str, options: dict[str, Any], shape: dict[str, int], words: str
) -> None:
    install(f"import tests.flash_kernels as f\n{fault}{REST}")
    assert reasons(flash_attn_func, *qkv(d=64, dtype=HALF)) == []
    assert words in reasons(flash_attn_func, *qkv(dtype=HALF, **shape), **options)[0]


# ---------------------------------------------------------------- the name flash_attn


def test_loading_it_leaves_the_name_to_whoever_has_it(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    stand_in = type(sys)("flash_attn_2_cuda")
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", stand_in)
    flash_attn_func(*qkv(dtype=HALF))
    assert sys.modules["flash_attn_2_cuda"] is stand_in and "flash_attn" not in sys.modules


def test_a_real_package_that_runs_on_our_functions_is_not_asked(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setattr("flash_attn_compat.installed._swapped", object())
    assert reasons() == ["the installed flash-attn runs on this package at present"]


@pytest.mark.parametrize("change", [flash_attn_compat.patch, flash_attn_compat.unpatch])
def test_patching_and_unpatching_make_dispatch_decide_anew(change: Callable[[], None]) -> None:
    (flash_attn_compat.unpatch if change is flash_attn_compat.patch else flash_attn_compat.patch)()
    with use_backend("reference"):
        flash_attn_func(*qkv())
    assert dispatch._decisions
    change()
    assert not dispatch._decisions
