"""sentence-transformers on this package: embeddings of texts of very different length are eager's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
import sentence_transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.clients.models import VOCABULARY, build

TEXTS = ["7", "3 4 5 6 7 8 9 10 11", " ".join(str(3 + i % 90) for i in range(70)), "90 5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT and a tokenizer of numbers, as they are saved."""
    place = tmp_path_factory.mktemp("bert")
    build("bert", "eager").bert.save_pretrained(place)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", unk_token="0").save_pretrained(place)
    return place


@pytest.mark.usefixtures("patched")
def test_embeddings_are_those_of_eager(folder: Path, calls: Any) -> None:
    def embeddings(implementation: str) -> torch.Tensor:
        options = {"attn_implementation": implementation, "dtype": torch.float32}
        model = sentence_transformers.SentenceTransformer(str(folder), model_kwargs=options, device="cpu")
        found: torch.Tensor = model.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False)
        return found

    eager = embeddings("eager")
    assert calls() == 0
    ours = embeddings("flash_attention_2")
    assert calls() > 0
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
