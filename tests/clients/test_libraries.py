"""Libraries, unmodified, after patch(), trainers among them; flash-attn's own Python layer on our raw functions."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_attn_compat
from flash_attn_compat import fa3, flash_attn_func, installed
from flash_attn_compat.dropin.hub_kernels import FOLDERS, LOCAL_KERNELS, NAMES
from tests.forms.plain import pairwise
from tests.forms.support import load_file
from tests.tools.interpreters import forked, forked_child

# --------------------------------- `kernels`, which loads kernels of Hugging Face's hub, takes our builds for downloads

GET = """
import kernels
versions = ("2", {"version": 3}), ("2", {"version": 4}), ("2", {"revision": "v1"}), ("", {"revision": "main"})
for name, which in versions:
    got = kernels.get_kernel(f"kernels-community/flash-attn{name}", **which)
    import flash_attn_compat as ours
    assert got.flash_attn_func is ours.flash_attn_func and got.flash_attn_with_kvcache is ours.flash_attn_with_kvcache
fa3 = kernels.get_kernel("kernels-community/flash-attn3", revision="main").flash_attn_interface
from flash_attn_compat import fa3 as ours
assert fa3.flash_attn_func is ours.flash_attn_func
"""
DIFFUSERS = """
import torch, flash_attn_compat
from diffusers.models import attention_dispatch as dispatch
q, k, v = (torch.randn(1, 6, 2, 16) for _ in range(3))
for name in ("flash_hub", "flash_varlen_hub"):
    backend = dispatch.AttentionBackendName(name)
    dispatch._maybe_download_kernel_for_backend(backend)
    flash_attn_compat.reset_backend_counts()
    found = dispatch.dispatch_attention_fn(q, k, v, backend=backend)
    assert flash_attn_compat.backend_counts(), name
    expected = dispatch.dispatch_attention_fn(q, k, v, backend=dispatch.AttentionBackendName.NATIVE)
    torch.testing.assert_close(found, expected)
"""


@pytest.mark.parametrize(("packages", "code"), [(["kernels"], GET), (["kernels", "diffusers"], DIFFUSERS)])
def test_a_child_gets_our_functions_by_the_names_of_the_hub(packages: list[str], code: str) -> None:
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed")
    with flash_attn_compat.patched(hub_kernels=True):
        answer = forked_child(code)
    assert answer.returncode == 0, answer.stderr[-3000:]


ENTRIES = [f"{name}={folder}" for name, folder in FOLDERS.items()]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ENTRIES),
        ("another/kernel=/there", ["another/kernel=/there", *ENTRIES]),
        (f"{NAMES[0]}=/theirs", [f"{NAMES[0]}=/theirs", *ENTRIES[1:]]),
        (f"{NAMES[1]}=/theirs:{NAMES[0]}=/theirs", [f"{NAMES[1]}=/theirs", f"{NAMES[0]}=/theirs", ENTRIES[2]]),
    ],
)
def test_the_setting_keeps_its_value_and_is_restored(
    given: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LOCAL_KERNELS, raising=False)
    if given is not None:
        monkeypatch.setenv(LOCAL_KERNELS, given)
    with flash_attn_compat.patched(hub_kernels=True):
        assert os.environ[LOCAL_KERNELS] == ":".join(expected)
    assert os.environ.get(LOCAL_KERNELS) == given
    with flash_attn_compat.patched():
        assert os.environ.get(LOCAL_KERNELS) == given


def test_each_hub_build_names_its_torch_variant() -> None:
    builds = [build for folder in sorted(set(FOLDERS.values())) for build in sorted(folder.glob("torch-*"))]
    assert len(builds) == 10
    for build in builds:
        told = json.loads((build / "metadata.json").read_text())
        backend, version = told["backend"]["type"], build.parent.name[-1]
        assert build.name == f"torch-{backend}" and told["id"].endswith(backend)
        assert told["name"] == f"flash-attn{version}"
        found: dict[str, Any] = {}
        exec((build / "__init__.py").read_text(), found)
        assert found["flash_attn_func"] is found["flash_attn_interface"].flash_attn_func
        assert found["flash_attn_func"] is (fa3.flash_attn_func if version == "3" else flash_attn_func)


# ---------------------------------------------------------------- diffusers

needs_diffusers = pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="diffusers is not installed")


@pytest.fixture(scope="module")
def dispatch(patched):
    """diffusers looks for flash-attn once, at its import: one imported before by another test is imported anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "diffusers"]:
        del sys.modules[name]
    return importlib.import_module("diffusers.models.attention_dispatch")


