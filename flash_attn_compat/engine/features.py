"""The vocabulary in which calls and backends are described: features of a call, and its traits.

Traits hold everything a backend may decide by, so a decision can be remembered per traits. They are
properties of shapes, dtypes and flags, never of values: computing them does not wait for a GPU.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch


class Feature(enum.IntFlag):
    """What a call may ask for beyond dense attention of equal heads. A backend serves what its table lists."""

    CAUSAL = enum.auto()
    WINDOW_LEFT = enum.auto()
    WINDOW_RIGHT = enum.auto()
    SOFTCAP = enum.auto()
    ALIBI = enum.auto()
    DROPOUT = enum.auto()
    SHARED_DROPOUT_MASK = enum.auto()
    GQA = enum.auto()
    VALUE_HEAD_DIM = enum.auto()
    VARLEN = enum.auto()
    SEQUSED_K = enum.auto()
    LEFTPAD_K = enum.auto()
    PAGED = enum.auto()
    APPEND = enum.auto()
    LSE = enum.auto()
    BACKWARD = enum.auto()
    GIVEN_LSE = enum.auto()
    LSE_GRADIENT = enum.auto()
    TRANSFORMS = enum.auto()
    DETERMINISTIC = enum.auto()
    SCALE_NOT_POSITIVE = enum.auto()
    BIAS = enum.auto()


DESCRIPTIONS: dict[Feature, str] = {
    Feature.CAUSAL: "causal masking",
    Feature.WINDOW_LEFT: "a left window",
    Feature.WINDOW_RIGHT: "a right window",
    Feature.SOFTCAP: "softcap",
    Feature.ALIBI: "ALiBi slopes",
    Feature.DROPOUT: "dropout",
    Feature.SHARED_DROPOUT_MASK: "a dropout mask that S_dmask or rng_state describes",
    Feature.GQA: "fewer key/value heads than query heads",
    Feature.VALUE_HEAD_DIM: "a value head_dim other than the key's",
    Feature.VARLEN: "packed sequences (cu_seqlens)",
    Feature.SEQUSED_K: "key lengths given per sequence (seqused_k, cache_seqlens)",
    Feature.LEFTPAD_K: "leftpad_k",
    Feature.PAGED: "paged keys and values (block_table, cache_batch_idx)",
    Feature.APPEND: "new keys and values for a cache",
    Feature.LSE: "returning softmax_lse",
    Feature.BACKWARD: "gradients",
    Feature.GIVEN_LSE: "a backward from an out and softmax_lse of the caller's",
    Feature.LSE_GRADIENT: "gradients of softmax_lse",
    Feature.TRANSFORMS: "forward-mode or higher-order differentiation and torch.func transforms",
    Feature.DETERMINISTIC: "gradients that are the same to the bit in every run",
    Feature.SCALE_NOT_POSITIVE: "a softmax_scale that is not positive",
    Feature.BIAS: "a dense mask",
}


def split(features: int) -> list[Feature]:
    """The single features in a combination, in declaration order."""
    return [feature for feature in Feature if features & feature]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Traits(NamedTuple):
    """Everything a dispatch decision may depend on.

    sq_vs_sk compares the two lengths: "=", "<", ">", or "?" where they differ per sequence.
    gpu: the model, since cards of one capability differ in speed, and what fails on one may work on another
    """

    device_type: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    sq_vs_sk: str
    features: int
    gpu: str | None = None

    @property
    def needs_backward(self) -> bool:
        return bool(self.features & (Feature.BACKWARD | Feature.GIVEN_LSE))
