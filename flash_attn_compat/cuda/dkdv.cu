// Computes dk and dv of one tile of keys, summed over the query heads of its group, by Algorithm 2 of FlashAttention-2.
// The grid is the algorithm's outer loop, over keys. FEW_KEYS: the tile has all keys of its sequence, and the kernel
// also computes delta and dq.
//
// If there are too few key heads to fill the GPU, p.splits blocks share the heads of a group, and the block that
// finishes last adds up their gradients in a fixed order.
//
// grid: tiles * nheads_k * batch * splits blocks; with cu_seqlens_k tiles * nheads_k * splits more, which clear tokens
// outside of all sequences. tiles = ceil(keys (or slots) of the longest sequence / STATIONARY_ROWS). SHARED_GRID:
// p.varlen_tiles * nheads_k blocks.
#define KEYS_STATIONARY 1
#include "base/sequences.cuh"

// Tells backward.cuh which rows and operands of dkdv are stationary, and which are streamed.
struct Operands {
  // Stationary: keys and values, one head of them.
  static DEVICE const int *stationary_starts(const Params &p) { return p.cu_seqlens_k; }
  static DEVICE int stationary_total(const Params &p) { return p.total_k; }
  static DEVICE int stationary_heads(const Params &p) { return p.nheads_k; }
  static DEVICE int splits(const Params &p) { return p.splits; }
  static DEVICE int stationary_first(const Sequence &s) { return s.first_k; }
  static DEVICE int stationary_rows(const Sequence &s) { return s.seqlen_k; }
  // Streamed: queries, all heads of the group.
  static DEVICE int streamed_first(const Sequence &s) { return s.first_q; }
  static DEVICE int streamed_rows(const Sequence &s) { return s.seqlen_q; }
  static DEVICE const u16 *streamed_qk(const Params &p) { return p.q; }
  static DEVICE const u16 *streamed_vo(const Params &p) { return p.dout; }
  static DEVICE const Strides &streamed_qk_strides(const Params &p) { return p.q_s; }
  static DEVICE const Strides &streamed_vo_strides(const Params &p) { return p.dout_s; }
};
#include "gradients/few_keys.cuh"
#include "gradients/stages.cuh"

DEVICE void write_dk(const Params &p, Block &block, GradientQK &dk, const StationaryTile &known) {
  const StationaryTile keys(p, blockIdx.x + p.zero, &known);
  const Exponents e(p, keys.b, keys.head);
  block.write(dk, -(P_SHIFT + e.v + e.dout + e.q), p.softmax_scale, keys.of(p.dk, p.dk_s), p.dk_s.row, keys.left,
              p.head_dim, true);
}
DEVICE void write_dv(const Params &p, Block &block, GradientVO &dv, const StationaryTile &known) {
  const StationaryTile keys(p, blockIdx.x + p.zero, &known);
  const Exponents e(p, keys.b, keys.head);
  const float scale = (DROPOUT ? p.dropout_scale : 1.f) * (SOFTCAP ? 0.25f : 1.f);
  block.write(dv, -(P_SHIFT + e.dout), scale, keys.of(p.dv, p.dv_s), p.dv_s.row, keys.left, p.head_dim_v, false);
}

// store_part() stores a thread's part of a gradient in global memory; add_part() adds another block's part to it.
template <int C> DEVICE void store_part(float4 *part, const float (&c)[C][MMA_M][4]) {
  UNROLLED(n, C)
    UNROLLED(m, MMA_M) global_store(part + (n * MMA_M + m) * THREADS, together(c[n][m]));
}
template <int C> DEVICE void add_part(float (&c)[C][MMA_M][4], const float4 *part) {
  UNROLLED(n, C)
    UNROLLED(m, MMA_M) add(c[n][m], global_load_fresh(part + (n * MMA_M + m) * THREADS));
}
// Adds up the gradients of a tile's splits, in order. Returns true in the block that arrives last, which then holds the
// sums, and false in the others.
DEVICE bool add_splits(const Params &p, GradientQK &dk, GradientVO &dv, const StationaryTile &known) {
  if (p.splits == 1) return true;
  const StationaryTile keys(p, blockIdx.x + p.zero, &known);
  constexpr int OF_DK = sizeof(GradientQK) / 16 * THREADS,
                BOTH = OF_DK + sizeof(GradientVO) / 16 * THREADS;   // float4s of a split: dk, then dv
  const i64 tile = (i64)(keys.b * p.nheads_k + keys.head) * p.tiles + keys.tile;
  float4 *parts = (float4 *)p.parts + tile * p.splits * BOTH + threadIdx.x, *mine = parts + keys.split * BOTH;
  store_part(mine, dk), store_part(mine + OF_DK, dv);
  if (!is_last(p, tile, p.splits)) return false;
  set_zero(dk), set_zero(dv);
#pragma unroll 1
  for (int s = 0; s < p.splits; s++, parts += BOTH) add_part(dk, parts), add_part(dv, parts + OF_DK);
  return true;
}

