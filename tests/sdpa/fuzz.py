"""Thousands of random problems for PyTorch's operators: `python -m tests.sdpa.fuzz --dtype float16`.

Problem N is the same on every machine. Each is computed by the operator and by plain operations in fp64, forward and
backward; the bound is that of the package: twice the error of plain operations in the dtype, thrice for gradients.
On a GPU set FLASH_ATTN_COMPAT_CAPABILITY=7.5, or use a GPU of 7.5. The last line is a summary as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn_compat import backend_counts, reset_backend_counts
from flash_attn_compat.torch_sdpa.policy import Policy
from tests.sdpa import originals

aten = torch.ops.aten
LAYOUTS = ("rows first", "heads first", "one tensor", "one head", "channels apart", "unaligned")
SMALL, LARGE = 48, 400  # the longest sequences, by the emulator and by a GPU


class Problem(NamedTuple):
    """operator: "sdpa", "efficient" or "packed"; lengths of rows and keys, one pair for each sequence."""

    operator: str
    dtype: str
    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int]
    dims: tuple[int, int]
    mask: int
    window: int | None
    scale: float | None
    layouts: tuple[str, str, str]
    backward: bool
    seed: int
    bias: str | None = None


def draw(seed: int, dtype: str | None = None, longest: int = LARGE, mixes: int | None = None) -> Problem:
    """mixes: how many mixtures of features there are; lengths and numbers go on being different."""
    source = random.Random(seed)
    features = random.Random(seed % mixes) if mixes else source
    operator = features.choice(("sdpa", "sdpa", "efficient", "packed"))

    def length() -> int:
        return min(longest, source.choice((1, 2, 17, 32, 64, 65, 128, source.randint(1, longest), longest)))

    if operator == "packed":
        count, mask = source.randint(1, 4), features.randint(0, 2)
        lengths = tuple((length(), length()) for _ in range(count))
        if mask == originals.TOP_LEFT or source.random() < 0.4:
            lengths = tuple((rows, rows) for rows, _ in lengths)
        elif source.random() < 0.2:
            lengths = (*lengths, (length(), 0))
    else:
        mask = features.randint(0, 1 if operator == "sdpa" else 2)
        lengths = ((length(), length()),) * source.randint(1, 3)
        if source.random() < 0.5:
            lengths = tuple((rows, rows) for rows, _ in lengths)
    heads = source.choice(((1, 1), (3, 3), (4, 4), (4, 2), (6, 1))[: 5 if operator == "sdpa" else 3])
    dim = features.choice((8, 16, 32, 40, 64, 72, 80, 96, 128, 160, 256, features.randint(1, 256)))
    dims = dim, dim if features.random() < 0.85 else features.choice((8, 32, 64, 128))
    window = (
        source.choice((1, 5, source.randint(1, longest)))
        if mask == 2 and operator != "sdpa" and features.random() < 0.3
        else None
    )
    scale = None if source.random() < 0.7 else source.choice((0.05, 0.5, 1.0))
    layouts = tuple(features.choice(LAYOUTS) for _ in range(3))
    dtype = dtype or features.choice(("float16", "bfloat16"))
    backward = source.random() < 0.7
    bias = None
    if operator != "packed" and mask == originals.NO_MASK and features.random() < 0.6:
        kinds = ("bool", "bool", "own", "fp32") if operator == "sdpa" else ("own",)
        bias = " ".join(features.choice(choices) for choices in (kinds, SHARED, HIDDEN))
    return Problem(operator, dtype, lengths, heads, dims, mask, window, scale, layouts, backward, seed, bias)  # type: ignore[arg-type]


# Problems that a few random ones may miss.
_DENSE = Problem(
    "sdpa", "float16", ((33, 70),) * 2, (4, 2), (32, 32), originals.NO_MASK, None, 0.3, ("heads first",) * 3, True, 0
)
_MASKED = _DENSE._replace(lengths=((150, 150),), bias="bool none left")
NAMED = {
    "head_dim 512": _DENSE._replace(dims=(512, 512), lengths=((33, 70),), mask=originals.TOP_LEFT),
    "causal, more rows than keys": _DENSE._replace(lengths=((70, 33),) * 2, mask=originals.TOP_LEFT),
    "1,100 keys under booleans": _MASKED._replace(lengths=((20, 1100),), heads=(2, 1), bias="bool none some"),
    "1,100 keys under biases": _MASKED._replace(lengths=((20, 1100),), heads=(2, 1), bias="own none some"),
    "two tiles of rows a warp, several key heads a block": _MASKED._replace(dims=(64, 64)),
    "rows off the 16 bytes": _MASKED._replace(dims=(20, 20)),
    "warps in pairs": _MASKED._replace(dims=(136, 136), heads=(2, 1)),
    "one row under biases of each head": _MASKED._replace(
        lengths=((1, 130),) * 2, bias="fp32 batch some", backward=False
    ),
}

# Which of a dense mask's axes are 1, or made of one by a stride of 0; and what it hides.
SHARED, HIDDEN = ("none", "heads", "batch", "rows", "all"), ("some", "blocks", "left", "nothing", "lowest")


def dense_mask(p: Problem, device: str) -> Tensor | None:
    """(batch or 1, heads or 1, rows, keys), booleans or biases of which some rows see nothing."""
    if p.bias is None:
        return None
    kind, shared, hides = p.bias.split()
    batch, (rows, keys), heads = len(p.lengths), p.lengths[0], p.heads[0]
    shape = [1 if shared in (axis, "all") else size for axis, size in (("batch", batch), ("heads", heads))]
    shape += [1 if shared == "rows" else rows, keys]
    generator = torch.Generator().manual_seed(p.seed + 2)
    numbers, (row, key) = torch.randn(shape, generator=generator), (torch.arange(shape[2])[:, None], torch.arange(keys))
    hidden = torch.zeros(shape, dtype=torch.bool)
    if hides == "some":
        hidden = numbers > 0.3
    elif hides == "blocks":
        hidden |= row * 3 // shape[2] != key * 3 // keys
    elif hides == "left":
        hidden |= (key < torch.rand(shape[0], 1, 1, 1, generator=generator) * keys) | (key > row + keys - 1)
    if kind == "bool":
        found = ~hidden
    else:
        dtype = torch.float32 if kind == "fp32" else getattr(torch, p.dtype)
        found = numbers.to(dtype).masked_fill(hidden, -torch.inf)
        if hides == "lowest":
            # Where the LSE alone is handed on, it cannot say how many keys a row has that are all at -3e38.
            found = found.masked_fill((numbers > 0.3) & ((key > 0) | (p.operator == "sdpa")), torch.finfo(dtype).min)
    return found.expand(batch, heads, rows, keys).to(device) if p.operator == "efficient" else found.to(device)


def tensors(p: Problem, device: str) -> list[Tensor]:
    """q, k and v as (batch, heads, rows, channels), or (1, heads, total, channels) of packed sequences."""
    generator, made = torch.Generator().manual_seed(p.seed), []
    for index, layout in zip((0, 1, 1), p.layouts):
        heads, dim = p.heads[index], p.dims[1 if len(made) == 2 else 0]
        per_sequence = [pair[index] for pair in p.lengths]
        batch, rows = (1, sum(per_sequence)) if p.operator == "packed" else (len(per_sequence), per_sequence[0])
        x = torch.randn(batch, heads, rows, dim, generator=generator).to(device, getattr(torch, p.dtype))
        made.append(laid_out(x, layout))
    return made


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "rows first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "one tensor":  # as a projection to q, k and v leaves it
        return torch.stack((x, x, x), 3)[:, :, :, 1].transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "one head":
        return x[:, :1].expand(x.shape)
    if layout == "channels apart":
        return x.repeat_interleave(2, -1)[..., ::2]
    if layout == "unaligned":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    return x


def plainly(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
    """out, and the LSE of each sequence, in the tensors' dtype; differentiable."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if p.operator != "packed":
        out, lse = one(p, q, k, v)
        return out, list(lse)
    parts = [x.split([pair[index] for pair in p.lengths], 2) for x, index in ((q, 0), (k, 1), (v, 1))]
    found = [one(p, *sequence) for sequence in zip(*parts)]
    return torch.cat([out for out, _ in found], 2), [lse[0] for _, lse in found]


