"""trl's SFTTrainer on this package: sequences without padding, one after the other or packed, cost what eager's do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed")
import datasets
import trl
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainerCallback

from tests.clients.models import VOCABULARY, build

LENGTHS = (5, 31, 12, 20, 3, 9, 17, 26)
WAYS: dict[str, dict[str, Any]] = {
    "padding-free": {"padding_free": True, "max_length": None},
    # Rows of at most 64 tokens, so that all eight fit into two.
    "packed": {"packing": True, "max_length": 64},
}


def texts() -> datasets.Dataset:
    generator = torch.Generator().manual_seed(0)
    return datasets.Dataset.from_dict(
        {"input_ids": [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]}
    )


def tokenizer() -> PreTrainedTokenizerFast:
    words = {str(number): number for number in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), pad_token="0", eos_token="2", unk_token="0"
    )


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **other: Any) -> None:
        if logs and "loss" in logs:
            self.found.append(logs["loss"])


def losses(implementation: str, folder: Path, **way: Any) -> list[float]:
    """Of three steps, each over all texts."""
    settings = trl.SFTConfig(
        output_dir=str(folder), per_device_train_batch_size=len(LENGTHS), max_steps=3, learning_rate=3e-3,
        lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, disable_tqdm=True, **way,
    )  # fmt: skip
    seen = Losses()
    trl.SFTTrainer(
        build("llama", implementation).train(), settings, train_dataset=texts(), processing_class=tokenizer(),
        callbacks=[seen],
    ).train()  # fmt: skip
    return seen.found


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("way", WAYS)
def test_sequences_without_padding_have_the_losses_of_eager_with_padding(way: str, calls: Any, tmp_path: Path) -> None:
    eager = losses("eager", tmp_path)
    assert len(eager) == 3 and calls() == 0
    ours = losses("flash_attention_2", tmp_path, **WAYS[way])
    assert calls() > 0
    assert ours == pytest.approx(eager, rel=2e-3)
