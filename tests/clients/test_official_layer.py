"""flash-attn's own Python layer, unbuilt, on our raw functions: FLASH_ATTN_SOURCE names a directory that holds it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import flash_attn_compat
from flash_attn_compat import installed

SOURCE = os.environ.get("FLASH_ATTN_SOURCE")
pytestmark = pytest.mark.skipif(not SOURCE, reason="FLASH_ATTN_SOURCE does not name flash-attn's sources")


@pytest.fixture(autouse=True)
def official(monkeypatch):
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
STARTS, LENGTHS = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 7, 7, 20], [5, 7]))
CALLS = [
    ("flash_attn_func", DENSE, {}),
    ("flash_attn_func", DENSE, {"window_size": (4, 0), "softcap": 3.0}),
    ("flash_attn_varlen_qkvpacked_func", [(20, 3, 4, 32)], {"cu_seqlens": STARTS, "max_seqlen": 13, "causal": True}),
    ("flash_attn_with_kvcache", [(2, 1, 4, 32), (2, 1, 2, 32), *[(2, 32, 2, 32)] * 2], {"cache_seqlens": LENGTHS}),
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
