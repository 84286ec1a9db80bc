"""Checkpoints travel in either direction: objects imported as flash_attn are pickled under that name."""

from __future__ import annotations

import importlib
import pickle
import pickletools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flash_attn_compat
from flash_attn_compat.dropin import patch, patched, unpatch
from tests.dropin.environment import write_package
from tests.tools.interpreters import forked

# Where flash-attn 2.8.3 defines the classes of models.
CLASSES = {
    "modules.mha": "MHA SelfAttention CrossAttention FlashSelfAttention FlashCrossAttention",
    "modules.mlp": "Mlp GatedMlp",
    "modules.block": "Block ParallelBlock StochasticDepth",  # it imports StochasticDepth from torchvision
    "modules.embedding": "GPT2Embeddings BertEmbeddings",
    "layers.rotary": "RotaryEmbedding",
    "layers.patch_embed": "PatchEmbed",
    "losses.cross_entropy": "CrossEntropyLoss",
    "ops.fused_dense": "FusedDense FusedMLP",
    "ops.layer_norm": "DropoutAddLayerNorm",
    "ops.rms_norm": "RMSNorm DropoutAddRMSNorm",
    "ops.triton.layer_norm": "RMSNorm",
    "utils.generation": "InferenceParams",
}
FUNCTIONS = {
    "flash_attn_interface": "flash_attn_func flash_attn_varlen_func flash_attn_with_kvcache _flash_attn_forward",
    "bert_padding": "pad_input unpad_input",
    "modules.mha": "get_alibi_slopes",
    "ops.activations": "sqrelu_fwd",
}
MODEL = """
import torch
from functools import partial
from flash_attn.modules.block import Block
from flash_attn.modules.embedding import GPT2Embeddings
from flash_attn.modules.mha import MHA
from flash_attn.modules.mlp import GatedMlp, Mlp
from flash_attn.ops.activations import sqrelu_fwd
from flash_attn.ops.triton.layer_norm import RMSNorm
from flash_attn.losses.cross_entropy import CrossEntropyLoss

torch.manual_seed(0)
mixer = partial(MHA, num_heads=4, causal=True, rotary_emb_dim=4, use_flash_attn=True, fused_bias_fc=True, layer_idx=0)
model = torch.nn.ModuleDict({
    "embeddings": GPT2Embeddings(16, 10, 12),
    "first": Block(16, mixer, partial(Mlp, activation=sqrelu_fwd), norm_cls=RMSNorm),
    "second": MHA(16, 4, num_heads_kv=2, return_residual=True),
    "third": GatedMlp(16),
    "loss": CrossEntropyLoss(label_smoothing=0.1),
}).eval()
"""
# model, as it answers
ANSWER = """
def answer(model):
    import torch
    hidden = model["embeddings"](torch.tensor([[1, 5, 3]]))
    hidden, rest = model["first"](hidden)
    hidden, same = model["second"](hidden)
    return model["loss"](model["third"](hidden).flatten(0, 1), torch.tensor([1, 2, 3])) + rest.sum() + same.sum()
"""
NO_COMPAT = "import sys; sys.modules['flash_attn_compat'] = None\n"


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A stand-in for flash-attn 2.8.3 with its modules, classes and functions, which compute nothing."""
    package = write_package(tmp_path / "real", "__version__ = '2.8.3'\n", "2.8.3")
    for folder in ("modules", "layers", "losses", "ops", "ops/triton", "utils"):
        (package / folder).mkdir()
        (package / folder / "__init__.py").touch()
    for below in CLASSES | FUNCTIONS:
        classes = [f"class {name}(torch.nn.Module): pass" for name in CLASSES.get(below, "").split()]
        functions = [f"def {name}(*_): pass" for name in FUNCTIONS.get(below, "").split()]
        text = "\n".join(["import torch", *classes, *functions])
        (package / f"{below.replace('.', '/')}.py").write_text(text)
    return package.parent


@pytest.mark.parametrize("api", ["2.6", "2.8"])
def test_a_model_saved_under_the_name_loads_where_only_flash_attn_is_and_comes_back(
    real: Path, tmp_path: Path, api: str
) -> None:
    here, there = str(tmp_path / "here.pt"), str(tmp_path / "there.pt")
    save = forked(
        f"import flash_attn_compat; flash_attn_compat.patch({api!r})\n{MODEL}{ANSWER}"
        f"torch.save((model, answer(model)), {here!r})"
    )
    assert save.returncode == 0, save.stderr
    visit = forked(
        f"{NO_COMPAT}sys.path.insert(0, {str(real)!r})\nimport torch\n"
        f"model, expected = torch.load({here!r}, weights_only=False)\n"
        "modules = {type(m).__module__ for m in model.modules()}\n"
        "assert {'flash_attn.modules.mha', 'flash_attn.modules.mlp', 'flash_attn.layers.rotary'} <= modules, modules\n"
        "for m in model.modules(): vars(m).pop('pos_idx_in_fp32', None)  # which 2.8.3 has no more\n"
        f"torch.save((model, expected), {there!r})"
    )
    assert visit.returncode == 0, visit.stderr
    back = forked(
        f"import flash_attn_compat; flash_attn_compat.patch({api!r})\n{ANSWER}import torch\n"
        f"model, expected = torch.load({there!r}, weights_only=False)\n"
        "torch.testing.assert_close(answer(model), expected)"
    )
    assert back.returncode == 0, back.stderr


@pytest.mark.parametrize("names", [CLASSES, FUNCTIONS], ids=["classes", "functions"])
def test_everything_is_pickled_by_the_module_in_which_flash_attn_defines_it(names: dict[str, str]) -> None:
    patch()
    for below, listed in names.items():
        for name in listed.split():
            value = getattr(importlib.import_module(f"flash_attn.{below}"), name)
            written = pickle.dumps(value, protocol=0)
            assert written.startswith(f"cflash_attn.{below}\n{name}\n".encode())
            assert pickle.loads(written) is value


def test_without_patch_and_after_unpatch_the_names_are_ours() -> None:
    rotary = importlib.import_module("flash_attn_compat.layers.rotary").RotaryEmbedding
    with patched():
        importlib.import_module("flash_attn.layers.rotary")
        assert rotary.__module__ == "flash_attn.layers.rotary"
    assert rotary.__module__ == "flash_attn_compat.layers.rotary"
    patch()
    assert rotary.__module__ == "flash_attn_compat.layers.rotary"  # nobody has imported it under the name
    importlib.import_module("flash_attn.modules.mha")
    assert rotary.__module__ == "flash_attn.layers.rotary"  # a part of what was imported
    unpatch()
    assert rotary.__module__ == "flash_attn_compat.layers.rotary"


def test_files_with_our_names_load_whether_or_not_it_is_patched() -> None:
    rotary = importlib.import_module("flash_attn_compat.layers.rotary").RotaryEmbedding
    written = pickle.dumps((rotary(8), flash_attn_compat.flash_attn_func))
    for options in ({}, {"api": "2.6"}):
        with patched(**options):
            importlib.import_module("flash_attn.layers.rotary")
            module, function = pickle.loads(written)
            assert type(module) is rotary and function is flash_attn_compat.flash_attn_func


def test_every_global_of_a_pickle_can_be_looked_up_under_either_interface() -> None:
    for api in ("2.6", "2.8", "2.6"):
        with patched(api):
            for below in CLASSES | FUNCTIONS:
                module = importlib.import_module(f"flash_attn.{below}")
                for value in public(vars(module)):
                    assert pickle.loads(pickle.dumps(value)) is value


def public(namespace: dict[str, object]) -> Iterator[object]:
    for name, value in namespace.items():
        if getattr(value, "__qualname__", None) == name and getattr(value, "__module__", "").startswith("flash_attn"):
            yield value


def test_a_pickle_under_the_name_holds_no_name_of_ours() -> None:
    with patched():
        mha = importlib.import_module("flash_attn.modules.mha")
        options = dict(rotary_emb_dim=4, use_flash_attn=True, use_alibi=True, fused_bias_fc=True, return_residual=True)
        written = pickle.dumps(mha.MHA(16, 4, dwconv=False, **options))
    words = {str(argument) for _, argument, _ in pickletools.genops(written)}
    assert not [word for word in words if "flash_attn_compat" in word]


@pytest.mark.skipif(not hasattr(torch.serialization, "safe_globals"), reason="torch.serialization has no safe_globals")
def test_a_class_that_is_allowed_loads_with_weights_only(tmp_path: Path) -> None:
    with patched():
        loss = importlib.import_module("flash_attn.losses.cross_entropy").CrossEntropyLoss
        torch.save(loss(), tmp_path / "loss.pt")
        with torch.serialization.safe_globals([loss, set]):
            assert type(torch.load(tmp_path / "loss.pt", weights_only=True)) is loss
