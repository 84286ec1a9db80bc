// Algorithm 2 once more, with an outer loop over tiles of queries: dq of one tile and head.
//
// grid: tiles * nheads * batch, and with cu_seqlens_q tiles * nheads more, which clear tokens outside of all sequences;
// tiles = ceil(longest rows of a sequence / OWN); SEATS: p.seats * nheads in all.
#define KEYS_STAY 0
#include "backward.cuh"

// The largest |dout| (scaled) of each own row: with a bound of its own a row is exact however small it is beside others.
DEVICE void largest_of_rows(float (&largest)[MT][2], const Block &block) {
  // With SUMS a warp has some of the channels, and the tile from which it took them all.
  const u32 own_at = block.shared + (SUMS && REG_P ? TILES : OWN_P) + OfP::a_operand_at(threadIdx.x) + group_of(threadIdx.x) * WARP_ROWS * OfP::ROW_BYTES;
  constexpr bool KEPT = REG_P && !SUMS;
  UNROLLED(m, MT) {
    u32 bits[2] = {0, 0};   // magnitudes of fp16 compare as integers do
    UNROLLED(k, DV / 16) {
      u32 a[4];
      if (!KEPT) ldmatrix(a, OfP::along(own_at + m * 16 * OfP::ROW_BYTES, 2 * k));
      UNROLLED(i, 4) {
        const u32 x = KEPT ? block.own_p[KEPT ? k : 0][m][i] : a[i];
        bits[i & 1] = max(bits[i & 1], max(x & 0x7fff, x >> 16 & 0x7fff));
      }
    }
    UNROLLED(r, 2) largest[m][r] = max_of<4>(half_to_float((u16)bits[r]));
  }
  if (SUMS) __syncthreads();
}

KERNEL(THREADS, MINB) dq(const Params p) {
  SHARED_MEMORY
  const Owned queries(p, blockIdx.x);
  if (queries.b == p.batch) mark_missing(p, p.dq, p.dq_s, p.head_dim, queries);
  clear_unused(p, p.dq, p.dq_s, p.head_dim, queries);
  if (queries.b == p.batch || queries.left <= 0) return;

  const Exponents e(p, queries.b, queries.head_k(p));
  uint4 q[OwnMoverS::N], dout[OwnMoverP::N];
  OwnMoverS(threadIdx.x).load_own(q, queries.of(p.q, p.q_s), p.q_s.row, queries.left, p.head_dim);
  OwnMoverP(threadIdx.x).load_own(dout, queries.of(p.dout, p.dout_s), p.dout_s.row, queries.left, p.head_dim_v);
  float lse[MT][2], delta[MT][2], largest[MT][2];
  const int first_row = queries.first + group_of(threadIdx.x) * WARP_ROWS + ((threadIdx.x & 31) >> 2);
  UNROLLED(m, MT)
    UNROLLED(r, 2) {
      const int row = first_row + m * 16 + r * 8;
      const i64 at = queries.row_values(p) + row;
      lse[m][r] = row < queries.rows ? global_load(p.lse + at) : POS_INF;
      delta[m][r] = row < queries.rows ? global_load(p.delta + at) : 0.f;
    }
  Block block(p, SHARED_BASE, e);
  const Passing keys(p, queries);
  block.keep<REG_S, D>(block.own_s, 0, q, e.q);
  block.keep<REG_P, DV>(block.own_p, OWN_P, dout, e.dout);
  if (TYPE == 2) largest_of_rows(largest, block);
  UNROLLED(m, MT)
    UNROLLED(r, 2) {
      const int row = first_row + m * 16 + r * 8, ds = exponent_of_ds(p, e, largest[m][r], fabsf(delta[m][r]));
      block.own.lse[m][r] = row_lse(p, lse[m][r] - bias_top(p, queries.b, queries.head, row), row, keys.shift, position_slope(p, queries.b, queries.head));
      block.own.minus_delta[m][r] = times_power_of_two(-delta[m][r], e.v + e.dout + ds);
      block.ds_exponent[m][r] = ds;
      if (DROPOUT) block.own.word[m][r] = DropoutWords(p, queries.b, queries.head).row(row);
    }

  GradientS dq;
  GradientP unused;
  set_zero(dq);
  block.walk(p, queries, keys, dq, unused);
  const Owned again(p, blockIdx.x + p.zero);
  const Exponents same(p, again.b, again.head_k(p));
  block.write(dq, -(P_SHIFT + same.v + same.dout + same.k), p.softmax_scale, again.of(p.dq, p.dq_s), p.dq_s.row, again.left, p.head_dim, true);
}
