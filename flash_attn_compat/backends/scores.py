"""The matrix of scores, and S_dmask: the probabilities of a call with dropout, negative where dropout dropped them.

flash-attn's kernel visits blocks of keys from the last to the first, and writes exp(score - m), where m is the
row's maximum over the blocks visited so far. Tests and tools undo exactly that, so the same numbers are computed
here. It needs the whole matrix in memory, but only if the caller asks for S_dmask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_compat.backends import alibi
from flash_attn_compat.backends.varlen import Block, Layout
from flash_attn_compat.core import torch_state
from flash_attn_compat.core.call import AttentionCall
from flash_attn_compat.core.kernel_layout import key_block_size, round_up
from flash_attn_compat.core.mask import Range


def signed_probabilities(call: AttentionCall, rng_state: Tensor | None) -> Tensor:
    """Return S_dmask, (batch, nheads, max_seqlen_q, max_seqlen_k rounded up to 128) in q's dtype.

    Probabilities that dropout keeps are >= 0, dropped ones negative. Each sequence starts at [0, 0] of its own matrix.
    Elements for keys that a row does not see are 0.
    """
    shape = (call.batch, call.nheads, round_up(call.max_seqlen_q, 128), round_up(call.max_seqlen_k, 128))
    signed = call.q.new_zeros(shape)
    if call.is_empty or call.q.is_meta:
        return signed
    layout = Layout(call)
    with torch_state.without_autocast(call.q.device):
        for block, _, _ in layout.blocks(layout.alone()):
            heads_first = block.k.float().repeat_interleave(call.nheads // call.nheads_k, dim=2)
            scores, _ = scores_of(call, block, block.q.float(), heads_first)
            weights, places = torch.exp(scores - _running_maxima(call, scores)), map(Range, (0, 0, 0), scores.shape[1:])
            tile = torch.where(block.kept(rng_state, call.dropout_p, *places), weights, -weights)[0]
            rows, keys = min(tile.shape[1], shape[2]), min(tile.shape[2], shape[3])
            signed[block.sequences[0], :, :rows, :keys] = tile[:, :rows, :keys]
    return signed


def scores_of(call: AttentionCall, block: Block, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return scores (n, nheads, seqlen_q, seqlen_k), -inf where a key is hidden, and softcap's derivative or None.

    q, k: the block's, in the dtype to compute in, with a key head for every query head
    """
    rows, keys = Range(0, q.shape[1]), Range(0, k.shape[1])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * call.softmax_scale
    softcap_slope = None
    if call.softcap:
        capped = torch.tanh(scores / call.softcap)
        scores, softcap_slope = call.softcap * capped, 1 - capped**2
    if block.slopes is not None:
        scores = alibi.add_bias(scores, block.slopes, rows, keys, block.offset)
    if call.bias is not None:  # only dense calls have one, and a dense call is one block: shapes agree
        is_boolean = call.bias.dtype == torch.bool
        scores = scores.masked_fill(~call.bias, -torch.inf) if is_boolean else scores + call.bias
    hidden = call.mask.hidden(rows, keys, block.offset, q.device)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    padding = block.padding(keys)
    if padding is not None:
        scores = scores.masked_fill(padding, -torch.inf)
    return scores, softcap_slope


def _running_maxima(call: AttentionCall, scores: Tensor) -> Tensor:
    """Return for each score its row's maximum over its own block of keys and all later blocks; 0 if all are hidden."""
    seqlen_k = scores.shape[-1]
    head_dim = min(call.q.shape[-1], 256)
    size = key_block_size(scores.device, head_dim, True, call.mask.right == 0)
    blocks = [scores[..., start : start + size].amax(-1) for start in range(0, seqlen_k, size)]
    running = torch.stack(blocks, -1).flip(-1).cummax(-1).values.flip(-1)
    running = running.masked_fill(running == -torch.inf, 0.0)
    return running.repeat_interleave(size, dim=-1)[..., :seqlen_k]
