"""The vocabulary in which calls and backends are described: features of a call, and its traits.

Traits hold everything a backend may decide by, so a decision can be remembered per traits. They are
properties of shapes, dtypes and flags, never of values: computing them does not wait for a GPU.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

import torch


class Feature(enum.IntEnum):
    """A feature that a call may need beyond plain dense attention, with its description for messages.

    Each feature is one bit. A backend gets only calls whose features it lists. Combinations of features are plain
    ints, which take a twentieth of the time of an IntFlag's.
    """

    description: str

    def __new__(cls, description: str) -> Feature:
        feature = int.__new__(cls, 1 << len(cls.__members__))
        feature._value_, feature.description = int(feature), description
        return feature

    CAUSAL = "causal masking"
    WINDOW_LEFT = "a left window"
    WINDOW_RIGHT = "a right window"
    SOFTCAP = "softcap"
    ALIBI = "ALiBi slopes"
    DROPOUT = "dropout"
    SHARED_DROPOUT_MASK = "a dropout mask that S_dmask or rng_state describes"
    GQA = "fewer key/value heads than query heads"
    VALUE_HEAD_DIM = "a value head_dim other than the key's"
    VARLEN = "packed sequences (cu_seqlens)"
    SEQUSED_K = "key lengths given per sequence (seqused_k, cache_seqlens)"
    LEFTPAD_K = "leftpad_k"
    PAGED = "paged keys and values (block_table, cache_batch_idx)"
    APPEND = "new keys and values for a cache"
    LSE = "returning softmax_lse"
    BACKWARD = "gradients"
    GIVEN_LSE = "a backward from an out and softmax_lse of the caller's"
    LSE_GRADIENT = "gradients of softmax_lse"
    TRANSFORMS = "forward-mode or higher-order differentiation and torch.func transforms"
    DETERMINISTIC = "gradients that are the same to the bit in every run"
    SCALE_NOT_POSITIVE = "a softmax_scale that is not positive"
    BIAS = "a dense mask"
    WIDE_SOFTCAP = "a softcap above 1024"
    EIGHT_BIT_CACHE = "keys and values of 8-bit floats"


# Further bits of Options.use, for results that dispatch computes itself, whichever backend serves the call.
DMASK, SLOPES_GRADIENT = (1 << place for place in range(len(Feature), len(Feature) + 2))
BY_DISPATCH = DMASK | SLOPES_GRADIENT


def all_but(refused: int) -> int:
    """Return every feature up to EIGHT_BIT_CACHE except ``refused``. A backend adds later features by name.

    With ~refused alone, a backend would claim every feature added in future, ignore it, and compute wrong results.
    """
    return (Feature.EIGHT_BIT_CACHE << 1) - 1 & ~refused


def split(features: int) -> list[Feature]:
    """Return the single features in a combination of bits, in the order of their declaration."""
    return [feature for feature in Feature if features & feature]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Traits(NamedTuple):
    """Everything a dispatch decision may depend on.

    sq_vs_sk compares the two lengths: "=", "<", ">", or "?" where they differ per sequence.
    gpu: the model: cards of one capability differ in speed, and a kernel that fails on one may work on another
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


# Names of all cards with the chips TU116 and TU117, and of a GTX 1650 with a TU106: GTX 16, MX, CMP and small T cards.
_WITHOUT_TENSOR_CORES = re.compile(r"\b(GTX 16[0-9]{2}|MX[45]50|CMP 30HX|T(400|500|550|600|1000|1200|2000)E?)\b")


def lacks_tensor_cores(gpu: str | None) -> bool:
    """Whether a GPU model has capability 7.5 but no tensor cores: only its name tells. fp32 is faster there than fp16.

    gpu: the model as ``settings.gpu`` names it; None for a device other than CUDA's
    """
    return gpu is not None and _WITHOUT_TENSOR_CORES.search(gpu) is not None
