// Computes dq of one tile of queries of one head, by Algorithm 2 of FlashAttention-2. The grid loops over the queries.
//
// grid: tiles * nheads * batch blocks; with cu_seqlens_q tiles * nheads more, which clear tokens outside of all
// sequences. tiles = ceil(rows of the longest sequence / STATIONARY_ROWS). SHARED_GRID: p.varlen_tiles * nheads blocks.
#define KEYS_STATIONARY 0
#include "base/sequences.cuh"

// Tells backward.cuh which rows and operands of dq are stationary, and which are streamed.
struct Operands {
  // Stationary: queries, one head of them.
  static DEVICE const int *stationary_starts(const Params &p) { return p.cu_seqlens_q; }
  static DEVICE int stationary_total(const Params &p) { return p.total_q; }
  static DEVICE int stationary_heads(const Params &p) { return p.nheads; }
  static DEVICE int splits(const Params &p) { return 1; }
  static DEVICE int stationary_first(const Sequence &s) { return s.first_q; }
  static DEVICE int stationary_rows(const Sequence &s) { return s.seqlen_q; }
  // Streamed: keys and values of their key head.
  static DEVICE int streamed_first(const Sequence &s) { return s.first_k; }
  static DEVICE int streamed_rows(const Sequence &s) { return s.seqlen_k; }
  static DEVICE const u16 *streamed_qk(const Params &p) { return p.k; }
  static DEVICE const u16 *streamed_vo(const Params &p) { return p.v; }
  static DEVICE const Strides &streamed_qk_strides(const Params &p) { return p.k_s; }
  static DEVICE const Strides &streamed_vo_strides(const Params &p) { return p.v_s; }
};
#include "gradients/stages.cuh"

// Finds the largest |dout| (scaled) of each stationary row. Each row's dS is then scaled by its own bound, so that a
// row keeps its digits even if it is much smaller than other rows.
DEVICE void largest_of_rows(float (&largest)[MMA_M][2], const Block &block) {
  // With SPLIT_K a warp holds only some of the channels, so all are read from the tile in shared memory.
  const u32 stationary_at = block.shared + (SPLIT_K && VO_IN_REGS ? QK_TILES_AT : STATIONARY_VO_AT) +
                            LayoutVO::a_operand_at(threadIdx.x) +
                            group_of(threadIdx.x) * WARP_ROWS * LayoutVO::ROW_BYTES;
  constexpr bool KEPT = VO_IN_REGS && !SPLIT_K;
  UNROLLED(m, MMA_M) {
    u32 bits[2] = {0, 0};   // magnitudes of fp16 compare as integers do
    UNROLLED(k, DV / 16) {
      u32 a[4];
      if (!KEPT) ldmatrix(a, LayoutVO::along(stationary_at + m * 16 * LayoutVO::ROW_BYTES, 2 * k));
      UNROLLED(i, 4) {
        const u32 x = KEPT ? block.stationary_vo[KEPT ? k : 0][m][i] : a[i];
        bits[i & 1] = max(bits[i & 1], max(x & 0x7fff, x >> 16 & 0x7fff));
      }
    }
    UNROLLED(r, 2) largest[m][r] = max_of<4>(half_to_float((u16)bits[r]));
  }
  if (SPLIT_K) __syncthreads();
}

KERNEL(THREADS, MIN_BLOCKS) dq(const Params p) {
  SHARED_MEMORY
  const StationaryTile queries(p, blockIdx.x);
  if (queries.b == p.batch) mark_missing(p, p.dq, p.dq_s, p.head_dim, queries);
  clear_unused(p, p.dq, p.dq_s, p.head_dim, queries);
  if (queries.b == p.batch || queries.left <= 0) return;

  const Exponents e(p, queries.b, queries.head_k(p));
  uint4 q[CopyStationaryQK::N], dout[CopyStationaryVO::N];
  CopyStationaryQK(threadIdx.x).load_stationary(q, queries.of(p.q, p.q_s), p.q_s.row, queries.left, p.head_dim);
  CopyStationaryVO(threadIdx.x)
      .load_stationary(dout, queries.of(p.dout, p.dout_s), p.dout_s.row, queries.left, p.head_dim_v);
  float lse[MMA_M][2], delta[MMA_M][2], largest[MMA_M][2];
  const int first_row = queries.first + group_of(threadIdx.x) * WARP_ROWS + ((threadIdx.x & 31) >> 2);
  UNROLLED(m, MMA_M)
    UNROLLED(r, 2) {
      const int row = first_row + m * 16 + r * 8;
      const i64 at = queries.row_values(p) + row;
      lse[m][r] = row < queries.rows ? global_load(p.lse + at) : POS_INF;
      delta[m][r] = row < queries.rows ? global_load(p.delta + at) : 0.f;
    }
  Block block(p, SHARED_BASE, e);
  const StreamedTiles keys(p, queries);
  block.keep_stationary<QK_IN_REGS, D>(block.stationary_qk, 0, q, e.q);
  block.keep_stationary<VO_IN_REGS, DV>(block.stationary_vo, STATIONARY_VO_AT, dout, e.dout);
  if (TYPE == 2) largest_of_rows(largest, block);
  const int steepest = exponent_of_slopes(p, queries.b, queries.head, 1);
  UNROLLED(m, MMA_M)
    UNROLLED(r, 2) {
      const int row = first_row + m * 16 + r * 8,
                ds = exponent_of_ds(p, e, largest[m][r], fabsf(delta[m][r]), steepest);
      block.stationary.lse[m][r] = row_lse(p, lse[m][r] - bias_top(p, queries.b, queries.head, row), row, keys.shift,
                                           position_slope(p, queries.b, queries.head));
      block.stationary.minus_delta[m][r] = times_power_of_two(-delta[m][r], e.v + e.dout + ds);
      block.ds_exponent[m][r] = ds;
      if (DROPOUT) block.stationary.word[m][r] = DropoutWords(p, queries.b, queries.head).row(row);
    }

#if FLEX_GRADIENTS
  block.first_exponent = P_SHIFT + e.v + e.dout;
#endif
  GradientQK dq;
  GradientVO unused;
  set_zero(dq);
#if STAGES
  staged_loop(block, p, queries, keys, dq, unused);
#else
  block.main_loop(p, queries, keys, dq, unused);
#endif
  block.write_captured();
  const StationaryTile again(p, blockIdx.x + p.zero, &queries);
  const Exponents same(p, again.b, again.head_k(p));
  block.write(dq, -(P_SHIFT + same.v + same.dout + same.k), p.softmax_scale, again.of(p.dq, p.dq_s), p.dq_s.row,
              again.left, p.head_dim, true);
}
