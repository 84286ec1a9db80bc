"""How exact is attention over very many keys on Turing, whose tensor cores cut sums where others round them?

    python -m benchmarks.truncated_sums --keys 65536 131072

No GPU is needed and none is asked: the kernels' sources run in the tests' emulator, for some minutes. Its tensor cores
do as Fasi, Higham, Mikaitis and Pranesh found (Numerical behavior of NVIDIA tensor cores, 2021): four products and the
sum are cut to the 24 bits of the largest of them. One block takes all keys of its rows: no sum can be longer.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import flash_attn_compat
from flash_attn_compat.backends.fused import variants
from tests import fused_on_cpu

HEAD_DIM = 64


class Case(NamedTuple):
    """rows, keys: of the one head; mean: of the values and of the upstream gradient, whose deviation is 1"""

    rows: int
    keys: int
    mean: float


def tensors(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and dout."""
    generator = torch.Generator().manual_seed(case.keys)
    lengths = case.rows, case.keys, case.keys, case.rows
    drawn = [torch.randn(1, length, 1, HEAD_DIM, generator=generator) for length in lengths]
    return [(x + (case.mean if index > 1 else 0.0)).to(dtype) for index, x in enumerate(drawn)]


def by_formula(given: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """out, dq, dk, dv with every intermediate result in ``dtype``."""
    q, k, v, dout = (x[0, :, 0].to(dtype) for x in given)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = (q @ k.T * HEAD_DIM**-0.5).softmax(-1) @ v
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def by_kernels(given: list[Tensor], truncates: bool) -> list[Tensor]:
    """out, dq, dk, dv by the emulated kernels for Turing."""
    with pytest.MonkeyPatch.context() as patch, flash_attn_compat.use_backend("fused"):
        fused_on_cpu.emulate(patch, 75, truncates=truncates)
        patch.setattr(variants, "splits", lambda *shapes: 1)
        q, k, v, dout = given
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flash_attn_compat.flash_attn_func(*leaves)
        found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    return [x[0, :, 0] for x in found]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """The largest of each, as a share of the largest exact value."""
    return [float((x.double() - right).abs().max() / right.abs().max()) for x, right in zip(found, exact)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, nargs="+", default=[65536, 131072])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    chosen = parser.parse_args()
    dtype = getattr(torch, chosen.dtype)
    print(
        f"{'rows':>7} {'keys':>7} {'mean':>5}  {'computed':<10}"
        + "".join(f"{x:>10}" for x in ("out", "dq", "dk", "dv"))
    )
    for length in chosen.keys:
        for rows, keys in ((chosen.rows, length), (length, chosen.rows)):
            for mean in (0.0, 1.0):
                given = tensors(Case(rows, keys, mean), dtype)
                exact = by_formula(given, torch.float64)
                ways = {
                    "plainly": by_formula(given, dtype),
                    "rounded": by_kernels(given, truncates=False),
                    "truncated": by_kernels(given, truncates=True),
                }
                for way, found in ways.items():
                    row = "".join(f"{error:10.1e}" for error in errors(found, exact))
                    print(f"{rows:7} {keys:7} {mean:5.1f}  {way:<10}{row}", flush=True)


if __name__ == "__main__":
    main()
