"""Load the state dict of a pretrained model, from a directory or from the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

# File names in flash-attn's order of preference. An index file names the files of a checkpoint in several parts.
_FILES = (
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.safetensors",
    "model.safetensors.index.json",
)


def state_dict_from_pretrained(
    model_name: str | os.PathLike[str],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint by its name.

    Args:
        model_name: a directory, or a model's name on the hub. Needs transformers, and safetensors for such files.
        device: of the tensors. A cast to another dtype than fp32 is done on the CPU before.
        dtype: of the tensors; by default as stored.
    Raises:
        OSError: the checkpoint has none of the known files.
    """
    loaded_on = device if dtype in (torch.float32, None) else "cpu"
    state: dict[str, Tensor] = {}
    for file in _checkpoint_files(os.fspath(model_name)):
        state.update(_load(file, loaded_on))
    return {name: tensor.to(device=device, dtype=dtype) for name, tensor in state.items()}


def _checkpoint_files(model_name: str) -> list[str]:
    from transformers.utils.hub import cached_file, get_checkpoint_shard_files

    for name in _FILES:
        if os.path.isdir(model_name) and not os.path.isfile(os.path.join(model_name, name)):
            continue
        file = cached_file(model_name, name, _raise_exceptions_for_missing_entries=False)
        if file is None:
            continue
        return get_checkpoint_shard_files(model_name, file)[0] if name.endswith(".json") else [file]
    raise OSError(f"Model name {model_name} was not found.")


def _load(file: str, device: torch.device | str | None) -> dict[str, Tensor]:
    if Path(file).suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file, device=str(device or "cpu"))
    loaded: dict[str, Tensor] = torch.load(file, map_location=device, weights_only=True)
    return loaded
