"""Tensors whose memory overlaps itself, and lazily negated views, are read as their contiguous copies are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    use_backend,
)
from flash_attn_compat.backends import sdpa
from flash_attn_compat.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
from tests.answers import others_kernels
from tests.forms.inputs import DTYPES, HALVES, PATTERNS, WITH_CHANNELS, copied, cumulative, ints, randn, strided
from tests.forms.plain import pairwise, some, some_of
from tests.forms.support import GENERAL, Serve, check_equal
from tests.kernels import fused_on_cpu
from tests.sdpa import originals

Answers = list[Tensor]
Q_SHAPE, K_SHAPE = (2, 5, 4, 8), (2, 7, 2, 8)


def dense(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out: Tensor = flash_attn_func(q, k, v, **options)
    return out


def attend_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first sequence of each tensor as two packed ones; the last key belongs to none."""
    starts_q, starts_k = cumulative(2, 3), cumulative(2, 4)
    return flash_attn_varlen_func(q[0], k[0], v[0], starts_q, starts_k, 3, 4, causal=True)[None]


CALLS: dict[str, Callable[..., Tensor]] = {
    "full": dense,
    "causal": lambda *qkv: dense(*qkv, causal=True),
    "packed": attend_packed,
    "one row": lambda q, k, v: dense(q[:, :1], k, v),
    "one head": lambda q, k, v: dense(q[:, :, :1], k[:, :, :1], v[:, :, :1], causal=True),
    "window": lambda *qkv: dense(*qkv, window_size=(2, 1)),
}


