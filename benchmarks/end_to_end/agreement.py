"""Whether two implementations gave the same answer."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.end_to_end.program import Answer, Implementation

# Of the largest value: what rounding in many layers makes of it, with room. Wrong attention is off by far more.
_LIMITS = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def reference(names: list[str]) -> str:
    """Whose answer the others are held against: flash-attn's, else the plain formula's. SDPA has no softcap."""
    order = ("official", "eager", "sdpa", "ours", "switched")
    return min(names, key=lambda name: order.index(Implementation(name).kind)) if names else ""


def compared(answer: Answer, expected: Answer, dtype: torch.dtype) -> tuple[str, bool]:
    """In words, and whether it is no more than rounding."""
    if "tokens" in answer:
        return _tokens(answer["tokens"], expected["tokens"], expected["margins"], _LIMITS[dtype])
    words, agrees = [], True
    for part, value in expected.items():
        off = float((answer[part] - value).abs().max() / value.abs().max())
        words.append(f"{part} {off:.1e}")
        agrees &= off <= _LIMITS[dtype]
    return ", ".join(words), agrees


def _tokens(tokens: Tensor, expected: Tensor, margins: Tensor, limit: float) -> tuple[str, bool]:
    """Equal, or parted at two logits as good as equal: from there on the texts are others."""
    differs = tokens != expected
    rows = differs.any(-1).nonzero().flatten()
    if not len(rows):
        return f"all {tokens.numel()} tokens", True
    first = differs[rows].int().argmax(-1)
    widest = float(margins[rows, first].max())
    words = f"{len(tokens) - len(rows)} of {len(tokens)} rows; others part at token {int(first.min())} or later"
    return f"{words}, where two logits are within {widest:.1e}", widest <= limit
