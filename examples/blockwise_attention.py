"""Attention over a sequence cut into query and key chunks: the forward, and the backward that people get wrong.

One process does here the work of ring attention over GPUs. Each block is one call of flash-attn's private functions, as
in any code that does not fit into flash_attn_func. Run it to see the errors against fp64:

    python examples/blockwise_attention.py

Three things decide whether the gradients are right:

1. Every block's backward gets the *whole* row's `out` and `softmax_lse`, not the block's own. The kernel computes
   P = exp(scores - softmax_lse) and D = rowsum(dout * out), and both belong to the row, not to the block.
2. A row that sees no key of a block reports softmax_lse = +inf and out = 0. In a merge it must weigh nothing.
3. Partial results are summed in fp32: dq over key chunks, dk and dv over query chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# On a machine with flash-attn itself, `from flash_attn.flash_attn_interface import ...` does the same.
from flash_attn_compat.flash_attn_interface import _flash_attn_backward, _flash_attn_forward


def blockwise_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = True, query_chunk: int = 128, key_chunk: int = 128
) -> Tensor:
    """Return flash_attn_func(q, k, v, causal=causal), differentiable, one chunk of queries and of keys at a time.

    q (batch, seqlen, nheads, head_dim); k, v (batch, seqlen, nheads_k, head_dim). Returns a tensor like q.
    """
    return _Blockwise.apply(q, k, v, causal, query_chunk, key_chunk)


def blocks(seqlen: int, causal: bool, query_chunk: int, key_chunk: int) -> Iterator[tuple[slice, slice, int]]:
    """Yield the query rows, key rows and window_size_right of every block with a visible key.

    flash-attn aligns masks at the bottom right of a block: row i stands at key i + sk - sq. A causal row sees the keys
    up to its own position, (end of queries) - (end of keys) further right.
    """
    for first_query in range(0, seqlen, query_chunk):
        last_query = min(first_query + query_chunk, seqlen)
        for first_key in range(0, seqlen, key_chunk):
            last_key = min(first_key + key_chunk, seqlen)
            if causal and first_key >= last_query:
                break
            if causal:
                last_key = min(last_key, last_query)  # no row of this chunk sees later keys
            yield slice(first_query, last_query), slice(first_key, last_key), last_query - last_key if causal else -1


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two partial softmaxes over different keys. Outputs weigh by exp(lse); a row without keys weighs nothing.

    out, block_out (batch, seqlen, nheads, head_dim) fp32; lse, block_lse (batch, nheads, seqlen) fp32, lse = -inf
    for a row that has seen no key yet.
    """
    block_lse = block_lse.masked_fill(block_lse == float("inf"), float("-inf"))
    merged = torch.logaddexp(lse, block_lse)
    reference = merged.masked_fill(merged == float("-inf"), 0.0)  # exp(-inf - -inf) would be nan

    def weight(part: Tensor) -> Tensor:
        return (part - reference).exp().transpose(1, 2).unsqueeze(-1)

    return weight(lse) * out + weight(block_lse) * block_out, merged


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, query_chunk: int, key_chunk: int) -> Tensor:
        batch, seqlen, nheads, head_dim = q.shape
        out = torch.zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        lse = torch.full((batch, nheads, seqlen), float("-inf"), device=q.device)
        for rows, keys, window_right in blocks(seqlen, causal, query_chunk, key_chunk):
            block_out, block_lse, _, _ = _flash_attn_forward(
                q[:, rows],
                k[:, keys],
                v[:, keys],
                dropout_p=0.0,
                softmax_scale=head_dim**-0.5,
                causal=False,
                window_size_left=-1,
                window_size_right=window_right,
                softcap=0.0,
                alibi_slopes=None,
                return_softmax=False,
            )
            out[:, rows], lse[:, :, rows] = merge(out[:, rows], lse[:, :, rows], block_out, block_lse)
        ctx.save_for_backward(q, k, v, out.to(q.dtype), lse)
        ctx.options = causal, query_chunk, key_chunk
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        sums = [
            torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device) for x in (q, k, v)
        ]
        for rows, keys, window_right in blocks(q.shape[1], *ctx.options):
            parts = [torch.empty_like(x) for x in (q[:, rows], k[:, keys], v[:, keys])]
            _flash_attn_backward(
                dout[:, rows],
                q[:, rows],
                k[:, keys],
                v[:, keys],
                out[:, rows],  # out and LSE over all keys, not of this block
                lse[:, :, rows].contiguous(),
                *parts,  # the call writes this block's dq, dk, dv here
                dropout_p=0.0,
                softmax_scale=q.shape[-1] ** -0.5,
                causal=False,
                window_size_left=-1,
                window_size_right=window_right,
                softcap=0.0,
                alibi_slopes=None,
                deterministic=False,
            )
            for total, part, place in zip(sums, parts, (rows, keys, keys)):
                total[:, place] += part
        dq, dk, dv = (total.to(x.dtype) for total, x in zip(sums, (q, k, v)))
        return dq, dk, dv, None, None, None


def main() -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(2, 300, heads, 64, dtype=torch.float64) for heads in (8, 2, 2, 8))

    def gradients(function: Any, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = function(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(dtype))]

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        ).transpose(1, 2)

    exact = gradients(whole, torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        got = gradients(lambda *inputs: blockwise_attention(*inputs, query_chunk=128, key_chunk=96), dtype)
        errors = (f"{name} {(a - b).abs().max():.1e}" for name, a, b in zip(("out", "dq", "dk", "dv"), got, exact))
        print(f"{dtype!s:15}", *errors, sep="  ")


if __name__ == "__main__":
    main()
