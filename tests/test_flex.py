"""The flex backend on a CPU: FlexAttention traced by the compiler, run by PyTorch's own dense formula."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import flash_attn_compat
from flash_attn_compat import explain, flash_attn_func, flash_attn_varlen_func, use_backend
from flash_attn_compat.backends import BACKENDS, flex, flex_mask
from flash_attn_compat.engine import dispatch
from flash_attn_compat.engine.call import AttentionCall
from flash_attn_compat.engine.mask import Mask
from tests.judge import Examination
from tests.problems import Problem
from tests.support import cumulative, qkv

LACKS = [reason for reason in flex._missing() if "Triton" not in reason]
pytestmark = pytest.mark.skipif(bool(LACKS), reason="; ".join(LACKS) or "this PyTorch has what the backend needs")

FLEX = next(backend for backend in BACKENDS if backend.name == "flex")


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compilation allowed, calls on CPU tensors counted as calls on a GPU, and no kernel generated."""
    monkeypatch.setenv("FLASH_ATTN_COMPAT_COMPILE", "1")
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CAPABILITY", "9.0")
    true_traits = AttentionCall.traits
    monkeypatch.setattr(
        AttentionCall, "traits", lambda call: true_traits(call)._replace(device_type="cuda", capability=(9, 0))
    )
    monkeypatch.setattr(flex, "_missing", list)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    # PyTorch has no compiled backward on a CPU, but its formula has one.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    _forget()
    yield
    _forget()


def _forget() -> None:
    FLEX._failures.clear()
    flex._compiled.cache_clear()
    flex._capped.cache_clear()
    flex_mask._dense.cache_clear()
    dispatch.forget_decisions()


HEADS = {"nheads_k": 1, "group": 2, "head_dim": 16}
EVEN, UNEVEN = {"seqlens_q": (150, 150), "seqlens_k": (150, 150)}, {"seqlens_q": (30, 30), "seqlens_k": (40, 40)}
HOLES = {"kind": "varlen", "seqlens_q": (3, 0, 150, 20), "seqlens_k": (5, 4, 90, 0), "gap": (2, 3)}
PACKED = {"kind": "varlen", "seqlens_q": (130, 20), "seqlens_k": (130, 31)}
PROBLEMS = {
    "softcap, GQA": Problem(**EVEN, **HEADS, softcap=2.0, causal=True),
    "rows without keys": Problem(seqlens_q=(140,), seqlens_k=(9,), head_dim=16, causal=True, softcap=5.0),
    "two-sided window": Problem(seqlens_q=(270,), seqlens_k=(300,), head_dim=24, window=(40, 7)),
    "ALiBi": Problem(**UNEVEN, **HEADS, alibi="bh", causal=True, softcap=3.0),
    "packed": Problem(**HOLES, **HEADS, softcap=2.0, causal=True),
    "packed, NaN outside": Problem(**HOLES, **HEADS, poison=True, dtype="bfloat16"),
    "packed, window, ALiBi": Problem(**PACKED, **HEADS, alibi="h", window=(30, 0)),
    "packed ALiBi, pure causal": Problem(**PACKED, **HEADS, alibi="bh", causal=True),
}


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_it_agrees_with_the_oracle(problem: Problem) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="compiled FlexAttention", category=RuntimeWarning)
        verdict = Examination(problem).judge("flex")
    assert verdict.failures == [] and not verdict.refused


# ---------------------------------------------------------------- which blocks are visited

MASKS = [Mask(), Mask(None, 0), Mask(10, 0), Mask(200, 0), Mask(5, 7), Mask(300, None), Mask(None, 140)]


@pytest.mark.parametrize("lengths", [(128, 128), (1, 400), (300, 300), (400, 130), (260, 700), (130, 5)])
@pytest.mark.parametrize("mask", MASKS)
def test_blocks_that_are_left_out_hold_nothing_visible_and_full_ones_nothing_hidden(
    mask: Mask, lengths: tuple[int, int]
) -> None:
    seqlen_q, seqlen_k = lengths
    geometry = flex_mask._dense(seqlen_q, seqlen_k, mask, torch.device("cpu"))
    keys = torch.arange(seqlen_k)
    visible = (keys >= geometry.first[:, None]) & (keys < geometry.stop[:, None])
    _check_blocks(visible, geometry.block_mask)


