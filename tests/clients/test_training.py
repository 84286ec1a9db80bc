"""Trainers, and sequences cut over two gloo processes: losses, outputs and gradients are those of the plain way."""

from __future__ import annotations

import importlib.util
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import flash_attn_compat
from tests.clients import ring_worker
from tests.clients.ring_worker import NHEADS, Case, contiguous, zigzag
from tests.forms.support import in_group

with_the_name = pytest.mark.usefixtures("patched")
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

    from tests.clients.models import VOCABULARY

    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2", unk_token="0")


def losses(trl: Any, implementation: str, folder: Path, **way: Any) -> list[float]:
    """Of three steps, each over all texts."""
    import datasets
    from transformers import TrainerCallback  # whose module takes seconds to import

    from tests.clients.models import VOCABULARY, build

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


@with_the_name
@pytest.mark.parametrize("way", WAYS)
def test_sequences_without_padding_have_the_losses_of_eager_with_padding(way: str, calls: Any, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    eager = losses(trl, "eager", tmp_path)
    assert len(eager) == 3 and calls() == 0
    ours = losses(trl, "flash_attention_2", tmp_path, **WAYS[way])
    assert calls() > 0
    assert ours == pytest.approx(eager, rel=2e-3)


@with_the_name
def test_embeddings_of_texts_of_very_different_length_are_those_of_eager(tmp_path: Path, calls: Any) -> None:
    package = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from tests.clients.models import build

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


# -------------------------------------------------- ring-flash-attn, yunchang and DeepSpeed, against the whole sequence

SEQLEN, HEAD_DIM = [64], 16


def ring(rank: int) -> None:
    ring_worker.check_all("cpu", torch.float16)


def yunchang(rank: int) -> None:
    import yunchang
    from yunchang.kernels import AttnType

    # Processes of Ulysses and of the ring, implementation, how a tensor is cut, causal, whether backward.
    for ulysses, ring, implementation, cut, causal, backward in (
        (1, 2, "basic", contiguous, True, True),
        (1, 2, "basic", contiguous, False, True),
        (1, 2, "zigzag", zigzag, True, True),
        (2, 1, "basic", contiguous, True, False),  # backward, its ring of one sends to itself, which gloo cannot
    ):
        yunchang.set_seq_parallel_pg(ulysses, ring, rank, 2)
        long_context = yunchang.LongContextAttention(ring_impl_type=implementation, attn_type=AttnType.FA)
        # bf16 rounds to 4e-3 and each partial gradient is rounded; a mistake would show as 0.1 and more.
        case = Case(partial(long_context, causal=causal), cut, False, causal)
        ring_worker.check(case, SEQLEN, HEAD_DIM, torch.bfloat16, (2e-2, 2e-2), nheads_k=NHEADS, backward=backward)


def ulysses(rank: int) -> None:
    os.environ.update({"LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"})
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention
    from flash_attn import flash_attn_func

    deepspeed.init_distributed("gloo", verbose=False)
    layer = DistributedAttention(flash_attn_func, dist.group.WORLD)
    case = Case(lambda q, k, v: layer(q, k, v, 0, causal=True), contiguous, False, True)
    ring_worker.check(case, SEQLEN, HEAD_DIM, torch.float64, (1e-9, 1e-9), nheads_k=NHEADS)


def process(rank: int, name: str) -> None:
    flash_attn_compat.patch()
    WORKERS[name](rank)
    assert sum(flash_attn_compat.backend_counts().values()) > 0


WORKERS = {"ring_flash_attn": ring, "yunchang": yunchang, "deepspeed": ulysses}


@pytest.mark.parametrize("name", WORKERS)
def test_every_variant_gives_output_and_gradients_of_the_whole_sequence(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    in_group(process, name)
