"""Embeddings of tokens, positions and token types, on one device and tensor-parallel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flash_attn_compat.utils.distributed import all_reduce, reduce_scatter


class GPT2Embeddings(nn.Module):
    """Token embeddings plus learned position embeddings.

    Args:
        max_position_embeddings: 0 or less for no position embeddings.
        word_embed_proj_dim: embed tokens in this many dimensions, then project to embed_dim (OPT-350m).
    """

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        padding_idx: int | None = None,
        word_embed_proj_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        word_dim = embed_dim if word_embed_proj_dim is None else word_embed_proj_dim
        self.word_embeddings = nn.Embedding(vocab_size, word_dim, padding_idx=padding_idx, **where)
        self.project_in = None if word_embed_proj_dim is None else nn.Linear(word_dim, embed_dim, bias=False, **where)
        self.max_position_embeddings = max_position_embeddings
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, **where)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return (batch, seqlen, embed_dim). Both ids are (batch, seqlen), positions 0, 1, ... by default."""
        embeddings: Tensor = self.word_embeddings(input_ids)
        if self.project_in is not None:
            embeddings = self.project_in(embeddings)
        if self.max_position_embeddings > 0:
            embeddings = embeddings + self.position_embeddings(_default_positions(input_ids, position_ids))
        return embeddings


class BertEmbeddings(nn.Module):
    """The sum of token, position and token type embeddings; positions or types are left out if their number is 0."""

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        type_vocab_size: int,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.word_embeddings = nn.Embedding(vocab_size, embed_dim, padding_idx=padding_idx, **where)
        self.max_position_embeddings = max_position_embeddings
        self.type_vocab_size = type_vocab_size
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, **where)
        if type_vocab_size > 0:
            self.token_type_embeddings = nn.Embedding(type_vocab_size, embed_dim, **where)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Return (batch, seqlen, embed_dim). All ids are (batch, seqlen), types 0 by default."""
        embeddings: Tensor = self.word_embeddings(input_ids)
        if self.max_position_embeddings > 0:
            embeddings = embeddings + self.position_embeddings(_default_positions(input_ids, position_ids))
        if self.type_vocab_size > 0:
            types = input_ids.new_zeros(input_ids.shape[1]) if token_type_ids is None else token_type_ids
            embeddings = embeddings + self.token_type_embeddings(types)
        return embeddings


class VocabParallelEmbedding(nn.Embedding):
    """Rank r holds the r-th part of the vocabulary, and returns zeros for tokens of other ranks."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        process_group: dist.ProcessGroup | None = None,
        padding_idx: int | None = None,
        **kwargs: Any,
    ) -> None:
        world_size = 1 if process_group is None else dist.get_world_size(process_group)
        if num_embeddings % world_size:
            raise ValueError(f"num_embeddings ({num_embeddings}) must be divisible by world_size ({world_size})")
        if world_size > 1 and padding_idx is not None:
            raise RuntimeError("ParallelEmbedding does not support padding_idx")
        super().__init__(num_embeddings // world_size, embedding_dim, padding_idx=padding_idx, **kwargs)
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., embedding_dim), to be summed over ranks, for token ids (...) of the whole vocabulary."""
        if self.process_group is None:
            return super().forward(input)
        local = input - dist.get_rank(self.process_group) * self.num_embeddings
        elsewhere = (local < 0) | (local >= self.num_embeddings)
        embeddings = super().forward(local.masked_fill(elsewhere, 0))
        return embeddings.masked_fill(elsewhere[..., None], 0.0)


class ColumnParallelEmbedding(nn.Embedding):
    """Rank r holds the r-th part of the embedding's dimensions."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        world_size = 1 if process_group is None else dist.get_world_size(process_group)
        if embedding_dim % world_size:
            raise ValueError(f"embedding_dim ({embedding_dim}) must be divisible by world_size ({world_size})")
        super().__init__(num_embeddings, embedding_dim // world_size, **kwargs)
        self.process_group = process_group


class ParallelGPT2Embeddings(nn.Module):
    """`GPT2Embeddings` over a process group: tokens split by vocabulary, positions by dimension.

    Args:
        sequence_parallel: each rank keeps its part of the first axis; otherwise all keep everything.
    """

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        process_group: dist.ProcessGroup,
        padding_idx: int | None = None,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert process_group is not None, "process_group is required; GPT2Embeddings works without one"
        where: dict[str, Any] = {"process_group": process_group, "device": device, "dtype": dtype}
        self.process_group = process_group
        self.sequence_parallel = sequence_parallel
        self.word_embeddings = VocabParallelEmbedding(vocab_size, embed_dim, padding_idx=padding_idx, **where)
        self.max_position_embeddings = max_position_embeddings
        if max_position_embeddings > 0:
            self.position_embeddings = ColumnParallelEmbedding(max_position_embeddings, embed_dim, **where)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, combine_batch_seqlen_dim: bool = False
    ) -> Tensor:
        """
        Args:
            input_ids, position_ids: (batch, seqlen), the same on every rank.
            combine_batch_seqlen_dim: the first axis of the result is batch * seqlen.
        Returns:
            (batch, seqlen, embed_dim) or (batch * seqlen, embed_dim); with sequence_parallel this rank's part of it.
        """
        embeddings: Tensor = self.word_embeddings(input_ids)
        if self.max_position_embeddings > 0:
            positions = self.position_embeddings(_default_positions(input_ids, position_ids))
            first = dist.get_rank(self.process_group) * positions.shape[-1]
            embeddings[..., first : first + positions.shape[-1]] += positions
        if combine_batch_seqlen_dim:
            embeddings = embeddings.flatten(0, 1)
        if dist.get_world_size(self.process_group) == 1:
            return embeddings
        return (reduce_scatter if self.sequence_parallel else all_reduce)(embeddings, self.process_group)


def _default_positions(input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
    if position_ids is not None:
        return position_ids
    return torch.arange(input_ids.shape[1], dtype=torch.long, device=input_ids.device)
