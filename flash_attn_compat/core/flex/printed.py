"""What the printer returns: a call's functions in C++, and what they read of its captured arguments."""

from __future__ import annotations

from typing import NamedTuple


class Bound(NamedTuple):
    """A captured tensor's axis that the text indexes by ``name``: b, h, q or kv. The axis must be as long as these."""

    tensor: int
    axis: int
    name: str


class Number(NamedTuple):
    """A captured number of the parameters.

    is_float: whether the parameters hold a float's bits; is_on_host: whether it is a tensor in the CPU's memory
    """

    position: int
    is_float: bool
    is_on_host: bool


class Printed(NamedTuple):
    """The functions of a call in C++.

    tensors, numbers: positions of the captured arguments that the text reads, in its order
    bounds: what the host has to check of the tensors' sizes; indexed: (tensor, axis) that must not be empty
    has_score, has_mask: whether the functions change a score, or hide one
    gradients: places in ``tensors`` of those whose gradients the text adds up
    """

    text: str
    tensors: tuple[int, ...]
    numbers: tuple[Number, ...]
    bounds: tuple[Bound, ...]
    indexed: tuple[tuple[int, int], ...]
    has_score: bool
    has_mask: bool
    gradients: tuple[int, ...] = ()
