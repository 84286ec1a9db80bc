// Which sequence, rows and keys a block works on, and where they lie. Lengths are clamped, so that wrong lengths never
// lead to addresses outside of the tensors.
#pragma once
#include "base/eight_bit.cuh"

// Lengths and positions of one sequence.
struct Sequence {
  int first_q, seqlen_q;   // first_q: the sequence's first token if rows are packed, else 0
  int first_k, seqlen_k;   // slot of the first key, and the number of keys
};

DEVICE Sequence find_sequence(const Params &p, int b) {
  Sequence s = {0, p.seqlen_q, 0, p.seqlen_k};
  if (p.cu_seqlens_q) {
    s.first_q = clamp(global_load(p.cu_seqlens_q + b), 0, p.total_q);
    s.seqlen_q = clamp(global_load(p.cu_seqlens_q + b + 1), s.first_q, p.total_q) - s.first_q;
  }
  if (p.cu_seqlens_k) {
    s.first_k = clamp(global_load(p.cu_seqlens_k + b), 0, p.total_k);
    s.seqlen_k = clamp(global_load(p.cu_seqlens_k + b + 1), s.first_k, p.total_k) - s.first_k;
  }
  if (p.seqused_k) s.seqlen_k = clamp(global_load(p.seqused_k + b) + p.seqlen_new, 0, s.seqlen_k);
  if (p.leftpad_k) {
    const int skipped = clamp(global_load(p.leftpad_k + b), 0, s.seqlen_k);
    s.first_k += skipped;
    s.seqlen_k -= skipped;
  }
  return s;
}

#define UNBOUNDED (1 << 29)   // of a length or a window

// The tile and the batch_head (a head of a sequence) of a block. Under a mask some tiles take longer than others. The
// longest tiles of several heads start first, so that the blocks that start last are short. Only as many heads are
// mixed as the GPU runs blocks for at once, since their keys should stay in the L2 cache.
//
// With an uneven BlockMask some tiles may take a hundred times as long as others, and ListLengths (flex.cuh) ranks the
// tiles of a head. All heads' first RANKS tiles start before all heads' next RANKS, or the last heads' longest tiles
// would start late. The RANKS tiles of a head read the same keys at about the same time.
constexpr int RANKS = 4;
struct TileScheduler {
  int tile, batch_head;   // tile: 0 is the longest
  DEVICE TileScheduler(const Params &p, int index, int tiles, bool is_uneven = false)
        : tile(index % tiles), batch_head(index / tiles) {
    if (!LOCAL && FLEX != 2) return;
    if (FLEX == 2 && is_uneven) {
      const int all_heads = gridDim.x / tiles, first_rank = index / (RANKS * all_heads) * RANKS,
                ranks = min(RANKS, tiles - first_rank), within = index - first_rank * all_heads;
      tile = first_rank + within % ranks, batch_head = within / ranks;
      return;
    }
    const int batch_heads = gridDim.x / tiles, together = clamp(p.resident / tiles, 1, batch_heads),
              first = batch_head / together * together;
    const int heads = min(together, batch_heads - first), within = index - first * tiles;
    tile = within / heads;
    batch_head = first + within % heads;
  }
};

// The sequence and the tile of a block, from the batch_head and the tile of its TileScheduler. Usually each sequence
// has as many blocks as the longest sequence needs. With SHARED_GRID all sequences share p.varlen_tiles blocks:
// sequence i has the blocks from number starts[i] / ROWS + i on, which are enough wherever it starts. Blocks after
// those of the last sequence get b = p.batch. A batch_head then is p.tiles neighbouring tiles of one head.
template <int ROWS, bool LAST_FIRST> struct VarlenTile {
  int b, tile, tiles;   // tiles: blocks of the sequence
  DEVICE VarlenTile(const Params &p, const int *starts, int total, int batch_head, int index_in_head)
        : b(batch_head), tile(LAST_FIRST ? p.tiles - 1 - index_in_head : index_in_head), tiles(p.tiles) {
    if (!SHARED_GRID) return;
    const int index = batch_head * p.tiles + index_in_head, number = LAST_FIRST ? p.varlen_tiles - 1 - index : index;
    int first = 0, end = p.varlen_tiles, beyond = p.batch + 1;
    b = 0;
#pragma unroll 1
    while (beyond - b > 1) {
      const int middle = (b + beyond) / 2, its_first = clamp(global_load(starts + middle), 0, total) / ROWS + middle;
      if (its_first <= number) b = middle, first = its_first;
      else beyond = middle, end = its_first;
    }
    tile = number - first, tiles = end - first;
  }
};

