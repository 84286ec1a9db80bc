"""Libraries, unmodified, after patch(): `kernels`, diffusers, peft, accelerate, xformers, verl."""

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
from flash_attn_compat import fa3, flash_attn_func
from flash_attn_compat.dropin.hub_kernels import FOLDERS, LOCAL_KERNELS, NAMES
from tests.forms.plain import pairwise
from tests.forms.support import load_file
from tests.tools.interpreters import forked, forked_child

# --------------------------------- `kernels`, which loads kernels of Hugging Face's hub, takes our builds for downloads

GET = """
import kernels
got = kernels.get_kernel("kernels-community/{name}", {which})
import flash_attn_compat as ours
assert got.flash_attn_func is ours.flash_attn_func and got.flash_attn_with_kvcache is ours.flash_attn_with_kvcache
"""


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("flash-attn2", "version=3"),
        ("flash-attn2", "version=4"),
        ("flash-attn2", "revision='v1'"),
        ("flash-attn", "revision='main'"),
    ],
)
def test_get_kernel_gives_our_functions_in_a_child_too(name: str, which: str) -> None:
    pytest.importorskip("kernels", reason="kernels is not installed")
    with flash_attn_compat.patched(hub_kernels=True):
        answer = forked_child(GET.format(name=name, which=which))
    assert answer.returncode == 0, answer.stderr[-3000:]


GET_FA3 = """
import kernels
fa3 = kernels.get_kernel("kernels-community/flash-attn3", revision="main").flash_attn_interface
from flash_attn_compat import fa3 as ours
assert fa3.flash_attn_func is ours.flash_attn_func
"""


def test_get_kernel_gives_flash_attention_3s_interface() -> None:
    pytest.importorskip("kernels", reason="kernels is not installed")
    with flash_attn_compat.patched(hub_kernels=True):
        answer = forked_child(GET_FA3)
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


BUILDS = [build for folder in sorted(set(FOLDERS.values())) for build in sorted(folder.glob("torch-*"))]


@pytest.mark.parametrize("build", BUILDS, ids=[f"{build.parent.name}-{build.name}" for build in BUILDS])
def test_each_hub_build_names_its_torch_variant(build: Path) -> None:
    assert len(BUILDS) == 10
    told = json.loads((build / "metadata.json").read_text())
    backend, version = told["backend"]["type"], build.parent.name[-1]
    assert build.name == f"torch-{backend}" and told["id"].endswith(backend) and told["name"] == f"flash-attn{version}"
    found: dict[str, Any] = {}
    exec((build / "__init__.py").read_text(), found)
    assert found["flash_attn_func"] is found["flash_attn_interface"].flash_attn_func
    assert found["flash_attn_func"] is (fa3.flash_attn_func if version == "3" else flash_attn_func)


@pytest.mark.usefixtures("patched")
def test_diffusers_finds_it_by_its_own_names() -> None:
    pytest.importorskip("kernels", reason="kernels is not installed")
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    with flash_attn_compat.patched(hub_kernels=True):
        answer = forked_child(DIFFUSERS)
    assert answer.returncode == 0, answer.stderr[-3000:]


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
