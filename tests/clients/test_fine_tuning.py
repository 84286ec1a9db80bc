"""Fine-tuning a tiny Llama on packed text of the standard library: the loss curve on this package is that of eager."""

from __future__ import annotations

import itertools
import pydoc_data.topics

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.clients.models import build

STEPS, TOKENS = 30, 256


def packed_batches():
    """Rows of TOKENS characters: the heads of help texts one after the other, each with positions from 0."""
    heads = [torch.tensor([ord(letter) % 97 for letter in text[:150]]) for text in pydoc_data.topics.topics.values()]
    texts = itertools.cycle(heads)
    for _ in range(STEPS):
        row = [next(texts)]
        while sum(map(len, row)) < TOKENS:
            row.append(next(texts))
        positions = torch.cat([torch.arange(len(text)) for text in row])
        yield torch.cat(row)[None, :TOKENS], positions[None, :TOKENS]


def block_mask(positions):
    """What eager needs to be told of packing: causal, within a text. (1, 1, seqlen, seqlen), added to the scores."""
    text = (positions[0].diff(prepend=positions[0, :1]) != 1).cumsum(0)
    visible = (text[:, None] == text[None]) & torch.ones(text.numel(), text.numel(), dtype=torch.bool).tril()
    return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]


def losses(implementation):
    model = build("llama", implementation).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for ids, positions in packed_batches():
        mask = block_mask(positions) if implementation == "eager" else None
        logits = model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
        same_text = positions[0, 1:] > 0  # the first character of a text is not told by the one before
        loss = torch.nn.functional.cross_entropy(logits[0, :-1][same_text], ids[0, 1:][same_text])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.usefixtures("patched")
def test_thirty_steps_on_packed_text_have_the_losses_of_eager(calls):
    eager = losses("eager")
    assert calls() == 0
    ours = losses("flash_attention_2")
    assert calls() == 2 * STEPS
    assert eager[-1] < 0.8 * eager[0], "it must learn for the comparison to mean something"
    assert max(abs(a / b - 1) for a, b in zip(ours, eager)) <= 0.01
