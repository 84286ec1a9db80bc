"""Runs the cells of examples/t4.ipynb in this process, in the folder in which it is started.

    cd "$(mktemp -d)" && NOTEBOOK_SOURCE=file:///path/to/clone python /path/to/clone/tests/clients/notebook.py

The cell INSTALL installs what the environment lacks. Without NOTEBOOK_MODEL a tiny random model stands in for one of
the hub's.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

HELPERS, INSTALL = "helpers", "cell-2"  # the ids of two cells
NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "t4.ipynb"


def cells() -> dict[str, str]:
    """The code of each cell, by its id."""
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return {cell["id"]: "".join(cell["source"]) for cell in found if cell["cell_type"] == "code"}


def run(name: str, source: str, names: dict[str, Any]) -> None:
    exec(compile(source, f"{NOTEBOOK.name}, {name}", "exec"), names)


def save_tiny_model(folder: Path) -> None:
    """Save a random Llama in bf16 and a tokenizer of bytes as from_pretrained reads them."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = Tokenizer(models.BPE(letters, []))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    words.add_special_tokens(["<end>"])
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    end = len(letters)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=end + 1, eos_token_id=end, bos_token_id=end,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def main() -> None:
    names: dict[str, Any] = {}
    for name, source in cells().items():
        start = time.perf_counter()
        run(name, source, names)
        print(f"-- {name}: {time.perf_counter() - start:.1f} s", flush=True)
        if name == INSTALL and "NOTEBOOK_MODEL" not in os.environ:
            save_tiny_model(Path("tiny-model"))
            os.environ["NOTEBOOK_MODEL"] = "tiny-model"


if __name__ == "__main__":
    main()
