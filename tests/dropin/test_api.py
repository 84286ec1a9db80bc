"""Under the name: the interface of flash-attn 2.6, and pickles, which travel in either direction."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_attn_compat
from flash_attn_compat import flash_attn_interface as current
from flash_attn_compat.dropin import patch, patched, unpatch
from tests.forms.inputs import cumulative, qkv, randn
from tests.forms.support import write_package
from tests.tools.interpreters import forked, forked_each

VARIABLE = "FLASH_ATTN_COMPAT_API"


@pytest.fixture
def old() -> Any:
    patch(api="2.6")
    return lambda name: importlib.import_module(f"flash_attn.{name}")


def test_unpad_input_returns_four_values(old: Any) -> None:
    hidden, mask = randn(2, 3, 4), torch.tensor([[True, True, False], [True, False, False]])
    tokens, indices, cu_seqlens, max_seqlen = old("bert_padding").unpad_input(hidden, mask)
    assert torch.equal(tokens, hidden[mask]) and indices.tolist() == [0, 1, 3]
    assert cu_seqlens.tolist() == [0, 2, 3] and max_seqlen == 2
    assert len(flash_attn_compat.bert_padding.unpad_input(hidden, mask)) == 5


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_private_functions_have_their_old_shapes_and_todays_values(old: Any, packed: bool, dropout_p: float) -> None:
    q, k, v = (t.flatten(0, 1)[:7] for t in qkv()) if packed else qkv()
    kind = "_flash_attn_varlen" if packed else "_flash_attn"
    lengths = (cumulative(3, 4), cumulative(3, 4), 4, 4) if packed else ()
    interface = old("flash_attn_interface")
    torch.manual_seed(0)
    out, *inputs, padded, lse, dmask, rng_state = getattr(interface, f"{kind}_forward")(
        q, k, v, *lengths, dropout_p, 0.3, True, (4, 0), 0.0, None, dropout_p > 0
    )
    torch.manual_seed(0)
    expected = getattr(current, f"{kind}_forward")(
        q, k, v, *lengths, dropout_p, 0.3, True, 4, 0, 0.0, None, dropout_p > 0
    )
    for found, right in zip((out, lse, dmask, rng_state, padded, *inputs), (*expected, expected[0], q, k, v)):
        assert torch.equal(found, right)

    dout, grads = randn(*out.shape, seed=9), [torch.zeros_like(t) for t in (q, k, v)]
    tail = (0.0, None, False, rng_state)
    dq, dk, dv, softmax_d = getattr(interface, f"{kind}_backward")(
        dout, q, k, v, out, lse, *grads, *lengths, dropout_p, 0.3, True, (4, 0), *tail
    )
    assert all(found is given for found, given in zip((dq, dk, dv), grads))
    again = [torch.zeros_like(t) for t in grads]
    right_d = getattr(current, f"{kind}_backward")(
        dout, q, k, v, out, lse, *again, *lengths, dropout_p, 0.3, True, 4, 0, *tail
    )
    assert torch.equal(softmax_d, right_d) and all(torch.equal(a, b) for a, b in zip(grads, again))


def test_positional_arguments_land_where_2_6_had_them(old: Any) -> None:
    x, weight = randn(3, 8), randn(8)
    found = old("ops.triton.layer_norm").layer_norm_fn(
        x, weight, None, None, None, None, None, 1e-6, 0.0, None, False, False, True
    )
    torch.testing.assert_close(found, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight)
    logits, labels = randn(3, 8), torch.tensor([1, 7, 2])
    losses, _ = old("ops.triton.cross_entropy").cross_entropy_loss(logits, labels, 0.1)
    expected = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(losses, expected)
    assert old("layers.rotary").RotaryEmbedding(8, 10000.0, False, None, True, "cpu").inv_freq.device.type == "cpu"
    norm = old("ops.triton.layer_norm").RMSNorm(8, 1e-5, 0.0, "cpu", torch.float16)
    assert norm.weight.dtype == torch.float16

    function = old("ops.triton.layer_norm").rms_norm_fn
    with pytest.raises(TypeError, match="zero_centered_weight"):  # an argument of 2.8
        function(x, weight, None, zero_centered_weight=True)
    assert b"flash_attn.ops.triton.layer_norm" in pickle.dumps(function)


def test_unchanged_functions_are_shared_and_our_modules_stay_untouched(old: Any) -> None:
    import flash_attn

    assert flash_attn.flash_attn_func is flash_attn_compat.flash_attn_func
    assert old("modules.mha") is importlib.import_module("flash_attn_compat.modules.mha")
    for package, module, is_old in (
        ("layers", "rotary", True), ("layers", "patch_embed", False), ("ops", "activations", False),
        ("ops.triton", "layer_norm", True), ("ops.triton", "mlp", False),
    ):  # fmt: skip
        ours = importlib.import_module(f"flash_attn_compat.{package}.{module}")
        assert ours.__name__ == f"flash_attn_compat.{package}.{module}"
        found = getattr(old(package), module)  # as `from flash_attn.layers import rotary` does
        assert found.__name__ == ours.__name__.replace("compat", "compat.api_2_6") if is_old else found is ours
    assert flash_attn_compat.layers.rotary.__name__ == "flash_attn_compat.layers.rotary"
    with pytest.raises(ModuleNotFoundError):
        old("ops.not_there")


def test_version_metadata_and_raw_module_are_of_2_6_3_until_unpatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the argument or the variable, whose word counts less."""
    for variable, options, version in (
        (None, {"api": "2.6"}, "2.6.3"), (None, {}, "2.8.3"), ("2.6", {}, "2.6.3"), ("2.6", {"api": "2.8"}, "2.8.3")
    ):  # fmt: skip
        if variable:
            monkeypatch.setenv(VARIABLE, variable)
        with patched(**options):
            assert importlib.import_module("flash_attn").__version__ == version
            for name in ("flash-attn", "flash_attn", "Flash.Attn"):
                assert importlib.metadata.version(name) == version
            assert set(importlib.metadata.packages_distributions()["flash_attn"]) == {"flash-attn"}
            place = "api_2_6.flash_attn_2_cuda" if version == "2.6.3" else "flash_attn_2_cuda"
            assert importlib.import_module("flash_attn_2_cuda").__name__ == f"flash_attn_compat.{place}"
        assert os.environ.get(VARIABLE) == variable


