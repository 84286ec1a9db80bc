// What forward, decode and backward share: where a sequence lies, tiles in shared memory, loads with conversion, dropout's words.
//
// Macros, 0 where a call asks for nothing of the kind (DEFAULTS in backends/fused/variants.py): D, the head dim that registers and tiles are made
// for, and DV that of values, where it is another one (the true ones are p.head_dim and p.head_dim_v); MIN_BLOCKS, blocks that a multiprocessor is to hold,
// which bounds the registers; VEC, elements a global load may take at once, 8 where every row starts on 16 bytes, else 1; BIAS and BIAS_PAIRS, as mask.cuh says; LOCAL, causal or any window; ALIBI, SOFTCAP, DROPOUT; PAGED, keys and values through block_table;
// APPEND, new keys come with the call; SHARED_GRID, sequences share a grid; COPIED, what passes by is converted bf16 already.
#pragma once
#include "ptx.cuh"

#ifndef DV
#define DV D
#endif

DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }
DEVICE int clamp(int x, int low, int high) { return max(low, min(x, high)); }
// Of LANES neighbouring lanes; all of them get it. Four share a row of what mma returns.
template <int LANES, class T> DEVICE T max_of(T x) {
#pragma unroll
  for (int i = LANES / 2; i; i >>= 1) x = max(x, __shfl_xor_sync(ALL_LANES, x, i));
  return x;
}
template <int LANES> DEVICE float sum_of(float x) {
#pragma unroll
  for (int i = LANES / 2; i; i >>= 1) x += __shfl_xor_sync(ALL_LANES, x, i);
  return x;
}

