"""Problems on every backend: answers against fp64, flash-attn's recorded ones, masks, dropout, lengths, magnitudes.

Each (sequence, head) is held against fp64; what a call must not read is NaN, what it must not write is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_attn_compat import flash_attn_func, flash_attn_varlen_func, use_backend
from flash_attn_compat.backends import BACKENDS, sdpa, varlen
from flash_attn_compat.core.arguments import checked_call
from flash_attn_compat.core.call import BackwardInputs
from flash_attn_compat.core.features import Feature
from flash_attn_compat.core.inputs import DenseInputs, Options, PackedInputs
from flash_attn_compat.flash_attn_interface import _flash_attn_varlen_forward, _get_block_size_n
from tests.forms.inputs import PROBLEMS, TOGETHER, cumulative, qkv, randn
from tests.forms.plain import in_turns, some
from tests.forms.support import GENERAL, close, on_backend, on_general_backends
from tests.fuzz import must_serve
from tests.kernels import accuracy, emulate, fused_on_cpu
from verify import oracle
from verify.cases import Case
from verify.drawing import random_problem
from verify.errors import NotSupported
from verify.examination import Examination
from verify.implementations import Backend
from verify.judge import Check, against_official
from verify.problems import KINDS, Problem
from verify.recorded import recorded_cases


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_answer_is_right_and_nothing_else_is_touched(name: str) -> None:
    check(PROBLEMS[name], GENERAL[1:] if name.startswith("long") else GENERAL)


# ---------------------------------------------------------------- sequences alone, as a view, gathered, padded


@pytest.fixture(params=["cpu", "accelerator"])
def joining(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How sequences are joined: padded on an accelerator, where SDPA's gradients take no LSE."""
    if request.param == "accelerator":
        if torch.__version__ < "2.5":
            pytest.skip("SDPA's gradients are nan there, so that chunked serves")
        monkeypatch.setattr(varlen, "_CPU", varlen._ACCELERATOR)
        monkeypatch.setattr(sdpa, "_pays_to_split", lambda block: False)
        monkeypatch.setattr(sdpa, "_compute_gradients", gradients_without_lse)


def gradients_without_lse(
    q: Tensor, k: Tensor, v: Tensor, upstream: BackwardInputs, causal: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, ...]:
    q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    with torch.enable_grad():
        return torch.autograd.grad(sdpa._call_public_sdpa(q, k, v, causal, bias, scale), (q, k, v), upstream.dout)


@pytest.mark.parametrize(("name", "joining"), in_turns(TOGETHER, ("cpu", "accelerator")), indirect=["joining"])
def test_sequences_are_right_however_they_are_put_together(joining: None, name: str) -> None:
    check(TOGETHER[name])


@pytest.mark.usefixtures("joining")
@on_general_backends
def test_rows_of_padding_give_no_gradient_however_large_their_scores_would_be(backend: str) -> None:
    inputs = [randn(length, 1, 8).requires_grad_() for length in (103, 200, 200)]
    starts = cumulative(3, 100), cumulative(100, 100)
    out = on_backend(backend, flash_attn_varlen_func, *inputs, *starts, 100, 100, alibi_slopes=torch.tensor([-1.0]))
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.usefixtures("joining")
@on_general_backends
def test_of_a_page_that_sequences_share_gradients_add_up(backend: str) -> None:
    tensors, found = (randn(60, 2, 8), randn(1, 16, 2, 8, seed=1), randn(1, 16, 2, 8, seed=2)), []
    for table in (torch.zeros(2, 1, dtype=torch.int32), None):
        inputs = [tensor.clone().requires_grad_() for tensor in tensors]
        keys = inputs[1:] if table is not None else [torch.cat([x[0], x[0, :10]]) for x in inputs[1:]]
        lengths = cumulative(50, 10), cumulative(16, 10), 50, 16
        out = on_backend(backend, flash_attn_varlen_func, inputs[0], *keys, *lengths, block_table=table)
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for ours, right in zip(*found):
        close(ours, right, right.detach().abs().max())


