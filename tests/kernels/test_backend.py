"""The fused backend as a whole: refusals, answers, kernels that cannot be used, and that wrong ones are caught."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_compat
from flash_attn_compat import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, use_backend
from flash_attn_compat.backends.fused import Fused
from flash_attn_compat.backends.fused.building import nvrtc
from flash_attn_compat.backends.fused.choosing import variants
from flash_attn_compat.backends.fused.choosing.kinds import FP16, KernelFeatures, Kind, Sizes
from flash_attn_compat.backends.fused.judging import self_test
from flash_attn_compat.backends.fused.launching import layouts
from flash_attn_compat.core.arguments import checked_call
from flash_attn_compat.core.call import AttentionCall
from flash_attn_compat.core.features import Feature, Traits
from flash_attn_compat.core.inputs import CacheInputs, DenseInputs, Options
from flash_attn_compat.dispatch import kvcache
from flash_attn_compat.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from tests.forms import inputs
from tests.forms.inputs import randn
from tests.forms.plain import in_turns, some, some_of
from tests.forms.support import close
from tests.kernels import fused_on_cpu
from verify.examination import Examination
from verify.problems import Problem

HALF = torch.float16


def traits(**changes: Any) -> Traits:
    q = torch.zeros(1, 2, 2, 64, dtype=HALF)
    return (
        checked_call(DenseInputs(q, q, q)).traits()._replace(**{"device_type": "cuda", "capability": (7, 5), **changes})
    )


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return inputs.qkv(2, 40, 50, h=4, hk=2, d=64, dtype=HALF)


# ---- reasons


@pytest.fixture
def _available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "decline_reason", lambda: None)


@pytest.mark.usefixtures("_available")
def test_pages_with_gradients_rocm_and_the_user_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = traits(features=int(Feature.PAGED | Feature.BACKWARD))
    assert ["gradients over pages" in reason for reason in Fused().reasons(pages)] == [True]
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert Fused().reasons(traits()) == ["its kernels are for NVIDIA GPUs"]
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setenv("FLASH_ATTN_COMPAT_FUSED", "0")
    assert Fused().reasons(traits()) == ["FLASH_ATTN_COMPAT_FUSED=0 forbids it"]


def test_a_machine_without_nvrtc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("no libnvrtc anywhere")

    monkeypatch.setattr(nvrtc, "_open_nvrtc", missing)
    monkeypatch.setattr(nvrtc, "compiler", nvrtc.compiler.__wrapped__)
    monkeypatch.setattr(nvrtc, "decline_reason", nvrtc.decline_reason.__wrapped__)
    (reason,) = Fused().reasons(traits())
    assert "NVRTC" in reason and "no libnvrtc anywhere" in reason


# ---- answers


@pytest.mark.parametrize(("head_dim", "small"), in_turns((20, 32), (0, layouts.MAX_SCALAR_LOADS)))
def test_gradients_arrive_where_the_caller_wants_them(
    head_dim: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For gradients and dout of any strides, whatever strides an earlier plan had."""
    monkeypatch.setattr(layouts, "MAX_SCALAR_LOADS", small)
    fused_on_cpu.emulate(monkeypatch)
    q, k, v = inputs.qkv(2, 40, 50, h=4, hk=2, d=head_dim, dtype=HALF)
    options = (0.0, head_dim**-0.5, True, -1, -1, 0.0, None, False)
    dout = randn(2, 40, 4, head_dim, dtype=HALF)
    unaligned = torch.cat([torch.zeros(1, dtype=HALF), dout.flatten()])[1:].view(dout.shape)
    douts = dout, unaligned, dout.transpose(1, 2).contiguous().transpose(1, 2), dout[:, :1, :, :1].expand(dout.shape)
    found: dict[str, list[Tensor]] = {}
    for backend in ("chunked", "fused"):
        with flash_attn_compat.use_backend(backend):
            out, lse, *_ = _flash_attn_forward(q, k, v, 0.0, head_dim**-0.5, True, -1, -1, 0.0, None, False)
            for given, wide in [*zip(douts, (0, 0, 0, 0)), *zip(douts, (8, 1, 8, 1))]:
                places = [torch.zeros(*x.shape[:-1], head_dim + wide, dtype=HALF)[..., wide:] for x in (q, k, v)]
                versions = [place._version for place in places]
                _flash_attn_backward(given, q, k, v, out, lse, *places, *options)
                assert all(place._version > before for place, before in zip(places, versions))
                found.setdefault(backend, []).extend(places)
    for ours, right in zip(found["fused"], found["chunked"]):
        close(ours, right, 4.0)


