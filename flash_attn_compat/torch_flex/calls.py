"""The arguments of torch.ops.higher_order.flex_attention and its backward, by PyTorch's names, and parts of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from flash_attn_compat.backends.fused.flex import BlockLists, Blocks
from flash_attn_compat.core.inputs import new_tuple

# The size of a block that PyTorch passes if the caller gave no BlockMask.
WHOLE = 1 << 30


class FlexCall(NamedTuple):
    """The forward operator's arguments. query: (batch, heads, rows, channels); key and value may have fewer heads."""

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: Any
    block_mask: tuple[Any, ...]
    scale: float
    kernel_options: Mapping[str, Any]
    score_mod_other_buffers: tuple[Any, ...] = ()
    mask_mod_other_buffers: tuple[Any, ...] = ()

    @property
    def mask_mod(self) -> Any:
        return self.block_mask[-1]

    @property
    def captured(self) -> tuple[Any, ...]:
        """The tensors and numbers that score_mod captured, then those of mask_mod."""
        return (*self.score_mod_other_buffers, *self.mask_mod_other_buffers)


class FlexBackwardCall(NamedTuple):
    """The backward operator's arguments. logsumexp: in units of log2, as the forward operator returns it"""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    logsumexp: Tensor
    grad_out: Tensor | None
    grad_logsumexp: Tensor | None
    fw_graph: Any
    joint_graph: Any
    block_mask: tuple[Any, ...]
    scale: float
    kernel_options: Mapping[str, Any]
    score_mod_other_buffers: tuple[Any, ...] = ()
    mask_mod_other_buffers: tuple[Any, ...] = ()

    def forward(self) -> FlexCall:
        """Return the forward call of this backward."""
        buffers = self.score_mod_other_buffers, self.mask_mod_other_buffers
        return FlexCall(*self[:3], self.fw_graph, self.block_mask, self.scale, self.kernel_options, *buffers)


def lists_of(block_mask: Sequence[Any]) -> tuple[Any, ...]:
    """Return kv_num_blocks, kv_indices, the same of full blocks, then all four of q. For PyTorch 2.6 to 2.15."""
    return tuple(block_mask[2:10])


def sizes_of(block_mask: Sequence[Any]) -> tuple[Any, Any]:
    """Return how many queries and how many keys a block has. Counted from the end: newer PyTorch has more in front."""
    return block_mask[-3], block_mask[-2]


def has_blocks(block_mask: Sequence[Any]) -> bool:
    """Whether the caller passed a BlockMask: if not, PyTorch passes one with a single block."""
    return sizes_of(block_mask) != (WHOLE, WHOLE)


def make_blocks(rows: int, keys: int, lists: Sequence[Tensor | None], backward: bool) -> Blocks | None:
    """Return a BlockMask for our kernels; None if it has one block. rows, keys: of a block; lists: from ``lists_of``"""
    if (rows, keys) == (WHOLE, WHOLE):
        return None
    assert lists[0] is not None and lists[1] is not None  # PyTorch makes no BlockMask without them
    of_keys = None
    if backward:
        assert lists[4] is not None and lists[5] is not None  # PyTorch refuses gradients without them
        of_keys = new_tuple(BlockLists, lists[4:8])
    found: Blocks = new_tuple(Blocks, (rows, keys, new_tuple(BlockLists, lists[:4]), of_keys))
    return found