def one(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    seen = originals.visible(p.mask, p.window, q.shape[2], k.shape[2], q.device)
    scores = masked(p, q @ k.mT * (q.shape[-1] ** -0.5 if p.scale is None else p.scale), seen)
    sees = (scores > -torch.inf).any(-1, keepdim=True)
    scores = torch.where(sees, scores, 0.0)  # no NaN in gradients
    out = torch.where(sees, scores.softmax(-1) @ v, 0.0)
    return out, torch.where(sees[..., 0], scores.logsumexp(-1), 0.0)


def masked(p: Problem, scores: Tensor, seen: Tensor) -> Tensor:
    mask = dense_mask(p, str(scores.device))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    return scores.masked_fill(~seen, -torch.inf)


def sums_of_terms(p: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, float]:
    """Return the largest sum of absolute terms in each result, the measure of one rounding."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    wide = [x.detach().double() for x in (q, k, v, dout)]
    parts = [tuple(wide)]
    if p.operator == "packed":
        split = [x.split([pair[index] for pair in p.lengths], 2) for x, index in zip(wide, (0, 1, 1, 0))]
        parts = [sequence for sequence in zip(*split) if sequence[1].shape[2]]
    scale = q.shape[-1] ** -0.5 if p.scale is None else p.scale
    found = dict.fromkeys(("out", "dq", "dk", "dv"), 0.0)
    for one_q, one_k, one_v, one_dout in parts:
        seen = originals.visible(p.mask, p.window, one_q.shape[2], one_k.shape[2], one_q.device)
        shares = masked(p, one_q @ one_k.mT * scale, seen).softmax(-1).nan_to_num()
        dshares = one_dout.abs() @ one_v.abs().mT
        dscores = shares * (dshares + (shares * dshares).sum(-1, keepdim=True)) * scale
        sums = shares @ one_v.abs(), dscores @ one_k.abs(), dscores.mT @ one_q.abs(), shares.mT @ one_dout.abs()
        for name, x in zip(found, sums):
            found[name] = max(found[name], float(x.max()))
    return found


def by_operator(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
    if p.operator == "sdpa":
        options: dict[str, Any] = {"is_causal": p.mask == originals.TOP_LEFT, "scale": p.scale}
        options["attn_mask"] = dense_mask(p, str(q.device))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options), []
    starts: list[Any] = [None] * 4
    if p.operator == "packed":
        lengths = torch.tensor(p.lengths)
        starts_q, starts_k = (F.pad(lengths[:, index].cumsum(0), (1, 0)).int().to(q.device) for index in (0, 1))
        is_square = all(rows == keys for rows, keys in p.lengths)
        starts = [starts_q, starts_q if is_square else starts_k, *map(int, lengths.amax(0))]
    out, lse, *_ = aten._efficient_attention_forward(
        *(x.transpose(1, 2) for x in (q, k, v)),
        dense_mask(p, str(q.device)), *starts, 0.0, p.mask, True, scale=p.scale, window_size=p.window,
    )  # fmt: skip
    rows = [pair[0] for pair in p.lengths]
    assert lse.shape[2] % 32 == 0
    return out.transpose(1, 2), [lse[index, :, :count] for index, count in enumerate(rows)]


def examine(p: Problem, device: str) -> list[str]:
    """Return complaints about the operator's results."""
    given = tensors(p, device)
    dout = torch.randn(*given[0].shape[:3], p.dims[1], generator=torch.Generator().manual_seed(p.seed + 1)).to(device)
    found = {}
    for name, way, dtype in (
        ("right", plainly, torch.float64), ("plain", plainly, given[0].dtype), ("ours", by_operator, given[0].dtype),
    ):  # fmt: skip
        leaves = [x.to(dtype) if x.dtype != dtype else x for x in given]
        leaves = [x.detach().requires_grad_(p.backward and with_gradients(p)) for x in leaves]
        out, lse = way(p, *leaves)
        values = {"out": out.detach(), **{f"lse of {i}": x.detach() for i, x in enumerate(lse)}}
        if leaves[0].requires_grad:
            values |= dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, dout.to(dtype))))
        found[name] = values
    complaints, sums = [], sums_of_terms(p, *given, dout)
    for name, ours in found["ours"].items():
        right, plain = found["right"][name], found["plain"][name]
        if ours.shape != right.shape or not ours.isfinite().all():
            complaints.append(f"{name} has shape {tuple(ours.shape)} or is not finite")
            continue
        factor, roundings = (2.0, 1.0) if name == "out" else (3.0, 2.0)
        error, beside = (float((x.double() - right).abs().max()) if x.numel() else 0.0 for x in (ours, plain))
        if name.startswith("lse"):
            bound = 1e-4 + 1e-5 * float(right.abs().max()) if right.numel() else 0.0
        else:
            bound = factor * beside + roundings * torch.finfo(given[0].dtype).eps * sums[name]
        if error > bound:
            complaints.append(f"{name} is off by {error:.3g}, at most {bound:.3g} is right")
    return complaints


