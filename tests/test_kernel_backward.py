"""The backward's kernels (delta, dkdv, dq), run by the emulator, against fp64: per sequence and head."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from flash_attn_compat.backends.fused import params, variants
from flash_attn_compat.backends.fused.variants import Kind, Tile
from flash_attn_compat.engine import dropout
from tests.kernels import emulate
from tests.kernels.emulate import compile_kernel
from verify import oracle
from verify.call import Call
from verify.problems import Problem

pytestmark = pytest.mark.skipif(bool(emulate.why_not()), reason=emulate.why_not())

FP16, BF16, CONVERTED = variants.FP16, variants.BF16, variants.BF16_AS_FP16


@dataclass
class Backward:
    """What a backward is given besides the problem's tensors; each field that is set replaces what follows of them."""

    call: Call
    type: int = FP16
    vec: int = 8
    out: Tensor | None = None
    lse: Tensor | None = None
    lse_has_position: bool = False
    rng_state: Tensor | None = None
    dropout_p: float = 0.0
    macros: dict[str, int] = field(default_factory=dict)
    seed: int = 1  # the emulator's order of blocks and warps

    def run(self) -> dict[str, Tensor]:
        """dq, dk, dv by the names q, k, v; they start as NaN."""
        a = self.call.args
        q, k, v, dout = a["q"], a["k"], a["v"], self.call.dout
        assert dout is not None and self.out is not None and self.lse is not None
        dq, dk, dv = (_like(x) for x in (q, k, v))
        delta = torch.full_like(self.lse, torch.nan)
        head_dim, head_dim_v, nheads, nheads_k = q.shape[-1], v.shape[-1], q.shape[-2], k.shape[-2]
        packed = "cu_seqlens_q" in a
        batch = a["cu_seqlens_q"].numel() - 1 if packed else q.shape[0]
        left, right = a.get("window_size") or (a["window_size_left"], a["window_size_right"])
        right = 0 if a["causal"] else right
        slopes, absmax = a.get("alibi_slopes"), _absmax(self.call, batch) if self.type == CONVERTED else None
        scale = a.get("softmax_scale")
        fields: dict[str, params.Value] = {
            "softmax_scale": head_dim**-0.5 if scale is None else scale,
            "lse_batch": 0 if packed else nheads * q.shape[1],
            "lse_head": q.shape[0] if packed else q.shape[1],
            "slopes_batch": 0 if slopes is None or slopes.dim() == 1 else slopes.stride(0),
            "batch": batch,
            "nheads": nheads,
            "nheads_k": nheads_k,
            "group": nheads // nheads_k,
            "seqlen_q": a["max_seqlen_q"] if packed else q.shape[1],
            "seqlen_k": a["max_seqlen_k"] if packed else k.shape[1],
            "total_q": q.shape[0] if packed else 0,
            "total_k": k.shape[0] if packed else 0,
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
            "window_left": left,
            "window_right": right,
            "lse_has_position": int(self.lse_has_position),
            "softcap": a.get("softcap", 0.0),
            "absmax_splits": 2,
        }
        if self.dropout_p:
            threshold = int((1.0 - self.dropout_p) * 255.0)
            fields["dropout_limit"] = ((threshold + 1 - 128) << 24) - 1
            fields["dropout_scale"] = 1 / (1 - self.dropout_p)
        tensors: dict[str, Tensor | None] = {
            "q": q, "k": k, "v": v, "out": self.out, "dout": dout, "dq": dq, "dk": dk, "dv": dv, "lse": self.lse,
            "delta": delta, "alibi_slopes": slopes, "absmax": absmax, "rng_state": self.rng_state,
            **{name: a.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "leftpad_k")},
        }  # fmt: skip
        given = {name: x for name, x in tensors.items() if x is not None}
        for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"):
            x = given[name]
            fields[f"{name}_s"] = (0, x.stride(0), x.stride(1)) if packed else (x.stride(0), x.stride(1), x.stride(2))
        fields |= {name: x.data_ptr() for name, x in given.items()}
        kind = Kind(
            80 if self.type == BF16 else 75, self.type, max(head_dim, head_dim_v), local=left >= 0 or right >= 0,
            alibi=slopes is not None, softcap=a.get("softcap", 0.0) > 0, dropout=self.dropout_p > 0, vec=self.vec,
        )  # fmt: skip
        sequences, parts = batch + packed, variants.dkdv_parts(kind)
        rows, keys = fields["seqlen_q"], fields["seqlen_k"]
        for make, length, blocks in (
            (variants.delta, rows, nheads * batch),
            (variants.dkdv, keys, nheads_k * sequences * parts),
            (variants.dq, rows, nheads * sequences),
        ):
            variant = make(kind)
            fields["tiles"] = -(-length // variant.rows)
            kernel = compile_kernel(variant.source, variant.entry, dict(variant.macros) | self.macros)
            grid, memory = fields["tiles"] * blocks, list(given.values())
            kernel.launch(params.pack(fields), grid, variant.threads, variant.shared, memory, self.seed)
        return {"q": dq, "k": dk, "v": dv}


def _like(x: Tensor) -> Tensor:
    """A buffer of x's shape and strides, NaN all over and in between."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return torch.full((extent,), torch.nan, dtype=x.dtype).as_strided(x.shape, x.stride())


def _absmax(call: Call, batch: int) -> Tensor:
    """(4, batch, nheads_k, 2): what convert.cu finds, here with everything in the second part."""
    a = call.args
    nheads_k = a["k"].shape[-2]
    found = torch.zeros(4, batch, nheads_k, 2)
    for tensor, x in enumerate((a["q"], a["k"], a["v"], call.dout)):
        cu = a.get("cu_seqlens_k" if tensor in (1, 2) else "cu_seqlens_q")
        for b in range(batch):
            rows = x[b] if cu is None else x[cu[b] : cu[b + 1]]
            finite = rows.float().abs().nan_to_num(0.0, 0.0, 0.0).unflatten(1, (nheads_k, -1))
            if finite.numel():
                found[tensor, b, :, 1] = finite.amax((0, 2, 3))
    return found


def prepared(problem: Problem, type: int = FP16, **changes: object) -> tuple[Backward, oracle.Answer, oracle.Answer]:
    """A problem's backward with the exact forward's out and LSE, the exact gradients and the plain ones."""
    call = problem.build()
    if call.dout is None:  # a kind that has none of its own
        generator = torch.Generator().manual_seed(problem.seed + 1)
        q, v = call.args["q"], call.args["v"]
        dout = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator).to(q.dtype)
        call = replace(call, dout=dout)
    return complete(Backward(call, type, **changes))


def complete(backward: Backward) -> tuple[Backward, oracle.Answer, oracle.Answer]:
    call = backward.call
    keep = None
    if call.args.get("dropout_p", 0.0) > 0:
        backward.dropout_p, backward.rng_state = call.args["dropout_p"], torch.tensor([2**61 + 12345, 2**60 + 678])
        keep = kept(call, backward.rng_state)
    exact, plain = (judge(call.fn, call.args, call.dout, keep) for judge in (oracle.answer, oracle.plain))
    if backward.out is None:
        backward.out = exact.out.to(call.args["q"].dtype)
    if backward.lse is None:
        assert exact.softmax_lse is not None
        backward.lse = exact.softmax_lse.float().contiguous()
        slopes, mask = call.args.get("alibi_slopes"), oracle._mask(call.args)
        backward.lse_has_position = slopes is not None and mask.shifts_lse
    return backward, exact, plain


def kept(call: Call, rng_state: Tensor) -> Tensor:
    """(batch, nheads, seqlen_q, seqlen_k) bool, from the package's own words."""
    a = call.args
    batch = a["cu_seqlens_q"].numel() - 1 if "cu_seqlens_q" in a else a["q"].shape[0]
    rows = a.get("max_seqlen_q", a["q"].shape[1])
    keys = a.get("max_seqlen_k", a["k"].shape[1])
    places = (torch.arange(n) for n in (batch, a["q"].shape[-2], rows, keys))
    return dropout.keep_tile(rng_state, a["dropout_p"], *places)


def pieces(call: Call, name: str, x: Tensor) -> Iterator[Tensor]:
    """(tokens, channels) of each sequence and head."""
    cu = call.args.get("cu_seqlens_q" if name == "q" else "cu_seqlens_k")
    sequences = x.unbind() if cu is None else [x[start:stop] for start, stop in itertools.pairwise(cu)]
    for sequence in sequences:
        yield from sequence.unbind(1)


def check(backward: Backward, exact: oracle.Answer, plain: oracle.Answer, got: dict[str, Tensor] | None = None) -> None:
    """No (sequence, head) is off by more than twice what the plain computation is off by there."""
    got = got or backward.run()
    eps = torch.finfo(backward.call.args["q"].dtype).eps
    for name, ours in got.items():
        right, yardstick = exact.grads[name], plain.grads[name]
        for i, (a, b, c) in enumerate(zip(*(pieces(backward.call, name, x) for x in (ours, right, yardstick)))):
            if not a.numel():
                continue
            error, plain_error, size = ((x.double() - y).abs().max().item() for x, y in ((a, b), (c, b), (b, b * 0)))
            assert error <= 2 * plain_error + eps * size + 1e-40, (
                f"d{name}, sequence and head {i}: {error:.3e} of {size:.3e}, plainly {plain_error:.3e}"
            )
        cu = backward.call.args.get("cu_seqlens_q" if name == "q" else "cu_seqlens_k")
        if cu is not None:
            assert not ours[: cu[0]].any() and not ours[cu[-1] :].any(), f"d{name} outside of the sequences is not 0"


DENSE = Problem(seqlens_q=(70,), seqlens_k=(83,), nheads_k=2, group=2, head_dim=64, dtype="float16")


EVERY = [*((d, FP16) for d in variants.HEAD_DIMS), (256, BF16), *((d, CONVERTED) for d in (32, 128, 256))]


@pytest.mark.parametrize(("head_dim", "type"), EVERY)  # 64 and 128 in native bf16: below, with newer instructions
def test_gradients_are_right_for_every_type_and_size(head_dim: int, type: int) -> None:
    problem = replace(DENSE, head_dim=head_dim, causal=True, dtype="bfloat16" if type else "float16")
    check(*prepared(problem, type))


@pytest.mark.parametrize("entry", ["dkdv", "dq"])
@pytest.mark.parametrize("tile", [Tile(32, 4, 2, 2), Tile(64, 8, 1, 1, s=False), Tile(32, 2, 1, 1, p=False)], ids=str)
def test_tiles_that_no_kernel_is_shipped_with_are_right_too(
    entry: str, tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all tiles have in common is right; benchmarks/kernel_tiles.py tries others than the shipped ones."""
    monkeypatch.setattr(variants, f"{entry}_tile", lambda kind: tile)
    for causal in (False, True):
        check(*prepared(replace(DENSE, head_dim=32, seqlens_q=(150,), seqlens_k=(171,), causal=causal)))


FEATURES = {
    "full": {},
    "causal, more rows than keys": {"causal": True, "seqlens_q": (150,), "seqlens_k": (70,)},
    "causal, more keys than rows": {"causal": True, "seqlens_q": (5,), "seqlens_k": (200,)},
    "left window": {"causal": True, "window": (9, -1), "seqlens_q": (140,), "seqlens_k": (140,)},
    "both windows": {"window": (20, 3), "seqlens_q": (140,), "seqlens_k": (131,)},
    "right window": {"window": (-1, 30)},
    "ALiBi": {"alibi": "h", "causal": True},
    "ALiBi by sequence": {"alibi": "bh", "seqlens_q": (20,) * 2, "seqlens_k": (70,) * 2},
    "softcap": {"softcap": 1.5, "magnitude": 2.0},
    "dropout": {"dropout_p": 0.3},
    "dropout, causal, many heads": {"dropout_p": 0.17, "causal": True, "nheads_k": 1, "group": 5},
    "ALiBi, softcap, dropout, window": {"alibi": "h", "softcap": 3.0, "dropout_p": 0.2, "window": (40, 10)},
    "one row": {"seqlens_q": (1,), "seqlens_k": (77,)},
    "negative scale": {"softmax_scale": -0.3},
    "no scale": {"softmax_scale": 0.0},
    "one query head": {"nheads_k": 1, "group": 1},
    "large scores": {"magnitude": 8.0, "causal": True},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_gradients_are_right_for_every_feature(feature: str) -> None:
    check(*prepared(replace(DENSE, head_dim=32, **FEATURES[feature])))


TOGETHER = FEATURES["ALiBi, softcap, dropout, window"]


@pytest.mark.parametrize(("head_dim", "type"), [(64, BF16), (64, CONVERTED), (256, FP16)])
def test_gradients_are_right_for_all_features_together(head_dim: int, type: int) -> None:
    check(*prepared(replace(DENSE, head_dim=head_dim, dtype="bfloat16" if type else "float16", **TOGETHER), type))


def test_one_key_gets_all_the_gradient_there_is() -> None:
    """dS is 0 but for out's rounding, so that nothing but the size of its terms says how good dq and dk are."""
    backward, exact, _ = prepared(replace(DENSE, head_dim=32, seqlens_q=(77,), seqlens_k=(1,)))
    for name, ours in backward.run().items():
        assert (ours.double() - exact.grads[name]).abs().max() <= 2**-10 * exact.magnitude(name)


PACKED = Problem(
    "varlen", seqlens_q=(3, 0, 70, 65), seqlens_k=(66, 9, 0, 67), nheads_k=2, group=2, head_dim=32, dtype="float16",
    gap=(3, 2), poison="nan",
)  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"causal": True, "alibi": "h"}, {"head_dim": 256, "causal": True}], ids=str)
def test_packed_sequences_and_nothing_outside_of_them_have_gradients(changes: dict) -> None:
    check(*prepared(replace(PACKED, **changes)))


