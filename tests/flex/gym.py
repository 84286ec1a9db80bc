"""attention-gym's collection of masks and score functions, written anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tests.flex.calls import causal, identity

Mod = Callable[..., Tensor]


class Entry(NamedTuple):
    """A pair of functions. per_head: whether its BlockMask has batch and heads of its own"""

    score_mod: Mod = identity
    mask_mod: Mod | None = None
    per_head: bool = False


def sliding_window(size: int) -> Mod:
    return lambda b, h, q, kv: (q >= kv) & (q - kv <= size)


def prefix_lm(lengths: Tensor) -> Mod:
    return lambda b, h, q, kv: (kv < lengths[b]) | (q >= kv)


def document(numbers: Tensor, inner: Mod = causal) -> Mod:
    """Tokens see those of their own document; numbers: (batch, tokens)"""
    return lambda b, h, q, kv: (numbers[b, q] == numbers[b, kv]) & inner(b, h, q, kv)


def packed_document(offsets: Tensor, tokens: int, inner: Mod = causal) -> Mod:
    """One sequence of documents; positions count from a document's start. offsets: (documents + 1,)"""
    number = torch.searchsorted(offsets, torch.arange(tokens, device=offsets.device), right=True) - 1

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (number[q] == number[kv]) & inner(b, h, q - offsets[number[q]], kv - offsets[number[kv]])

    return mask


def dilated_sliding_window(size: int, dilation: int) -> Mod:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (q - kv <= size * dilation) & ((q - kv) % dilation == 0)

    return mask


def natten(width: int, kernel: int) -> Mod:
    """Each pixel of a picture of ``width`` columns sees the square around it, moved inside of the picture."""

    def near(a: Tensor, b: Tensor) -> Tensor:
        return (a.clamp(kernel // 2, width - 1 - kernel // 2) - b).abs() <= kernel // 2

    return lambda b, h, q, kv: near(q % width, kv % width) & near(q // width, kv // width)


def flamingo(picture_starts: Tensor, picture_ends: Tensor) -> Mod:
    """Text sees the pictures before it: a picture's keys are visible from the row that follows it."""
    return lambda b, h, q, kv: (kv >= picture_starts[b, q]) & (kv < picture_ends[b, q])


def tanh_softcap(cap: float) -> Mod:
    return lambda score, b, h, q, kv: cap * torch.tanh(score / cap)


def alibi(heads: int, device: str) -> Mod:
    slopes = torch.exp2(-(torch.arange(1, heads + 1, device=device, dtype=torch.float32) * 8.0 / heads))
    return lambda score, b, h, q, kv: score + (kv - q) * slopes[h]


def relative_positions(table: Tensor, keys: int) -> Mod:
    """table: (heads, rows + keys)"""
    return lambda score, b, h, q, kv: score + table[h, q - kv + keys]


def activation(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return torch.nn.functional.silu(score) + 0.01 * torch.sigmoid(score) * (q - kv).abs()


def checkerboard(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return torch.where((q - kv).abs() % 2 == 1, score * 0.5, torch.where((q - kv).abs() % 3 == 0, score * 2.0, score))


def collection(batch: int, heads: int, tokens: int, device: str = "cpu") -> dict[str, Entry]:
    """Return every entry for queries and keys of ``tokens`` tokens."""
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randint(0, 4, (batch, tokens), generator=generator).sort()[0].to(device)
    lengths = torch.tensor([tokens // 3, tokens // 2] * batch, dtype=torch.int32, device=device)[:batch]
    offsets = torch.tensor([0, tokens // 4, tokens // 2 + 7, tokens], device=device)
    table = torch.randn(heads, 2 * tokens, generator=generator).to(device)
    bias = torch.randn(batch, heads, tokens, tokens, generator=generator).half().to(device)
    starts = (torch.arange(tokens, device=device) // 2).expand(batch, -1)
    window, cap, slopes = sliding_window(tokens // 5), tanh_softcap(20.0), alibi(heads, device)
    found = {
        "nothing": Entry(),
        "causal": Entry(mask_mod=causal),
        "sliding_window": Entry(mask_mod=window),
        "prefix_lm": Entry(mask_mod=prefix_lm(lengths), per_head=True),
        "document": Entry(mask_mod=document(numbers), per_head=True),
        "packed_document": Entry(mask_mod=packed_document(offsets, tokens)),
        "dilated_sliding_window": Entry(mask_mod=dilated_sliding_window(20, 3)),
        "natten": Entry(mask_mod=natten(max(int(tokens**0.5), 8), 7)),
        "flamingo": Entry(mask_mod=flamingo(starts, starts + 9), per_head=True),
        "tanh_softcap": Entry(cap),
        "alibi": Entry(slopes),
        "relative_positions": Entry(relative_positions(table, tokens)),
        "bias": Entry(lambda score, b, h, q, kv: score + bias[b, h, q, kv]),
        "activation": Entry(activation),
        "checkerboard": Entry(checkerboard),
    }
    masks = {"causal": causal, "sliding_window": window, "document": document(numbers)}
    scores = {"tanh_softcap": cap, "alibi": slopes}
    products = {
        f"{score} + {mask}": Entry(scores[score], masks[mask], mask == "document") for score in scores for mask in masks
    }
    return found | products