// The same for ROLES, where a warp holds only dk or only dv.
DEVICE bool add_splits(const Params &p, GradientQK &grad, const StationaryTile &known) {
  if (p.splits == 1) return true;
  const StationaryTile keys(p, blockIdx.x + p.zero, &known);
  constexpr int SIZE = sizeof(GradientQK) / 16 * THREADS;
  const i64 tile = (i64)(keys.b * p.nheads_k + keys.head) * p.tiles + keys.tile;
  float4 *parts = (float4 *)p.parts + tile * p.splits * SIZE + threadIdx.x;
  store_part(parts + keys.split * SIZE, grad);
  if (!is_last(p, tile, p.splits)) return false;
  set_zero(grad);
#pragma unroll 1
  for (int s = 0; s < p.splits; s++, parts += SIZE) add_part(grad, parts);
  return true;
}

// FEW_KEYS: writes 0 to the rows of dq that no tile of keys writes: tokens outside of all sequences (b = batch), and
// the queries of a sequence without keys, whose delta becomes 0, too.
DEVICE void clear_dq(const Params &p, const StationaryTile &keys) {
  int first = keys.seq.first_q, end = first + keys.seq.seqlen_q, behind = 0, last = 0;
  if (keys.b == p.batch) {
    first = 0, end = clamp(global_load(p.cu_seqlens_q), 0, p.total_q), last = p.total_q;
    behind = clamp(global_load(p.cu_seqlens_q + p.batch), end, last);
  }
  const i64 batch = keys.b == p.batch ? 0 : keys.b * p.dq_s.batch;
  for (int i = keys.tile; i < end - first + last - behind; i += keys.tiles) {
    u16 *row = p.dq + batch + (i64)(i < end - first ? first + i : behind + i - (end - first)) * p.dq_s.row;
    for (int c = threadIdx.x; c < p.head_dim * keys.heads(p); c += THREADS)
      global_store2(row + (i64)(keys.first_head(p) + c / p.head_dim) * p.dq_s.head + c % p.head_dim, 0);
    for (int head = threadIdx.x; keys.b < p.batch && head < keys.heads(p); head += THREADS)
      global_store(p.delta + keys.row_values(p) + head * p.lse_head + i, 0.f);
  }
}

KERNEL(THREADS, MIN_BLOCKS) dkdv(const Params p) {
  SHARED_MEMORY
  const StationaryTile keys(p, blockIdx.x);
  if (keys.b == p.batch)
    mark_missing(p, p.dk, p.dk_s, p.head_dim, keys), mark_missing(p, p.dv, p.dv_s, p.head_dim_v, keys);
  clear_unused(p, p.dk, p.dk_s, p.head_dim, keys);
  clear_unused(p, p.dv, p.dv_s, p.head_dim_v, keys);
  if (FEW_KEYS && (keys.b == p.batch || keys.rows == 0)) clear_dq(p, keys);
  if (keys.b == p.batch || keys.left <= 0) return;

  const Exponents e(p, keys.b, keys.head);
  const float delta = TYPE == 2 ? __int_as_float(global_load(absmax_of_delta(p, keys.b, keys.head))) : 0.f;
  uint4 k[CopyStationaryQK::N], v[CopyStationaryVO::N];
  CopyStationaryQK(threadIdx.x).load_stationary(k, keys.of(p.k, p.k_s), p.k_s.row, keys.left, p.head_dim);
  CopyStationaryVO(threadIdx.x).load_stationary(v, keys.of(p.v, p.v_s), p.v_s.row, keys.left, p.head_dim_v);
  Block block(p, SHARED_BASE, e);
  const StreamedTiles queries(p, keys);
#if FEW_KEYS
  StreamedLoads loads;
  loads.start(block, p, queries, 0, 0, threadIdx.x, 0);
#endif
  const int steepest = exponent_of_slopes(p, keys.b, keys.head * p.group, p.group),
            exponent = exponent_of_ds(p, e, 32768.f, delta, steepest);
  block.delta_exponent = e.v + e.dout + exponent;
  UNROLLED(m, MMA_M)
    UNROLLED(r, 2) {
      block.ds_exponent[m][r] = exponent;
      const int key = keys.first + group_of(threadIdx.x) * WARP_ROWS + m * 16 + ((threadIdx.x & 31) >> 2) + r * 8;
      if (DROPOUT) block.stationary.word[m][r] = DropoutWords(p, keys.b, keys.first_head(p)).key(key);
    }
#if ROLES
  keep_role(block, k, v, e.k, e.v);
  GradientQK grad;   // dv of warps that compute P, dk of the others
  GradientVO unused;
  set_zero(grad);
  staged_loop(block, p, keys, queries, grad, unused);
  if (!add_splits(p, grad, keys)) return;
  if (side_of(threadIdx.x)) write_dk(p, block, grad, keys);
  else write_dv(p, block, grad, keys);
#else
  block.keep_stationary<QK_IN_REGS, D>(block.stationary_qk, 0, k, e.k);
  block.keep_stationary<VO_IN_REGS, DV>(block.stationary_vo, STATIONARY_VO_AT, v, e.v);

  GradientQK dk;
  GradientVO dv;
  set_zero(dk);
  set_zero(dv);
#if FEW_KEYS
  few_keys_loop(block, p, keys, queries, loads, dk, dv);
  __syncthreads();   // K is no longer read
#elif STAGES
  staged_loop(block, p, keys, queries, dk, dv);
#else
  block.main_loop(p, keys, queries, dk, dv);
#endif
  if (!add_splits(p, dk, dv, keys)) return;
  write_dv(p, block, dv, keys);
  write_dk(p, block, dk, keys);
#endif
}