def test_slots_that_hold_no_key_get_no_gradient() -> None:
    problem = replace(
        PACKED, kind="private_varlen", seqlens_k=(90, 9, 5, 167), seqused=(70, 9, 0, 100), leftpad=(4, 9, 0, 66)
    )
    backward, exact, plain = prepared(problem)
    got = backward.run()
    check(backward, exact, plain, got)
    starts = backward.call.args["cu_seqlens_k"].tolist()
    for start, stop, used, leftpad in zip(starts, starts[1:], problem.seqused, problem.leftpad):
        for name in ("k", "v"):
            slots = got[name][start:stop]
            assert not slots[:leftpad].any() and not slots[used:].any()


DIMS = [(40, 24, 8), (24, 64, 8), (80, 96, 8), (200, 136, 8), (1, 1, 1), (3, 9, 1), (40, 50, 1), (136, 199, 1)]


@pytest.mark.parametrize(("head_dim", "head_dim_v", "vec"), DIMS)
def test_any_head_dims_have_gradients(head_dim: int, head_dim_v: int, vec: int) -> None:
    check(*prepared(replace(DENSE, head_dim=head_dim, head_dim_v=head_dim_v, causal=True), vec=vec))


def test_rows_may_lie_anywhere() -> None:
    problem = replace(DENSE, head_dim=17, causal=True, layouts=("sliced", "wide_rows", "offset", "heads_first"))
    backward, exact, plain = prepared(problem, vec=1)
    assert not backward.call.args["k"].is_contiguous()
    check(backward, exact, plain)


