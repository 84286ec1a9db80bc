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
      if (!REG_P) ldmatrix(a, (block.shared + Block::OWN_P + Block::own_at(threadIdx.x) + m * 16 * ROW_BYTES) ^ (k << 5));
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

// A block's query rows. Computed again after the loop (`index` is blockIdx.x, which the compiler cannot see through): no registers keep it meanwhile.
struct Queries {
  int tile, head, b, first, left;
  Sequence seq;
  DEVICE Queries(const Params &p, int index) {
    // The last tiles of a causal problem see most keys: they start first.
    tile = LOCAL ? p.tiles - 1 - index % p.tiles : index % p.tiles;
    head = index / p.tiles % p.nheads;
    b = index / p.tiles / p.nheads;
    first = tile * OWN;
    if (b == p.batch) return;
    seq = find_sequence(p, b);
    left = seq.seqlen_q - first;
  }
  template <typename T> DEVICE T *rows(T *x, const Strides &s) const {
    return x + b * s.batch + (i64)(seq.first_q + first) * s.row + (i64)head * s.head;
  }
};

KERNEL(THREADS, MINB) dq(const Params p) {
  SHARED_MEMORY
  const Queries queries(p, blockIdx.x);
  const Sequence &seq = queries.seq;
  const int b = queries.b, head = queries.head, head_k = head / p.group;
  if (b == p.batch) {
    const int end = clamp(global_load(p.cu_seqlens_q), 0, p.total_q), behind = clamp(global_load(p.cu_seqlens_q + b), end, p.total_q);
    return clear_rows(p.dq, p.dq_s, head, p.head_dim, 0, end, behind, p.total_q, queries.tile, p.tiles);
  }
  if (queries.left <= 0) return;

  const Exponents e(p, b, head_k);
  Block block(p, SHARED_BASE, e);
  const int offset = seq.seqlen_k - seq.seqlen_q;
  block.own_first = queries.first, block.shift = offset;
  const Sight band = sight(p, queries.first, offset, seq.seqlen_k, 0);
  const Range keys = visible_keys(queries.first, min(queries.first + OWN, seq.seqlen_q), offset, band.passing, band.before, band.after);
  const Passing passing = {
      p.k + b * p.k_s.batch + (i64)seq.first_k * p.k_s.row + (i64)head_k * p.k_s.head,
      p.v + b * p.v_s.batch + (i64)seq.first_k * p.v_s.row + (i64)head_k * p.v_s.head,
      0, seq.seqlen_k, keys.first / TL, (keys.end + TL - 1) / TL, 1};

  block.load_own<REG_S>(block.own_s, 0, queries.rows(p.q, p.q_s), p.q_s.row, queries.left, p.head_dim, e.q);
  block.load_own<REG_P>(block.own_p, Block::OWN_P, queries.rows(p.dout, p.dout_s), p.dout_s.row, queries.left, p.head_dim_v, e.dout);
  float largest[MT][2];
  if (TYPE == 2) largest_dout(largest, block);
  const i64 row_values = b * p.lse_batch + head * p.lse_head + seq.first_q;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int row = queries.first + (threadIdx.x >> 5) * WARP_ROWS + m * 16 + ((threadIdx.x & 31) >> 2) + r * 8;
      const bool there = row < seq.seqlen_q;
      block.own.lse[m][r] = there ? row_lse(p, p.lse + row_values, row, offset, position_slope(p, b, head)) : POS_INF;
      const int ds = exponent_of_ds(p, e, largest[m][r], there ? fabsf(global_load(p.delta + row_values + row)) : 0.f);
      block.own.delta[m][r] = there ? row_delta(p.delta + row_values, row, e.v + e.dout + ds) : 0.f;
      block.ds_exponent[m][r] = ds;
#if DROPOUT
      block.own.word[m][r] = DropoutWords(p, b, head).row(row);
#endif
    }

  Gradient dq, unused;
  set_zero(dq);
  block.walk<true, false>(p, passing, b, head, dq, unused);
  const Queries again(p, blockIdx.x + p.zero);
  const Exponents same(p, again.b, again.head / p.group);
  block.write(dq, -(P_SHIFT + same.v + same.dout + same.k), p.softmax_scale, again.rows(p.dq, p.dq_s), p.dq_s.row, again.left, p.head_dim, true);
}
