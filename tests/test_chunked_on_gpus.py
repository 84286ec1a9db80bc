"""What `chunked` does on a GPU only, on a CPU: one kernel for a tile's elementwise work, and windows cut in pieces."""

from __future__ import annotations

import pytest
import torch

from flash_attn_compat import flash_attn_func, flash_attn_with_kvcache
from flash_attn_compat.backends import chunked, chunked_tiles
from flash_attn_compat.backends.base import HALF_DTYPES
from flash_attn_compat.engine import band, elementwise, jiterated
from flash_attn_compat.engine.compilation import OptionallyCompiled
from flash_attn_compat.engine.elementwise import Sight
from tests import cuda_on_cpu, elementwise_steps
from tests.judge import Examination
from tests.problems import Problem, random_problem
from tests.support import check_against_oracle, qkv

PROBLEMS = 300


@pytest.fixture
def fused_steps(monkeypatch):
    """Half-precision tiles go through the stand-in of the kernels; a CPU multiplies them in fp32."""
    calls = []

    def counted(step):
        return lambda *arguments: calls.append(step.__name__) or step(*arguments)

    monkeypatch.setattr(elementwise, "is_usable", lambda device, dtype: dtype in HALF_DTYPES)
    for name in ("peaks", "weights", "finish", "gradients"):
        monkeypatch.setattr(elementwise, name, counted(getattr(elementwise_steps, name)))
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
            parts.append(part.problems)
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


@pytest.fixture
def compiled_step(monkeypatch):
    """The step that FLASH_ATTN_COMPAT_COMPILE=1 compiles, as the compiler gets it; counts its runs."""
    step, runs = chunked._fused_weights._function, []
    monkeypatch.setenv("FLASH_ATTN_COMPAT_COMPILE", "1")
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: lambda *args: runs.append(1) or function(*args))
    monkeypatch.setattr(chunked, "_fused_weights", OptionallyCompiled(step))
    return runs


@pytest.mark.parametrize("first", range(0, 150, 50))
def test_random_problems_are_right_with_the_compiled_step(compiled_step, cut_windows, first):
    for number in range(first, first + 50):
        problem = random_problem(9000 + number, dtypes=("float32", "float64"))
        verdict = Examination(problem).judge("chunked")
        assert not verdict.failures, (problem, verdict)
    assert compiled_step


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "left"), [(150, 150, 12), (130, 171, 7), (210, 150, 30)])
def test_the_compiled_step_sees_no_blank_keys_in_front_of_a_cut_window(
    compiled_step, cut_windows, seqlen_q, seqlen_k, left, softcap
):
    q, k, v = qkv(1, seqlen_q, seqlen_k, dtype=torch.float64)
    arguments = {"q": q, "k": k, "v": v, "causal": True, "window_size": (left, 0), "softcap": softcap}
    check_against_oracle("chunked", "flash_attn_func", arguments)
    assert compiled_step and max(cut_windows) > 4


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on NVIDIA GPUs only")