def test_unknown_interfaces_and_changes_of_mind_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"api must be 2\.6 or 2\.8, got '2\.5'"):
        patch(api="2.5")
    patch(api="2.6")
    patch(api="2.6")
    patch()
    with pytest.raises(RuntimeError, match=r"patched already with the interface of 2\.6"):
        patch(api="2.8")
    unpatch()
    monkeypatch.setenv(VARIABLE, "2.7")
    with pytest.raises(ValueError, match=rf"{VARIABLE} must be 2\.6 or 2\.8"):
        patch()


WAYS = [
    "from flash_attn.layers import rotary as m",
    "import flash_attn.layers as l; m = l.rotary",
    "import flash_attn.ops as o; m = o.triton.layer_norm",
    "import flash_attn; from flash_attn import bert_padding as m",
    "import flash_attn.ops.triton.cross_entropy, flash_attn; m = flash_attn.ops.triton.cross_entropy",
]


def test_every_way_of_importing_finds_the_old_module_in_a_fresh_process() -> None:
    patching = "import flash_attn_compat as c; c.patch(api='2.6')"
    for statement, answer in zip(WAYS, forked_each([f"{patching}; {way}; print(m.__name__)" for way in WAYS])):
        assert answer.stdout.startswith("flash_attn_compat.api_2_6."), (statement, answer.stderr)