def attend(dispatch, backend, *inputs, **options):
    with dispatch.attention_backend(backend):
        return dispatch.dispatch_attention_fn(*inputs, **options)


@needs_diffusers
def test_it_takes_us_for_flash_attn(dispatch):
    checks = importlib.import_module("diffusers.utils.import_utils")
    assert checks.is_flash_attn_available() and checks.is_flash_attn_version(">=", "2.6.3")
    assert dispatch._wrapped_flash_attn_forward is not None


@needs_diffusers
@pytest.mark.parametrize(
    ("dtype", "backend", "is_causal"),
    pairwise((torch.float16, torch.bfloat16), ("flash", "flash_varlen"), (False, True)),
)
def test_a_backend_equals_native_in_output_and_gradients(dispatch, calls, backend, dtype, is_causal):
    inputs = [torch.randn(2, 24, 4, 32, dtype=dtype, requires_grad=True) for _ in range(3)]
    weights = torch.randn(2, 24, 4, 32, dtype=dtype)
    expected = attend(dispatch, "native", *inputs, is_causal=is_causal)
    assert calls() == 0
    got = attend(dispatch, backend, *inputs, is_causal=is_causal)
    assert calls() == 1
    limit = 4e-3 if dtype is torch.float16 else 3e-2
    for a, b in zip(
        [got, *torch.autograd.grad(got, inputs, weights)], [expected, *torch.autograd.grad(expected, inputs, weights)]
    ):
        assert float((a - b).detach().abs().max()) <= limit * float(b.detach().abs().max())


@needs_diffusers
def test_varlen_with_a_key_mask_equals_native(dispatch, calls):
    q, k, v = (torch.randn(3, 16, 2, 32, dtype=torch.float16) for _ in range(3))
    mask = torch.ones(3, 16, dtype=torch.bool)
    mask[0, 9:], mask[1, 1:] = False, False
    expected = attend(dispatch, "native", q, k, v, attn_mask=mask[:, None, None])
    got = attend(dispatch, "flash_varlen", q, k, v, attn_mask=mask)
    assert calls() == 1
    torch.testing.assert_close(got, expected, atol=4e-3, rtol=0)


@needs_diffusers
def test_a_tiny_transformer_gives_the_same_image_on_flash(dispatch, calls):
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    ).to(torch.bfloat16)  # fmt: skip
    shapes = {"hidden_states": (1, 16, 4), "encoder_hidden_states": (1, 6, 32), "pooled_projections": (1, 32)}
    shapes |= {"timestep": (1,), "img_ids": (16, 3), "txt_ids": (6, 3)}
    inputs = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    expected = model(**inputs).sample
    model.set_attention_backend("flash")
    got = model(**inputs).sample
    assert calls() == 2
    assert float((got - expected).detach().abs().max()) <= 4e-2 * float(expected.detach().abs().max())


# ----------------------------------------------------------- clients with attention of their own, or wrappers of models


@pytest.mark.usefixtures("patched")
def test_peft_trains_a_model_on_us(calls: Any) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    from tests.clients.models import build, token_ids

    model = build("llama", "flash_attention_2").train()
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    model(token_ids(1, 8)).logits.sum().backward()
    adapted = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert calls() == 2 and adapted and all("lora_" in name for name in adapted)


@pytest.mark.usefixtures("patched")
def test_accelerate_prepares_a_layer_before_us() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    from flash_attn import flash_attn_func

    accelerator = accelerate.Accelerator(cpu=True)
    layer = accelerator.prepare(torch.nn.Linear(8, 8))
    q = layer(torch.randn(1, 4, 2, 8))
    accelerator.backward(flash_attn_func(q, q, q).sum())
    assert layer.weight.grad is not None


@pytest.mark.skipif(importlib.util.find_spec("xformers") is None, reason="xformers is not installed")
def test_xformers_finds_the_name_at_its_import() -> None:
    code = "import xformers.ops, xformers.ops.fmha.flash as f; print('flash_attn' in sys.modules)"
    answer = forked("import sys, flash_attn_compat; flash_attn_compat.patch()\n" + code)
    assert answer.stdout.strip() == "True", answer.stderr[-3000:]


# ---------------------------------------------------------------- verl's padding utilities

FOUND = importlib.util.find_spec("verl")
MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 1, 1]])