// Address of a row of one head.
template <class T> DEVICE T *row_at(T *x, const Strides &s, int b, int row, int head) {
  return x + b * s.batch + (i64)row * s.row + (i64)head * s.head;
}
DEVICE float alibi_slope(const Params &p, int b, int head) {
  return global_load(p.alibi_slopes + b * p.slopes_batch + head);
}

// Address of a slot of a sequence's cache, contiguous or paged. Page numbers out of range are clamped.
DEVICE const Cached *key_row(const Params &p, const Cached *base, const Strides &s, const int *pages, int slot) {
  if (!PAGED) return base + (i64)slot * s.row;
  const u32 page = (u32)slot / (u32)p.page_size, within = slot - page * p.page_size;
  const u32 index = min((u32)global_load(pages + min(page, (u32)(p.pages_per_sequence - 1))), (u32)(p.num_pages - 1));
  return base + (i64)index * s.batch + (i64)within * s.row;
}

// Writes out = 0 and LSE = 0 for packed tokens before the first and after the last sequence. This block takes part
// number `part` of `parts`.
DEVICE void clear_outside(const Params &p, int head, int part, int parts) {
  const int first = clamp(global_load(p.cu_seqlens_q), 0, p.total_q),
            end = clamp(global_load(p.cu_seqlens_q + p.batch), first, p.total_q);
  const int outside = first + p.total_q - end;
  for (int i = part; i < outside; i += parts) {
    const int token = i < first ? i : end + i - first;
    u16 *out = p.out + (i64)token * p.out_s.row + (i64)head * p.out_s.head;
    for (int c = threadIdx.x; c < p.head_dim_v; c += blockDim.x) global_store2(out + c, 0);
    if (p.lse && threadIdx.x == 0) {
      global_store(p.lse + head * p.lse_head + token, 0.f);
      if (p.lse_true) global_store(p.lse_true + head * p.lse_head + token, 0.f);
    }
  }
}

// ---- If a packed sequence is longer than the caller's max_seqlen, no block computes its further rows: they become
// NaN. Blocks without a sequence look for such rows, so that it costs the other blocks no time.

// Whether a causal sequence has several rows although max_seqlen_q was 1. For 1 row the kernel was compiled without a
// mask, so it must compute none of these rows.
DEVICE bool lacks_mask(const Params &p, int rows) { return !LOCAL && p.window_right >= 0 && rows > 1; }

// Calls write(b, first, rows) for the rows of each sequence that no block computes: those from `covered` on. This block
// looks at part number `part` of `parts` of the sequences.
template <class Write> DEVICE void for_missing_rows(const Params &p, const int *starts, int total, int covered,
                                                    int part, int parts, const Write &write) {
  if (SHARED_GRID) return;
#pragma unroll 1
  for (int group = part * blockDim.x; group < p.batch; group += parts * blockDim.x) {
    const int mine = group + threadIdx.x;
    const auto rows_of = [&](int b) {
      return b < p.batch ? clamp(global_load(starts + b + 1), 0, total) - clamp(global_load(starts + b), 0, total) : 0;
    };
    const int found = rows_of(mine);
    if (!__syncthreads_or(found > covered || lacks_mask(p, found))) continue;
#pragma unroll 1
    for (int b = group; b < min(p.batch, group + (int)blockDim.x); b++) {
      const int rows = rows_of(b), first = lacks_mask(p, rows) ? 0 : covered;
      if (first < rows) write(b, clamp(global_load(starts + b), 0, total) + first, rows - first);
    }
  }
}
DEVICE void write_nan(u16 *row, int row_stride, int rows, int channels) {
#pragma unroll 1
  for (int i = 0; i < rows; i++, row += row_stride)
    for (int c = threadIdx.x; c < channels; c += blockDim.x)
      global_store2(row + c, 0x7fff);   // NaN as fp16 and as bf16
}

// Writes NaN to the rows of out and LSE that no block computes, for one head.
DEVICE void mark_missing_rows(const Params &p, int head, int covered, int part, int parts) {
  for_missing_rows(p, p.cu_seqlens_q, p.total_q, covered, part, parts, [&](int, int first, int rows) {
    write_nan(p.out + (i64)first * p.out_s.row + (i64)head * p.out_s.head, p.out_s.row, rows, p.head_dim_v);
    for (int i = threadIdx.x; p.lse && i < rows; i += blockDim.x) {
      const i64 at = (i64)head * p.lse_head + first + i;
      global_store(p.lse + at, __int_as_float(0x7fffffff));
      if (p.lse_true) global_store(p.lse_true + at, __int_as_float(0x7fffffff));
    }
  });
}
