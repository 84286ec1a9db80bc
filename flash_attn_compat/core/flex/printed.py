"""The printer's result: a call's score_mod and mask_mod in C++, and which captured arguments they read."""

from __future__ import annotations

from typing import NamedTuple


class Bound(NamedTuple):
    """An axis of a captured tensor that the C++ text indexes by b, h, q or kv, which ``name`` says.

    The axis must be at least as long as that index has values.
    """

    tensor: int
    axis: int
    name: str


class Number(NamedTuple):
    """A captured number that a kernel gets in its parameters.

    position: its index among the captured arguments; is_float: whether the parameters hold the bits of a float
    is_on_host: whether the caller gave it as a tensor in CPU memory
    """

    position: int
    is_float: bool
    is_on_host: bool


class Printed(NamedTuple):
    """The functions of a call in C++.

    tensors, numbers: positions of the captured arguments that the text reads, in its order
    bounds: axes whose lengths the host has to check; indexed: (tensor, axis) pairs whose axis must not be empty
    has_score, has_mask: whether score_mod changes any score, and whether mask_mod hides any
    gradients: indices into ``tensors`` of the tensors whose gradients the text adds up
    """

    text: str
    tensors: tuple[int, ...]
    numbers: tuple[Number, ...]
    bounds: tuple[Bound, ...]
    indexed: tuple[tuple[int, int], ...]
    has_score: bool
    has_mask: bool
    gradients: tuple[int, ...] = ()