def with_gradients(p: Problem) -> bool:
    """Whether autograd's formula hands a window on to the backward: PyTorch's did not before 2.15."""
    return p.window is None


@contextlib.contextmanager
def in_front(device: str) -> Iterator[None]:
    """Serve calls of every size for a block."""
    with originals.override_on(Policy(device=device, least_products=0)):
        yield


class Tally(NamedTuple):
    """Counts and failures of some problems."""

    problems: int
    failures: list[str]
    served: Counter[str]


def solve(seeds: range, dtype: str | None, device: str, end: float, mixes: int | None = None) -> Tally:
    """Solve problems until the time ``end``; each failure is a problem's line with its complaints."""
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    reset_backend_counts()
    failures, done = [], 0
    with in_front(device):
        for seed in seeds:
            if time.time() > end:
                break
            problem = draw(seed, dtype, mixes=mixes)
            try:
                complaints = examine(problem, device)
            except Exception as error:  # noqa: BLE001  an answer like another
                complaints = [f"{type(error).__name__}: {str(error)[:300]}"]
            done += 1
            if complaints:
                failures.append("\n  ".join([repr(problem), *complaints]))
    return Tally(done, failures, Counter(backend_counts()))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sdpa.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--problems", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="the first problem's number")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), help="both, unless given")
    parser.add_argument("--seconds", type=float, default=1e6, help="stop after as long")
    parser.add_argument("--mixes", type=int, help="mixtures of features, where compiling kernels would take the time")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args(argv)
    begun, last = time.time(), options.seed + options.problems
    parts = [range(options.seed + job, last, options.jobs) for job in range(options.jobs)]
    total = Tally(0, [], Counter())
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for tally in pool.map(
            solve, parts, *([x] * len(parts) for x in (options.dtype, "cuda", begun + options.seconds, options.mixes))
        ):
            print(*tally.failures[:5], sep="\n", end="\n" if tally.failures else "", flush=True)
            total = Tally(*(one + other for one, other in zip(total, tally)))
    found = {"problems": total.problems, "failures": len(total.failures), "served": total.served}
    print(json.dumps({**found, "dtype": options.dtype, "seconds": round(time.time() - begun, 1)}))
    return 1 if total.failures or not total.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
