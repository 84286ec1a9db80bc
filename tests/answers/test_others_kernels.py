"""The backends around kernels of others, which are acted out on a CPU: flash-attn's, and two of PyTorch's."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_compat
from flash_attn_compat import explain, flash_attn_func, flash_attn_interface, flash_attn_varlen_func, use_backend
from flash_attn_compat.backends import base, smoke_test
from flash_attn_compat.core.features import Feature, Traits
from flash_attn_compat.dispatch import call_cache
from tests.answers import others_kernels
from tests.answers.others_kernels import BACKENDS, GENUINE, lay_flash_attn
from tests.forms.caller_state import State, skip_reason, states
from tests.forms.inputs import cumulative, qkv
from verify.drawing import random_problem
from verify.examination import Examination
from verify.problems import KINDS, Problem

HALF: dict[str, Any] = {"dtype": torch.float16}
FLASH = ("official", "torch_flash")
ALL = (*FLASH, "older torch_flash", "torch_efficient")


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A backend's name, once it serves CPU tensors; "older torch_flash" pads the LSE of packed rows."""
    older, _, name = str(request.param).rpartition(" ")
    others_kernels.install(monkeypatch, name, tmp_path, pads_lse=bool(older))
    return name


def on(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("backend", names, indirect=True)


@functools.lru_cache(16)
def examined(problem: Problem) -> Examination:
    """Return the examination of a problem, whose right answer the next backends are held against too."""
    return Examination(problem)


@on(*ALL)
@pytest.mark.parametrize("kind", KINDS)
def test_every_served_call_matches_the_oracle(backend: str, kind: str) -> None:
    served, most = 0, 6 if kind == "private_varlen" else 3
    for seed in range(30 if kind == "paged" else 400):
        problem = random_problem(seed, (kind,), ("float16", "bfloat16"))
        verdict = examined(problem).judge(backend)
        assert not verdict.failures, (problem, verdict)
        served += not verdict.refused
        if served == most:
            break
    if kind == "paged":  # which is left to others, unless there is nothing to compute
        assert not others_kernels.calls
    else:
        assert served == most and others_kernels.calls


# Queries far before the first key, under windows that end on one side only.
FAR = Problem(seqlens_q=(40,), seqlens_k=(5,), nheads_k=1, group=2, head_dim=16, dtype="float16")
FAR_PACKED = replace(FAR, kind="varlen", seqlens_q=(40, 3), seqlens_k=(5, 4))
WINDOWS = ((3, -1), (0, -1), (-1, 10), (2, 20))
SINGLE = Problem("varlen", (0, 1, 0, 0), (0, 1, 0, 0), group=3, dtype="bfloat16", causal=True, gap=(3, 0))
GROUPED = Problem("varlen", (9, 0, 40), (9, 0, 40), group=2, nheads_k=2)
LONELY = Problem("varlen", (9, 5, 0, 40, 70, 1), (9, 0, 7, 52, 33, 64), 2, 2, dtype="float16", gap=(3, 2))
MORE_ROWS = Problem(seqlens_q=(90,), seqlens_k=(33,), group=2, nheads_k=2)
SERVED = {
    **{f"rows far before the keys of window {window}": (FLASH, replace(FAR_PACKED, window=window))
       for window in WINDOWS},
    "single rows beside tokens outside": (ALL, SINGLE),
    "packed, queries without keys and keys without queries": (ALL, LONELY),
    "the same, causal": (ALL, replace(LONELY, causal=True)),
    "packed, fp32": (ALL[-1:], GROUPED),
    "packed, causal fp32": (ALL[-1:], replace(GROUPED, causal=True)),
    "more rows than keys, fp32": (ALL[-1:], MORE_ROWS),
}  # fmt: skip
REFUSED = {
    **{f"rows far before the keys, window {window}": (FLASH, replace(FAR, window=window)) for window in WINDOWS},
    **{f"rows far before the cache, window {window}": (
        FLASH, replace(FAR, kind="kvcache", capacity=6, window=window)) for window in WINDOWS},
    **{f"a scale of {scale}": (ALL, replace(MORE_ROWS, softmax_scale=scale, dtype="float16")) for scale in (-0.3, 0.0)},
    # Of the used keys alone such a window hides nothing, and the kernel's LSE would be that of no window.
    "ALiBi over a cache, window longer than what is used of it": (
        FLASH[:1], Problem("kvcache", (3, 3), (9, 9), 2, 2, 32, dtype="float16", capacity=32, causal=True,
                           window=(20, 0), alibi="h", lengths_as="int")),
    "causal, more rows than keys": (ALL[-1:], replace(MORE_ROWS, causal=True, dtype="float16")),
}  # fmt: skip


def cases(table: dict[str, tuple[tuple[str, ...], Problem]]) -> pytest.MarkDecorator:
    rows = [(backend, problem) for names, problem in table.values() for backend in names]
    labels = [f"{backend}: {label}" for label, (names, _) in table.items() for backend in names]
    return pytest.mark.parametrize(("backend", "problem"), rows, ids=labels, indirect=["backend"])


@cases(SERVED)
def test_differences_of_their_kernels_are_corrected(backend: str, problem: Problem) -> None:
    verdict = Examination(problem.build() if problem.gap[0] else problem).judge(backend)
    assert not verdict.failures and not verdict.refused, verdict


@on("official", "torch_flash", "torch_efficient")
def test_rows_beyond_max_seqlen_are_zero(backend: str) -> None:
    """Of 50 rows where max_seqlen_q is 20: out, LSE and dq."""
    q, k, v = (x[0].requires_grad_() for x in qkv(b=1, sq=60, sk=60, d=16, **HALF))
    starts, found = cumulative(50, 10), []
    with use_backend(backend):
        for longest in (20, 50):
            out, lse, _ = flash_attn_varlen_func(q, k, v, starts, starts, longest, 50, return_attn_probs=True)
            (dq,) = torch.autograd.grad(out.sum(), q)
            found.append([x.detach().flatten(1) for x in (out, lse.t(), dq)])
    for short, full in zip(*found, strict=True):
        assert not short[20:50].any()
        assert torch.equal(short[:20], full[:20]) and torch.equal(short[50:], full[50:])


@cases(REFUSED)
def test_uncorrectable_calls_are_refused(backend: str, problem: Problem) -> None:
    assert Examination(problem).judge(backend).refused


OF_ANOTHER = [
    (name, window, is_packed)
    for name in ALL
    for window in ((-1, -1), (-1, 0), (3, 0), (4, 5))
    for is_packed in (False, True)
    if name != "torch_efficient" or window[0] == -1
]


@pytest.mark.parametrize(("backend", "window", "is_packed"), OF_ANOTHER, indirect=["backend"])
def test_a_backward_takes_an_out_and_an_lse_that_another_forward_left(
    backend: str, window: tuple[int, int], is_packed: bool
) -> None:
    tensors, lengths, kind = qkv(b=2, sq=40, sk=40, h=4, hk=2, **HALF), (), "_flash_attn"
    if is_packed:
        lengths = cumulative(9, 71), cumulative(30, 50), 71, 50
        tensors, kind = [x.flatten(0, 1) for x in tensors], "_flash_attn_varlen"
    options = (0.0, 0.25, False, *window, 0.0, None, False)
    with use_backend("reference"):
        out, lse, *_ = getattr(flash_attn_interface, f"{kind}_forward")(*tensors, *lengths, *options)
    out, found = out.transpose(-3, -2).contiguous().transpose(-3, -2), []
    for name in (backend, "reference"):
        found.append([torch.empty_like(x) for x in tensors])
        given = (torch.ones_like(out), *tensors, out, lse, *found[-1])
        with use_backend(name):
            getattr(flash_attn_interface, f"{kind}_backward")(*given, *lengths, *options)
    for ours, right in zip(*found):
        torch.testing.assert_close(ours.float(), right.float(), rtol=4e-3, atol=4e-3)


@on(*ALL)
def test_the_lse_of_tokens_outside_of_all_sequences_is_zero(backend: str) -> None:
    starts, tensors = torch.tensor([2, 5, 9], dtype=torch.int32), [x.flatten(0, 1) for x in qkv(**HALF)]
    with use_backend(backend):
        _, lse, _ = flash_attn_varlen_func(*tensors, starts, starts, 4, 4, return_attn_probs=True)
    assert lse[:, 2:9].all() and not lse[:, :2].any() and not lse[:, 9:].any()


@on("official")
def test_slopes_are_read_through_their_strides(backend: str) -> None:
    q, slopes = qkv(**HALF), torch.tensor([0.3, 9.0, 0.1, 9.0])[::2]
    found = flash_attn_func(*q, alibi_slopes=slopes)
    with use_backend("reference"):
        assert torch.equal(found, flash_attn_func(*q, alibi_slopes=slopes.contiguous()))
    assert others_kernels.calls


PLAIN = Traits("cuda", (9, 0), torch.float16, 64, 64, "=", 0)
WIDE: dict[str, Any] = {"capability": (8, 6), "head_dim": 200, "head_dim_v": 200}
COMBINED: list[tuple[str, Feature | int, dict[str, Any], str | None]] = [
    ("official", Feature.SOFTCAP | Feature.DROPOUT, {}, "softcap with dropout"),
    ("torch_flash", Feature.BACKWARD, WIDE, "shared memory"),
    ("torch_flash", Feature.BACKWARD, WIDE | {"capability": (9, 0)}, None),
    ("torch_flash", Feature.BACKWARD, WIDE | {"head_dim": 192, "head_dim_v": 192}, None),
    ("torch_flash", Feature.BACKWARD, WIDE | {"head_dim": 256, "head_dim_v": 256}, None),
    ("torch_flash", 0, WIDE, None),
    ("torch_efficient", Feature.VARLEN | Feature.CAUSAL | Feature.BACKWARD, {"sq_vs_sk": "?"}, None),
    ("torch_efficient", Feature.VARLEN | Feature.CAUSAL | Feature.BACKWARD, {}, None),
    ("torch_efficient", Feature.CAUSAL, {"sq_vs_sk": "<"}, None),
    ("torch_efficient", 0, {"dtype": torch.bfloat16, "capability": (7, 5)}, "8.0"),
    ("torch_efficient", 0, {"dtype": torch.bfloat16, "capability": (8, 0)}, None),
]


@pytest.mark.parametrize(("name", "features", "changes", "words"), COMBINED)
def test_calls_that_its_kernels_get_wrong_or_lack_are_declined(
    name: str, features: int, changes: dict[str, Any], words: str | None
) -> None:
    reasons = BACKENDS[name]().extra_reasons(PLAIN._replace(features=int(features), **changes))
    assert reasons == [] if words is None else any(words in reason for reason in reasons)


@pytest.mark.parametrize("name", BACKENDS)
def test_calls_on_amd_gpus_are_declined(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert any("ROCm" in reason for reason in BACKENDS[name]().reasons(PLAIN))


@pytest.mark.parametrize("name", ["torch_flash", "torch_efficient"])
def test_the_installed_pytorch_has_operators_with_every_argument(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert BACKENDS[name]().unavailable_reasons() == []
    monkeypatch.setattr(base, "argument_names", lambda operator: frozenset())
    assert len(BACKENDS[name]().unavailable_reasons()) == 2


# ---------------------------------------------------------------- the flash-attn that is installed


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return install(source, version), which replaces the extension that serves CPU tensors."""
    others_kernels.install(monkeypatch, "official", tmp_path)
    return lambda *what: lay_flash_attn(monkeypatch, tmp_path, *what)


def reasons(*tensors: Tensor, **options: Any) -> list[str]:
    return explain(flash_attn_func, *(tensors or qkv(**HALF)), **options).reasons["official"]


RAISES = "def fwd(*arguments):\n    raise RuntimeError('no kernel image')\nbwd = varlen_fwd = varlen_bwd = fwd\n"
# The extension's source, flash-attn's version, words of the reason.
USELESS: list[tuple[str | None, str, str]] = [
    (None, "2.8.3", "flash_attn_2_cuda is missing"),
    ("raise ImportError('undefined symbol: _ZN3c104cuda9SetDeviceEi')", "2.8.3", "loading .* ImportError"),
    ("raise SystemError('initialization failed')", "2.8.3", "loading .* SystemError"),
    ("def fwd(*arguments): ...\n", "2.8.3", "loading .* AttributeError"),
    (RAISES, "2.8.3", "calling it raises RuntimeError: no kernel image"),
    *((GENUINE, f"{version}.1", f"flash-attn {version} is installed") for version in ("2.6", "1.0", "3.0")),
]


@pytest.mark.parametrize(("extension", "version", "words"), USELESS)
def test_a_useless_flash_attn_is_a_reason(install: Any, extension: str | None, version: str, words: str) -> None:
    install(extension, version)
    with pytest.raises(flash_attn_compat.BackendNotSupported, match=words), use_backend("official"):
        flash_attn_func(*qkv(**HALF))


def test_loading_is_tried_once_and_only_for_calls_it_could_take(install: Any) -> None:
    install("import tests.answers.others_kernels as o\no.calls.append('loaded')\nraise OSError('no')\n")
    assert reasons(*qkv()) == ["does not compute float32"] and others_kernels.calls == []
    for _ in range(2):
        reasons()
        call_cache.forget()
    assert others_kernels.calls == ["loaded"]


def test_a_flash_attn_that_is_switched_off_or_runs_on_ours_is_not_asked(
    install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reasons() == []
    monkeypatch.setenv("FLASH_ATTN_COMPAT_DISABLE_OFFICIAL", "1")
    assert reasons() == ["FLASH_ATTN_COMPAT_DISABLE_OFFICIAL is set"]
    monkeypatch.delenv("FLASH_ATTN_COMPAT_DISABLE_OFFICIAL")
    monkeypatch.setattr("flash_attn_compat.installed._swapped", object())
    assert reasons() == ["the installed flash-attn is patched to run on this package"]


WRONG = {
    "of half the size from head_dim 65 on": (
        "def fwd(q, *rest):\n    out, *more = o.fwd(q, *rest)\n    return [out * (1 - q.shape[-1] // 65 / 2), *more]\n",
        {"d": 96}, {}, "head_dim 96",
    ),
    "without dropout": (
        "def fwd(q, k, v, out, slopes, p, *rest):\n    return o.fwd(q, k, v, out, slopes, 0.0, *rest)\n",
        {}, {"dropout_p": 0.1}, "wrong answer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_a_build_is_not_used_for_calls_it_gets_wrong(install: Any, fault: str) -> None:
    forward, shape, options, words = WRONG[fault]
    rest = "bwd, varlen_fwd, varlen_bwd = o.bwd, o.varlen_fwd, o.varlen_bwd\n"
    install(f"import tests.answers.others_kernels as o\n{forward}{rest}")
    assert reasons(*qkv(d=64, **HALF)) == []
    assert words in reasons(*qkv(**HALF, **shape), **options)[0]


@on("official")
@pytest.mark.parametrize("state", [state for state in states() if "=" not in state.name], ids=lambda state: state.name)
def test_the_trial_ends_well_in_every_state_of_the_callers(backend: str, state: State) -> None:
    if reason := skip_reason(state, torch.device("cpu")):
        pytest.skip(reason)
    tensors, slopes = qkv(**HALF), torch.tensor([0.1, 0.2])
    with state.enter(torch.device("cpu")):
        assert not reasons(*tensors) and not reasons(*tensors, alibi_slopes=slopes)


@pytest.mark.parametrize(("capability", "index"), [((8, 0), 1), ((9, 0), 0), ((7, 5), 2), ((6, 1), 1)])
def test_the_trial_is_made_on_a_gpu_of_the_calls_kind(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], index: int
) -> None:
    gpus = [(9, 0), (8, 0), (7, 5), (8, 0)]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpus[device.index])
    assert smoke_test.find_device(capability) == torch.device("cuda", index)


@on("official")
def test_loading_it_keeps_another_module_named_flash_attn_2_cuda(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = type(sys)("flash_attn_2_cuda")
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", stand_in)
    flash_attn_func(*qkv(**HALF))
    assert sys.modules["flash_attn_2_cuda"] is stand_in and "flash_attn" not in sys.modules


@pytest.mark.parametrize("change", [flash_attn_compat.patch, flash_attn_compat.unpatch])
def test_patching_and_unpatching_make_dispatch_decide_anew(change: Callable[[], None]) -> None:
    (flash_attn_compat.unpatch if change is flash_attn_compat.patch else flash_attn_compat.patch)()
    with use_backend("reference"):
        flash_attn_func(*qkv())
    assert call_cache.current().choices
    change()
    assert not call_cache.current().choices and not call_cache.current().calls
    flash_attn_compat.unpatch()


# ---------------------------------------------------------------- on a GPU

needs_gpu = pytest.mark.gpu(capability=(8, 0))  # PyTorch's flash kernels


@needs_gpu
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("spare", [0, 20])
def test_tokens_outside_of_all_sequences_are_zero_also_where_lengths_change_unseen(spare: int, name: str) -> None:
    if name == "official" and importlib.util.find_spec("flash_attn_2_cuda") is None:
        pytest.skip("needs flash-attn")
    tensors = [torch.randn(80 + spare, 2, 64, device="cuda", **HALF) for _ in range(3)]
    starts = cumulative(30, 50).cuda()
    for lengths in ((30, 50), (30, 50), (30, 20)):
        starts.data.copy_(cumulative(*lengths))
        leaves = [x.index_fill(0, torch.arange(sum(lengths), 80 + spare, device="cuda"), torch.nan) for x in tensors]
        torch.full((400, 2, 64), torch.nan, dtype=torch.float16, device="cuda")  # what freed memory holds
        with use_backend(name):
            out = flash_attn_varlen_func(*[x.requires_grad_() for x in leaves], starts, starts, 50, 50, causal=True)
        for result in (out, *torch.autograd.grad(out, leaves, torch.ones_like(out))):
            assert result.isfinite().all() and not result[sum(lengths) :].any()
        torch.cuda.synchronize()


@needs_gpu
def test_deterministic_gradients_are_the_same_every_time() -> None:
    leaves = [torch.randn(2, 1500, 4, 64, device="cuda", requires_grad=True, **HALF) for _ in range(3)]
    runs = [
        torch.autograd.grad(flash_attn_func(*leaves, causal=True, deterministic=True).sum(), leaves) for _ in range(8)
    ]
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0]))


@pytest.mark.gpu
def test_gradients_of_grouped_heads_do_not_depend_on_how_out_is_strided() -> None:
    """torch_efficient's kernel reads ``out`` as if it were contiguous."""
    q, k, v, dout = (torch.randn(1, 128, heads, 64, device="cuda", **HALF) for heads in (4, 1, 1, 4))
    leaves, found = (q.requires_grad_(), k.requires_grad_()), []
    for name in ("torch_efficient", "chunked"):
        with use_backend(name):
            found.append(torch.autograd.grad(flash_attn_func(q, k, v, causal=True), leaves, dout))
    assert all((a - b).abs().max() < 2e-2 for a, b in zip(*found))
