"""Functions that people run flex_attention with, written anew: attention-gym's collection, and PyTorch's own tests.

Of PyTorch's test/inductor/test_flex_attention.py, by name; tests without a call of ours are left out: of BlockMask and
PagedAttention alone, of CPUs, of Triton's generated code, and of error messages that flex_attention raises before its
operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tests.flex.calls import Mod, causal, identity

# ---------------------------------------------------------------- attention-gym


class Entry(NamedTuple):
    """A pair of functions. per_head: whether its BlockMask has batch and heads of its own"""

    score_mod: Mod = identity
    mask_mod: Mod | None = None
    per_head: bool = False


def sliding_window(size: int) -> Mod:
    return lambda b, h, q, kv: (q >= kv) & (q - kv <= size)


def prefix_lm(lengths: Tensor) -> Mod:
    return lambda b, h, q, kv: (kv < lengths[b]) | (q >= kv)


def document(numbers: Tensor, inner: Mod = causal) -> Mod:
    """Tokens see those of their own document; numbers: (batch, tokens)"""
    return lambda b, h, q, kv: (numbers[b, q] == numbers[b, kv]) & inner(b, h, q, kv)


def packed_document(offsets: Tensor, tokens: int, inner: Mod = causal) -> Mod:
    """One sequence of documents; positions count from a document's start. offsets: (documents + 1,)"""
    number = torch.searchsorted(offsets, torch.arange(tokens, device=offsets.device), right=True) - 1

    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (number[q] == number[kv]) & inner(b, h, q - offsets[number[q]], kv - offsets[number[kv]])

    return mask