def check(problem: Problem, backends: tuple[str, ...] = GENERAL) -> None:
    examination = Examination(problem)
    for backend in backends:
        verdict = examination.judge(backend)
        assert not verdict.failures, (backend, verdict)
        assert not verdict.refused or not must_serve(problem, backend), (backend, verdict)


# ---------------------------------------------------------------- answers that flash-attn 2.8.3 gave on an H200

ON_CPU = [
    backend.name
    for backend in BACKENDS
    if backend.capabilities.devices is None or "cpu" in backend.capabilities.devices
]
recorded = pytest.mark.parametrize("case", recorded_cases(), ids=lambda case: case.name)


def wrong(case: Case, backend: str) -> list[Check]:
    examination = Examination(case.problem)
    assert case.official is not None
    with Backend(backend).serving(examination.call) as function:
        answer = examination.ask(function)
    return [check for check in against_official(examination.host, answer, case.official) if not check.ok]


@pytest.mark.parametrize("backend", ON_CPU)
@recorded
def test_a_backend_gives_the_recorded_answer(case: Case, backend: str) -> None:
    try:
        assert wrong(case, backend) == []
    except NotSupported as refusal:
        pytest.skip(f"{backend}: {refusal}")


@pytest.mark.parametrize("case", some(recorded_cases(), 20), ids=lambda case: case.name)
def test_the_kernels_give_the_recorded_answer(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = fused_on_cpu.emulate(monkeypatch)
    assert wrong(case, "fused") == []
    assert launches.seen


def test_the_backends_without_limits_are_among_those_tested() -> None:
    assert {"chunked", "reference"} <= set(ON_CPU)


FIRST = 10_000  # numbers that test_judge.py and the fuzzer's first minutes do not see


def _problems(kind: str) -> int:
    return 24 if kind in ("dense", "varlen", "kvcache") else 12


@pytest.mark.parametrize("part", some(range(3), 3))
@pytest.mark.parametrize("kind", KINDS)
def test_every_backend_agrees_with_the_oracle(kind: str, part: int) -> None:
    complaints = []
    for number in range(FIRST + part, FIRST + _problems(kind), 3):
        examination = Examination(problem := random_problem(number, (kind,)))
        for backend in BACKENDS:
            verdict = examination.judge(backend.name)
            complaints += [f"{problem} on {backend.name}: {failure}" for failure in verdict.failures]
            if verdict.refused and must_serve(problem, backend.name):
                complaints.append(f"{problem}: {backend.name} refused: {verdict.refused}")
    assert not complaints, "\n".join(complaints)


@on_general_backends
@pytest.mark.parametrize("d", [16, 20])
def test_the_output_is_contiguous_so_that_heads_can_be_viewed_as_one_dimension(backend: str, d: int) -> None:
    q, k, v = torch.stack(qkv(d=d), 2).unbind(2)
    assert on_backend(backend, flash_attn_func, q, k, v).view(2, 7, 2 * d).shape == (2, 7, 2 * d)


@pytest.mark.parametrize("lengths", [(3, 2), (0, 0)])
def test_zero_tensors_marks_tokens_outside_every_sequence_with_minus_inf_lse(lengths: tuple[int, int]) -> None:
    used, rows = sum(lengths), 7 if sum(lengths) else 0  # of no rows none is outside
    q, k, starts = randn(rows, 2, 16), randn(10, 2, 16), (cumulative(*lengths), cumulative(4, 4))
    out, lse, _, _ = _flash_attn_varlen_forward(q, k, k, *starts, max(lengths), 4, 0.0, 0.25, False, zero_tensors=True)
    assert out.shape == (rows, 2, 16) and lse.shape == (2, rows)
    assert not out[used:].any() and (lse[:, used:] == -torch.inf).all() and lse[:, :used].isfinite().all()


@on_general_backends
def test_a_scale_that_is_no_number_gives_none(backend: str) -> None:
    leaves = [tensor.requires_grad_() for tensor in qkv(sq=40, sk=40)]
    out = on_backend(backend, flash_attn_func, *leaves, softmax_scale=torch.nan)
    found = out, *torch.autograd.grad(out.sum(), leaves[:2])
    assert all(bool(x.isnan().all()) for x in found)


def test_a_row_whose_scores_are_all_minus_infinity_is_one_without_keys_to_chunked() -> None:
    q, k = torch.full((1, 3, 1, 8), 1e20), torch.full((1, 20_000, 1, 8), -1e20)  # more keys than a tile has
    leaves = [tensor.bfloat16().requires_grad_() for tensor in (q, k, torch.ones_like(k))]
    with use_backend("chunked"):
        out, lse, _ = flash_attn_func(*leaves, return_attn_probs=True)
        gradients = torch.autograd.grad(out.sum(), leaves)
    assert not out.any() and bool((lse == torch.inf).all()) and not any(gradient.any() for gradient in gradients)


# ------------------------------------------------ dropout: reproducible, honest in its probability, reported in S_dmask

DROPPING = pytest.mark.parametrize("backend", ["reference", "chunked"])


def dropped(backend: str, seed: int, *args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    return on_backend(backend, flash_attn_func, *args, **kwargs)


@DROPPING
def test_the_mask_is_that_of_the_seed_whether_it_is_asked_for_or_not(backend: str) -> None:
    q, k, v = qkv()
    first, again, other = (dropped(backend, seed, q, k, v, dropout_p=0.3) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(other, on_backend(backend, flash_attn_func, q, k, v, dropout_p=0.3))
    assert torch.equal(first, dropped(backend, 1, q, k, v, dropout_p=0.3, return_attn_probs=True)[0])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_an_unrecorded_call_goes_to_the_backend_of_its_recorded_one(is_packed: bool, deterministic: bool) -> None:
    """A reentrant checkpoint records its recomputation only, and two backends may draw two masks."""
    tensors, options = DenseInputs(*qkv()), Options(dropout_p=0.1, deterministic=deterministic)
    if is_packed:
        tensors = PackedInputs(*(x.flatten(0, 1) for x in qkv()), None, cumulative(7, 7), cumulative(7, 7))
        options = options._replace(max_seqlen_q=7, max_seqlen_k=7)
    unrecorded, recorded = (checked_call(tensors, options._replace(use=use)).traits() for use in (0, Feature.BACKWARD))
    assert unrecorded == recorded


@DROPPING
@pytest.mark.parametrize("p", [0.1, 0.17, 0.5, 0.9])
def test_each_probability_is_kept_by_a_random_byte_of_its_own(backend: str, p: float) -> None:
    """Iff byte <= floor(255 (1 - p)); within 4.5 standard deviations of a binomial count, 5 of neighbours' products."""
    q, k, v = qkv(b=2, sq=250, sk=250, h=4, d=8)
    _, _, s_dmask = dropped(backend, 5, q, k, v, dropout_p=p, return_attn_probs=True)
    wanted = (math.floor(255 * (1 - p)) + 1) / 256
    x = ((s_dmask[:, :, :250, :250] >= 0).double() - wanted) / math.sqrt(wanted * (1 - wanted))
    for axes, what in (((0, 1, 2, 3), "all"), ((0, 2, 3), "head"), ((2, 3), "matrix"), ((0, 1, 3), "row")):
        means = x.mean(axes)
        assert means.abs().max() < 4.5 / math.sqrt(x.numel() / means.numel()), what
    pairs = {
        "keys": (x[..., 1:], x[..., :-1]), "rows": (x[:, :, 1:], x[:, :, :-1]), "heads": (x[:, 1:], x[:, :-1]),
        "sequences": (x[0], x[1]), "diagonal": (x[..., 1:, 1:], x[..., :-1, :-1]), "mirror": (x, x.transpose(2, 3)),
    }  # fmt: skip
    for name, (a, b) in pairs.items():
        assert (a * b).mean().abs() < 5 / math.sqrt(a.numel() / 2), name


@DROPPING
def test_s_dmask_of_packed_sequences_has_a_mask_for_each_padded_from_the_longest(backend: str) -> None:
    args = dict(
        q=randn(24, 2, 8, seed=1), k=randn(149, 2, 8, seed=2), v=randn(149, 2, 8, seed=3),
        cu_seqlens_q=cumulative(12, 12), cu_seqlens_k=cumulative(137, 12), max_seqlen_q=12, max_seqlen_k=137,
    )  # fmt: skip
    _, _, s_dmask = on_backend(backend, flash_attn_varlen_func, **args, dropout_p=0.5, return_attn_probs=True)
    assert s_dmask.shape == (2, 2, 128, 256)
    assert (s_dmask[0, :, :12, :137] != 0).all() and (s_dmask[1, :, :12, :12] != 0).all()
    keep = s_dmask[:, :, :12, :12] >= 0
    assert not torch.equal(keep[0], keep[1]) and not torch.equal(keep[0, 0], keep[0, 1])


@DROPPING
@pytest.mark.parametrize(
    ("d", "kwargs"),
    [
        (8, {}),
        (64, dict(causal=True)),
        (100, dict(window_size=(20, 9))),
        (128, dict(alibi_slopes=torch.tensor([0.2, 0.05]))),
        (8, dict(alibi_slopes=torch.tensor([0.2, 0.05]), causal=True)),
    ],
    ids=["plain", "causal", "window", "alibi", "alibi_causal"],
)
def test_s_dmask_is_exp_of_score_minus_the_running_maximum_of_key_blocks_from_the_right(
    backend: str, d: int, kwargs: Any
) -> None:
    q, k, v = qkv(b=1, sq=60, sk=200, h=2, d=d)
    _, _, s_dmask = dropped(backend, 0, q, k, v, dropout_p=0.2, return_attn_probs=True, **kwargs)
    block = _get_block_size_n(q.device, d, True, kwargs.get("causal", False))
    scores = torch.einsum("qhd,khd->hqk", q[0], k[0]).double() * d**-0.5
    if "alibi_slopes" in kwargs:
        distance = (torch.arange(60)[:, None] + 140 - torch.arange(200)).abs()
        scores = scores - kwargs["alibi_slopes"].double()[:, None, None] * distance
    seen = oracle.keys_visible(60, 200, kwargs.get("causal", False), kwargs.get("window_size", (-1, -1)), "cpu")
    scores = scores.masked_fill(~seen, -torch.inf)
    right = torch.zeros_like(scores)
    running = torch.full((2, 60), -torch.inf, dtype=torch.float64)
    for start in reversed(range(0, 200, block)):
        columns = slice(start, start + block)
        running = torch.maximum(running, scores[:, :, columns].amax(-1))
        right[:, :, columns] = (scores[:, :, columns] - running.masked_fill(running == -torch.inf, 0)[..., None]).exp()
    assert s_dmask.shape == (1, 2, 128, 256) and s_dmask.dtype == q.dtype
    torch.testing.assert_close(s_dmask[0, :, :60, :200].abs().double(), right, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- sequences longer than max_seqlen_q and max_seqlen_k

HALF, BRAIN = torch.float16, torch.bfloat16
# Lengths, max_seqlen_q and max_seqlen_k, dtype, options; how many rows of out, dq and dk are NaN.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, int], torch.dtype, dict[str, Any], tuple[int, int, int]]] = {
    "more tokens than such sequences hold": ((100, 50), (32, 32), HALF, {}, (0, 0, 0)),
    "one long sequence": ((200, 5, 5, 5), (64, 64), HALF, {}, (136, 136, 200)),
    "one long sequence, causal": ((200, 5, 5, 5), (64, 200), HALF, {"causal": True}, (136, 136, 200)),
    "one long sequence, converted": ((200, 5, 5, 5), (64, 64), BRAIN, {}, (136, 136, 200)),
    "keys alone": ((200, 5, 5, 5), (200, 64), HALF, {"causal": True}, (0, 0, 136)),
    "few rows": ((20, 1, 0), (8, 20), HALF, {"causal": True}, (4, 4, 20)),
    "single rows under a mask": ((2, 1, 0, 0), (1, 2), HALF, {"causal": True}, (2, 2, 2)),
    "single rows under a mask, more of them": ((2, 1), (1, 2), HALF, {"causal": True}, (2, 2, 2)),
    "single rows without a mask": ((2, 1, 0, 0), (1, 2), HALF, {}, (0, 0, 0)),
    "single rows with dropout": ((2, 1, 0, 0), (1, 2), HALF, {"causal": True, "dropout_p": 0.2}, (0, 0, 0)),
}


def of_lengths(lengths: tuple[int, ...], longest: tuple[int, int], dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """out, LSE and gradients, with a row for each token."""
    q, k, v = (randn(sum(lengths), 1, 16, seed=seed).to(dtype).requires_grad_() for seed in range(3))
    starts = cumulative(*lengths)
    torch.manual_seed(0)
    out, lse, _ = flash_attn_varlen_func(q, k, v, starts, starts, *longest, **options, return_attn_probs=True)
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    return [x.detach().flatten(1) for x in (out, lse.t(), *gradients)]


@pytest.mark.parametrize("name", some(CASES, 2))
def test_rows_beyond_max_seqlen_are_right_or_nan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, longest, dtype, options, (of_out, of_dq, of_dk) = CASES[name]
    fused_on_cpu.emulate(monkeypatch, number=75, held=7.0)
    with use_backend("fused"):
        found = of_lengths(lengths, longest, dtype, options)
        expected = of_lengths(lengths, (max(lengths),) * 2, dtype, options)
    for x, right, most in zip(found, expected, (of_out, of_out, of_dq, of_dk, of_dk), strict=True):
        is_nan = x.isnan().all(1)
        assert int(is_nan.sum()) == most
        torch.testing.assert_close(x[~is_nan], right[~is_nan], rtol=2e-2, atol=2e-2)


# ------------- rounding: bf16 as scaled fp16 (the table of docs/exactness.md, of fewer tokens), and sums over many keys

emulated = pytest.mark.skipif(bool(emulate.skip_reason()), reason=emulate.skip_reason())


@emulated
@pytest.mark.parametrize("sizes", accuracy.MAGNITUDES[::5], ids=str)
def test_errors_are_at_most_twice_those_of_plain_bf16(sizes: Sequence[float]) -> None:
    assert max(accuracy.error_ratios(sizes, tokens=40)) <= 2


@emulated
@pytest.mark.parametrize("decodes", [False, True])
def test_a_rows_sum_drifts_by_no_factor_from_one_tile_of_keys_to_the_next(decodes: bool) -> None:
    found = accuracy.errors(accuracy.problem(2**14, "float16", 0.0), False, decodes)
    assert found["softmax_lse"].error < 3e-6


@emulated
@pytest.mark.parametrize("dtype", some(("bfloat16", "float16"), 2))
def test_truncation_losses_of_one_sided_values_are_within_the_bound(dtype: str) -> None:
    rounding, truncating = (
        accuracy.errors(accuracy.problem(2**14, dtype, 1.0), truncates) for truncates in (False, True)
    )
    assert rounding["out"].error < truncating["out"].error < truncating["out"].bound / 2


@emulated
def test_the_command_prints_the_errors_of_rounding_and_truncation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["accuracy", "truncation", "--keys", "100"])
    assert accuracy.main() == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert "rounding, truncating, allowed" in head and len(rows) == 4
