"""What `chunked` does on a GPU only, on a CPU: one kernel for a tile's elementwise work, and windows cut in pieces."""

from __future__ import annotations

import pytest
import torch

from flash_attn_compat.backends import chunked, chunked_tiles
from flash_attn_compat.backends.base import HALF_DTYPES
from flash_attn_compat.engine import band, elementwise
from tests import elementwise_steps
from tests.judge import Examination
from tests.problems import Problem, random_problem
from tests.support import check_against_oracle, qkv

PROBLEMS = 300


@pytest.fixture
def fused_steps(monkeypatch):
    """Half-precision tiles go through the stand-in of the kernels; a CPU multiplies them in fp32."""
    calls = []

    def counted(name, dtype):
        calls.append(name)
        return elementwise_steps.compiled(name, dtype)

    monkeypatch.setattr(elementwise, "is_usable", lambda device, dtype: dtype in HALF_DTYPES)
    monkeypatch.setattr(elementwise, "_compiled", counted)
    monkeypatch.setattr(elementwise, "_compiled_score", lambda: elementwise_steps.score)
    monkeypatch.setattr(chunked_tiles, "_multiplies_half", lambda tensor: tensor.dtype in HALF_DTYPES)
    monkeypatch.setattr(
        chunked_tiles.Piece, "product", lambda self, a, b, scale=1.0: (a.to(self.dtype) @ b.to(self.dtype)).mul_(scale)
    )
    return calls


@pytest.fixture
def cut_windows(monkeypatch):
    """Windows are cut as on a GPU, into blocks small enough for small problems; counts the blocks."""
    parts = []
    original = band.cut

    def counted(block, left):
        for part in original(block, left):
            parts.append(part.count)
            yield part

    monkeypatch.setattr(chunked, "_CUTS_WINDOWS", {"cpu"})
    monkeypatch.setattr(band, "_MIN_ROWS", 8)
    monkeypatch.setattr(band, "_ROUNDED_TO", 8)
    monkeypatch.setattr(band, "cut", counted)
    return parts


@pytest.mark.parametrize("first", range(0, PROBLEMS, 50))
def test_random_problems_are_right_with_fused_steps(fused_steps, cut_windows, first):
    for number in range(first, first + 50):
        problem = random_problem(7000 + number, dtypes=("float16", "bfloat16"))
        verdict = Examination(problem).judge("chunked")
        assert not verdict.failures, (problem, verdict)
    assert {"weights", "gradients"} <= set(fused_steps)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("lengths", [(65, 65), (40, 131), (90, 33), (1, 7), (2, 1)])
def test_fused_steps_serve_odd_numbers_of_keys(fused_steps, lengths, softcap):
    seqlen_q, seqlen_k = lengths
    problem = Problem("dense", (seqlen_q,), (seqlen_k,), causal=True, softcap=softcap, group=2, dtype="float16")
    verdict = Examination(problem).judge("chunked")
    assert not verdict.refused and not verdict.failures, verdict
    assert fused_steps


@pytest.mark.parametrize("window", [(-1, 0), (13, 0), (9, 20), (-1, -1)])
def test_fused_steps_serve_rows_in_blocks(fused_steps, monkeypatch, window):
    monkeypatch.setattr(chunked_tiles, "_tile", lambda call, block, whole_rows: chunked_tiles.Tile(1, 1, 24, 1000))
    problem = Problem("dense", (50, 50), (71, 71), window=window, softcap=2.0, group=2, nheads_k=2, dtype="float16")
    verdict = Examination(problem).judge("chunked")
    assert not verdict.refused and not verdict.failures, verdict


@pytest.mark.parametrize("slopes", [None, 0.1])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "left"), [(150, 150, 12), (130, 171, 7), (210, 150, 30), (110, 110, 0), (153, 154, 129)]
)
def test_a_window_cut_in_pieces_is_the_whole(cut_windows, seqlen_q, seqlen_k, left, slopes):
    q, k, v = qkv(2, seqlen_q, seqlen_k, h=4, hk=2, dtype=torch.float64)
    arguments = {"q": q, "k": k, "v": v, "causal": True, "window_size": (left, 0)}
    if slopes is not None:
        arguments["alibi_slopes"] = torch.linspace(-slopes, slopes, 8).view(2, 4)
    check_against_oracle("chunked", "flash_attn_func", arguments)
    assert left > 100 or max(cut_windows) > 4


def test_a_short_sequence_is_not_cut(cut_windows):
    q, k, v = qkv(1, 40, 40, dtype=torch.float64)
    check_against_oracle("chunked", "flash_attn_func", {"q": q, "k": k, "v": v, "causal": True, "window_size": (12, 0)})
    assert not cut_windows


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on NVIDIA GPUs only")


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_kernels_compile_and_equal_their_stand_in(dtype):
    device = torch.device("cuda", torch.cuda.current_device())
    assert elementwise.is_usable(device, dtype)
    products = torch.randn(2, 3, 65, 129, device=device) * 4
    products[..., :7].masked_fill_(torch.rand(65, 7, device=device) < 0.5, -torch.inf)
    dp = torch.randn_like(products)
    peak, delta = products.amax(-1, keepdim=True), torch.randn(2, 3, 65, 1, device=device)
    lse = elementwise_steps.score(peak, 0.3, 1.5)
    weights, sums = elementwise.weights(products, peak, 0.3, 1.5, dtype)
    found = (
        weights,
        sums.sum(-1, keepdim=True),
        *elementwise.gradients(products, dp, lse, delta, 0.3, 1.5, dtype),
        elementwise.score(products, 0.3, 0.0),
    )
    score = elementwise_steps.score(products.double(), 0.3, 1.5)
    p = torch.exp(score - lse)
    ds = p * (dp - delta) * (1 - (score / 1.5).square())
    right = (p, p.sum(-1, keepdim=True), p, ds.masked_fill(p == 0, 0.0), products.double() * 0.3)
    for one, other in zip(found, right, strict=True):
        exact = max(torch.finfo(one.dtype).eps, 1e-5)
        torch.testing.assert_close(one.double(), other, rtol=exact, atol=exact / 16)


@needs_cuda
def test_without_the_jiterator_plain_operators_serve(monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_COMPAT_JITERATOR", "0")
    assert not elementwise.is_usable(torch.device("cuda", 0), torch.float16)


@needs_cuda
def test_kernels_that_give_wrong_numbers_are_not_used(monkeypatch):
    monkeypatch.setattr(elementwise, "_compiled_score", lambda: lambda products, **parameters: products)
    monkeypatch.setattr(elementwise, "_problems", {})
    with pytest.warns(RuntimeWarning, match="its results are wrong"):
        assert not elementwise.is_usable(torch.device("cuda", 0), torch.float16)
