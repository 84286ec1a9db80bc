"""benchmarks.kernel_ladder: each step computes attention, compiles for Turing and costs less than the step before."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import kernel_ladder
from benchmarks.kernel_ladder import TODAY, Measured, Model, make_variant, pack_argument
from benchmarks.kernel_report import Pipes
from tests.forms.plain import some_of
from tests.kernels import emulate, fused_on_cpu, offline
from tests.kernels.emulate import Rules, compile_kernel
from verify.timing import Failed, Timing

STEPS = range(TODAY)  # tests/kernels/test_kernels.py runs today's kernel
emulated = pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())
compiled = pytest.mark.skipif(
    not offline.compilers() or offline.cuobjdump() is None, reason="needs NVRTC and cuobjdump"
)


def emulate_step(step: int, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, int]:
    """Return the result and the number of bank conflicts."""
    kernel, out = make_variant(step, q.shape[-1], causal), torch.full_like(q, torch.nan)
    blocks, packed = pack_argument(kernel, q, k, v, out, causal)
    emulated_kernel = compile_kernel(kernel.source, kernel.entry, dict(kernel.macros))
    rules = Rules(number=75, truncates=True)
    return out, emulated_kernel.launch(packed, blocks, kernel.threads, kernel.shared, (q, k, v, out), rules)


def compute_in_fp64(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return attention in fp64; rows that see no key are 0."""
    group, (seqlen_q, seqlen_k) = q.shape[2] // k.shape[2], (q.shape[1], k.shape[1])
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / math.sqrt(q.shape[-1])
    if causal:
        seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)
        scores = scores.masked_fill(~seen, -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).nan_to_num(), v.double())


@emulated
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("step", "head_dim"), [*((step, 64) for step in STEPS), *some_of([(8, 128), (3, 128)], 2)])
def test_each_step_computes_attention_of_odd_lengths_and_grouped_heads(step: int, head_dim: int, causal: bool) -> None:
    for seqlen_q, seqlen_k in ((37, 75), (67, 35))[: 1 + causal]:  # causal, more rows than keys: some rows see none
        q = torch.randn(1, seqlen_q, 2, head_dim).half() * 4  # large: maxima rise late
        k, v = (torch.randn(1, seqlen_k, 1, head_dim).half() for _ in range(2))
        out, _ = emulate_step(step, q, k, v, causal)
        torch.testing.assert_close(out.double(), compute_in_fp64(q, k, v, causal), rtol=2e-3, atol=2e-3)


@emulated
def test_swizzled_tiles_have_no_bank_conflicts_and_plain_tiles_have_as_many_as_the_model_assumes() -> None:
    q, k, v = (torch.randn(1, 64, 1, 64).half() for _ in range(3))
    conflicts = {step: emulate_step(step, q, k, v, False)[1] for step in (5, 6, 7, 8)}
    assert [conflicts[step] for step in (6, 7, 8)] == [0, 0, 0]
    products = 4 * 64  # of S, and as many of O, by the block's four warps
    # Words of eight rows, or of four rows and two lanes each, lie in four banks: 28 of 32 lanes clash with another one.
    # A product of S loads one such word, a product of O two.
    assert conflicts[5] == products * 3 * 28


@compiled
@pytest.mark.parametrize(("step", "head_dim"), some_of([*((step, 64) for step in STEPS), (8, 128)], 5))
def test_each_step_fits_turing_and_the_model_counts_its_products(step: int, head_dim: int) -> None:
    found = kernel_ladder.apply_model(step, head_dim, causal=True)
    assert found is not None and found.spilled == 0
    kernel = make_variant(step, head_dim, True)
    assert found.registers * kernel.threads <= offline.REGISTERS and kernel.shared <= offline.SHARED_MEMORY[75]
    if step >= 4:
        assert found.pipes.tensor == 16 * head_dim
    else:
        products = 2 * 2 * head_dim * 64 / 4 * 2  # 2 warps, 64 keys, on one of four quarters in 2 cycles
        assert found.pipes.tensor == 0 and products * (1.5 if step == 0 else 1) <= found.pipes.fma < 2 * products
    assert 0.02 < found.share <= 1