def dilated_sliding_window(size: int, dilation: int) -> Mod:
    def mask(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (q - kv <= size * dilation) & ((q - kv) % dilation == 0)

    return mask


def natten(width: int, kernel: int) -> Mod:
    """Each pixel of a picture of ``width`` columns sees the square around it, moved inside of the picture."""

    def near(a: Tensor, b: Tensor) -> Tensor:
        return (a.clamp(kernel // 2, width - 1 - kernel // 2) - b).abs() <= kernel // 2

    return lambda b, h, q, kv: near(q % width, kv % width) & near(q // width, kv // width)


def flamingo(picture_starts: Tensor, picture_ends: Tensor) -> Mod:
    """Text sees the pictures before it: a picture's keys are visible from the row that follows it."""
    return lambda b, h, q, kv: (kv >= picture_starts[b, q]) & (kv < picture_ends[b, q])


def tanh_softcap(cap: float) -> Mod:
    return lambda score, b, h, q, kv: cap * torch.tanh(score / cap)


def alibi(heads: int, device: str) -> Mod:
    slopes = torch.exp2(-(torch.arange(1, heads + 1, device=device, dtype=torch.float32) * 8.0 / heads))
    return lambda score, b, h, q, kv: score + (kv - q) * slopes[h]


def relative_positions(table: Tensor, keys: int) -> Mod:
    """table: (heads, rows + keys)"""
    return lambda score, b, h, q, kv: score + table[h, q - kv + keys]


def activation(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return torch.nn.functional.silu(score) + 0.01 * torch.sigmoid(score) * (q - kv).abs()


def checkerboard(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return torch.where((q - kv).abs() % 2 == 1, score * 0.5, torch.where((q - kv).abs() % 3 == 0, score * 2.0, score))


def collection(batch: int, heads: int, tokens: int, device: str = "cpu") -> dict[str, Entry]:
    """Return every entry for queries and keys of ``tokens`` tokens."""
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randint(0, 4, (batch, tokens), generator=generator).sort()[0].to(device)
    lengths = torch.tensor([tokens // 3, tokens // 2] * batch, dtype=torch.int32, device=device)[:batch]
    offsets = torch.tensor([0, tokens // 4, tokens // 2 + 7, tokens], device=device)
    table = torch.randn(heads, 2 * tokens, generator=generator).to(device)
    bias = torch.randn(batch, heads, tokens, tokens, generator=generator).half().to(device)
    starts = (torch.arange(tokens, device=device) // 2).expand(batch, -1)
    window, cap, slopes = sliding_window(tokens // 5), tanh_softcap(20.0), alibi(heads, device)
    found = {
        "nothing": Entry(),
        "causal": Entry(mask_mod=causal),
        "sliding_window": Entry(mask_mod=window),
        "prefix_lm": Entry(mask_mod=prefix_lm(lengths), per_head=True),
        "document": Entry(mask_mod=document(numbers), per_head=True),
        "packed_document": Entry(mask_mod=packed_document(offsets, tokens)),
        "dilated_sliding_window": Entry(mask_mod=dilated_sliding_window(20, 3)),
        "natten": Entry(mask_mod=natten(max(int(tokens**0.5), 8), 7)),
        "flamingo": Entry(mask_mod=flamingo(starts, starts + 9), per_head=True),
        "tanh_softcap": Entry(cap),
        "alibi": Entry(slopes),
        "relative_positions": Entry(relative_positions(table, tokens)),
        "bias": Entry(lambda score, b, h, q, kv: score + bias[b, h, q, kv]),
        "activation": Entry(activation),
        "checkerboard": Entry(checkerboard),
    }
    masks = {"causal": causal, "sliding_window": window, "document": document(numbers)}
    scores = {"tanh_softcap": cap, "alibi": slopes}
    products = {
        f"{score} + {mask}": Entry(scores[score], masks[mask], mask == "document") for score in scores for mask in masks
    }
    return found | products


# ---------------------------------------------------------------- PyTorch's tests

ROWS, BATCH, HEADS = 160, 2, 4
MINUS_INFINITY = float("-inf")


class Case(NamedTuple):
    """shape: arguments of calls.tensors; block: the BlockMask's block size; reason: words of ours if we decline."""

    score_mod: Mod = identity
    mask_mod: Mod | None = None
    shape: dict[str, Any] = {}  # noqa: RUF012 -- never written to
    block: Any = 128
    per_head: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012 -- never written to
    reason: str | None = None
    change: Callable[[BlockMask], BlockMask] = lambda mask: mask


def where(seen: Mod, inner: Mod = identity) -> Mod:
    """A mask as a function of the score."""
    return lambda score, b, h, q, kv: torch.where(seen(b, h, q, kv), inner(score, b, h, q, kv), MINUS_INFINITY)


def plus(bias: Mod) -> Mod:
    return lambda score, b, h, q, kv: score + bias(b, h, q, kv)


def relative(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score + (q - kv)


def alibi_of_head(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score + (kv - q) * torch.exp2(-((h + 1) * 8.0 / HEADS))


def without_twins(mask: BlockMask) -> BlockMask:
    """Without the lists of rows for each block of keys, which only a backward needs."""
    mask.q_num_blocks = mask.q_indices = mask.full_q_num_blocks = mask.full_q_indices = None
    return mask


def of_lists(mask: BlockMask) -> BlockMask:
    """The same mask from lists of keys alone."""
    return BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices, mask.BLOCK_SIZE,
        mask.mask_mod,
    )  # fmt: skip


class _Where(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(score: Tensor, seen: Tensor) -> Tensor:
        return torch.where(seen, score, MINUS_INFINITY)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.mark_non_differentiable(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # one gradient
        return gradient, None


def make_cases() -> dict[str, Case]:
    """Each case by PyTorch's name of its test; captured tensors are made anew."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    half, brain = torch.float16, torch.bfloat16
    tokens = torch.arange(ROWS)
    document, offsets = tokens // 37, torch.arange(5) * 37
    late = tokens >= ROWS // 2
    head, batch, token = random(HEADS), random(BATCH), random(ROWS)
    table, square = random(2 * ROWS, dtype=half), random(ROWS, ROWS, dtype=half)
    batched, full = random(BATCH, ROWS, ROWS, dtype=half), random(BATCH, HEADS, ROWS, ROWS, dtype=half)
    turned, full_brain, brain_token = full.transpose(2, 3), full.to(brain), token.to(brain)
    seen = torch.ones(BATCH, 1, ROWS, ROWS, dtype=torch.bool).tril()
    two, thirds, fours = random(BATCH, ROWS), random(4, BATCH, HEADS, ROWS), random(BATCH, HEADS, 4, ROWS)
    which, one, lengths = torch.tensor(0), torch.ones((), dtype=torch.int32), torch.tensor([90, 31], dtype=torch.int32)
    points, scales = random(ROWS, 3), torch.logspace(0.001, 0.1, HEADS)
    page = torch.tensor([1, 4, 0, 3, 2])  # the page of 32 tokens that holds each fifth of the keys
    logical = torch.argsort(page)

    def njt(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return q - offsets[document[q]] >= kv - offsets[document[kv]]

    def natten(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return ((q / 12 - kv / 12).abs() <= 3) | ((q % 12 - kv % 12).abs() <= 3)

    def padded(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.where(score <= lengths[b], where(causal)(score, b, h, q, kv), MINUS_INFINITY)

    def distance(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.exp(-(points[q] - points[kv]).pow(2).sum(-1).sqrt() / scales[h]) * score

    def new_zeros(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return seen[b, h.new_zeros(h.shape), q, kv]

    def in_pages(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return causal(b, h, q, logical[kv // 32] * 32 + kv % 32)

    def clamped(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return document[q.clamp(0, ROWS - 1)] == document[kv.clamp(0, ROWS - 1)]

    def squared(score: Tensor, *at: Tensor) -> Tensor:
        return score * score

    def trig2(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return torch.cos(score) * torch.sin(score) + torch.tan(b)

    window = lambda b, h, q, kv: (q >= kv) & (q - kv <= 64)  # noqa: E731
    one_key = {"heads_k": HEADS}
    return {
        "builtin_score_mods[identity]": Case(),
        "builtin_score_mods[times_two]": Case(lambda score, b, h, q, kv: score * 2),
        "builtin_score_mods[squared]": Case(squared),
        "builtin_score_mods[causal]": Case(where(causal)),
        "builtin_score_mods[inverse_causal]": Case(where(lambda b, h, q, kv: q <= kv)),
        "builtin_score_mods[rel_bias]": Case(relative),
        "builtin_score_mods[rel_causal]": Case(where(causal, relative)),
        "builtin_score_mods[alibi]": Case(alibi_of_head),
        "builtin_score_mods_dynamic": Case(where(causal), causal),
        "builtin_score_mods_different_seqlen": Case(alibi_of_head, shape={"rows": ROWS // 2}),
        "builtin_score_mods_different_block_size": Case(alibi_of_head, causal, block=(128, 256)),
        "builtin_score_mods_seqlen_lt_custom_sparse_block_size": Case(relative, causal, {"rows": 64, "keys": 64}, 256),
        "kv_batch_broadcast_causal_mask": Case(mask_mod=causal, per_head=True),
        "GQA": Case(relative, shape={"heads": 8, "heads_k": 2, "rows": 18}),
        "GQA_causal_mask": Case(mask_mod=causal, shape={"heads": 8, "heads_k": 2}),
        "doc_mask_sparse": Case(where(lambda b, h, q, kv: (q >= kv) & (document[q] == document[kv]))),
        "index_multiple": Case(plus(lambda b, h, q, kv: two[b][q])),
        "index_weird1": Case(plus(lambda b, h, q, kv: thirds[0][b, h][q])),
        "index_weird2": Case(plus(lambda b, h, q, kv: fours[b][h][which, q])),
        "skip_odd_keys": Case(where(lambda b, h, q, kv: kv % 2 == 0)),
        "function_composition": Case(where(lambda b, h, q, kv: q <= kv, relative)),
        "captured_buffers_all_dims": Case(plus(lambda b, h, q, kv: token[q] + batch[b] + head[h])),
        "seq_masking": Case(where(lambda b, h, q, kv: late[q] == late[kv])),
        "load_from_bias_seq_only": Case(plus(lambda b, h, q, kv: square[q, kv])),
        "load_from_bias_seq_batch": Case(plus(lambda b, h, q, kv: batched[b, q, kv])),
        "load_from_bias_head_seq_batch": Case(plus(lambda b, h, q, kv: full[b, h, q, kv])),
        "load_from_view_buffer": Case(plus(lambda b, h, q, kv: turned[b, h, q, kv // 8])),
        "modular_indexing": Case(plus(lambda b, h, q, kv: full_brain[b, h, q, kv]), shape={"dtype": brain}),
        "load_rel_bias": Case(plus(lambda b, h, q, kv: table[(q - kv) + ROWS])),
        "dependent_causal_bidirectional": Case(
            where(lambda b, h, q, kv: ((q <= lengths[b]) & (kv <= lengths[b])) | (q >= kv))
        ),
        "natten_2d": Case(where(natten)),
        "subgraph_respect_decompostion": Case(lambda score, b, h, q, kv: score - q // (1 + kv)),
        "silu_on_score": Case(lambda score, b, h, q, kv: torch.nn.functional.silu(score)),
        "padded_dense_causal": Case(padded),
        "captured_scale": Case(plus(lambda b, h, q, kv: one)),
        "recompile_changed_score_mod": Case(lambda score, b, h, q, kv: score * one),
        "captured_reduction": Case(plus(lambda b, h, q, kv: two[b].sum(dim=-1)), reason="sum"),
        "reduction_unrolled": Case(distance, shape={"dtype": brain}, reason="of a captured tensor"),
        "njt_causal": Case(where(njt)),
        "mask_mod_combiners": Case(mask_mod=lambda b, h, q, kv: causal(b, h, q, kv) & (q - kv <= 51)),
        "non_equal_head_dims[wide]": Case(alibi_of_head, shape={"dim": 64, "dim_v": 32}),
        "non_equal_head_dims[narrow]": Case(alibi_of_head, shape={"dim": 32, "dim_v": 64}),
        "autograd_function_in_score_mod": Case(lambda score, b, h, q, kv: _Where.apply(score, q <= kv)),
        "causal_block": Case(mask_mod=causal),
        "new_empty_mask_mod": Case(plus(new_zeros), new_zeros, per_head=True, shape=one_key),
        "custom_block_mask_generator": Case(mask_mod=causal, block=32, change=of_lists),
        "logsumexp_correctness": Case(where(causal)),
        "trig2": Case(trig2),
        "captured_score_mod": Case(lambda score, b, h, q, kv: score * head[h]),
        "document_masking_edge_case": Case(mask_mod=lambda b, h, q, kv: late[q] == late[kv]),
        "fully_masked_out_rows": Case(mask_mod=lambda b, h, q, kv: q < ROWS // 2, per_head=True),
        "kernel_options_argument_is_respected": Case(options={"BLOCK_M": 16}),
        "block_mask_non_divisible": Case(
            mask_mod=lambda b, h, q, kv: q // 16 == kv // 16, shape={"rows": 127, "keys": 127}
        ),
        "causal_block_non_divisible_with_captured_buffer": Case(  # summed in fp32, as PyTorch's compiled graphs do
            plus(lambda b, h, q, kv: brain_token[q].float() + brain_token[kv]), causal, {"rows": 141, "keys": 141}
        ),
        "non_divisible_with_captured_buffer": Case(
            lambda score, b, h, q, kv: score * brain_token[q], shape={"rows": 141, "keys": 141}
        ),
        "lse_masked_output[local]": Case(mask_mod=window),
        "lse_masked_output[global]": Case(mask_mod=lambda b, h, q, kv: (q >= kv) & (q - kv > 64)),
        "invalid_block_size": Case(mask_mod=causal, block=96),
        "small_q_kv_len": Case(shape={"rows": 1, "keys": 1, "dim": 16}),
        "num_warps_8_error": Case(shape={"dim": 128}),
        "no_q_info": Case(mask_mod=causal, change=without_twins),
        "doc_mask_clamped_repro": Case(mask_mod=clamped),
        "paged_builtin_score_mods": Case(where(in_pages), in_pages, block=32),
        "fp32 and fp64 inputs": Case(shape={"dtype": torch.float32}, reason="not float32"),
    }
