"""The compiled step of `chunked`: off by default, as right as the plain one, given up after one failure."""

from __future__ import annotations

import warnings

import pytest
import torch

from flash_attn_compat import flash_attn_func, use_backend
from flash_attn_compat.backends import chunked, chunked_tiles
from flash_attn_compat.engine.compilation import OptionallyCompiled


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_nothing_is_compiled_unless_the_user_says_so(monkeypatch):
    monkeypatch.delenv("FLASH_ATTN_COMPAT_COMPILE", raising=False)
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: pytest.fail("compiled"))
    assert OptionallyCompiled(double)(torch.ones(1)).item() == 2


def test_a_failed_compilation_warns_once_and_is_not_tried_again(monkeypatch):
    tried = []

    def fails(*args):
        tried.append(1)
        raise RuntimeError("no compiler here")

    monkeypatch.setenv("FLASH_ATTN_COMPAT_COMPILE", "1")
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: fails)
    step = OptionallyCompiled(double)
    with pytest.warns(RuntimeWarning, match="no compiler here"):
        assert step(torch.ones(1)).item() == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step(torch.ones(1)).item() == 2
    assert len(tried) == 1


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("window_size", [(-1, -1), (40, 0)])
def test_the_fused_step_equals_the_plain_one(monkeypatch, softcap, window_size):
    q, k, v = (torch.randn(2, 150, 4, 16) for _ in range(3))
    arguments = {"causal": True, "softcap": softcap, "window_size": window_size, "return_attn_probs": True}
    monkeypatch.setattr(chunked_tiles, "_tile_size", lambda call, block: chunked_tiles.TileSize(1, 2, 64, 48))
    with use_backend("chunked"):
        plain = flash_attn_func(q, k, v, **arguments)
        monkeypatch.setenv("FLASH_ATTN_COMPAT_COMPILE", "1")
        # The step as the compiler gets it; compiling it here would take longer than all other tests.
        monkeypatch.setattr(torch, "compile", lambda function, **kwargs: function)
        monkeypatch.setattr(chunked, "_fused_weights", OptionallyCompiled(chunked._fused_weights._function))
        fused = flash_attn_func(q, k, v, **arguments)
    for a, b in zip(plain[:2], fused[:2]):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
