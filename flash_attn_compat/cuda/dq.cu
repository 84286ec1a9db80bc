// Algorithm 2 once more, with an outer loop over tiles of queries: dq of one tile and head.
//
// grid: tiles * nheads * batch, and with cu_seqlens_q tiles * nheads more, which clear tokens outside of all sequences;
// tiles = ceil(longest rows of a sequence / OWN).
#define KEYS_STAY 0
#include "backward.cuh"

// The largest |dout| (scaled) of each own row: with a bound of its own a row is exact however small it is beside others.
DEVICE void largest_dout(float (&largest)[MT][2], const Block &block) {
#pragma unroll
  for (int m = 0; m < MT; m++) {
    u32 bits[2] = {0, 0};   // magnitudes of fp16 compare as integers do
#pragma unroll
    for (int k = 0; k < CHUNKS / 2; k++) {
      u32 a[4];
      if (!REG_P) ldmatrix(a, (block.shared + Block::OWN_P + block.a_operand() + m * 16 * ROW_BYTES) ^ (k << 5));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u32 x = REG_P ? block.own_p[REG_P ? k : 0][m][i] : a[i];
        bits[i & 1] = max(bits[i & 1], max(x & 0x7fff, x >> 16 & 0x7fff));
      }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float x = half_to_float((u16)bits[r]);
      x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
      largest[m][r] = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
    }
  }
}

KERNEL(THREADS, MINB) dq(const Params p) {
  SHARED_MEMORY
  const int head = blockIdx.x / p.tiles % p.nheads, b = blockIdx.x / p.tiles / p.nheads, head_k = head / p.group;
  // The last tiles of a causal problem see most keys: they start first.
  const int tile = LOCAL ? p.tiles - 1 - blockIdx.x % p.tiles : blockIdx.x % p.tiles;
  if (b == p.batch) {
    const int end = clamp(p.cu_seqlens_q[0], 0, p.total_q), behind = clamp(p.cu_seqlens_q[b], end, p.total_q);
    return clear_rows(p.dq, p.dq_s, head, p.head_dim, 0, end, behind, p.total_q, tile, p.tiles);
  }
  const Sequence seq = find_sequence(p, b);
  const int first_row = tile * OWN, left = seq.seqlen_q - first_row;
  if (left <= 0) return;

  Block block(p, b, head_k);
  const Exponents &e = block.exponents;
  block.shared = SHARED_BASE;
  const int offset = seq.seqlen_k - seq.seqlen_q;
  const int before = LOCAL && p.window_left >= 0 ? p.window_left : UNBOUNDED, after = LOCAL && p.window_right >= 0 ? p.window_right : UNBOUNDED;
  const Range keys = visible_keys(first_row, min(first_row + OWN, seq.seqlen_q), offset, seq.seqlen_k, before, after);
  block.band = {first_row + (int)(threadIdx.x >> 5) * WARP_ROWS, offset, before, after, seq.seqlen_k};
  const Passing passing = {
      p.k + b * p.k_s.batch + (i64)seq.first_k * p.k_s.row + (i64)head_k * p.k_s.head,
      p.v + b * p.v_s.batch + (i64)seq.first_k * p.v_s.row + (i64)head_k * p.v_s.head,
      nullptr, nullptr, seq.seqlen_k, offset, keys.first / TL, (keys.end + TL - 1) / TL, 1};

  const u16 *q = p.q + b * p.q_s.batch + (i64)(seq.first_q + first_row) * p.q_s.row + (i64)head * p.q_s.head;
  const u16 *dout = p.dout + b * p.dout_s.batch + (i64)(seq.first_q + first_row) * p.dout_s.row + (i64)head * p.dout_s.head;
  block.load_own<REG_S>(block.own_s, 0, q, p.q_s.row, left, p.head_dim, e.q);
  block.load_own<REG_P>(block.own_p, Block::OWN_P, dout, p.dout_s.row, left, p.head_dim_v, e.dout);
  float largest[MT][2];
  if (TYPE == 2) largest_dout(largest, block);
  const i64 row_values = b * p.lse_batch + head * p.lse_head + seq.first_q;
  const float slope = ALIBI ? p.alibi_slopes[b * p.slopes_batch + head] : 0.f;
  int exponent[MT][2];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = block.band.first + m * 16 + ((threadIdx.x & 31) >> 2) + r * 8;
      const bool there = row < seq.seqlen_q;
      block.own.lse[m][r] = there ? row_lse(p, p.lse + row_values, row, offset, slope) : POS_INF;
      block.own.delta[m][r] = there ? row_delta(p.delta + row_values, row, e) : 0.f;
      const int ds = ds_exponent(p, largest[m][r], fabsf(block.own.delta[m][r]));
      block.ds_factor[m][r] = power_of_two(ds);
      exponent[m][r] = -(ds + P_SHIFT + e.v + e.dout + e.k);
#if DROPOUT
      block.own.word[m][r] = DropoutWords(p, b, head).row(row);
#endif
    }

  Gradient dq, unused;
  set_zero(dq);
  block.walk<true, false>(p, passing, b, head, dq, unused);
  u16 *to = p.dq + b * p.dq_s.batch + (i64)(seq.first_q + first_row) * p.dq_s.row + (i64)head * p.dq_s.head;
  block.write(dq, exponent, p.softmax_scale, to, p.dq_s.row, left, p.head_dim);
}