def test_a_real_package_is_put_aside_for_it(tmp_path: Path) -> None:
    """One that would serve 2.8 cannot serve this."""
    write_package(tmp_path, "__version__ = '2.8.3'\nreal = True\n", "2.8.3")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import flash_attn as real, flash_attn_compat as c;"
        "c.patch(api='2.6'); import flash_attn, importlib.metadata as m;"
        "print(flash_attn.__version__, m.version('flash-attn'));"
        "c.unpatch(); import flash_attn; print(flash_attn is real)"
    )
    answer = forked(code)
    assert answer.stdout.split() == ["2.6.3", "2.6.3", "True"], answer.stderr


def test_choosing_api_2_6_beside_xformers_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "xformers").mkdir()
    (tmp_path / "xformers/__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.warns(UserWarning, match=r"xformers.* accepts flash-attn 2\.7\.1 to 2\.8\.4") as told:
        patch(api="2.6")
        patch(api="2.6")
        unpatch()
        patch()
    assert len(told) == 1 and told[0].filename == __file__


def test_old_code_alone_can_have_the_old_unpad_input_beside_todays_version(tmp_path: Path) -> None:
    """As docs/monkeypatching.md says: for libraries that refuse the version 2.6.3, such as xformers."""
    (tmp_path / "old_code.py").write_text("from flash_attn.bert_padding import unpad_input")
    answer = forked(f"""
import sys, torch, flash_attn_compat
sys.path.insert(0, {str(tmp_path)!r})
flash_attn_compat.patch()
import flash_attn, flash_attn.bert_padding, old_code
from flash_attn_compat.api_2_6.bert_padding import unpad_input
old_code.unpad_input = unpad_input
given = torch.ones(2, 3, 4), torch.tensor([[1, 1, 0], [1, 1, 1]])
assert len(old_code.unpad_input(*given)) == 4 and len(flash_attn.bert_padding.unpad_input(*given)) == 5
assert tuple(map(int, flash_attn.__version__.split("."))) == (2, 8, 3)  # within xformers' 2.7.1 to 2.8.4
""")
    assert answer.returncode == 0, answer.stderr


# ----------------------------------------------------------- objects imported as flash_attn are pickled under that name

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


def test_a_model_saved_under_the_name_loads_where_only_flash_attn_is_and_comes_back(real: Path, tmp_path: Path) -> None:
    place = f"for api in ('2.6', '2.8'):\n    path = {str(tmp_path)!r} + '/' + api"
    for code in (
        f"""{ANSWER}
import flash_attn_compat, torch
{place}
    with flash_attn_compat.patched(api):
        exec({MODEL!r})
        torch.save((model, answer(model)), path)
""",
        f"""
import sys; sys.modules['flash_attn_compat'] = None
sys.path.insert(0, {str(real)!r})
import torch
{place}
    model, expected = torch.load(path, weights_only=False)
    modules = {{type(m).__module__ for m in model.modules()}}
    assert {{'flash_attn.modules.mha', 'flash_attn.modules.mlp', 'flash_attn.layers.rotary'}} <= modules, modules
    for m in model.modules(): vars(m).pop('pos_idx_in_fp32', None)  # which 2.8.3 has no more
    torch.save((model, expected), path)
""",
        f"""{ANSWER}
import flash_attn_compat, torch
{place}
    with flash_attn_compat.patched(api):
        model, expected = torch.load(path, weights_only=False)
        torch.testing.assert_close(answer(model), expected)
""",
    ):
        done = forked(code)
        assert done.returncode == 0, done.stderr


def test_everything_is_pickled_by_the_module_in_which_flash_attn_defines_it() -> None:
    patch()
    for names in (CLASSES, FUNCTIONS):
        for below, name in ((below, name) for below, listed in names.items() for name in listed.split()):
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
                for name, value in vars(module).items():
                    home = getattr(value, "__module__", None) or ""
                    if getattr(value, "__qualname__", None) == name and home.startswith("flash_attn"):
                        assert pickle.loads(pickle.dumps(value)) is value


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
