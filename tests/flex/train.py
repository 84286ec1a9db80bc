"""Trains a tiny Llama of transformers with flex_attention on our kernels, and beside it one with eager attention.

`python -m tests.flex.train [--steps 50] [--device cuda]` prints both losses; returns 1 if they part, or if our kernels
served no call. On a CPU the kernels are emulated, PyTorch's function refuses gradients, and few steps of a smaller
model call the operator below it. FLASH_ATTN_COMPAT_CAPABILITY=7.5 makes a newer GPU count as Turing.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any

import torch

from flash_attn_compat import backend_counts, reset_backend_counts
from tests.flex import fuzz

MOST = 0.03  # nats between the losses, averaged over the last five steps


def make_model(implementation: str, device: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=128, max_position_embeddings=512,
    )  # fmt: skip
    config._attn_implementation = implementation
    return LlamaForCausalLM._from_config(config, attn_implementation=implementation).to(device)


def losses(implementation: str, steps: int, device: str, tokens: int) -> list[float]:
    """Return the losses of training on texts of counting numbers, the second of which is padded."""
    model = make_model(implementation, device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        starts, strides = (torch.randint(low, 64, (4, 1), generator=generator) for low in (0, 1))
        ids = ((starts + strides * torch.arange(tokens)) % 128).to(device)
        seen = torch.ones_like(ids)
        seen[1, : tokens // 3] = 0
        labels = ids.masked_fill(seen == 0, -100)
        with torch.autocast(device, dtype=torch.float16 if device == "cuda" else torch.bfloat16):
            loss = model(ids, attention_mask=seen, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.flex.train", description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    if options.device == "cpu":
        allow_gradients_on_a_cpu()
    arguments = options.steps, options.device, options.tokens
    right = losses("eager", *arguments)
    reset_backend_counts()
    with fuzz.kernels_on(options.device):
        ours = losses("flex_attention", *arguments)
    counts = backend_counts()
    for step in range(0, options.steps, max(options.steps // 10, 1)):
        print(f"step {step:3}: flex_attention {ours[step]:.4f}, eager {right[step]:.4f}")
    last = min(options.steps, 5)
    apart = abs(sum(ours[-last:]) - sum(right[-last:])) / last
    print(f"last {last} steps apart by {apart:.4f}; calls by {counts}")
    return int(not (apart < MOST and counts.get("fused")))


def allow_gradients_on_a_cpu() -> None:
    """Let PyTorch's function pass gradients on a CPU, where it refuses them: our kernels compute them."""
    import torch.nn.attention.flex_attention as module

    module._validate_device = lambda *tensors: None


if __name__ == "__main__":
    sys.exit(main())
