"""diffusers' attention backends `flash` and `flash_varlen` against `native`, and a tiny transformer that uses them."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest
import torch

from tests.forms.plain import pairwise

pytestmark = pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="diffusers is not installed")


@pytest.fixture(scope="module")
def dispatch(patched):
    """diffusers looks for flash-attn once, at its import: one imported before by another test is imported anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "diffusers"]:
        del sys.modules[name]
    return importlib.import_module("diffusers.models.attention_dispatch")


def attend(dispatch, backend, *inputs, **options):
    with dispatch.attention_backend(backend):
        return dispatch.dispatch_attention_fn(*inputs, **options)


def test_it_takes_us_for_flash_attn(dispatch):
    checks = importlib.import_module("diffusers.utils.import_utils")
    assert checks.is_flash_attn_available() and checks.is_flash_attn_version(">=", "2.6.3")
    assert dispatch._wrapped_flash_attn_forward is not None


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


def test_varlen_with_a_key_mask_equals_native(dispatch, calls):
    q, k, v = (torch.randn(3, 16, 2, 32, dtype=torch.float16) for _ in range(3))
    mask = torch.ones(3, 16, dtype=torch.bool)
    mask[0, 9:], mask[1, 1:] = False, False
    expected = attend(dispatch, "native", q, k, v, attn_mask=mask[:, None, None])
    got = attend(dispatch, "flash_varlen", q, k, v, attn_mask=mask)
    assert calls() == 1
    torch.testing.assert_close(got, expected, atol=4e-3, rtol=0)


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