// ---- Where one sequence lies. Whatever the lengths say, nothing outside of the tensors is addressed.
struct Sequence {
  int first_q, seqlen_q;   // first token of packed rows, else 0
  int first_k, seqlen_k;   // first key's slot, and how many keys there are
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

// Keys that the rows [row, row_end) see between them: [first, end). A row's own position among the keys is row + offset.
struct Range {
  int first, end;
};
#define UNBOUNDED (1 << 29)

DEVICE Range visible_keys(int row, int row_end, int offset, int seqlen_k, int left, int right) {
  if (!LOCAL) return {0, seqlen_k};
  return {max(0, row + offset - left), min(seqlen_k, row_end - 1 + offset + right + 1)};
}

DEVICE int window(int size) { return LOCAL && size >= 0 ? size : UNBOUNDED; }

// A warp's ROWS own rows, and which of those that pass by in tiles of TILE they see: own row i from i + shift - before to i + shift + after.
template <int ROWS, int TILE> struct MaskRange {
  int first, shift;    // the first own row, and where it stands among those that pass
  int streamed;         // how many pass
  int before, after;   // the window
  DEVICE bool sees_some(int tile) const {
    return tile <= first + ROWS - 1 + shift + after && tile + TILE - 1 >= first + shift - before;
  }
  DEVICE bool sees_all(int tile) const {
    if (tile + TILE > streamed) return false;
    return !LOCAL || (tile + TILE - 1 <= first + shift + after && tile >= first + ROWS - 1 + shift - before);
  }
  // All of a tile lies on one side of all own positions.
  DEVICE bool is_behind(int tile) const { return tile + TILE - 1 <= first + shift; }
  DEVICE bool is_ahead(int tile) const { return tile >= first + ROWS - 1 + shift; }
};

// Which tile of which slab (a head of a sequence) a block works on. Under a mask some tiles are longer than others: the longest start first,
// those of several heads, so that the last ones to start are short. Of more than the GPU holds at once, keys would push each other out of the L2 cache.
struct TileScheduler {
  int tile, batch_head;   // tiles from the longest on
  DEVICE TileScheduler(const Params &p, int index, int tiles) : tile(index % tiles), batch_head(index / tiles) {
    if (!LOCAL) return;
    const int batch_heads = gridDim.x / tiles, together = clamp(p.resident / tiles, 1, batch_heads), first = batch_head / together * together;
    const int heads = min(together, batch_heads - first), within = index - first * tiles;
    tile = within / heads;
    batch_head = first + within % heads;
  }
};

// Which tile of which sequence a block works on, where its TileScheduler gives `slab` and `turn`. As a rule a sequence has as many blocks as the longest one may
// need. Where that is far too many (SHARED_GRID), p.seats are dealt out by length: sequence i has those from starts[i] / ROWS + i on, which are enough for its
// tiles wherever it starts; those behind the last one's are sequence p.batch's. Blocks of p.tiles neighbouring seats and one head stand together.
template <int ROWS, bool LAST_FIRST> struct VarlenTile {
  int b, tile, tiles;   // tiles: for which the sequence has blocks
  DEVICE VarlenTile(const Params &p, const int *starts, int total, int batch_head, int turn) : b(batch_head), tile(LAST_FIRST ? p.tiles - 1 - turn : turn), tiles(p.tiles) {
    if (!SHARED_GRID) return;
    const int index = batch_head * p.tiles + turn, number = LAST_FIRST ? p.varlen_tiles - 1 - index : index;
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

// Where a row of one head begins.
template <class T> DEVICE T *row_at(T *x, const Strides &s, int b, int row, int head) { return x + b * s.batch + (i64)row * s.row + (i64)head * s.head; }
DEVICE float alibi_slope(const Params &p, int b, int head) { return global_load(p.alibi_slopes + b * p.slopes_batch + head); }

// A slot of a sequence's cache: contiguous, or through its pages.
DEVICE const u16 *key_row(const Params &p, const u16 *base, const Strides &s, const int *pages, int slot) {
  if (!PAGED) return base + (i64)slot * s.row;
  const u32 page = (u32)slot / (u32)p.page_size, within = slot - page * p.page_size;
  const u32 index = min((u32)global_load(pages + min(page, (u32)(p.pages_per_sequence - 1))), (u32)(p.num_pages - 1));
  return base + (i64)index * s.batch + (i64)within * s.row;
}

// Tokens of packed rows before the first and behind the last sequence get out 0 and LSE 0: this block's share of them, `part` of `parts`.
DEVICE void clear_outside(const Params &p, int head, int part, int parts) {
  const int first = clamp(global_load(p.cu_seqlens_q), 0, p.total_q), end = clamp(global_load(p.cu_seqlens_q + p.batch), first, p.total_q);
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

// ---- Sequences that are longer than the caller said have rows for which there is no block: these become NaN.
// Blocks that have no sequence look for them, so that others have nothing to do with it.

// Whether a causal sequence has several rows where the caller said one, by which the kernel has no mask: all of its rows are missing then.
DEVICE bool lacks_mask(const Params &p, int rows) { return !LOCAL && p.window_right >= 0 && rows > 1; }

// write(b, first, rows): a sequence and its rows from `first` on; `covered` of each sequence have blocks. This block looks at some sequences, as
// `part` of `parts`.
template <class Write> DEVICE void for_missing_rows(const Params &p, const int *starts, int total, int covered, int part, int parts, const Write &write) {
  if (SHARED_GRID) return;
#pragma unroll 1
  for (int group = part * blockDim.x; group < p.batch; group += parts * blockDim.x) {
    const int mine = group + threadIdx.x;
    const auto rows_of = [&](int b) { return b < p.batch ? clamp(global_load(starts + b + 1), 0, total) - clamp(global_load(starts + b), 0, total) : 0; };
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
    for (int c = threadIdx.x; c < channels; c += blockDim.x) global_store2(row + c, 0x7fff);   // NaN as fp16 and as bf16
}

// Those of out and LSE, of one head.
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

// ---- 16-bit numbers
DEVICE u32 word(const uint4 &x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
DEVICE float bits_to_float(u16 x) { return TYPE == 0 ? half_to_float(x) : __int_as_float((u32)x << 16); }   // of the caller's dtype

// Two floats rounded to the caller's dtype.
DEVICE u32 pack_out(float a, float b) {
  if (TYPE != 2) return pack(a, b);
  u32 x = __float_as_int(a), y = __float_as_int(b);
  x = (x & 0x7fffffff) > 0x7f800000 ? 0x7fffffff : x + 0x7fff + ((x >> 16) & 1);
  y = (y & 0x7fffffff) > 0x7f800000 ? 0x7fffffff : y + 0x7fff + ((y >> 16) & 1);
  return (x >> 16) | (y & 0xffff0000u);
}

// Converted bf16: every (sequence, key head) has powers of two of its own, which bring its largest finite magnitude to
// [2^14, 2^15): nothing overflows, 29 binades below it keep all bits, and an inf or NaN affects no other head.
// absmax finds those of k and v, forward of q; delta that of dout, and the largest |delta|. They are bits of floats, which compare as the floats do.
// The forward's copies go by every other power, to [2^14, 2^16): so that one is mostly right before all is known.
enum { ABSMAX_K, ABSMAX_V, ABSMAX_Q, ABSMAX_DOUT };
DEVICE int *absmax_of(const Params &p, int tensor, int b, int head_k) { return p.absmax + (i64)(tensor * p.batch + b) * p.nheads_k + head_k; }
DEVICE int *absmax_of_dout(const Params &p, int b, int head_k) { return p.absmax_dout + b * p.nheads_k + head_k; }
DEVICE int *absmax_of_delta(const Params &p, int b, int head_k) { return absmax_of_dout(p, b + p.batch, head_k); }
// A maximum of what all lanes have: the same in whichever order warps come. What is known of it then.
DEVICE int raise(int *maximum, int x) {
  const int known = threadIdx.x % 32 == 0 ? global_load_fresh(maximum) : 0;
  x = max_of<32>(x);
  if (threadIdx.x % 32 == 0 && x > known) atomicMax(maximum, x);
  return __shfl_sync(ALL_LANES, max(x, known), 0);
}
DEVICE int finite_magnitude(int largest, u32 pair) {   // of bf16; floats that are not negative compare as their bits do
  const int low = pair << 16 & 0x7fff0000, high = pair & 0x7fff0000;
  return max(largest, max(low < 0x7f800000 ? low : 0, high < 0x7f800000 ? high : 0));
}
DEVICE int finite_magnitude(int largest, const uint4 &x) {
  return finite_magnitude(finite_magnitude(finite_magnitude(finite_magnitude(largest, x.x), x.y), x.z), x.w);
}
template <int N> DEVICE int finite_magnitude(const uint4 (&x)[N]) {
  int largest = 0;
  UNROLLED(i, N) largest = finite_magnitude(largest, x[i]);
  return largest;
}
DEVICE float scale_for(int largest, bool is_copied = false) {
  if (largest == 0) return 1.f;
  const int exponent = max((largest >> 23) - 127, -111);
  return __int_as_float(((is_copied ? 15 - (exponent + 1 & ~1) : 14 - exponent) + 127) << 23);
}
DEVICE float inverse_of_power(float scale) { return __int_as_float((254 << 23) - __float_as_int(scale)); }
DEVICE float scale_of(const int *absmax, bool is_copied = false) { return TYPE == 2 ? scale_for(global_load(absmax), is_copied) : 1.f; }

DEVICE u32 convert(u32 x, float scale) { return pack(__int_as_float(x << 16) * scale, __int_as_float(x & 0xffff0000u) * scale); }
DEVICE uint4 convert(uint4 x, float scale) {
  return TYPE == 2 ? make_uint4(convert(x.x, scale), convert(x.y, scale), convert(x.z, scale), convert(x.w, scale)) : x;
}

// Eight channels of a row, of which `channels` exist.
DEVICE uint4 load_chunk(const u16 *from, int channels) {
  if (VEC == 8) return global_load16(from);
  u32 x[8];
  UNROLLED(i, 8) x[i] = i < channels ? global_load2(from + i) : 0;
  return make_uint4(x[0] | x[1] << 16, x[2] | x[3] << 16, x[4] | x[5] << 16, x[6] | x[7] << 16);
}

DEVICE uint4 load_chunk_if(bool there, const u16 *from, int channels) {   // else zeros
  return VEC == 8 ? global_load16_if(there && channels > 0, from) : load_chunk(from, there ? channels : 0);
}

DEVICE void store_chunk(u16 *to, uint4 v, int channels) {
  if (VEC == 8) return global_store16(to, v);
  const u32 x[4] = {v.x, v.y, v.z, v.w};
  UNROLLED(i, 8)
    if (i < channels) global_store2(to + i, (u16)(x[i / 2] >> (i % 2 * 16)));
}

// ---- Tiles in shared memory: rows of W channels, a multiple of 16, in chunks of 16 bytes. An ldmatrix reads one chunk of 8 rows, which must lie in
// all 8 places of 128 bytes. Rows begin in 8 / SPREAD of the places; within each SPREAD chunks of a row, these change places by the row's number.
template <int W> struct Layout {
  static constexpr int CHUNKS = W / 8, ROW_BYTES = W * 2, SPREAD = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;
  static DEVICE u32 at(int row, int chunk) {
    // Rows that would lie in one place differ in the bits that XOR takes of their number: it sends a chunk of each to another place,
    // and since XOR is its own inverse, no two chunks of a row to the same.
    return row * ROW_BYTES + ((chunk ^ (row >> (SPREAD == 8 ? 0 : SPREAD == 4 ? 1 : 2) & (SPREAD - 1))) << 4);
  }
  // From where one of a row's first chunks lies to where the one an even number of `chunks` behind does. (c ^ r) ^ n = (c ^ n) ^ r: whatever the row
  // is, XOR with n leads from chunk c to chunk c ^ n, which is c + n where they have no bits in common: for c of 0 or 1 and even n.
  static DEVICE u32 along(u32 at, int chunks) {
    if (W % 256 == 0) return at ^ chunks << 4;   // compiler steering: the widest rows leave no registers for parts of it
    return (at ^ (chunks & (SPREAD - 1)) << 4) + ((chunks & -SPREAD) << 4);
  }
  // Where a lane's ldmatrix rows lie. Of an A operand (and of a B operand that is read transposed): rows 0-7, 8-15, then the next chunk.
  // Of a B operand: rows 0-7, the next chunk, then rows 8-15.
  static DEVICE u32 a_operand_at(int thread) { return at(thread & 15, thread >> 4 & 1); }
  static DEVICE u32 b_operand_at(int thread) { return at((thread & 7) + (thread >> 4 & 1) * 8, thread >> 3 & 1); }
};

// How THREADS share a tile of ROWS rows on its way from global to shared memory: LANES of them take LANES neighbouring chunks, so that what 8 threads
// store fills all 128 bytes. A thread takes every STEP-th row, and every SIDES * LANES-th chunk of it: N in all, which registers hold while the tensor
// cores work (cp.async: in flight).
template <int THREADS, int ROWS, int W> struct TileCopy {
  typedef Layout<W> L;
  static constexpr int LANES = L::SPREAD, STEP = THREADS / LANES < ROWS ? THREADS / LANES : ROWS, SIDES = THREADS / LANES / STEP;
  static constexpr int SHARES = L::CHUNKS / LANES, PASSES = (SHARES + SIDES - 1) / SIDES, N = ROWS / STEP * PASSES;
  static_assert(STEP % 8 == 0 && ROWS % STEP == 0 && THREADS % (LANES * STEP) == 0, "a thread's rows are swizzled alike");
  int row, chunk;    // this thread's first row, its first chunk
  u32 at;            // byte offset of that chunk in a tile
  DEVICE TileCopy(int thread)
      : row(SIDES == 1 ? thread / LANES : thread / LANES % STEP), chunk(thread % LANES + (SIDES == 1 ? 0 : thread / (LANES * STEP) * LANES)), at(L::at(row, chunk)) {}
  // How far the thread's i-th chunk is behind its first one, in rows and in chunks; whether it lies in the row.
  static DEVICE constexpr int down(int i) { return i / PASSES * STEP; }
  static DEVICE constexpr int along(int i) { return i % PASSES * SIDES * LANES; }
  DEVICE bool has(int i) const { return (i % PASSES + 1) * SIDES <= SHARES || chunk + along(i) < L::CHUNKS; }
  DEVICE u32 offset(int i) const { return at + down(i) * L::ROW_BYTES + along(i) * 16; }

  // Rows from first_slot on, of which `left` are there; channels past head_dim and rows past the end are 0.
  DEVICE void load(uint4 *x, const Params &p, const u16 *base, const Strides &s, const int *pages, int first_slot, int left, int head_dim, u32 tile) const {
    const int rows = left - row;
    if (PAGED && (u32)first_slot % (u32)p.page_size + ROWS > (u32)p.page_size) {   // each row is looked up
      UNROLLED(i, N) {
        const bool there = down(i) < rows;
        take(x, i, there, there ? key_row(p, base, s, pages, first_slot + row + down(i)) + (chunk + along(i)) * 8 : base, base, head_dim, tile);
      }
      return;
    }
    const u16 *from = PAGED ? key_row(p, base, s, pages, first_slot) + (i64)row * s.row + chunk * 8 : base + (i64)(first_slot + row) * s.row + chunk * 8;
    if (!CP_ASYNC && left >= ROWS && head_dim >= W) {
      UNROLLED(i, N)
        if (has(i)) x[i] = load_chunk(from + (i64)down(i) * s.row + along(i) * 8, 8);
    } else {
      UNROLLED(i, N) take(x, i, down(i) < rows, from + (i64)down(i) * s.row + along(i) * 8, base, head_dim, tile);
    }
  }
  DEVICE void take(uint4 *x, int i, bool there, const u16 *from, const u16 *readable, int head_dim, u32 tile) const {
    const int channels = head_dim - (chunk + along(i)) * 8;
    if (!CP_ASYNC) x[i] = load_chunk_if(there, from, channels);
    else if (has(i)) copy_async(tile + offset(i), there && channels > 0 ? from : readable, there && channels > 0);
  }
  DEVICE void store(const uint4 *x, u32 tile, float scale) const {
    CP_ASYNC ? copy_async_wait() : COPIED ? keep<false>(x, tile, scale) : keep(x, tile, scale);
  }

  // The same for a block's own rows, which nothing has to wait for: `left` of them are there.
  DEVICE void load_stationary(uint4 *x, const u16 *rows, int row_stride, int left, int head_dim) const {
    UNROLLED(i, N)
      x[i] = load_chunk_if(row + down(i) < left, rows + (i64)(row + down(i)) * row_stride + (chunk + along(i)) * 8, head_dim - (chunk + along(i)) * 8);
  }
  template <bool CONVERTS = true> DEVICE void keep(const uint4 *x, u32 tile, float scale) const {
    UNROLLED(i, N)
      if (has(i)) shared_store(tile + offset(i), CONVERTS ? convert(x[i], scale) : x[i]);
  }
};

// A warp's own rows of W channels from there to registers: the tile is free again. SPLIT_K: as in product().
template <int W, int N, int M> DEVICE void load_operand(u32 (&operand)[N][M][4], u32 stationary_at) {
  UNROLLED(k, N)
    UNROLLED(m, M) ldmatrix(operand[k][m], Layout<W>::along(stationary_at + m * 16 * Layout<W>::ROW_BYTES, 2 * k << SPLIT_K));
  __syncthreads();
}

// Two steps of 8 along the inner dimension for two neighbouring 8-wide column blocks: b[0], b[1] are block 0's steps, b[2], b[3] block 1's.
// a[m]: the 16 x 16 operand of row tile m (steps a0, a1 and a2, a3).
template <int M> DEVICE void multiply(float (&c0)[M][4], float (&c1)[M][4], const u32 (&a)[M][4], const u32 (&b)[4]) {
  if (MMA_K16) {
    UNROLLED(m, M) mma_k16(c0[m], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
    UNROLLED(m, M) mma_k16(c1[m], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
    return;
  }
  UNROLLED(step, 2) {
    UNROLLED(m, M) mma_k8(c0[m], a[m][2 * step], a[m][2 * step + 1], b[step]);
    UNROLLED(m, M) mma_k8(c1[m], a[m][2 * step], a[m][2 * step + 1], b[2 + step]);
  }
}

template <int N, int M> DEVICE void set_zero(float (&c)[N][M][4]) {
  UNROLLED(n, N)
    UNROLLED(m, M)
      UNROLLED(e, 4) c[n][m][e] = 0.f;
}

// c += own rows times a tile's rows, both along their W channels; own operands lie in registers (REG) or in shared memory. With SPLIT_K, 2^SPLIT_K warps have the
// same own rows: each takes every 2^SPLIT_K-th 16 channels, from both addresses on, and they add up what they find.
template <bool REG, int W, int N, int M> DEVICE void product(float (*c)[M][4], const u32 (*own)[M][4], u32 stationary_at, u32 tile_at, int first = 0) {
  typedef Layout<W> L;
  UNROLLED(k, W / 16 >> SPLIT_K) {
    u32 a[M][4];
    UNROLLED(m, M) {
      if (!REG) ldmatrix(a[m], L::along(stationary_at + m * 16 * L::ROW_BYTES, 2 * k << SPLIT_K));
      UNROLLED(i, 4)
        if (REG) a[m][i] = own[k][m][i];
    }
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      u32 b[4];
      ldmatrix(b, L::along(tile_at, 2 * k << SPLIT_K) + (first + n) * 8 * L::ROW_BYTES);
      multiply<M>(c[n], c[n + 1], a, b);
    }
  }
}

DEVICE float4 together(const float (&c)[4]) { return make_float4(c[0], c[1], c[2], c[3]); }
DEVICE void add(float (&c)[4], const float4 &x) {
  c[0] += x.x, c[1] += x.y, c[2] += x.z, c[3] += x.w;
}
// With SPLIT_K: a lane's sums to shared memory, and added to those of another warp from there.
DEVICE void store_partial(const float (&c)[4], u32 at) { shared_store_float4(at, together(c)); }
DEVICE void add_partial(float (&c)[4], u32 at) { add(c, shared_load_float4(at)); }

// Online softmax: S becomes exp2(S * unit - m_new + P_SHIFT); row maxima m and this lane's share of the row sums l follow. Rescales O only
// where some maximum of the warp rose.
template <int P_SHIFT, int N, int C, int M>
DEVICE void online_softmax(float (&S)[N][M][4], float (&m)[M][2], float (&l)[M][2], float (&O)[C][M][4], float unit) {
  float shrink[M][2];
  bool rose = false;
  UNROLLED(i, M)
    UNROLLED(r, 2) {
      float highest = m[i][r];
      UNROLLED(n, N) highest = fmaxf(highest, fmaxf(S[n][i][2 * r], S[n][i][2 * r + 1]));
      highest = max_of<4>(highest);
      rose = rose || highest > m[i][r];
      const float top = highest == NEG_INF ? 0.f : highest, from = BIAS > 1 ? 0.f : top * unit, less = BIAS > 1 ? top : 0.f;   // biases may be huge
      shrink[i][r] = exp2_approx((m[i][r] - top) * unit);   // exactly 1 where the maximum stays, or sums drift over many tiles
      m[i][r] = highest;
      float sum = l[i][r] * shrink[i][r];
      UNROLLED(n, N) {
        S[n][i][2 * r] = exp2_approx(fmaf(S[n][i][2 * r] - less, unit, P_SHIFT - from));
        S[n][i][2 * r + 1] = exp2_approx(fmaf(S[n][i][2 * r + 1] - less, unit, P_SHIFT - from));
        sum += S[n][i][2 * r] + S[n][i][2 * r + 1];
      }
      l[i][r] = sum;
    }
  if (!__any_sync(ALL_LANES, rose)) return;
  UNROLLED(n, C)
    UNROLLED(i, M)
      UNROLLED(e, 4) O[n][i][e] *= shrink[i][e >> 1];
}

DEVICE float reciprocal_of_sum(float l) { return l == 0.f ? 0.f : 1.f / l; }   // rows that see no key: 0
// LSE = ln(2) (m + log2(l)), +inf where a row sees no key; with the row's position where flash-attn adds it.
DEVICE void write_lse(const Params &p, i64 at, float m, float l, float slope, int position) {
  const float lse = l == 0.f ? POS_INF : (m + __log2f(l)) * LN2;
  global_store(p.lse + at, (ALIBI || BIAS > 1) && p.lse_has_position ? fmaf(slope, (float)position, lse) : lse);
  if (p.lse_true) global_store(p.lse_true + at, lse);
}

// The 16 * M rows of a warp (first_row.. of its block's tile) times `factor`, through shared memory of its own (from `place` on) to 16-byte stores.
// SHARE warps have the same rows, and of their channels every SHARE-th 16; each writes some of the rows once all are there.
template <int SHARE, int N, int M>
DEVICE void write_rows(float (&c)[N][M][4], const float (&factor)[M][2], u32 place, int first_row, u16 *out, int row_stride, int rows, int head_dim, int side = 0) {
  typedef Layout<N * 8 * SHARE> L;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  UNROLLED(m, M)
    UNROLLED(r, 2)
      UNROLLED(n, N)
        shared_store(place + L::at(m * 16 + g + r * 8, SHARE == 1 ? n : (n / 2 * SHARE + side) * 2 + n % 2) + t * 4, pack_out(c[n][m][2 * r] * factor[m][r], c[n][m][2 * r + 1] * factor[m][r]));
  SHARE == 1 ? __syncwarp() : __syncthreads();
  UNROLLED(i, M * L::SPREAD / 2 / SHARE)
    UNROLLED(n, L::CHUNKS / L::SPREAD) {
      const int row = lane / L::SPREAD + i * 32 / L::SPREAD + side * M * 16 / SHARE, chunk = lane % L::SPREAD + n * L::SPREAD;
      if (first_row + row < rows && chunk * 8 < head_dim)
        store_chunk(out + (i64)(first_row + row) * row_stride + chunk * 8, shared_load4(place + L::at(row, chunk)), head_dim - chunk * 8);
    }
  SHARE == 1 ? __syncwarp() : __syncthreads();
}

// Half of what tanh(x) is below 1, (1 - tanh(x)) / 2 = 1 / (exp(2 x) + 1), good to 1e-7: doubled is 2 x log2(e).
DEVICE float half_below_one(float doubled) { return reciprocal_approx(exp2_approx(doubled) + 1.f); }

// ---- Dropout: the words of core/dropout.py. A probability is dropped when its word is above p.dropout_limit.
#define MULTIPLIER_A 0x7FEB352Du
#define MULTIPLIER_B 0x846CA68Bu
DEVICE u32 mix(u32 x) {
  x = (x ^ (x >> 16)) * MULTIPLIER_A;
  x = (x ^ (x >> 15)) * MULTIPLIER_B;
  return x ^ (x >> 16);
}
struct DropoutWords {
  u32 row_base, key_base;   // a row's word is mix(row_base + row), a key's mix(key_base + key)
  DEVICE DropoutWords(const Params &p, int b, int head) {
    const u64 seed = global_load(p.rng_state), offset = global_load(p.rng_state + 1);
    u32 word = mix((u32)seed);
    word = mix(word + (u32)(seed >> 32));
    word = mix(word + (u32)offset);
    word = mix(word + (u32)(offset >> 32));
    row_base = mix(mix(word + b) + head);
    key_base = mix(word ^ MULTIPLIER_A);
  }
  DEVICE u32 row(int i) const { return mix(row_base + i); }
  DEVICE u32 key(int j) const { return mix(key_base + j); }
};
DEVICE bool dropped(u32 row_word, u32 key_word, int limit) {
  u32 word = row_word + key_word;
  word = (word ^ (u32)((int)word >> 16)) * MULTIPLIER_A;   // signed shifts, as PyTorch's of int32 are
  word = (word ^ (u32)((int)word >> 15)) * MULTIPLIER_B;
  return (int)word > limit;
}