def with_gradients(call: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Answers:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = CALLS[call](*leaves)
    upstream = dout[: out.shape[0], : out.shape[1], : out.shape[2]]
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def dtypes_of(backend: str) -> tuple[torch.dtype, ...]:
    return DTYPES if backend in GENERAL else HALVES


def calls_of(backend: str) -> list[str]:
    return [name for name in CALLS if name != "window" or backend in (*GENERAL, "fused")]


WHICH = "q", "k", "v", "dout", "all four"
# Of how many patterns a test takes one. Tests of different tensors take different patterns.
EVERY = {"sdpa": 3, "chunked": 9, "reference": 9, "official": 37, "torch_flash": 37, "torch_efficient": 37, "fused": 95}


def cases(backend: str, which: str) -> Iterator[tuple[tuple[int, ...], torch.dtype, str]]:
    """Yield patterns of strides, with dtypes and calls that take turns."""
    start, step = WHICH.index(which) % EVERY[backend], EVERY[backend]
    for index, pattern in [*enumerate(PATTERNS)][start::step]:
        yield pattern, *mixed(index, dtypes_of(backend), calls_of(backend))


def mixed(index: int, dtypes: tuple[torch.dtype, ...], calls: list[str]) -> tuple[torch.dtype, str]:
    """Return a dtype and a call. Patterns with the same strides of heads and channels meet different ones."""
    options = [*itertools.product(dtypes, calls)]
    return options[(7 * index + index // 12) % len(options)]


@pytest.mark.parametrize(("backend", "which"), [
    *itertools.product([name for name in EVERY if name != "fused"], WHICH),
    *some_of((("fused", which) for which in ("v", "q", "k", "all four", "dout")), 3),  # the emulator takes seconds
])  # fmt: skip
def test_overlapping_inputs_give_the_answers_of_their_contiguous_copies(backend: str, which: str, serve: Serve) -> None:
    shapes = Q_SHAPE, K_SHAPE, K_SHAPE, Q_SHAPE
    with serve(backend):
        for pattern, dtype, call in cases(backend, which):
            chosen = [which in (name, "all four") for name in ("q", "k", "v", "dout")]
            tensors = [
                strided(shape, pattern, dtype, seed) if is_chosen else randn(*shape, seed=seed, dtype=dtype)
                for seed, (shape, is_chosen) in enumerate(zip(shapes, chosen))
            ]
            check_equal(with_gradients(call, *tensors), with_gradients(call, *map(copied, tensors)))


def test_pytorchs_kernel_for_cpus_gets_rows_that_lie_at_least_head_dim_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its matrix products read closer rows rightly depends on the processor."""

    def watched(operator: Any, count: int) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            for x in arguments[:count]:
                steps = [stride for size, stride in zip(x.shape[:3], x.stride()) if size > 1]
                assert x.stride(3) == 1 and all(not step or step >= x.shape[3] for step in steps), x.stride()
                assert x.shape[2] == 1 or x.stride(2), x.stride()
            seen.append(operator)
            return operator(*arguments, **named)

        return call

    seen: list[Any] = []
    monkeypatch.setattr(sdpa, "_FORWARD", watched(sdpa._FORWARD, 3))
    monkeypatch.setattr(sdpa, "_BACKWARD", watched(sdpa._BACKWARD, 5))
    with use_backend("sdpa"):
        for index, pattern in enumerate(PATTERNS):
            dtype, call = mixed(index, DTYPES, [*CALLS])
            shapes = Q_SHAPE, K_SHAPE, K_SHAPE, Q_SHAPE
            with_gradients(call, *[strided(shape, pattern, dtype, seed) for seed, shape in enumerate(shapes)])
    assert len(set(seen)) == 2


@pytest.mark.parametrize("backend", [*GENERAL, "fused"])
def test_sliding_windows_over_one_sequence_give_the_answers_of_their_copies(backend: str, serve: Serve) -> None:
    """unfold and expand as programs use them, longer than a tile of the kernels for CPUs."""
    dtype = torch.float32 if backend in GENERAL else torch.float16
    tokens = randn(2, 200, 2, 16, dtype=dtype)
    windows = tokens.unfold(1, 40, 1)[:, :150].movedim(-1, 2).flatten(0, 1)[:4]
    views = [windows, tokens[:, 7:47].expand(2, 40, 2, 16).repeat(2, 1, 1, 1), tokens[:1, 5:45].expand(4, 40, 2, 16)]
    series = randn(4, 60, dtype=dtype).unfold(1, 16, 1)[:, :40, None].expand(4, 40, 2, 16)
    with serve(backend):
        for q, k, v in (views, [series] * 3, [windows, series, views[2]]):
            dout = torch.ones((), dtype=dtype).expand(q.shape)
            check_equal(
                with_gradients("causal", q, k, v, dout), with_gradients("causal", *map(copied, (q, k, v)), dout)
            )


@pytest.mark.parametrize(
    ("backend", "name"), pairwise((*GENERAL, "fused"), ("qkv", "kv", "third axis of stride 0")), ids=str
)
def test_packed_inputs_that_overlap_give_the_answers_of_their_copies(backend: str, name: str, serve: Serve) -> None:
    with serve(backend):
        for pattern in WITH_CHANNELS[:: 31 if backend == "fused" else 9]:
            between = 0 if name == "third axis of stride 0" else 5
            shape = (2, 5, 2 if name == "kv" else 3, 2, 8)
            memory = strided(shape, (*pattern[:2], between, *pattern[2:]), dtypes_of(backend)[0], 1)
            q = randn(2, 5, 2, 8, dtype=memory.dtype)

            def answers(given: Tensor) -> Answers:
                given = given.detach().requires_grad_()
                out = flash_attn_kvpacked_func(q, given) if name == "kv" else flash_attn_qkvpacked_func(given)
                return [out.detach(), *torch.autograd.grad(out, given, torch.ones_like(out))]

            check_equal(answers(memory), answers(copied(memory)))


@pytest.mark.parametrize("layout", ["lengths in a tensor", "an int", "pages", "chosen rows"])
@pytest.mark.parametrize("backend", [*GENERAL, "fused"])
def test_overlapping_caches_are_read_as_their_copies(backend: str, layout: str, serve: Serve) -> None:
    options: dict[str, Any] = {"cache_seqlens": ints(7, 4), "causal": True}
    if layout == "an int":
        options["cache_seqlens"] = 6
    elif layout == "pages":
        options["block_table"] = torch.tensor([[1, 0], [0, 1]], dtype=torch.int32)
    elif layout == "chosen rows":
        options["cache_batch_idx"] = ints(1, 0)
    with serve(backend):
        for index, pattern in enumerate(WITH_CHANNELS[:: 31 if backend == "fused" else 9]):
            dtype = dtypes_of(backend)[index % len(dtypes_of(backend))]
            q = randn(2, 1 + index % 3, 4, 8, dtype=dtype)
            k, v = strided(K_SHAPE, pattern, dtype, 1), strided(K_SHAPE, WITH_CHANNELS[-1 - index], dtype, 2)
            found = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **options)
            expected = flash_attn_with_kvcache(q, copied(k), copied(v), return_softmax_lse=True, **options)
            check_equal([*found], [*expected])


SMALL: dict[str, Callable[[], Tensor]] = {
    "new keys": lambda: strided((2, 3, 2, 16), (0, 8, 8, 1), torch.float16, 1),
    "new values": lambda: strided((2, 3, 2, 16), (1, 1, 1, 1), torch.float16, 2),
    "cosines": lambda: strided((9, 8), (1, 1), torch.float16, 3),
    "sines": lambda: strided((9, 8), (0, 3), torch.float16, 4),
    "slopes": lambda: strided((2, 4), (1, 1), torch.float32, 5),
    "slopes of one number": lambda: torch.tensor(0.5).expand(2, 4),
    "pages": lambda: ints(2, 0, 1).unfold(0, 2, 1),
}


@pytest.mark.parametrize("backend", ["sdpa", "chunked", "fused"])
def test_overlapping_new_keys_tables_slopes_and_pages_are_read_as_their_copies(backend: str, serve: Serve) -> None:
    with serve(backend):
        for name, make in SMALL.items():

            def answers(convert: Callable[[Tensor], Tensor], name: str = name, view: Tensor = make()) -> Answers:  # noqa: B008
                given = {"new keys": randn(2, 3, 2, 16), "new values": randn(2, 3, 2, 16, seed=1)}
                given |= {"cosines": randn(9, 8, seed=2), "sines": randn(9, 8, seed=3), "slopes": randn(4).abs()}
                x = {key: tensor if key == "slopes" else tensor.half() for key, tensor in given.items()}
                x |= {"pages": ints(0, 2, 1, 0).view(2, 2), name.removesuffix(" of one number"): convert(view)}
                k, v = (torch.zeros(3, 4, 2, 16, dtype=torch.float16) for _ in "kv")
                out = flash_attn_with_kvcache(
                    randn(2, 3, 4, 16, dtype=torch.float16), k, v, x["new keys"], x["new values"], x["cosines"],
                    x["sines"], ints(1, 0), block_table=x["pages"], alibi_slopes=x["slopes"], causal=True,
                )  # fmt: skip
                return [out, k, v]

            check_equal(answers(lambda x: x), answers(copied))


@pytest.mark.parametrize("backend", EVERY)
def test_a_private_backward_reads_an_overlapping_out_dout_and_lse(backend: str, serve: Serve) -> None:
    with serve(backend):
        for index, pattern in enumerate(PATTERNS[:: 95 if backend == "fused" else 37]):
            dtype = dtypes_of(backend)[index % len(dtypes_of(backend))]
            q, k, v = (randn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate((Q_SHAPE, K_SHAPE, K_SHAPE)))
            lse = _flash_attn_forward(q, k, v, 0.0, 0.3, False, -1, -1, 0.0, None, False)[1]
            lse = lse[..., :1].expand(lse.shape) if index % 2 else lse[:, :1, :1].expand(lse.shape)
            given = strided(Q_SHAPE, pattern, dtype, 4), strided(Q_SHAPE, PATTERNS[-1 - index], dtype, 5)

            def gradients(dout: Tensor, out: Tensor, lse: Tensor) -> Answers:
                written = [torch.zeros_like(x) for x in (q, k, v)]
                options = 0.0, 0.3, False, -1, -1, 0.0, None, False
                _flash_attn_backward(dout, q, k, v, out, lse, *written, *options)
                return written

            check_equal(gradients(*given, lse), gradients(*map(copied, (*given, lse))))


@originals.needs_grouped_heads
@pytest.mark.parametrize("which", ["q", "k", "v", "dout", "all four", "attn_mask"])
@pytest.mark.parametrize("start", some((0, 47), 2))
def test_pytorchs_attention_on_our_kernels_reads_overlapping_views(
    which: str, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads lie first; relative biases are sliding windows over one vector."""
    biases = randn(12, seed=6).unfold(0, 8, 1).flip(0)
    with originals.cpu_stand_ins(), originals.served(monkeypatch):
        for index, pattern in enumerate(PATTERNS[start::95]):
            dtype = HALVES[index % 2]
            bias = biases.expand(2, 2, 5, 8).to(dtype) if which == "attn_mask" else None
            shapes = (2, 2, 5, 8), (2, 2, 8, 8), (2, 2, 8, 8), (2, 2, 5, 8)
            tensors = [
                strided(shape, pattern, dtype, seed)
                if which in (name, "all four")
                else randn(*shape, seed=seed, dtype=dtype)
                for seed, (name, shape) in enumerate(zip(("q", "k", "v", "dout"), shapes))
            ]

            def answers(*given: Tensor) -> Answers:
                *inputs, dout = given[:4]
                leaves = [x.detach().requires_grad_() for x in inputs]
                out = F.scaled_dot_product_attention(*leaves, attn_mask=given[4] if len(given) > 4 else None)
                return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

            given = tensors if bias is None else [*tensors, bias]
            check_equal(answers(*given), answers(*map(copied, given)))
        assert originals.counted() == {"fused": 2 * len(PATTERNS[start::95])}


# ------------------------------------------------------- imaginary parts of conjugates hold numbers with the other sign

STARTS = cumulative(20)


def negated(tensor: Tensor) -> Tensor:
    """Equal to ``tensor``, over memory that holds it with the other sign."""
    view = torch._neg_view(-tensor)
    assert view.is_neg() and torch.equal(view, tensor)
    return view


def packed_of_20(*qkv: Tensor) -> Tensor:
    return flash_attn_varlen_func(*(x[0] for x in qkv), STARTS, STARTS, 20, 20)[None]


def dropping(*qkv: Tensor) -> Tensor:
    return flash_attn_func(*qkv, dropout_p=0.3)


def sloping(*qkv: Tensor) -> Tensor:
    slopes = torch.tensor([0.3])
    return flash_attn_func(*qkv, alibi_slopes=negated(slopes) if any(x.is_neg() for x in qkv) else slopes)


@pytest.mark.parametrize(("attend", "backend"), [
    *itertools.product((flash_attn_func, packed_of_20, dropping, sloping), ("sdpa", "chunked")),
    *some_of(((attend, "fused") for attend in (dropping, flash_attn_func, sloping, packed_of_20)), 2),
])  # fmt: skip
def test_negated_views_give_the_answers_and_gradients_of_their_values(
    attend: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "sdpa" and attend is dropping:
        pytest.skip("computes no dropout")
    fused_on_cpu.emulate(monkeypatch)
    tensors = [randn(1, 20, 1, 32, seed=seed, dtype=torch.float16) for seed in range(4)]

    def answers(*given: Tensor) -> list[Tensor]:
        torch.manual_seed(0)
        leaves = [x.requires_grad_() for x in given[:3]]
        with use_backend(backend):
            out = attend(*leaves)
        return [out, *torch.autograd.grad(out, leaves, given[3])]

    expected = answers(*(x.clone() for x in tensors))
    for which in range(4):
        for _ in range(2):  # the second one by what was kept of the first
            found = answers(*(negated(x) if index == which else x.clone() for index, x in enumerate(tensors)))
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("backend", ["fused", "official", "chunked"])
def test_a_private_backward_takes_negated_views(backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if backend == "official":
        others_kernels.install(monkeypatch, backend, tmp_path)
    else:
        fused_on_cpu.emulate(monkeypatch)
    dout, q, k, v = (randn(1, 20, 1, 32, seed=seed, dtype=torch.float16) for seed in range(4))
    options = 0.0, 0.2, True, -1, -1, 0.0
    slopes = torch.tensor([0.3])

    def answers(which: int = -1) -> list[Tensor]:
        def seen(*tensors: Tensor) -> list[Tensor]:
            return [negated(x) if index == which else x for index, x in enumerate(tensors)]

        with use_backend(backend):
            out, lse, _, _ = _flash_attn_forward(q, k, v, *options, seen(slopes)[0], False)
            given = seen(slopes, dout, q, k, v, out, lse, *map(torch.zeros_like, (q, k, v)))
            softmax_d = _flash_attn_backward(*given[1:], *options, given[0], False)
        return [softmax_d, *given[7:]]

    expected = answers()
    for which in range(10):
        for _ in range(2):  # the second one by what was kept of the first
            assert all(map(torch.equal, answers(which), expected)), which


def test_a_negated_cache_is_written_by_pytorch_and_refused_for_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [randn(1, 20, 2, 16, seed=seed) for seed in range(2)]
    views = [negated(tensor) for tensor in plain]
    new, lengths = randn(1, 1, 2, 16), torch.tensor([4], dtype=torch.int32)
    expected = flash_attn_with_kvcache(new, *plain, new, new, cache_seqlens=lengths)
    assert torch.equal(flash_attn_with_kvcache(new, *views, new, new, cache_seqlens=lengths), expected)
    assert all(map(torch.equal, views, plain))
    launches = fused_on_cpu.record(monkeypatch)
    halves, new = [negated(x.half()) for x in plain], new.half()
    with use_backend("fused"), pytest.raises(RuntimeError, match="negated"):
        flash_attn_with_kvcache(new, *halves, new, new, cache_seqlens=lengths)
    assert all(torch.equal(half, x.half()) for half, x in zip(halves, plain)) and not launches.seen