def test_only_the_given_buffers_are_written() -> None:
    problem = replace(DENSE, causal=True, layouts=("heads_first", "sliced", "sliced", "sliced"))
    backward, exact, plain = prepared(problem)
    got = backward.run()
    check(backward, exact, plain, got)
    for grad in (got["k"], got["v"]):  # _like gave it the strides of a slice; what lies between is its neighbour's
        everything = grad.as_strided((grad.untyped_storage().nbytes() // 2,), (1,), 0)
        assert everything.numel() > grad.numel() and everything.isnan().sum() == everything.numel() - grad.numel()


def test_parts_of_a_longer_sequence_add_up() -> None:
    """out and LSE are those of all keys; each call sees some of them, as in ring attention."""
    backward, exact, plain = prepared(replace(DENSE, head_dim=32, seqlens_k=(150,)))
    args, found = backward.call.args, []
    for keys in (slice(0, 61), slice(61, 150)):
        part = {**args, "k": args["k"][:, keys], "v": args["v"][:, keys]}
        found.append(replace(backward, call=replace(backward.call, args=part)).run())
    dq = sum(part["q"].float() for part in found).half()
    check(backward, exact, plain, {"q": dq, **{n: torch.cat([part[n] for part in found], 1) for n in "kv"}})


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_rows_with_an_infinite_lse_have_no_gradient(value: float) -> None:
    backward, exact, plain = prepared(replace(DENSE, head_dim=32))
    dead = [0, 33, 69]
    backward.lse[:, :, dead] = value
    backward.out[:, dead] = torch.nan
    backward.call.dout[:, dead] = 100.0
    got = backward.run()
    assert not got["q"][:, dead].any()
    args = {**backward.call.args, "q": backward.call.args["q"].clone()}
    alive = [i for i in range(70) if i not in dead]
    call = Call(backward.call.fn, {**args, "q": args["q"][:, alive]}, backward.call.dout[:, alive])
    rest, exact, plain = complete(Backward(call))
    check(rest, exact, plain, {**got, "q": got["q"][:, alive]})


@pytest.mark.parametrize("type", [FP16, CONVERTED])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_nan_and_infinity_stay_in_their_sequence(name: str, value: float, type: int) -> None:
    problem = replace(PACKED, seqlens_q=(40, 70), seqlens_k=(66, 67), dtype="bfloat16" if type else "float16")
    backward = prepared(problem, type)[0]
    right = backward.run()
    tensor = backward.call.dout if name == "dout" else backward.call.args[name]
    tensor[problem.gap[0] + 5] = value
    got = backward.run()
    for grad, lengths in zip("qkv", (problem.seqlens_q, problem.seqlens_k, problem.seqlens_k)):
        first = problem.gap[0] + lengths[0]
        assert torch.equal(got[grad][first:], right[grad][first:])
    assert not all(got[grad].isfinite().all() for grad in "qkv")


SIZES = {
    "small gradients": {"dout": 1e-12},
    "large values": {"v": 1e8, "dout": 1e6},
    "small everything": {"q": 1e-9, "k": 1e-9, "v": 1e-9, "dout": 1e-9},
    "large keys, small queries": {"q": 1e-7, "k": 1e7},
    "gradients too small for bf16": {"q": 1e-30, "k": 1e-30, "v": 1e-30, "dout": 1e-30},
    "values and dout far apart": {"v": 1e-30, "dout": 1e30},
}


@pytest.mark.parametrize("sizes", SIZES)
def test_converted_bf16_keeps_its_range(sizes: str) -> None:
    backward, _, _ = prepared(replace(DENSE, head_dim=32, dtype="bfloat16"), CONVERTED)
    args, dout = dict(backward.call.args), backward.call.dout
    for name, size in SIZES[sizes].items():
        if name == "dout":
            dout = dout * size
        else:
            args[name] = args[name] * size
    check(*complete(Backward(Call(backward.call.fn, args, dout), CONVERTED)))


def test_converted_bf16_loses_no_head() -> None:
    """Heads 1e-7 as large as their neighbours, within a group and beside it."""
    backward, _, _ = prepared(replace(DENSE, head_dim=32, dtype="bfloat16"), CONVERTED)
    args, dout = dict(backward.call.args), backward.call.dout.clone()
    dout[:, :, 1] *= 1e-7
    args["q"] = args["q"].clone()
    args["q"][:, :, 2:] *= 1e-3
    args["v"] = args["v"].clone()
    args["v"][:, :, 1] *= 1e-7
    check(*complete(Backward(Call(backward.call.fn, args, dout), CONVERTED)))


def test_converted_bf16_loses_no_row() -> None:
    """A row's dq depends on nothing but its own dout, however small beside others."""
    backward, _, _ = prepared(replace(DENSE, head_dim=32, dtype="bfloat16"), CONVERTED)
    dout = backward.call.dout.clone()
    dout[:, ::3] *= 1e-6
    backward, exact, plain = complete(Backward(replace(backward.call, dout=dout), CONVERTED))
    got = backward.run()["q"][:, ::3]
    right, yardstick = exact.grads["q"][:, ::3], plain.grads["q"][:, ::3]
    assert (got.double() - right).abs().max() <= 2 * (yardstick.double() - right).abs().max()


@pytest.mark.parametrize("size", [1e6, 1e30])
def test_converted_bf16_does_not_overflow_for_the_out_of_larger_values(size: float) -> None:
    """delta is that of a longer sequence, whose other values are far larger than these."""
    backward, _, _ = prepared(replace(DENSE, head_dim=32, dtype="bfloat16"), CONVERTED)
    backward.out = backward.out * size
    a = {name: x.double() if isinstance(x, Tensor) else x for name, x in backward.call.args.items()}
    got, dout = backward.run(), backward.call.dout.double()
    k, v = (a[name].repeat_interleave(2, 2) for name in "kv")
    probabilities = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", a["q"], k) * 32**-0.5, -1)
    delta = (dout * backward.out.double()).sum(-1).transpose(1, 2)[..., None]
    dscores = probabilities * (torch.einsum("bqhd,bkhd->bhqk", dout, v) - delta) * 32**-0.5
    right = {
        "q": torch.einsum("bhqk,bkhd->bqhd", dscores, k),
        "k": torch.einsum("bhqk,bqhd->bkhd", dscores, a["q"]).unflatten(2, (2, 2)).sum(3),
    }
    for name, expected in right.items():
        error = (got[name].double() - expected).abs().amax((1, 3)) / expected.abs().amax((1, 3))
        assert error.max() < 2**-7


@pytest.mark.parametrize("type", [FP16, CONVERTED])
def test_the_same_bits_come_back_in_any_order_of_blocks_and_warps(type: int) -> None:
    backward, _, _ = prepared(replace(DENSE, head_dim=32, causal=True, dtype="bfloat16" if type else "float16"), type)
    first = backward.run()
    for seed in (2, 3):
        again = replace(backward, seed=seed).run()
        assert all(torch.equal(first[name], again[name]) for name in "qkv")


@pytest.mark.parametrize(("head_dim", "type"), [(64, BF16), (128, FP16)])
def test_newer_instructions_give_the_same_gradients(head_dim: int, type: int) -> None:
    problem = replace(DENSE, head_dim=head_dim, causal=True, seqlens_q=(140,), dtype="bfloat16" if type else "float16")
    check(*prepared(problem, type, macros={"MMA16": 1, "CPA": 1}))


def test_lengths_that_are_no_lengths_reach_nothing_outside() -> None:
    backward, _, _ = prepared(replace(PACKED, kind="private_varlen", seqused=(66, 9, 0, 67), leftpad=(0, 0, 0, 0)))
    args = backward.call.args
    args["cu_seqlens_q"].copy_(torch.tensor([-5, 30, 20, 10**6, 7]))
    args["cu_seqlens_k"].copy_(torch.tensor([2**31 - 1, -(2**31), 40, 200, 100]))
    args["seqused_k"].copy_(torch.tensor([-1, 10**9, 5, -(2**31)]))
    args["leftpad_k"].copy_(torch.tensor([10**9, -3, 2, 50]))
    backward.run()
