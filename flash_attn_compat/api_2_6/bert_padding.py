"""bert_padding of flash-attn 2.6: unpad_input returns four values."""

from __future__ import annotations

from torch import Tensor

from flash_attn_compat import bert_padding as _current
from flash_attn_compat.bert_padding import *  # noqa: F403


def unpad_input(  # type: ignore[no-redef]  # in place of 2.8's
    hidden_states: Tensor, attention_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return the first four values of `flash_attn_compat.bert_padding.unpad_input`."""
    tokens, indices, cu_seqlens, max_seqlen, _ = _current.unpad_input(hidden_states, attention_mask)
    return tokens, indices, cu_seqlens, max_seqlen
