"""Embeddings of tokens, positions, types and image patches against lookups and sums written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_attn_compat.layers.patch_embed import PatchEmbed
from flash_attn_compat.modules.embedding import (
    BertEmbeddings,
    ColumnParallelEmbedding,
    GPT2Embeddings,
    VocabParallelEmbedding,
)
from flash_attn_compat.ops.fused_dense import FusedDense
from tests.plain import Parameters, check_module, pairwise
from tests.support import randn

VOCAB, D, POSITIONS = 11, 6, 9
IDS = torch.tensor([[1, 4, 4, 0], [10, 2, 1, 7]])
PLACES = torch.tensor([[3, 3, 0, 8], [1, 2, 5, 5]])
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def plain_sum(params: Parameters, ids: Tensor, places: Tensor | None = None, types: Tensor | None = None) -> Tensor:
    """Of tokens, projected, and their positions and types."""
    out = params["word_embeddings.weight"][ids]
    if "project_in.weight" in params:
        out = out @ params["project_in.weight"].T
    if "position_embeddings.weight" in params:
        out = out + params["position_embeddings.weight"][torch.arange(ids.shape[1]) if places is None else places]
    if "token_type_embeddings.weight" in params:
        out = out + params["token_type_embeddings.weight"][torch.zeros_like(ids) if types is None else types]
    return out


@pytest.mark.parametrize(
    ("module_class", "dtype", "positions", "more"),
    pairwise((GPT2Embeddings, BertEmbeddings), DTYPES, (POSITIONS, 0), (False, True)),
)
def test_embeddings_are_tokens_plus_positions_plus_types(
    module_class: Any, dtype: torch.dtype, positions: int, more: bool
) -> None:
    """GPT-2's may be projected, BERT's may have types."""
    if module_class is GPT2Embeddings:
        module: Any = GPT2Embeddings(D, VOCAB, positions, word_embed_proj_dim=3 if more else None, dtype=dtype)
        names, inputs = ["project_in"] * more, [IDS, PLACES]
    else:
        module = BertEmbeddings(D, VOCAB, positions, 2 if more else 0, dtype=dtype)
        names, inputs = ["token_type_embeddings"] * more, [IDS, PLACES, torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0]])]
    names += ["word_embeddings", *["position_embeddings"] * bool(positions)]
    assert set(module.state_dict()) == {f"{name}.weight" for name in names}
    check_module(module, plain_sum, IDS)
    check_module(module, plain_sum, *inputs)


def test_the_padding_token_starts_at_zero_and_gets_no_gradient() -> None:
    for module in (GPT2Embeddings(D, VOCAB, 0, padding_idx=4), BertEmbeddings(D, VOCAB, 0, 0, padding_idx=4)):
        module(IDS).sum().backward()
        assert (module.word_embeddings.weight[4] == 0).all() and (module.word_embeddings.weight.grad[4] == 0).all()


def test_parallel_embeddings_without_a_group_are_ordinary() -> None:
    for module in (VocabParallelEmbedding(VOCAB, D), ColumnParallelEmbedding(VOCAB, D)):
        assert torch.equal(module(IDS), module.weight[IDS])


def plain_patches(params: Parameters, x: Tensor, norm: bool = False, flatten: bool = True) -> Tensor:
    """The convolution that the linear layer stands for."""
    weight, bias = params["proj.weight"], params.get("proj.bias")
    out = F.conv2d(x, weight.view(-1, 3, 2, 4), bias, stride=(2, 4)).permute(0, 2, 3, 1)
    out = out.flatten(1, 2) if flatten else out
    return F.layer_norm(out, out.shape[-1:], params["norm.weight"], params["norm.bias"]) if norm else out


@pytest.mark.parametrize(("dtype", "flatten", "bias", "norm", "fused"), pairwise(DTYPES, *[(False, True)] * 4))
def test_patch_embedding_is_a_convolution(
    dtype: torch.dtype, flatten: bool, bias: bool, norm: bool, fused: bool
) -> None:
    module = PatchEmbed((4, 8), (2, 4), 3, D, nn.LayerNorm if norm else None, flatten, bias, fused).to(dtype)
    assert isinstance(module.proj, FusedDense) == (fused and bias)
    assert module.grid_size == (2, 2) and module.num_patches == 4 and module.proj.weight.shape == (D, 24)
    x = randn(2, 3, 4, 8, dtype=dtype)
    check_module(module, lambda params, x: plain_patches(params, x, norm, flatten), x)