@pytest.fixture(params=cuda_on_cpu.devices())
def kernels(request, monkeypatch) -> torch.device:
    if request.param == "cpu":
        cuda_on_cpu.install(monkeypatch)
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("columns", [1, 7, 64, 131, 300, 1000])
@pytest.mark.parametrize(
    "sight",
    [
        Sight(0),
        Sight(40, right=0),
        Sight(-3, right=0),
        Sight(90, left=50, right=0),
        Sight(20, left=5, right=9, blank=70, blank_step=32),
        Sight(60, right=0, first_keys=torch.tensor([0, 9, 99]), start=4),
        Sight(10**6),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_kernels_equal_their_stand_in(kernels, dtype, sight, columns):
    device = kernels
    assert elementwise.is_usable(device, dtype)
    if sight.first_keys is not None:
        sight = sight._replace(first_keys=sight.first_keys.to(device))
    products, dp = torch.randn(2, 3, 2, 65, 3, columns, device=device).mul_(4)
    delta = torch.randn(3, 2, 65, 3, 1, device=device)
    peak = elementwise_steps.peaks(products, sight)
    assert torch.equal(elementwise.peaks(products, sight), peak)
    lse = elementwise_steps.score(peak, 0.3, 1.5).masked_fill(peak == -torch.inf, torch.inf)
    found = (
        *elementwise.weights(products, peak, 0.3, 1.5, dtype, sight),
        *elementwise.gradients(products, dp, lse, delta, 0.3, 1.5, dtype, sight),
    )
    exact = (products.double(), peak.double(), 0.3, 1.5, torch.float64, sight)
    right = (
        *elementwise_steps.weights(*exact),
        *elementwise_steps.gradients(exact[0], dp.double(), lse.double(), delta.double(), *exact[2:]),
    )
    for one, other in zip(found, right, strict=True):
        bound = max(torch.finfo(one.dtype).eps, 1e-5)
        torch.testing.assert_close(one.double(), other, rtol=bound, atol=bound / 16)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("channels", [1, 8, 20, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_finished_rows_are_written_where_they_belong(kernels, dtype, channels, softcap):
    sizes = (2, 3, 7, 2)  # sequences, key heads, rows, query heads of each
    products = torch.rand(*sizes, channels, device=kernels)
    total, peak = torch.rand(*sizes, 1, device=kernels), torch.randn(*sizes, 1, device=kernels)
    total[1, 2, 4] = 0.0
    peak[1, 2, 4] = -torch.inf
    found, right = [], []
    for finish, into in ((elementwise.finish, found), (elementwise_steps.finish, right)):
        for wants_lse in (True, False):
            out = torch.full((2, 9, 6, channels), 7.0, dtype=dtype, device=kernels)
            lse = torch.full((2, 6, 9), 7.0, device=kernels)
            rows = out[:, 1:8].unflatten(2, (3, 2)).transpose(1, 2)
            row_lse = lse[:, :, 1:8].transpose(1, 2).unflatten(2, (3, 2)).transpose(1, 2)
            finish(products, total, peak, 0.7, softcap, rows, row_lse if wants_lse else None)
            into += (out, lse)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=max(torch.finfo(one.dtype).eps, 1e-5), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_kernels_pass_their_own_trials(kernels, dtype):
    assert elementwise._tiles_are_right(kernels, dtype) and elementwise._bias_is_right(kernels, dtype)


@needs_cuda
def test_without_the_jiterator_plain_operators_serve(monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_COMPAT_JITERATOR", "0")
    assert not elementwise.is_usable(torch.device("cuda", 0), torch.float16)


@needs_cuda
def test_kernels_that_give_wrong_numbers_are_not_used(monkeypatch):
    monkeypatch.setattr(elementwise, "peaks", lambda products, sight: products[..., :1])
    monkeypatch.setattr(jiterated, "_problems", {})
    with pytest.warns(RuntimeWarning, match="its results are wrong"):
        assert not elementwise.is_usable(torch.device("cuda", 0), torch.float16)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_kernels_run_where_the_tensors_are_whatever_the_current_device():
    with torch.cuda.device(0):
        tensors = [torch.randn(2, 700, 4, 64, dtype=torch.float16) for _ in range(3)]
        found = []
        for device in ("cuda:0", "cuda:1"):
            q, k, v = (tensor.to(device).requires_grad_() for tensor in tensors)
            out = flash_attn_func(q, k, v, causal=True, softcap=5.0)
            with torch.no_grad():
                decoded = flash_attn_with_kvcache(q[:, :1], k.repeat(1, 4, 1, 1), v.repeat(1, 4, 1, 1))
            found.append((out, decoded, *torch.autograd.grad(out.sum(), (q, k, v))))
        for one, other in zip(*found, strict=True):
            assert other.device.index == 1
            torch.testing.assert_close(one.cpu(), other.cpu())
