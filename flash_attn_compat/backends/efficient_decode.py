"""efficient_shares.py's ``prepare`` and ``merge`` as one kernel each, where plain operators take up to fifteen.

A decoding step of few sequences is bound by the host, so what counts is the number of launches.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from flash_attn_compat.backends import efficient_shares
from flash_attn_compat.backends.efficient_shares import Cut, Prepared
from flash_attn_compat.engine import jiterated
from flash_attn_compat.engine.alignment import ready
from flash_attn_compat.engine.jiterated import Memory

# Bounds and keys of a share for the first threads, 16 bytes of a copy of q's rows for each of them.
_PREPARE = jiterated.Kernel(
    """
template <typename T> T prepare(T at, int spread, long long q, long long by_batch, long long by_row, long long by_head,
                                long long copies, long long numbers, long long used, long long leftpad, long long table,
                                long long by_sequence, int batch, int seqlen_q, int group, int heads, int units,
                                int count, int size, int page, int pitch, int pages, int left) {
  int i = (int)at, shares = batch * count;
  if (i % spread) return T(0);
  i /= spread;
  if (i < shares) {
    int* cu_seqlens_q = (int*)numbers;
    int* starts = cu_seqlens_q + shares + 1;
    int* lengths = starts + shares + 1;
    int n = i / count, offset = i % count * size;
    int stop = used ? ((const int*)used)[n] : pages ? pages * page : page, skipped = 0;
    int length = stop - offset;
    length = length < 0 ? 0 : length < size ? length : size;
    if (leftpad) skipped = ((const int*)leftpad)[n];
    if (left >= 0 && skipped < stop - 1 - left) skipped = stop - 1 - left;
    skipped = skipped < offset ? 0 : skipped - offset;
    skipped = skipped < length ? skipped : length;
    const int* of_sequence = (const int*)table + n * by_sequence;
    int start = pages > 1 ? of_sequence[i % count] * pitch : (pages ? of_sequence[0] : n) * pitch + offset;
    if (i == 0) cu_seqlens_q[0] = starts[shares] = 0;
    cu_seqlens_q[i + 1] = (i + 1) * seqlen_q * group;
    starts[i] = start + skipped;
    lengths[i] = length - skipped;
  }
  int unit = i % units, rest = i / units, head = rest % heads;
  rest /= heads;
  int member = rest % group, row = rest / group % seqlen_q, n = rest / group / seqlen_q / count;
  const uint4* from = (const uint4*)q + n * by_batch + row * by_row + (head * group + member) * by_head;
  ((uint4*)copies)[i] = from[unit];
  return T(0);
}""",
    "spread",
    "q",
    "by_batch",
    "by_row",
    "by_head",
    "copies",
    "numbers",
    "used",
    "leftpad",
    "table",
    "by_sequence",
    "batch",
    "seqlen_q",
    "group",
    "heads",
    "units",
    "count",
    "size",
    "page",
    "pitch",
    "pages",
    "left",
)

# Two channels of one row and head: the shares' outputs by the softmax of their LSE, 0 where none has keys.
_MERGE = jiterated.Kernel(
    """
