"""What a cache of 8-bit floats costs in accuracy, by keys and format: `python -m benchmarks.cache_error`.

The error is that of one decoding step's out against fp64 attention over the unrounded keys and values, in percent of
out's norm. Needs no GPU: the cache is quantised and read by this package's plain backends.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from flash_attn_compat import flash_attn_with_kvcache
from flash_attn_compat.core.eight_bit import quantize

BATCH, KEYS, HEADS, HEAD_DIM = 2, 2048, 4, 128
LOGIT_SPREAD = 2.0  # standard deviation of the scores
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

Draw = Callable[[torch.Generator], Tensor]


def normal(generator: torch.Generator, size: float = 1.0) -> Tensor:
    return size * torch.randn(BATCH, KEYS, HEADS, HEAD_DIM, generator=generator)


def with_outliers(generator: torch.Generator, factor: float) -> Tensor:
    """Keys with four channels a head that are ``factor`` times as large, as language models have after RoPE."""
    keys = normal(generator)
    keys[..., 10::32] *= factor
    return keys


def uneven_heads(generator: torch.Generator) -> Tensor:
    return normal(generator) * torch.tensor([0.02, 0.2, 2.0, 20.0])[:, None]


DISTRIBUTIONS: dict[str, Draw] = {
    "normal": normal,
    "normal, 1/1000 of the size": lambda generator: normal(generator, 1e-3),
    "outlier channels, 10 times as large": lambda generator: with_outliers(generator, 10.0),
    "outlier channels, 50 times as large": lambda generator: with_outliers(generator, 50.0),
    "heads from 0.02 to 20": uneven_heads,
}
# dtype, and how a descale is chosen: none, or the largest magnitude of a tensor or of each head, divided by the largest
# number of the format.
FORMATS: dict[str, tuple[torch.dtype, str]] = {
    "fp16": (torch.float16, ""),
    "e4m3, descale 1": (E4M3, ""),
    "e4m3, a tensor's": (E4M3, "tensor"),
    "e4m3, a head's": (E4M3, "head"),
    "e5m2, descale 1": (E5M2, ""),
    "e5m2, a head's": (E5M2, "head"),
}


def choose_descale(x: Tensor, dtype: torch.dtype, by: str) -> Tensor | None:
    if not by:
        return None
    largest = x.abs().amax((0, 1, 3)) if by == "head" else x.abs().amax().expand(HEADS)
    return (largest / torch.finfo(dtype).max)[None].contiguous()


def error_of(k: Tensor, v: Tensor, q: Tensor, name: str) -> float:
    """Return |out - exact| / |exact|, where out is computed from keys and values in the format ``name``."""
    dtype, by = FORMATS[name]
    exact = flash_attn_with_kvcache(q.double(), k.double(), v.double())
    if dtype.itemsize == 2:
        out = flash_attn_with_kvcache(q.to(dtype), k.to(dtype), v.to(dtype))
    else:
        k_descale, v_descale = choose_descale(k, dtype, by), choose_descale(v, dtype, by)
        caches = quantize(k, k_descale, 1.0, dtype), quantize(v, v_descale, 1.0, dtype)
        out = flash_attn_with_kvcache(q.half(), *caches, k_descale=k_descale, v_descale=v_descale)
    assert isinstance(out, Tensor) and isinstance(exact, Tensor)
    return float((out.double() - exact).norm() / exact.norm())


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser("cache_error", description=__doc__).parse_args(argv)
    print("| keys | " + " | ".join(FORMATS) + " |\n|---|" + "---|" * len(FORMATS))
    for title, draw in DISTRIBUTIONS.items():
        generator = torch.Generator().manual_seed(0)
        k, v = draw(generator), normal(generator)
        q = torch.randn(BATCH, 1, HEADS, HEAD_DIM, generator=generator)
        q *= LOGIT_SPREAD * HEAD_DIM**0.5 / k.square().sum(-1).mean((0, 1)).sqrt()[:, None]
        print(f"| {title} | " + " | ".join(f"{100 * error_of(k, v, q, name):.2f}" for name in FORMATS) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
