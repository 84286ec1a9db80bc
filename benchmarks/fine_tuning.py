"""Does training with this package learn as it does with eager attention? `python -m benchmarks.fine_tuning` compares.

A small byte-level language model learns Python's own documentation, from one seed and in one order of batches, once
with eager attention, once with ours, once with PyTorch's function on our kernels. Exit code 1 if another loss
curve, averaged over ten steps, is ever more than 1 % away from eager's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flash_attn_compat
from verify.contestants import textbook

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
HEAD_DIM, NHEADS, NHEADS_K, LAYERS, SEQLEN, BATCH = 64, 4, 2, 4, 512, 16
AVERAGED = 10


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of (batch, seqlen, heads, head_dim), written out."""
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril()
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    return textbook(*(x.transpose(1, 2) for x in (q, k, v)), seen).transpose(1, 2)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = flash_attn_compat.flash_attn_func(q, k, v, causal=True)
    return out


def switched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with flash_attn_compat.sdpa(always=True):
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, attention: Attention) -> None:
        super().__init__()
        width = NHEADS * HEAD_DIM
        self.attention = attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project = nn.Linear(width, (NHEADS + 2 * NHEADS_K) * HEAD_DIM)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(self.norm1(x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split((NHEADS, NHEADS_K, NHEADS_K), dim=2)
        x = x + self.out(self.attention(q, k, v).flatten(2))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Model(nn.Module):
    def __init__(self, attention: Attention) -> None:
        super().__init__()
        width = NHEADS * HEAD_DIM
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(SEQLEN, width)
        self.layers = nn.Sequential(*(Layer(attention) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.layers(x)))
        return logits


def text() -> Tensor:
    """Some 700,000 bytes of English that every Python carries."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)


def train(attention: Attention, device: str, dtype: torch.dtype, steps: int) -> list[float]:
    """The loss of each step."""
    torch.manual_seed(0)
    model = Model(attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device.partition(":")[0], enabled=dtype == torch.float16)
    data, order = text(), torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - SEQLEN - 1, (BATCH, 1), generator=order)
        batch = data[starts + torch.arange(SEQLEN + 1)].long().to(device)
        with torch.autocast(device.partition(":")[0], dtype):
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def furthest_apart(one: list[float], other: list[float]) -> float:
    """The largest relative distance of the two curves, averaged over some steps."""
    first, second = (torch.tensor(losses, dtype=torch.float64) for losses in (one, other))
    means = [losses.unfold(0, min(AVERAGED, len(losses)), 1).mean(-1) for losses in (first, second)]
    return float(((means[1] - means[0]) / means[0]).abs().max())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fine_tuning", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    worst = 0.0
    for dtype in (torch.float16, torch.bfloat16):
        right = train(eager, arguments.device, dtype, arguments.steps)
        print(f"{dtype}: eager {right[0]:.4f} -> {right[-1]:.4f}")
        for attention in (ours, switched):
            flash_attn_compat.reset_backend_counts()
            found = train(attention, arguments.device, dtype, arguments.steps)
            apart = furthest_apart(right, found)
            worst = max(worst, apart)
            served = ", ".join(flash_attn_compat.backend_counts())
            print(f"  {attention.__name__} ({served}) {found[0]:.4f} -> {found[-1]:.4f}, at most {apart:.3%} apart")
    return int(worst > 0.01)


if __name__ == "__main__":
    sys.exit(main())
