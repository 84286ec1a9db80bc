"""CPU speed as ratios within one run: packed sequences against padding and against a bare loop, `chunked` against
PyTorch's fused kernel, and the host time of a tiny call. `python -m benchmarks.cpu [--json FILE] [--only TEXT]`
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from benchmarks.measure import Figure, arguments, interleaved, report
from flash_attn_compat import flash_attn_func, flash_attn_varlen_func, use_backend

NHEADS, HEAD_DIM = 8, 64
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def skewed_lengths() -> list[int]:
    """32 lengths, log-normal around 200, the longest 2048."""
    drawn = torch.randn(32, generator=torch.Generator().manual_seed(0)).exp() * 200
    lengths = drawn.clamp(1, 2048).int().tolist()
    lengths[7] = 2048
    return lengths


LENGTHS = {
    "skewed": skewed_lengths(),
    "uniform": [256] * 16,
    "tiny": [1 + i % 16 for i in range(512)],
}
# (at least this share of padding's speed, and of the bare loop's)
REQUIRED = {"skewed": (3.0, 0.85), "uniform": (0.9, 0.85), "tiny": (0.9, 0.85)}


@dataclass(frozen=True)
class Packed:
    """A packed batch with everything that a scheme may prepare beforehand."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: list[int]
    cu_seqlens: Tensor

    @staticmethod
    def of(lengths: list[int], dtype: torch.dtype, requires_grad: bool) -> Packed:
        generator = torch.Generator().manual_seed(1)
        shape = (sum(lengths), NHEADS, HEAD_DIM)
        tensors = (torch.randn(shape, generator=generator).to(dtype).requires_grad_(requires_grad) for _ in range(3))
        return Packed(*tensors, lengths, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))

    def ours(self) -> Tensor:
        longest = max(self.lengths)
        return flash_attn_varlen_func(self.q, self.k, self.v, self.cu_seqlens, self.cu_seqlens, longest, longest)

    def loop(self) -> Tensor:
        """F.scaled_dot_product_attention on one sequence after the other."""
        parts = zip(*(x.split(self.lengths) for x in (self.q, self.k, self.v)), strict=True)
        outs = [F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in part)) for part in parts]
        return torch.cat([out[0].transpose(0, 1) for out in outs])

    def padded(self) -> Tensor:
        """Pad to the longest, attend under a mask of the keys, and pick the real rows."""
        longest = max(self.lengths)
        valid = torch.arange(longest)[None] < torch.tensor(self.lengths)[:, None]
        indices = valid.flatten().nonzero().flatten()
        batch = []
        for x in (self.q, self.k, self.v):
            rows = x.new_zeros(valid.numel(), NHEADS, HEAD_DIM).index_copy(0, indices, x)
            batch.append(rows.view(len(self.lengths), longest, NHEADS, HEAD_DIM).transpose(1, 2))
        out = F.scaled_dot_product_attention(*batch, attn_mask=valid[:, None, None])
        return out.transpose(1, 2).reshape(-1, NHEADS, HEAD_DIM)[indices]

    def call(self, scheme: Callable[[], Tensor]) -> Callable[[], object]:
        """The scheme, and its backward where gradients are wanted."""
        if not self.q.requires_grad:
            return scheme
        return lambda: torch.autograd.grad(scheme().sum(), (self.q, self.k, self.v))


def packed_sequences(name: str, dtype: str, with_backward: bool, repeats: int) -> Iterator[Figure]:
    batch = Packed.of(LENGTHS[name], DTYPES[dtype], with_backward)
    schemes = {"ours": batch.ours, "loop": batch.loop, "padded": batch.padded}
    _must_agree({scheme: call() for scheme, call in schemes.items()})
    calls = {scheme: batch.call(call) for scheme, call in schemes.items()}
    taken = interleaved(calls, repeats)
    case = f"{dtype} {'forward + backward' if with_backward else 'forward'}"
    detail = ", ".join(f"{scheme} {1e3 * seconds:.1f} ms" for scheme, seconds in taken.items())
    pad, loop = REQUIRED[name]
    of = "time of pad/SDPA/unpad over ours"
    yield Figure(f"{name} lengths, padding", case, of, taken["padded"] / taken["ours"], at_least=pad, detail=detail)
    of = "time of a loop of F.scaled_dot_product_attention over ours"
    yield Figure(f"{name} lengths, bare loop", case, of, taken["loop"] / taken["ours"], at_least=loop, detail=detail)