def test_packed_sequences_share_no_blocks_but_those_they_touch() -> None:
    q, k, v = torch.zeros(700, 1, 16), torch.zeros(900, 1, 16), torch.zeros(900, 1, 16)
    starts_q, starts_k = cumulative(100, 0, 300, 260), cumulative(130, 50, 300, 400)
    call = AttentionCall(
        q, k, v, 1.0, Mask(None, 0), 300, 400, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, is_dense=False
    )
    geometry = flex_mask.geometry(call)
    visible = torch.zeros(700, 900, dtype=torch.bool)
    for sq, sk, row, key in ((100, 130, 0, 0), (300, 300, 100, 180), (260, 400, 400, 480)):
        visible[row : row + sq, key : key + sk] = torch.ones(sq, sk, dtype=torch.bool).tril(sk - sq)
    keys = torch.arange(900)
    assert torch.equal((keys >= geometry.first[:, None]) & (keys < geometry.stop[:, None]), visible)
    _check_blocks(visible, geometry.block_mask)


def _check_blocks(visible: torch.Tensor, block_mask: Any) -> None:
    rows, keys = visible.shape
    size = flex_mask.BLOCK
    padded = torch.zeros(-(-rows // size) * size, -(-keys // size) * size, dtype=torch.bool)
    padded[:rows, :keys] = visible
    blocks = padded.unflatten(0, (-1, size)).unflatten(2, (-1, size)).transpose(1, 2)
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    assert not (partial & full).any()
    assert not (blocks.any((2, 3)) & ~partial & ~full).any(), "a visible block is not visited"
    assert blocks.all((2, 3))[full].all(), "a full block holds something hidden"
    wasted = partial & ~blocks.any((2, 3))
    assert wasted.sum() <= 0.1 * partial.sum() + 2


def _listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    counts, indices = counts[0, 0], indices[0, 0].long()
    listed = torch.zeros_like(indices, dtype=torch.bool)
    for row, count in enumerate(counts.tolist()):
        chosen = indices[row, :count]
        assert chosen.unique().numel() == count
        listed[row, chosen] = True
    return listed


# ---------------------------------------------------------------- when it serves


def test_it_serves_only_where_compilation_is_switched_on(switched_on: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert explain(flash_attn_func, *qkv(), softcap=2.0).backend == "flex"
    monkeypatch.delenv("FLASH_ATTN_COMPAT_COMPILE")
    found = explain(flash_attn_func, *qkv(), softcap=2.0)
    assert found.backend == "chunked" and "FLASH_ATTN_COMPAT_COMPILE=1" in found.reasons["flex"][0]


@pytest.mark.usefixtures("switched_on")
def test_a_failure_is_warned_of_once_served_by_another_and_a_reason_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts = []

    def fails(*arguments: Any) -> Any:
        attempts.append(arguments)
        raise RuntimeError("out of resource: shared memory\nand more")

    monkeypatch.setattr(flex, "_compiled", lambda *kind: fails)
    monkeypatch.setattr(flex._compiled, "cache_clear", lambda: None, raising=False)
    q, k, v = qkv()
    with use_backend("reference"):
        right = flash_attn_func(q, k, v, softcap=2.0)
    flash_attn_compat.reset_backend_counts()
    with pytest.warns(RuntimeWarning, match="out of resource"):
        first = flash_attn_func(q, k, v, softcap=2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = flash_attn_func(q, k, v, softcap=2.0)
    assert len(attempts) == 1
    torch.testing.assert_close(first, right)
    torch.testing.assert_close(second, right)
    assert {name: count for name, count in flash_attn_compat.backend_counts().items() if count} == {"chunked": 2}
    assert any("out of resource" in reason for reason in explain(flash_attn_func, q, k, v, softcap=2.0).reasons["flex"])
    monkeypatch.undo()


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize("failing", ["forward", "backward"])
def test_gradients_come_from_another_backend_whichever_half_fails(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(flex, f"_{failing}", fails)
    leaves = [x.requires_grad_() for x in qkv()]
    with pytest.warns(RuntimeWarning, match="FlexAttention failed"):
        ours = torch.autograd.grad(flash_attn_func(*leaves, softcap=2.0, causal=True).sum(), leaves)
    with use_backend("reference"):
        right = torch.autograd.grad(flash_attn_func(*leaves, softcap=2.0, causal=True).sum(), leaves)
    for gradient, expected in zip(ours, right):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_what_inference_mode_left_behind_serves_training(softcap: float) -> None:
    q, k, v = qkv()
    with use_backend("flex"), warnings.catch_warnings():
        warnings.filterwarnings("error", message="compiled FlexAttention", category=RuntimeWarning)
        with torch.inference_mode():
            flash_attn_func(q, k, v, softcap=softcap, causal=True)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        torch.autograd.grad(flash_attn_func(*leaves, softcap=softcap, causal=True).sum(), leaves)


@pytest.mark.usefixtures("switched_on")
def test_a_forced_flex_that_fails_raises_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(call: AttentionCall) -> Any:
        raise RuntimeError("unsupported MMA instruction")

    monkeypatch.setattr(flex, "_forward", fails)
    with (
        use_backend("flex"),
        pytest.warns(RuntimeWarning),
        pytest.raises(flash_attn_compat.BackendNotSupported) as refusal,
    ):
        flash_attn_func(*qkv(), softcap=2.0)
    assert "unsupported MMA instruction" in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"dtype": torch.bfloat16}, "bfloat16"), ({"head_dim": 192}, "128"), ({"capability": (6, 1)}, "7.0")],
)
def test_what_triton_cannot_do_on_an_older_gpu_is_a_reason(changes: dict[str, Any], word: str) -> None:
    starts = cumulative(3, 4)
    call = AttentionCall(
        *(torch.zeros(7, 2, 16, dtype=torch.float16) for _ in range(3)),
        1.0,
        Mask(),
        4,
        4,
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
    )
    traits = call.traits()._replace(device_type="cuda", capability=(7, 5))
    assert not any(word in reason for reason in FLEX.reasons(traits))
    assert any(word in reason for reason in FLEX.reasons(traits._replace(**changes)))


def test_tiles_fit_into_the_shared_memory_of_older_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CAPABILITY", "7.5")
    for head_dim in (16, 64, 128):
        for dtype in (torch.float16, torch.float32):
            inputs = flex._Inputs(*(torch.zeros(1, 1, 8, head_dim, dtype=dtype) for _ in range(3)))
            options = flex._kernel_options(inputs)
            row = head_dim * dtype.itemsize
            assert (options["BLOCK_M"] + 2 * options["BLOCK_N"]) * row <= 64 * 1024
            assert 2 * (options["BLOCK_M1"] + options["BLOCK_N1"]) * row <= 64 * 1024
            assert flex_mask.BLOCK % options["BLOCK_M"] == 0 and options["BLOCK_N1"] % options["BLOCK_M1"] == 0
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CAPABILITY", "8.0")
    assert flex._kernel_options(inputs) == {}


def test_flash_attn_varlen_is_refused_without_compilation() -> None:
    starts = cumulative(3, 4)
    found = explain(
        flash_attn_varlen_func, *(torch.zeros(7, 2, 16) for _ in range(3)), starts, starts, 4, 4, softcap=1.0
    )
    assert any("compilation" in reason for reason in found.reasons["flex"])


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="compiles kernels, needs a CUDA device")


@needs_gpu
@pytest.mark.parametrize("capability", ["9.0", "7.5"])
@pytest.mark.parametrize("problem", ["packed", "packed, NaN outside", "ALiBi"])
def test_a_compiled_kernel_agrees_with_the_oracle(
    problem: str, capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_ATTN_COMPAT_COMPILE", "1")
    monkeypatch.setenv("FLASH_ATTN_COMPAT_CAPABILITY", capability)
    _forget()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="compiled FlexAttention", category=RuntimeWarning)
        verdict = Examination(dataclasses.replace(PROBLEMS[problem], dtype="float16"), "cuda").judge("flex")
    assert verdict.failures == [] and not verdict.refused
