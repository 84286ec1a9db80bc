"""What looks for flash-attn finds it while patched and not afterwards; modules named flash_attn.X are our own."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import multiprocessing
import os
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import flash_attn_compat
from flash_attn_compat.dropin import patch, unpatch
from flash_attn_compat.dropin.finder import MIRRORED
from flash_attn_compat.installed import SITE, SITE_2_6
from tests.mirror.test_interfaces import SIGNATURES
from tests.tools.interpreters import WITHOUT_TORCH, forked, forked_child, fresh

FA3, FA4 = "flash_attn_compat.fa3", "flash_attn_compat.fa4"


def child_of(method: str) -> object:
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:  # its work is a function that no module of tests has to be imported for
        return pool.apply(importlib.util.find_spec, ("flash_attn",))


def on_disk(name: str) -> bool:
    """As unsloth asks (import_fixes) before it takes a flash_attn for version 4: a file or folder, nothing imported."""
    spec = importlib.util.find_spec("flash_attn")
    places = [os.path.join(place, name) for place in (spec.submodule_search_locations or () if spec else ())]
    suffixes = importlib.machinery.all_suffixes()
    return any(os.path.isdir(base) or any(os.path.isfile(base + suffix) for suffix in suffixes) for base in places)


def listed() -> set[str]:
    package = importlib.import_module("flash_attn")
    return {module.name for module in pkgutil.iter_modules(package.__path__)}


def files_that_exist() -> list[str]:
    files = importlib.metadata.files("flash-attn") or []
    return [str(file) for file in files if file.locate().is_file()]


METHODS = multiprocessing.get_all_start_methods()
LOOKS: dict[str, Callable[[], object]] = {
    "find_spec of the package": lambda: importlib.util.find_spec("flash_attn"),
    "find_spec of a module": lambda: importlib.util.find_spec("flash_attn.bert_padding"),
    "find_spec of a deep module": lambda: importlib.util.find_spec("flash_attn.ops.triton.rotary"),
    "find_spec of the extension": lambda: importlib.util.find_spec("flash_attn_2_cuda"),
    "import": lambda: importlib.import_module("flash_attn"),
    "metadata flash_attn": lambda: importlib.metadata.version("flash_attn"),
    "metadata flash-attn": lambda: importlib.metadata.version("flash-attn"),
    "metadata Flash.Attn": lambda: importlib.metadata.version("Flash.Attn"),
    "the disk": lambda: on_disk("flash_attn_interface") and on_disk("layers") and not on_disk("cute"),
    "pkgutil.iter_modules": lambda: "flash_attn_interface" in listed(),
    "metadata files": lambda: any(name.endswith("flash_attn/flash_attn_interface.py") for name in files_that_exist()),
    "packages_distributions": lambda: importlib.metadata.packages_distributions().get("flash_attn"),
    **{method: lambda method=method: child_of(method) for method in ("fork", "spawn") if method in METHODS},
}


def finds(look: Callable[[], object]) -> bool:
    try:
        return bool(look())
    except ImportError:  # a distribution's PackageNotFoundError is one
        return False


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_look_finds_flash_attn_while_patched_and_nothing_afterwards(look):
    assert not finds(look)
    patch()
    assert finds(look)
    unpatch()
    assert not finds(look)


class Client(NamedTuple):
    """A client's check before it uses flash-attn: the versions it accepts, and its unguarded imports."""

    lowest: tuple[int, ...]
    highest: tuple[int, ...]
    imports: tuple[str, ...]
    refuses_2_6: bool = False


_PUBLIC = "from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache"
_PRIVATE = "from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_backward"
_PRIVATE_VARLEN = "from flash_attn.flash_attn_interface import _flash_attn_varlen_forward, _flash_attn_varlen_backward"
_ANY = (0,), (9,)
CLIENTS = {
    "TransformerEngine": Client((2, 1, 1), (2, 8, 4), (
        "from flash_attn_2_cuda import varlen_bwd",
        "from flash_attn.flash_attn_interface import flash_attn_func, flash_attn_varlen_func",
        _PRIVATE, _PRIVATE_VARLEN,
    )),
    "Megatron-Core": Client(*_ANY, (_PUBLIC, "from flash_attn.layers.rotary import apply_rotary_emb")),
    "xformers 0.0.35": Client((2, 7, 1), (2, 8, 4), (
        "from flash_attn.flash_attn_interface import flash_attn_gpu",
        "flash_attn_gpu.fwd, flash_attn_gpu.bwd, flash_attn_gpu.varlen_fwd, flash_attn_gpu.varlen_bwd",
    ), refuses_2_6=True),
    "diffusers 0.42": Client((2, 6, 3), (9,), (
        "from flash_attn.flash_attn_interface import _wrapped_flash_attn_forward, _wrapped_flash_attn_backward",
    ), refuses_2_6=True),  # not by its version: it has no such functions
    "ring-flash-attn, yunchang": Client((2, 7, 0), (9,), (_PRIVATE, _PRIVATE_VARLEN), refuses_2_6=True),
    "DeepSpeed's FPDT": Client(*_ANY, (_PRIVATE,)),
    "SGLang, nano-vllm": Client(*_ANY, (_PUBLIC,)),
}  # fmt: skip


def accepts(client: Client) -> bool:
    version = tuple(map(int, importlib.metadata.version("flash-attn").split(".")[:3]))
    if not client.lowest <= version <= client.highest:
        return False
    found: dict[str, Any] = {}
    try:
        for statement in client.imports:
            exec(statement, found)
    except ImportError:
        return False
    return True


