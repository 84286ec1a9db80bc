"""Modules named flash_attn.X are flash_attn_compat's own; modules that flash-attn 2.8 lacks stay absent."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pickle
import pkgutil
import textwrap
from pathlib import Path

import pytest

import flash_attn_compat
from flash_attn_compat.dropin import patch
from flash_attn_compat.dropin.finder import MIRRORED
from flash_attn_compat.installed import SITE, SITE_2_6
from tests.mirror.test_interfaces import SIGNATURES
from tests.tools.interpreters import forked

ROOT = Path(flash_attn_compat.__file__).parent
MIRRORED_MODULES = sorted(
    module.name.removeprefix("flash_attn_compat.")
    for module in pkgutil.walk_packages([str(ROOT)], "flash_attn_compat.", onerror=lambda name: None)
    if module.name.split(".")[1] in MIRRORED
)
SITE_FILES = Path(SITE) / "flash_attn"
ABSENT = [
    "flash_attn_interface",  # FlashAttention 3
    "flash_attn_3",
    "flash_attn.cute",  # FlashAttention 4
    "flash_attn.flash_attention",  # FlashAttention 1
    "flash_attn.flash_blocksparse_attention",
    "flash_attn.models",
    "flash_attn.models.gpt",
    "flash_attn.engine",  # ours alone
    "flash_attn.backends",
    "flash_attn.naming",
    "flash_attn.cli",
    "flash_attn.utils.library",  # nobody imports them but flash-attn's own modules
    "flash_attn.utils.torch",
    "flash_attn.ops.not_there",
]


@pytest.mark.parametrize("name", MIRRORED_MODULES)
def test_a_submodule_is_the_same_object_with_its_spec_untouched(name):
    ours = importlib.import_module(f"flash_attn_compat.{name}")
    patch()
    theirs = importlib.import_module(f"flash_attn.{name}")
    assert theirs is ours
    assert ours.__spec__.name == f"flash_attn_compat.{name}"
    assert importlib.util.find_spec(f"flash_attn.{name}") is not None


def test_names_that_flash_attn_2_does_not_have_are_absent():
    patch()
    for name in ABSENT:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


@pytest.mark.parametrize(
    "statement",
    ["import flash_attn.models", "from flash_attn import models", "from flash_attn.models.gpt import GPTLMHeadModel"],
)
def test_whole_models_are_refused_with_the_reason(statement):
    patch()
    with pytest.raises(ImportError, match="is not part of flash_attn_compat"):
        exec(statement)


# What public code imports, one statement each: a single absent name fails the whole of it.
IMPORTS = [
    "from flash_attn.modules.block import Block, ParallelBlock",
    "from flash_attn.modules.embedding import BertEmbeddings, GPT2Embeddings, ParallelGPT2Embeddings",
    "from flash_attn.modules.mha import MHA, CrossAttention, FlashCrossAttention, LinearResidual, ParallelMHA",
    "from flash_attn.modules.mha import flash_attn_kvpacked_func, flash_attn_varlen_kvpacked_func",
    "from flash_attn.modules.mlp import FusedMLP, GatedMlp, Mlp, ParallelFusedMLP, ParallelGatedMlp, ParallelMLP",
    "from flash_attn.ops.fused_dense import ColumnParallelLinear, FusedDense, RowParallelLinear, fused_dense_func",
    "from flash_attn.ops.fused_dense import FusedDenseFunc, FusedMLP, ParallelFusedMLP, fused_mlp_func",
    "from flash_attn.ops.layer_norm import DropoutAddLayerNormFn",
    "from flash_attn.ops.triton.layer_norm import layer_norm_fn, layer_norm_ref, rms_norm_ref",
    "from flash_attn.ops.triton.layernorm import RMSNorm, layer_norm_fn, layer_norm_ref, rms_norm_fn, rms_norm_ref",
    "from flash_attn.layers.patch_embed import PatchEmbed",
    "from flash_attn.utils.benchmark import benchmark_all, benchmark_backward, benchmark_combined, benchmark_forward",
    "from flash_attn.utils.benchmark import benchmark_fwd_bwd, benchmark_memory, pytorch_profiler",
    "from flash_attn.utils.pretrained import state_dict_from_pretrained",
    "from flash_attn.utils.testing import attention_ref, generate_qkv, generate_random_padding_mask",
    "from flash_attn.utils.generation import GenerationMixin, InferenceParams, sample, update_graph_cache",
    "from flash_attn.ops.triton.linear import triton_dgrad_act, triton_linear_act",
    "from flash_attn.ops.triton.k_activations import Activation, gelu, gelu_approx, gelu_approx_grad, gelu_grad",
    "from flash_attn.ops.triton.mlp import FusedDenseSqreluDense, fused_dense_sqrelu_dense_function",
    "from flash_attn.flash_attn_triton import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func",
]


def test_imports_that_public_code_contains_work():
    patch()
    for statement in IMPORTS:
        exec(statement)


def test_the_package_has_a_real_spec_and_exactly_the_seven_functions():
    patch()
    import flash_attn

    functions = {name for name, value in vars(flash_attn).items() if inspect.isfunction(value)}
    assert functions == {name.rpartition(".")[2] for name in SIGNATURES if ".flash_attn_interface.flash_attn" in name}
    assert flash_attn.flash_attn_func is flash_attn_compat.flash_attn_func
    assert flash_attn.__spec__.name == "flash_attn" and flash_attn.__spec__.loader is not None
    assert inspect.getsource(flash_attn)


def test_a_function_pickled_under_the_name_comes_back_as_the_same_object():
    patch()
    from flash_attn import flash_attn_func

    assert pickle.loads(pickle.dumps(flash_attn_func)) is flash_attn_func


def test_every_module_beside_the_package_has_a_file_and_each_file_is_listed() -> None:
    """Submodules of packages need no files: a package's path is that of our own."""
    files = {path.relative_to(SITE_FILES) for path in SITE_FILES.rglob("*.py")}
    folders = {name for name in MIRRORED if (ROOT / name).is_dir()}
    wanted = {Path(name, "__init__.py") if name in folders else Path(f"{name}.py") for name in MIRRORED}
    assert files == {Path("__init__.py"), *wanted}, "copy a neighbour, add it to SOURCES.txt"
    contents = {(SITE_FILES / path).read_text() for path in files - {Path("__init__.py")}}
    assert len(contents) == 1, "they are all alike"
    for site in (SITE, SITE_2_6):
        (sources,) = Path(site).glob("*.dist-info/SOURCES.txt")
        told = sorted((Path(site) / line).resolve() for line in sources.read_text().splitlines())
        assert told == sorted([*SITE_FILES.rglob("*.py"), Path(SITE) / "flash_attn_2_cuda.py"])
        assert not list(Path(site).glob("*.dist-info/RECORD")), "pip in a child would remove the files"


def test_a_file_that_is_run_although_there_is_a_finder_leads_to_our_module() -> None:
    code = """
        import flash_attn_compat, sys
        flash_attn_compat.patch()
        import flash_attn
        from flash_attn_compat.dropin import finder
        finder.remove_from_meta_path()
        for name in ("bert_padding", "layers", "layers.rotary"):
            assert sys.modules.pop("flash_attn." + name, None) is None
        import flash_attn.bert_padding, flash_attn.layers, flash_attn_2_cuda
        assert sys.modules["flash_attn.bert_padding"] is flash_attn_compat.bert_padding
        assert sys.modules["flash_attn.layers"] is flash_attn_compat.layers
        assert flash_attn_2_cuda is flash_attn_compat.flash_attn_2_cuda
        """
    answer = forked(textwrap.dedent(code))
    assert answer.returncode == 0, answer.stderr