def _must_agree(outs: dict[str, Tensor]) -> None:
    """A contestant that computes something else wins nothing."""
    for name, out in outs.items():
        torch.testing.assert_close(out.float(), outs["loop"].float(), rtol=0.05, atol=0.05, msg=f"{name} disagrees")


def chunked(causal: bool, with_backward: bool, repeats: int) -> Iterator[Figure]:
    """The general backend against the fused kernel on 4096 tokens."""
    q, k, v = (torch.randn(1, 4096, NHEADS, HEAD_DIM, requires_grad=with_backward) for _ in range(3))

    def ours() -> Tensor:
        with use_backend("chunked"):
            return flash_attn_func(q, k, v, causal=causal)

    def fused() -> Tensor:
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal).transpose(1, 2)

    _must_agree({"chunked": ours(), "loop": fused()})

    def whole(call: Callable[[], Tensor]) -> Callable[[], object]:
        return (lambda: torch.autograd.grad(call().sum(), (q, k, v))) if with_backward else call

    taken = interleaved({"chunked": whole(ours), "SDPA": whole(fused)}, repeats)
    case = f"fp32 {'causal ' if causal else ''}{'forward + backward' if with_backward else 'forward'}"
    detail = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in taken.items())
    of = "time of chunked over that of F.scaled_dot_product_attention"
    yield Figure("4096 tokens", case, of, taken["chunked"] / taken["SDPA"], at_most=3.0, detail=detail)


def host_time(dtype: str, causal: bool, repeats: int) -> Iterator[Figure]:
    q, k, v = (torch.randn(1, 4, 2, 16).to(DTYPES[dtype]) for _ in range(3))
    by_head = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    calls = {
        "ours": lambda: flash_attn_func(q, k, v, causal=causal),
        "SDPA": lambda: F.scaled_dot_product_attention(*by_head, is_causal=causal),
    }
    taken = interleaved(calls, 3 * repeats, calls=300)
    detail = ", ".join(f"{name} {1e6 * seconds:.1f} us" for name, seconds in taken.items())
    of = "time of flash_attn_func over that of F.scaled_dot_product_attention"
    case = f"{dtype}{' causal' if causal else ''}"
    yield Figure("tiny dense call", case, of, taken["ours"] / taken["SDPA"], at_most=4.0, detail=detail)


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__).parse_args(argv)
    torch.set_num_threads(options.threads)
    repeats = options.repeats
    runs: list[tuple[str, Callable[[], Iterator[Figure]]]] = []
    for name in LENGTHS:
        for dtype in DTYPES:
            for with_backward in (False, True):
                label = f"{name} {dtype} {'backward' if with_backward else 'forward'}"
                runs.append((label, lambda n=name, d=dtype, b=with_backward: packed_sequences(n, d, b, repeats)))
    for causal in (False, True):
        for with_backward in (False, True):
            runs.append(("chunked 4096 tokens", lambda c=causal, b=with_backward: chunked(c, b, repeats)))
    for dtype in DTYPES:
        for causal in (False, True):
            runs.append((f"host time {dtype}", lambda d=dtype, c=causal: host_time(d, c, repeats)))
    wanted = [run for label, run in runs if options.only in label]
    figures = [figure for run in track(wanted, "measuring") for figure in run()]
    return report("CPU speed", figures, options)


if __name__ == "__main__":
    sys.exit(main())