def test_gradients_into_places_that_overlap_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.record(monkeypatch)
    q, k, v = qkv()
    overlapping = torch.zeros(q[:1].shape, dtype=HALF).expand(q.shape)
    lse, places = torch.zeros(2, 4, 40), (overlapping, torch.zeros_like(k), torch.zeros_like(v))
    with flash_attn_compat.use_backend("fused"), pytest.raises(RuntimeError, match="share memory"):
        _flash_attn_backward(q, q, k, v, q, lse, *places, 0.0, 0.125, True, -1, -1, 0.0, None, False)
    assert all(launch.fields["dq"] != overlapping.data_ptr() for launch in launches.seen)


@pytest.mark.parametrize("seqlen_q", [1, 20])
@pytest.mark.parametrize("change", ["q", "k", "rotary_sin", "block_table", "alibi_slopes"])
def test_only_inputs_with_unsupported_strides_are_copied(
    change: str, seqlen_q: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = fused_on_cpu.emulate(monkeypatch)
    table = torch.arange(8, dtype=torch.int32).view(2, 4)
    shapes = {"q": (2, seqlen_q, 4, 32), "k": (2, seqlen_q, 2, 32), "v": (2, seqlen_q, 2, 32)}
    shapes |= {"rotary_cos": (64, 16), "rotary_sin": (64, 16)}
    given: dict[str, Any] = {name: randn(*shapes[name], seed=i, dtype=HALF) for i, name in enumerate(shapes)}
    given |= {"block_table": table, "alibi_slopes": torch.rand(2, 4), "cache_seqlens": table[0, 3:].expand(2).clone()}
    found: dict[str, list[Tensor]] = {}
    for backend in ("fused", "chunked"):
        for _ in range(2):  # the second one by what was kept of the first
            caches = [randn(8, 16, 2, 32, seed=seed, dtype=HALF) for seed in (7, 8)]
            apart = {change: given[change].repeat_interleave(2, -1)[..., ::2]}
            with flash_attn_compat.use_backend(backend):
                out = flash_attn_with_kvcache(k_cache=caches[0], v_cache=caches[1], causal=True, **given | apart)
            found[backend] = [out, *caches]
            if backend == "fused":
                assert launches.last.fields["k"] == caches[0].data_ptr()
    assert len(launches.seen) == (2 if seqlen_q == 1 else 4)
    close(found["fused"][0], found["chunked"][0], 4.0)
    assert all(map(torch.equal, found["fused"][1:], found["chunked"][1:]))


# ---- the trial


TRIED = Problem(seqlens_q=(40,), seqlens_k=(50,), nheads_k=2, group=2, head_dim=64, dtype="float16", causal=True)
FULL = replace(TRIED, causal=False)
TRIALS = {
    "causal": (75, TRIED),
    "causal, on a newer GPU": (80, TRIED),
    "window, softcap, ALiBi": (75, replace(FULL, window=(7, 3), softcap=2.0, alibi="h")),
    "dropout": (75, replace(FULL, dropout_p=0.4)),
    "16 channels": (75, replace(TRIED, head_dim=16)),
    "converted, values of another head_dim": (75, replace(TRIED, head_dim=77, head_dim_v=80, dtype="bfloat16")),
    "192 and 128 channels": (75, replace(TRIED, head_dim=192, head_dim_v=128)),
    "504 and 512 channels": (75, replace(TRIED, head_dim=504, head_dim_v=512)),
}  # fmt: skip


@pytest.mark.parametrize("name", some(TRIALS, 4))
def test_right_kernels_pass_their_trial(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number, problem = TRIALS[name]
    launches = fused_on_cpu.emulate(monkeypatch, number, tried=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kernels in (8, 12):  # those of a trial and of a call, then of another call
            verdict = Examination(problem).judge("fused")
            assert not verdict.failures and not verdict.refused, verdict
            assert len([entry for entry in launches.entries if entry != "absmax"]) == kernels


@pytest.mark.parametrize(
    ("head_dim", "dtype", "number"),
    some_of(
        [(*of, number) for of in ((16, HALF), (77, torch.bfloat16), (256, torch.bfloat16)) for number in (75, 80)], 3
    ),
)
def test_right_steps_that_append_pass_their_trial(
    number: int, head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = fused_on_cpu.emulate(monkeypatch, number, tried=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode_step(1, head_dim, dtype)()
    assert launches.last.variant.entry == "decode" and len(launches.files) == 1


@pytest.mark.parametrize("head_dim", some([32, 64, 256], 3))
def test_truncation_of_large_sums_is_far_below_the_self_tests_bound(
    head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused_on_cpu.emulate(monkeypatch, tried=True, truncates=True)
    monkeypatch.setattr(self_test, "_TOLERANCE", {HALF: 0.25 * self_test._TOLERANCE[HALF]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not Examination(replace(FULL, head_dim=head_dim, group=1, dropout_p=0.3)).judge("fused").refused


@pytest.mark.parametrize("softcap", [1024.0, 1025.0])
def test_a_softcap_too_large_for_its_tanh_is_declined(softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.emulate(monkeypatch, 80)
    examination = Examination(replace(TRIED, softcap=softcap))
    verdict = examination.judge("fused")
    assert not verdict.failures and bool(verdict.refused) == (softcap > 1024.0)
    assert bool(launches.seen) != bool(verdict.refused)
    assert not examination.judge("chunked").failures


def mutated(folder: Path, file: str, before: str, after: str) -> Path:
    """The kernels' sources with one change."""
    shutil.copytree(nvrtc.SOURCES, folder / "cuda")
    source = folder / "cuda" / file
    text = source.read_text()
    assert text.count(before) >= 1, f"{file} has no {before!r} any more"
    source.write_text(text.replace(before, after))
    return folder / "cuda"


def train(**options: Any) -> Callable[[], object]:
    q, k, v = qkv()
    return lambda: flash_attn_func(q.requires_grad_(), k, v, **options).sum().backward()


def decode_step(seqlen_new: int, dim: int = 64, dtype: torch.dtype = HALF) -> Callable[[], object]:
    caches, new = (randn(2, 50, 2, dim, dtype=dtype) for _ in "kv"), randn(2, seqlen_new, 2, dim, dtype=dtype)
    (k_cache, v_cache), tables = caches, randn(50, 16 if dim > 16 else 8, dtype=dtype)
    lengths = torch.tensor([3, 30], dtype=torch.int32)
    q = randn(2, 1, 4, dim, dtype=dtype)
    if seqlen_new == 0:
        return lambda: flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, causal=True)
    return lambda: flash_attn_with_kvcache(q, k_cache, v_cache, new, new, tables, tables, lengths, causal=True)


IN_FP16 = """
  for (auto &tile : S)
    for (auto &rows : tile)
      for (float &score : rows) score = half_to_float((u16)pack(score, 0.f));
"""
WINDOW = train(window_size=(9, 3))
WRONG = {
    "a window one key too wide": ("scores/score.cuh", "position + after)", "position + after + 1)", WINDOW),
    "scores kept in fp16": (
        "forward.cu", "v_tile, step);\n      });\n", f"v_tile, step);\n      }});\n{IN_FP16}", train()
    ),
    "scores kept in fp16 by a decode": ("decode.cu", "w));\n  }\n", f"w));\n  }}\n{IN_FP16}", decode_step(0)),
    "scores kept in fp16 by a step that appends": (
        "decode.cu", "w));\n  }\n", f"w));\n  }}\n{IN_FP16}", decode_step(1)
    ),
    "scores kept in fp16 by gradients": ("gradients/backward.cuh", "qk_at);\n", f"qk_at);\n{IN_FP16}", train()),
    "a key too few": ("forward.cu", "range.streamed - 1 - from", "range.streamed - 2 - from", train()),
    "scores not rescaled": ("scores/softmax.cuh", "O[n][i][e] *= shrink[i][e >> 1];", ";", train()),
    "an LSE of other units": ("scores/softmax.cuh", "__log2f(l)) * LN2", "__log2f(l))", train()),
    "another dropout mask": (
        "scores/softmax.cuh", "mix(row_base + i);", "mix(row_base + i + 1);", train(dropout_p=0.3)
    ),
    "splits that share a key": ("splits.cuh", "+ split * each,", "+ split * (each - 1),", train()),
    "splits weighed alike": ("splits.cuh", "exp2_approx(x[s][0].x - from[0])", "1.f", train()),
    "gradients of some heads left out": ("dkdv.cu", "s < p.splits;", "s + 1 < p.splits;", train()),
    "no delta": ("delta.cu", ": sum;", ": 0.f;", train()),
    "a rotation the wrong way": ("append.cuh", "a[2 * i] * cosine -", "a[2 * i] * cosine +", decode_step(1)),
    "values of another sequence": ("append.cuh", "p.v_new, new_s, b,", "p.v_new, new_s, b ^ !is_k,", decode_step(17)),
    "the same rotation of many keys": ("append.cuh", "a[2 * i] * cosine -", "a[2 * i] * cosine +", decode_step(17)),
}  # fmt: skip


@pytest.mark.parametrize("name", some(WRONG, 4))
def test_a_wrong_kernel_is_caught_before_its_first_real_call(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, before, after, call = WRONG[name]
    fused_on_cpu.emulate(monkeypatch, tried=True, sources=mutated(tmp_path, file, before, after))
    with pytest.warns(RuntimeWarning, match="computes wrong numbers on this GPU"):
        call()
    with warnings.catch_warnings():  # said once
        warnings.simplefilter("error")
        call()


ALL_GRADIENTS = {
    "as they are": ("dkdv.cu", "clear_dq(p, keys);", "clear_dq(p, keys);", True),
    "dq without the last keys": (
        "gradients/few_keys.cuh",
        "UNROLLED(k, STATIONARY_ROWS / 16) {", "UNROLLED(k, STATIONARY_ROWS / 16 - 1) {", False,
    ),
    "no delta": (
        "gradients/few_keys.cuh", "(STREAMED_ROWS + step) * 4, -sum)", "(STREAMED_ROWS + step) * 4, 0.f)", False
    ),
    "dq left as it was outside": ("dkdv.cu", "clear_dq(p, keys);", ";", False),
}  # fmt: skip


@pytest.mark.parametrize("name", some(ALL_GRADIENTS, 2))
def test_the_kernel_that_finds_all_gradients_is_tried_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, before, after, is_right = ALL_GRADIENTS[name]
    fused_on_cpu.emulate(monkeypatch, tried=True, sources=mutated(tmp_path, file, before, after), one_tile=True)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train()()
    assert [str(one.message) for one in found if "computes wrong" in str(one.message)] == [] or not is_right
    assert is_right or any("computes wrong numbers on this GPU" in str(one.message) for one in found)


def test_a_passed_self_test_is_remembered_by_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.record(monkeypatch)
    monkeypatch.setattr(self_test, "check_kernels", _check)
    tries = []
    kernels = (variants.forward(Kind(75, 0, Sizes(64))),)
    for _ in range(2):
        self_test.check_kernels(kernels, -1, lambda watch: tries.append("tried"))
        self_test._passed.clear()
    assert tries == ["tried"] and list(launches.files.values()) == [b"right"]


def test_a_trial_depends_on_nothing_the_caller_set(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_on_cpu.emulate(monkeypatch, tried=True)
    q, k, v = qkv()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            torch.inference_mode(),
            torch.autocast("cpu", torch.bfloat16),
            torch.device("meta"),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("error")
            with flash_attn_compat.use_backend("fused"):
                flash_attn_func(q, k, v, window_size=(9, 4))
    finally:
        torch.set_default_dtype(torch.float32)


ALL_AT_ONCE = Kind(75, FP16, Sizes(32, window=104), KernelFeatures(local=True, alibi=True, softcap=True))


@pytest.mark.parametrize("name", ["forward", "dropout", "decode", "append", "backward"])
def test_a_self_tests_judge_computes_on_the_host(name: str) -> None:
    """Which is the meta device here: PyTorch refuses to compute with tensors of both."""
    kind, place = ALL_AT_ONCE.replace(dropout=name in ("dropout", "backward")), torch.device("meta")

    def run(call: AttentionCall, *others: Any) -> Any:
        given = [x for part in (call, *others) if part is not None for x in part]
        assert all(x.device == place for x in given if isinstance(x, Tensor))
        if name == "backward":
            return [torch.zeros(x.shape) for x in call[:3]]
        return {"out": torch.zeros(call.out_shape)}

    if name == "backward":
        wrong = self_test.find_backward_error(kind, place, run)
    else:
        wrong = self_test.find_forward_error(
            kind, place, run, few_rows=name in ("decode", "append"), appends=name == "append"
        )
    assert wrong is not None and "is off by" in wrong


@pytest.mark.parametrize("shape", [(20, 2, 8), (2, 10, 2, 8)], ids=["packed", "dense"])
def test_a_trial_forgives_each_row_of_a_gradient_the_rounding_of_a_loud_one(shape: tuple[int, ...]) -> None:
    right = torch.zeros(shape)
    right.view(-1, 2, 8)[3, 1, 7] = 5.0
    quiet, other_head = right.clone(), right.clone()
    quiet.view(-1, 2, 8)[4, 1, 7] = 0.05
    other_head.view(-1, 2, 8)[4, 0, 7] = 0.05
    assert self_test._find_difference([("dq", quiet, right)], torch.float16) is None
    assert self_test._find_difference([("dq", other_head, right)], torch.float16) is not None


_check = self_test.check_kernels


# ---- the way of a call


def files_entered(call: Callable[[], object]) -> list[str]:
    """Return the package's files in the order of entering them from another one, the second time that a call runs."""
    call()
    root, before, within, entered = str(Path(flash_attn_compat.__file__).parent), sys.getprofile(), [""], []

    def watch(frame: Any, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if event == "call":
            if name.startswith(root) and name != within[-1] and not frame.f_code.co_name.startswith("<"):
                entered.append(name)
            within.append(name)
        elif event == "return" and len(within) > 1:
            within.pop()

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(before)
    return entered


CU = torch.tensor([0, 40, 80], dtype=torch.int32)


def into_out(q: Tensor) -> object:
    rows, table = q[:, :1].contiguous(), torch.tensor([[0], [1]], dtype=torch.int32)
    x = CacheInputs(rows, q, q, seqused_k=CU[1:], block_table=table)
    return kvcache.attend_into(torch.empty_like(rows), x, Options(causal=True))


WAYS: dict[str, tuple[int, Callable[[Tensor], object]]] = {
    "dense": (8, lambda q: flash_attn_func(q, q, q, causal=True)),
    "packed": (8, lambda q: flash_attn_varlen_func(*(q.flatten(0, 1),) * 3, CU, CU, 40, 40, causal=True)),
    "packed, recorded": (9, lambda q: flash_attn_varlen_func(*(q.flatten(0, 1).requires_grad_(),) * 3, CU, CU, 40, 40)),
    "over a cache, into the caller's memory": (7, into_out),
    "over a cache": (9, lambda q: flash_attn_with_kvcache(q[:, :1], q, q, cache_seqlens=CU[1:], causal=True)),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_known_call_enters_each_file_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASH_ATTN_COMPAT_CAPABILITY", raising=False)  # or each call asks settings.py for it
    fused_on_cpu.record(monkeypatch)
    most, call = WAYS[name]
    with use_backend("fused"):
        entered = files_entered(lambda: call(inputs.qkv(2, 40, 40, h=4, hk=4, d=64, dtype=HALF)[0]))
    assert len(entered) == len({*entered}) <= most, entered
