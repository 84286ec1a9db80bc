"""What a program is, and the setting in which it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

Answer = dict[str, Tensor]


class NotHere(Exception):
    """This program or implementation cannot run here, and why."""


@dataclass(frozen=True)
class Implementation:
    """ours, official, sdpa, switched (sdpa on our kernels) or eager.

    `@7.5` behind the name forces the compute capability that it may use.
    """

    name: str

    @property
    def kind(self) -> str:
        return self.name.partition("@")[0]

    @property
    def forced(self) -> str:
        return self.name.partition("@")[2]

    @property
    def is_flash(self) -> bool:
        return self.kind in ("ours", "official")

    @property
    def in_transformers(self) -> str:
        if self.is_flash:
            return "flash_attention_2"
        return "sdpa" if self.kind == "switched" else self.kind


@dataclass(frozen=True)
class Setting:
    device: str
    dtype: torch.dtype
    tiny: bool
    implementation: Implementation


class Prepared(NamedTuple):
    """run: what is timed; answer: what of its result, or of another run, must agree between implementations.

    tokens: how many one run generates, 0 for programs that are measured in ms
    """

    run: Callable[[], Any]
    answer: Callable[[Any], Answer]
    tokens: int = 0


Program = Callable[[Setting], Prepared]


def margins(logits: Tensor) -> Tensor:
    """How far the first logit is ahead of the second, relative to the largest: no more than rounding is a tie."""
    best = logits.float().topk(2, dim=-1).values
    return (best[..., 0] - best[..., 1]) / logits.float().abs().amax(-1)


def lengths(total: int, count: int) -> list[int]:
    """`count` skewed lengths, the same each time, that add up to `total`."""
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(0)).exp()
    found: list[int] = (drawn / drawn.sum() * (total - count)).int().add(1).tolist()
    found[0] += total - sum(found)
    return found


def figure(row: dict[str, Any]) -> str:
    """What was found, in a word or two."""
    if "error" in row:
        return str(row["error"])
    rate = row["tokens_per_second"]
    return f"{rate:.1f} tok/s" if rate else f"{row['ms']:.1f} ms"