template <typename T> T merge(T at, int spread, long long outs, long long lses, long long lengths, long long merged,
                              int count, int seqlen_q, int group, int heads, int pairs, int padded) {HALVES
  int i = (int)at;
  if (i % spread) return T(0);
  i /= spread;
  int pair = i % pairs, rest = i / pairs, head = rest % (heads * group);
  rest /= heads * group;
  int n = rest / seqlen_q, row = rest % seqlen_q * group + head % group, rows = seqlen_q * group;
  head /= group;
  const float* lse = (const float*)lses + ((long long)n * count * heads + head) * padded + row;
  const int* keys = (const int*)lengths + n * count;
  const unsigned int* out = (const unsigned int*)outs;
  out += (((long long)n * count * rows + row) * heads + head) * pairs + pair;
  long long next_lse = (long long)heads * padded, next_out = (long long)rows * heads * pairs;
  T peak = -INFINITY, total = 0, low = 0, high = 0;
  _Pragma("unroll 8")
  for (int s = 0; s < count; ++s) {
    T one = lse[s * next_lse];
    peak = keys[s] > 0 ? fmaxf(peak, one) : peak;
  }
  _Pragma("unroll 8")
  for (int s = 0; s < count; ++s) {
    T one = lse[s * next_lse], of_low, of_high;
    unpack(out[s * next_out], of_low, of_high);
    // Beyond 128 channels the output of a share without keys is whatever the memory held.
    bool counts = keys[s] > 0;
    T weight = counts ? __expf(one - peak) : T(0);
    total += weight;
    low += counts ? weight * of_low : T(0);
    high += counts ? weight * of_high : T(0);
  }
  T scale = total > 0 ? T(1) / total : T(0);
  ((unsigned int*)merged)[i] = pack(low * scale, high * scale);
  return T(0);
}""",
    "spread",
    "outs",
    "lses",
    "lengths",
    "merged",
    "count",
    "seqlen_q",
    "group",
    "heads",
    "pairs",
    "padded",
)


def prepare(q: Tensor, nheads_k: int, cut: Cut) -> Prepared:
    """q: (batch, seqlen_q, nheads, head_dim)."""
    q = ready(q)
    batch, seqlen_q, nheads, head_dim = q.shape
    group, shares, unit = nheads // nheads_k, batch * cut.shares, 16 // q.element_size()
    rows = q.new_empty((1, shares * seqlen_q * group, nheads_k, head_dim))
    numbers = torch.empty(3 * shares + 2, dtype=torch.int32, device=q.device)
    by_batch, by_row, by_head, _ = q.stride()
    table = cut.table
    if table is not None and table.stride(1) != 1:
        table = table.contiguous()
    threads = rows.numel() // unit
    spread = _spread(threads)
    _PREPARE(
        q.dtype, jiterated.places(threads * spread, q.device), spread=spread,
        q=Memory(q, q.dtype, q.shape, dense_axes=1, in_words=True), by_batch=by_batch // unit, by_row=by_row // unit,
        by_head=by_head // unit, copies=Memory(rows, q.dtype, rows.shape, in_words=True),
        numbers=Memory(numbers, torch.int32, numbers.shape), used=_lengths(cut.used, batch),
        leftpad=_lengths(cut.leftpad, batch),
        table=None if table is None else Memory(table, torch.int32, (batch, cut.pages), dense_axes=1),
        by_sequence=0 if table is None else table.stride(0), batch=batch, seqlen_q=seqlen_q, group=group,
        heads=nheads_k, units=head_dim // unit,
        count=cut.shares, size=cut.size, page=cut.page, pitch=cut.pitch, pages=cut.pages,
        left=cut.left,
    )  # fmt: skip
    return Prepared(rows, *numbers.split((shares + 1, shares + 1, shares)))


def merge(out: Tensor, lse: Tensor, lengths: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The whole output in ``shape``, (batch, seqlen_q, nheads, head_dim_v), of shares that were computed alone.

    out: (1, batch * count * seqlen_q * group, nheads_k, head_dim_v), half precision
    lse: (batch * count, nheads_k, rows padded), fp32; lengths: (batch * count,) int32, 0 for shares without keys
    """
    batch, seqlen_q, nheads, head_dim = shape
    nheads_k, shares, padded = out.shape[2], lengths.shape[0], lse.shape[2]
    rows = seqlen_q * nheads // nheads_k
    merged = out.new_empty(shape)
    threads = merged.numel() // 2
    spread = _spread(threads)
    _MERGE(
        out.dtype, jiterated.places(threads * spread, out.device), spread=spread,
        outs=Memory(out, out.dtype, (1, shares * rows, nheads_k, head_dim)),
        lses=Memory(lse, torch.float32, (shares, nheads_k, padded)), lengths=Memory(lengths, torch.int32, (shares,)),
        merged=Memory(merged, out.dtype, shape), count=shares // batch, seqlen_q=seqlen_q, group=nheads // nheads_k,
        heads=nheads_k, pairs=head_dim // 2, padded=padded,
    )  # fmt: skip
    return merged


def serves(q: Tensor, v: Tensor, count: int) -> bool:
    """Whether both kernels can be used for ``count`` shares of the keys; v: (..., nheads_k, head_dim_v)."""
    units = q.numel() * count * q.element_size() // 16
    pairs = q.numel() // q.shape[-1] * v.shape[-1] // 2
    return max(units, pairs) < jiterated.MOST_PLACES and not jiterated.why_not(q.device, q.dtype, _is_right)


def _spread(threads: int) -> int:
    """The jiterator gives a thread up to eight neighbours: too few threads for little work, so every eighth counts."""
    return 8 if 8 * threads <= jiterated.KEPT_PLACES else 1


def _lengths(tensor: Tensor | None, batch: int) -> Memory | None:
    return None if tensor is None else Memory(tensor, torch.int32, (batch,))


def _is_right(device: torch.device, dtype: torch.dtype) -> bool:
    """Two sequences of three pages, padded in front and under a window, against plain operators."""

    def ints(*rows: object) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32, device=device)

    places = functools.partial(torch.arange, dtype=torch.float32, device=device)
    q = torch.linspace(-2.0, 2.0, 2 * 2 * 6 * 16, dtype=torch.float32, device=device).to(dtype).view(2, 2, 6, 16)
    cut = Cut(3, 4, 4, 5, 3, 6, ints(10, 3), ints(1, 0), ints([2, 0, 1], [1, 2, 0]))
    found, expected = prepare(q, 2, cut), efficient_shares.prepare(q, 2, cut)
    out = torch.cos(places(found.rows.numel())).to(dtype).view(found.rows.shape)
    lse = torch.sin(places(6 * 2 * 32)).view(6, 2, 32)
    ours, plain = (way(out, lse, expected.lengths, tuple(q.shape)).float() for way in (merge, efficient_shares.merge))
    return all(map(torch.equal, found, expected)) and torch.allclose(ours, plain, rtol=1e-2, atol=1e-3)
