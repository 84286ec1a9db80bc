"""trl's SFTTrainer and sentence-transformers on this package: losses without padding, and embeddings, are eager's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.clients.models import VOCABULARY, build

pytestmark = pytest.mark.usefixtures("patched")
LENGTHS = (5, 31, 12, 20, 3, 9, 17, 26)
WAYS: dict[str, dict[str, Any]] = {
    "padding-free": {"padding_free": True, "max_length": None},
    # Rows of at most 64 tokens, so that all eight fit into two.
    "packed": {"packing": True, "max_length": 64},
}


def tokenizer() -> Any:
    """Of numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2", unk_token="0")


def losses(trl: Any, implementation: str, folder: Path, **way: Any) -> list[float]:
    """Of three steps, each over all texts."""
    import datasets
    from transformers import TrainerCallback  # whose module takes seconds to import

    class Losses(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            if logs and "loss" in logs:
                found.append(logs["loss"])

    found: list[float] = []
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]
    settings = trl.SFTConfig(
        output_dir=str(folder), per_device_train_batch_size=len(LENGTHS), max_steps=3, learning_rate=3e-3,
        lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, disable_tqdm=True, **way,
    )  # fmt: skip
    trl.SFTTrainer(
        build("llama", implementation).train(), settings, processing_class=tokenizer(), callbacks=[Losses()],
        train_dataset=datasets.Dataset.from_dict({"input_ids": texts}),
    ).train()  # fmt: skip
    return found


@pytest.mark.parametrize("way", WAYS)
def test_sequences_without_padding_have_the_losses_of_eager_with_padding(way: str, calls: Any, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    eager = losses(trl, "eager", tmp_path)
    assert len(eager) == 3 and calls() == 0
    ours = losses(trl, "flash_attention_2", tmp_path, **WAYS[way])
    assert calls() > 0
    assert ours == pytest.approx(eager, rel=2e-3)


def test_embeddings_of_texts_of_very_different_length_are_those_of_eager(tmp_path: Path, calls: Any) -> None:
    package = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    build("bert", "eager").bert.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    texts = ["7", "3 4 5 6 7 8 9 10 11", " ".join(str(3 + i % 90) for i in range(70)), "90 5"]

    def embeddings(implementation: str) -> torch.Tensor:
        options = {"attn_implementation": implementation, "dtype": torch.float32}
        model = package.SentenceTransformer(str(tmp_path), model_kwargs=options, device="cpu")
        found: torch.Tensor = model.encode(texts, convert_to_tensor=True, show_progress_bar=False)
        return found

    eager = embeddings("eager")
    assert calls() == 0
    ours = embeddings("flash_attention_2")
    assert calls() > 0
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
