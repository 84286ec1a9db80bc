"""Does training with this package learn as it does with eager attention? `python -m benchmarks.fine_tuning` compares.

A small byte-level Llama learns Python's own documentation, with one seed and one order of batches: with eager
attention, with ours, with PyTorch's function on our kernels, and on its own kernels, which shows the effect of rounding
alone. Exit code 1 if a loss curve, averaged over ten steps, is ever more than 1 % away from eager's. Needs
transformers.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

import flash_attn_compat
from benchmarks.end_to_end import ATTENTIONS, Attention, language_model, use_attention

BYTES = dict(
    vocab_size=256, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512,
)  # fmt: skip
SEQLEN, BATCH, AVERAGED = 512, 16, 10


def text() -> Tensor:
    """Return some 700,000 bytes of English that come with every Python."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)


def train(attention: Attention, device: str, dtype: torch.dtype, steps: int) -> list[float]:
    """Train the model and return the loss of each step."""
    model, kind = language_model("Llama", BYTES, device, torch.float32).train(), device.partition(":")[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(kind, enabled=dtype == torch.float16)
    data, order, losses = text(), torch.Generator().manual_seed(1), []
    for _ in range(steps):
        starts = torch.randint(len(data) - SEQLEN, (BATCH, 1), generator=order)
        batch = data[starts + torch.arange(SEQLEN)].long().to(device)
        with torch.autocast(kind, dtype), use_attention(model, attention):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def largest_distance(one: list[float], other: list[float]) -> float:
    """Return the largest relative distance of two loss curves, both averaged over some steps."""
    first, second = (torch.tensor(losses, dtype=torch.float64) for losses in (one, other))
    means = [losses.unfold(0, min(AVERAGED, len(losses)), 1).mean(-1) for losses in (first, second)]
    return float(((means[1] - means[0]) / means[0]).abs().max())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fine_tuning", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=200)
    arguments, worst = parser.parse_args(argv), 0.0
    for dtype in (torch.float16, torch.bfloat16):
        right = train(Attention("eager"), arguments.device, dtype, arguments.steps)
        print(f"{dtype}: eager {right[0]:.4f} -> {right[-1]:.4f}")
        for name in ("ours", "switched", "sdpa"):
            flash_attn_compat.reset_backend_counts()
            losses = train(ATTENTIONS[name], arguments.device, dtype, arguments.steps)
            distance, served = largest_distance(right, losses), ", ".join(flash_attn_compat.backend_counts())
            worst = max(worst, distance)
            print(f"  {name} ({served}) {losses[0]:.4f} -> {losses[-1]:.4f}, at most {distance:.3%} apart")
    return int(worst > 0.01)


if __name__ == "__main__":
    sys.exit(main())
