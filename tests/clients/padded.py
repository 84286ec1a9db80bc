"""A model of transformers beside its copy with another attention, over batches padded on either side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.clients.models import relative_error

SIDES = ("none", "left", "right")


def mask_of(ids: Tensor, side: str) -> Tensor:
    """1 for tokens, 0 for padding on this side, of a third of the last sequence."""
    mask = torch.ones_like(ids)
    length = ids.shape[1]
    if side != "none":
        mask[-1, slice(0, length // 3) if side == "left" else slice(length - length // 3, length)] = 0
    return mask


def pair(head: Any, options: dict[str, Any], implementation: str, scale: float = 1.0) -> tuple[Any, Any]:
    """The model with eager attention and with this one, with the same weights; ``scale`` makes attention less even."""
    torch.manual_seed(0)
    eager, other = (
        head._from_config(head.config_class(**options), attn_implementation=way).eval()
        for way in ("eager", implementation)
    )
    with torch.no_grad():
        for weight in eager.parameters():
            weight.mul_(scale)
    other.load_state_dict(eager.state_dict())
    return eager, other


def check(eager: Any, other: Any, inputs: dict[str, Any], kept: Tensor | None = None, limit: float = 1e-5) -> None:
    """Logits (at the kept tokens) and the gradients of all parameters are eager's."""
    logits, gradients = [], []
    for model in (eager, other):
        out = model(**inputs).logits
        logits.append(out if kept is None else out * kept[..., None])
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        model.zero_grad()
        (logits[-1] * weights).sum().backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    assert relative_error(logits[1], logits[0]) < limit
    assert gradients[0].keys() == gradients[1].keys()
    scale = max(float(gradient.abs().max()) for gradient in gradients[0].values())
    worst = max(float((gradients[1][name] - right).abs().max()) for name, right in gradients[0].items())
    assert worst < limit * scale, f"{worst / scale:.1e}"