@pytest.mark.parametrize("api", ["2.6", "2.8"])
def test_clients_detection_lines_accept_this_package(api: str) -> None:
    patch(api)
    accepted = [name for name, client in CLIENTS.items() if accepts(client)]
    assert accepted == [name for name, client in CLIENTS.items() if api == "2.8" or not client.refuses_2_6]


def test_a_pkg_resources_loaded_before_sees_the_distribution_and_forgets_it():
    pkg_resources = pytest.importorskip("pkg_resources", reason="setuptools 82 and later have no pkg_resources")
    patch()
    assert pkg_resources.get_distribution("flash-attn").version == "2.8.3"
    assert pkg_resources.require("flash-attn>=2.5")
    unpatch()
    with pytest.raises(pkg_resources.DistributionNotFound):
        pkg_resources.get_distribution("flash-attn")


def test_lightning_requirement_cache_is_satisfied():
    utilities = pytest.importorskip("lightning_utilities.core.imports", reason="lightning-utilities is not installed")
    assert not utilities.RequirementCache("flash-attn>=2.0.0.post1")
    patch()
    assert utilities.RequirementCache("flash-attn>=2.0.0.post1")


def test_patching_and_find_spec_import_neither_torch_nor_the_module():
    answer = fresh(
        "-c",
        "import flash_attn_compat.dropin as n, importlib.util as u, sys; n.patch(); u.find_spec('flash_attn');"
        "assert 'torch' not in sys.modules and 'flash_attn' not in sys.modules;"
        "assert u.find_spec('flash_attn.losses.cross_entropy').origin.endswith('cross_entropy.py');"
        "assert 'flash_attn_compat.losses.cross_entropy' not in sys.modules; n.unpatch()",
    )
    assert answer.returncode == 0, answer.stderr


CALL = (
    "import torch; from torch.nn.attention.varlen import varlen_attn; q = torch.ones(2, 1, 8);"
    "s = torch.tensor([0, 2], dtype=torch.int32); print(varlen_attn(q, q, q, s, s, 2, 2).sum().item())"
)
OF_2_6 = (
    "import importlib.metadata as m, flash_attn, flash_attn.bert_padding as b, flash_attn_compat as c, torch;"
    "c.patch(); print(flash_attn.__version__, m.version('flash-attn'), b.__name__);"
    "print(hasattr(torch.ops.flash_attn, '_flash_attn_forward'))"  # which 2.6 did not have
)
# options of patch(): what a child does, and prints
CHILDREN: list[tuple[dict[str, Any], str, str]] = [
    ({}, "import flash_attn_compat as c, flash_attn; c.patch(); c.unpatch(); print(flash_attn.__version__)", "2.8.3"),
    ({"api": "2.6"}, OF_2_6, "2.6.3 2.6.3 flash_attn_compat.api_2_6.bert_padding False"),
    ({"interfaces": ("fa3",)}, "import flash_attn_interface as f; print(f.flash_attn_func.__module__)", FA3),
    ({"interfaces": ("fa4",)}, "from flash_attn.cute import interface as f; print(f.flash_attn_func.__module__)", FA4),
    ({"varlen_attn": True}, CALL, "16.0"),
]


@pytest.mark.parametrize(("options", "code", "printed"), CHILDREN, ids=[str(options) for options, *_ in CHILDREN])
def test_a_child_process_finds_the_patched_modules(options: dict[str, Any], code: str, printed: str) -> None:
    if "varlen_attn" in options:
        pytest.importorskip("torch.nn.attention.varlen", reason="torch.nn.attention.varlen came with torch 2.10")
    patch(**options)
    answer = forked_child(f"{WITHOUT_TORCH}\n{code}")
    assert answer.stdout.split() == printed.split(), answer.stderr


def test_a_child_finds_the_package_though_its_own_path_lacks_it_and_runs_the_hidden_sitecustomize(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.theirs_ran = True")
    patch()
    ours = [entry for entry in os.environ["PYTHONPATH"].split(os.pathsep) if "dropin" in entry]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*ours, str(tmp_path)])}
    code = (
        "import builtins, os, sys; os.chdir('/'); print(builtins.theirs_ran, sys.modules['sitecustomize'].__file__);"
        "import flash_attn, flash_attn.bert_padding; print(flash_attn.bert_padding.__name__)"
    )
    answer = forked_child(f"{WITHOUT_TORCH}\n{code}", environment)
    expected = ["True", str(tmp_path / "sitecustomize.py"), "flash_attn_compat.bert_padding"]
    assert answer.stdout.split() == expected, answer.stderr


# ---------------------------------------------------------- modules under the name, and those that flash-attn 2.8 lacks

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


def test_each_submodule_is_ours_with_its_spec_untouched():
    ours = {name: importlib.import_module(f"flash_attn_compat.{name}") for name in MIRRORED_MODULES}
    patch()
    for name, module in ours.items():
        assert importlib.import_module(f"flash_attn.{name}") is module
        assert module.__spec__.name == f"flash_attn_compat.{name}"
        assert importlib.util.find_spec(f"flash_attn.{name}") is not None, name


@pytest.mark.parametrize("api", ["2.6", "2.8"])
def test_names_that_flash_attn_2_does_not_have_are_absent_and_whole_models_say_why(api: str) -> None:
    patch(api)
    for name in ABSENT:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
    models = "import flash_attn.models", "from flash_attn import models", "from flash_attn.models.gpt import GPTModel"
    for statement in models:
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
    answer = forked("""
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
""")
    assert answer.returncode == 0, answer.stderr