# ---- the benchmark ---------------------------------------------------------------------------------------------------


def make_model(share: float) -> Model:
    return Model(Pipes(1024.0, 1024.0 / share, 1.0, 1.0, 1.0, 1.0), share, 255, 0)


def make_options(seqlen: int, causal: bool) -> argparse.Namespace:
    return argparse.Namespace(batch=2, heads=2, seqlen=seqlen, head_dim=64, causal=causal, repeats=1)


def test_each_step_and_todays_kernel_are_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.emulate(monkeypatch, number=75)
    found = kernel_ladder.measure(make_options(35, True), 1.0, "cpu")
    assert [kernel_ladder.describe_fault(each) for each in found] == [""] * (TODAY + 1)
    assert all(each.tflops == each.share > 0 for each in found)
    assert {*launches.entries} == {"ladder", "forward"}


@compiled
def test_the_loop_that_measures_the_peak_is_four_products_and_little_else() -> None:
    compiler = next(reversed(offline.compilers().values()))
    loop = offline.main_loop(offline.instructions(offline.compiled(compiler, kernel_ladder.PEAK, "sm_75").cubin))
    products = sum(count for name, count in loop.items() if name.startswith("HMMA.1688.F32"))
    assert products and products % 4 == 0 and sum(loop.values()) < 4 * products


def test_a_step_whose_answer_is_wrong_or_that_fails_is_named_and_gives_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timing = Timing(2.0, 2.0, 2.0, 1)
    right, wrong = Measured(timing, 1e-4, 5.0, 0.5), Measured(timing, 0.1, 5.0, 0.5)
    failed = Measured(Failed("out of memory"), math.inf, 0.0, 0.0)
    monkeypatch.setattr(kernel_ladder, "apply_model", lambda *what: None)
    monkeypatch.setattr(kernel_ladder, "describe", lambda devices: {})
    monkeypatch.setattr(kernel_ladder, "measure_peak", lambda: 10.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    for found, code in (([right] * 10, 0), ([*[right] * 8, wrong, failed], 1)):
        monkeypatch.setattr(kernel_ladder, "measure", lambda *what: found)
        assert kernel_ladder.main([]) == code
    said = capsys.readouterr().out
    assert "step 8: the answer is off by 0.1" in said and "step 9: out of memory" in said and "step 7: " not in said


def test_without_a_gpu_the_table_and_the_file_have_the_models_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(kernel_ladder, "apply_model", lambda step, *what: make_model(0.05 * (1 + step)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    saved = tmp_path / "ladder.json"
    assert kernel_ladder.main(["--json", str(saved)]) == 0
    said = capsys.readouterr().out
    assert "| 1 | online softmax: every score once | 255 | shared | 10,240 | 2.00 | 0.100 |" in said
    assert "nothing was timed" in said
    rows = json.loads(saved.read_text())["rows"]
    assert [row["model"]["pipes"]["shared"] for row in rows][:2] == [20480, 10240] and not any(
        row["gpu"] for row in rows
    )


def test_without_a_gpu_and_without_compilers_the_benchmark_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernel_ladder, "apply_model", lambda *what: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernel_ladder.main([]) == 1 and "needs a CUDA GPU, or NVRTC" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "change"), [
    ("k", lambda x: x.float()),
    ("v", lambda x: x[:, :-1]),
    ("q", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    ("out", lambda x: x[..., :32].contiguous()),
])  # fmt: skip
def test_tensors_that_the_kernels_cannot_read_are_refused_by_name(
    name: str, change: Callable[[Tensor], Tensor]
) -> None:
    given = {each: torch.zeros(1, 40, 2, 64, dtype=torch.half) for each in ("q", "k", "v", "out")}
    given[name] = change(given[name])
    with pytest.raises(ValueError, match=f"^{name} must be contiguous fp16"):
        pack_argument(make_variant(6, 64, False), **given, causal=False)