@pytest.fixture
def utilities(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module alone: the rest of verl asks for a cluster."""
    if FOUND is None or not FOUND.submodule_search_locations:
        pytest.skip("verl is not installed")
    device = types.ModuleType("verl.utils.device")
    device.is_torch_npu_available = lambda **options: False  # type: ignore[attr-defined]
    for name, module in (("verl", types.ModuleType("verl")), ("verl.utils", types.ModuleType("verl.utils"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "verl.utils.device", device)
    return load_file(Path(next(iter(FOUND.submodule_search_locations))) / "utils" / "attention_utils.py")


@pytest.mark.usefixtures("patched")
def test_tokens_leave_their_padding_and_come_back_as_by_verls_own(utilities: Any) -> None:
    x = torch.randn(3, 5, 2, 4)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    packed, indices, *lengths = utilities.unpad_input(mine, MASK)
    assert utilities._unpad_input.__module__.startswith("flash_attn")
    own, own_indices, *own_lengths = utilities._fallback_unpad_input(theirs, MASK)
    assert torch.equal(packed, own) and torch.equal(indices, own_indices)
    assert [torch.as_tensor(n).tolist() for n in lengths] == [torch.as_tensor(n).tolist() for n in own_lengths]
    back = utilities.pad_input(packed, indices, 3, 5)
    assert torch.equal(back, utilities._fallback_pad_input(own, own_indices, 3, 5))
    (back * back).sum().backward()
    (own * own).sum().backward()
    assert torch.equal(mine.grad, theirs.grad)
    chosen = utilities.index_first_axis(x.flatten(0, 1), indices)
    assert torch.equal(chosen, utilities._fallback_index_first_axis(x.flatten(0, 1), indices))


# ------------------------------------------------------------ trainers: losses and outputs are those of the plain way


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


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("way", WAYS)
def test_sequences_without_padding_have_the_losses_of_eager_with_padding(way: str, calls: Any, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    eager = losses(trl, "eager", tmp_path)
    assert len(eager) == 3 and calls() == 0
    ours = losses(trl, "flash_attention_2", tmp_path, **WAYS[way])
    assert calls() > 0
    assert ours == pytest.approx(eager, rel=2e-3)


@pytest.mark.usefixtures("patched")
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


# ------------------------------------ flash-attn's own Python layer, unbuilt, on our raw functions, where it is there

SOURCE = os.environ.get("FLASH_ATTN_SOURCE")


@pytest.fixture
def official(monkeypatch):
    if SOURCE is None:
        pytest.skip("FLASH_ATTN_SOURCE does not name flash-attn's sources")
    monkeypatch.syspath_prepend(SOURCE)
    with flash_attn_compat.patched():
        import flash_attn

        assert Path(flash_attn.__file__).is_relative_to(SOURCE) and installed.swapped_package()
        yield flash_attn
    assert "flash_attn" not in sys.modules


def results(function, *inputs, **options):
    """Return the results, gradients and written caches of a call on fresh copies."""
    leaves = [x.clone() for x in inputs]
    if "cache_seqlens" in options:
        return [function(leaves[0], *leaves[2:], k=leaves[1], v=leaves[1], **options), *leaves[2:]]
    out = function(*[x.requires_grad_() for x in leaves], **options)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


DENSE = [(2, 17, heads, 32) for heads in (4, 2, 2)]
STARTS, CACHED = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 7, 7, 20], [5, 7]))
CALLS = [
    ("flash_attn_func", DENSE, {}),
    ("flash_attn_func", DENSE, {"window_size": (4, 0), "softcap": 3.0}),
    ("flash_attn_varlen_qkvpacked_func", [(20, 3, 4, 32)], {"cu_seqlens": STARTS, "max_seqlen": 13, "causal": True}),
    ("flash_attn_with_kvcache", [(2, 1, 4, 32), (2, 1, 2, 32), *[(2, 32, 2, 32)] * 2], {"cache_seqlens": CACHED}),
]


@pytest.mark.parametrize(("name", "shapes", "options"), CALLS)
def test_results_and_gradients_are_ours_to_the_bit(official, calls, name, shapes, options):
    inputs = [torch.randn(shape) for shape in shapes]
    found = results(getattr(official, name), *inputs, **options)
    assert calls() > 0
    assert all(map(torch.equal, found, results(getattr(flash_attn_compat, name), *inputs, **options)))


def test_it_compiles_as_one_graph(official):
    inputs = [torch.randn(shape) for shape in DENSE]
    torch._dynamo.reset()
    compiled = torch.compile(official.flash_attn_func, fullgraph=True, backend="aot_eager")
    expected = results(flash_attn_compat.flash_attn_func, *inputs, causal=True)
    assert all(map(torch.equal, results(compiled, *inputs, causal=True), expected))
