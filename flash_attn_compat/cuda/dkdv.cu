// Algorithm 2's outer loop over tiles of keys: dk and dv of one tile, summed over the query heads of its group.
//
// grid: tiles * nheads_k * batch * PARTS, and with cu_seqlens_k tiles * nheads_k * PARTS more, which clear tokens outside of all sequences;
// tiles = ceil(longest keys (or slots) of a sequence / OWN). PARTS is 2 for D = 256, whose dk and dv do not fit into registers together:
// one block has dk, the next one dv.
#define KEYS_STAY 1
#include "backward.cuh"

constexpr int PARTS = D > 128 ? 2 : 1;

// The largest |delta| (scaled) of rows that pass: every warp finds it for itself.
DEVICE float largest_delta(const Params &p, const Passing &passing, const Exponents &e) {
  float largest = 0.f;
#if TYPE == 2
  for (int head = 0; head < passing.heads; head++)
    for (int row = passing.first * TL + (threadIdx.x & 31); row < min(passing.end * TL, passing.rows); row += 32)
      largest = fmaxf(largest, fabsf(row_delta(passing.delta + head * p.lse_head, row, e)));
#pragma unroll
  for (int i = 16; i; i >>= 1) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, i));
#endif
  return largest;
}

// Tokens outside of all sequences (b = batch), and this sequence's slots that hold no key, have no gradient.
DEVICE void clear_unused(const Params &p, u16 *x, const Strides &s, int head_dim, int b, int head_k, int tile) {
  int first = 0, end = p.seqlen_k, behind = 0, last = p.seqlen_k;
  if (b == p.batch) {
    end = clamp(p.cu_seqlens_k[0], 0, p.total_k);
    behind = clamp(p.cu_seqlens_k[b], end, p.total_k);
    last = p.total_k;
  } else {
    const Sequence seq = find_sequence(p, b);
    end = seq.first_k;
    behind = seq.first_k + seq.seqlen_k;
    if (p.cu_seqlens_k) {
      first = clamp(p.cu_seqlens_k[b], 0, p.total_k);
      last = clamp(p.cu_seqlens_k[b + 1], first, p.total_k);
    }
    x += b * s.batch;
  }
  clear_rows(x, s, head_k, head_dim, first, end, behind, last, tile, p.tiles);
}

KERNEL(THREADS, MINB) dkdv(const Params p) {
  SHARED_MEMORY
  const int part = blockIdx.x % PARTS, index = blockIdx.x / PARTS;
  const int tile = index % p.tiles, head_k = index / p.tiles % p.nheads_k, b = index / p.tiles / p.nheads_k, head = head_k * p.group;
  const bool has_dk = PARTS == 1 || part == 0, has_dv = PARTS == 1 || part == 1;
  if (has_dk) clear_unused(p, p.dk, p.dk_s, p.head_dim, b, head_k, tile);
  if (has_dv) clear_unused(p, p.dv, p.dv_s, p.head_dim_v, b, head_k, tile);
  if (b == p.batch) return;
  const Sequence seq = find_sequence(p, b);
  const int first_key = tile * OWN, left = seq.seqlen_k - first_key;
  if (left <= 0) return;

  Block block(p, b, head_k);
  const Exponents &e = block.exponents;
  block.shared = SHARED_BASE;
  const int offset = seq.seqlen_k - seq.seqlen_q;
  // A key is seen by rows from its own position - right to it + left.
  const int before = LOCAL && p.window_right >= 0 ? p.window_right : UNBOUNDED, after = LOCAL && p.window_left >= 0 ? p.window_left : UNBOUNDED;
  const Range rows = visible_keys(first_key, min(first_key + OWN, seq.seqlen_k), -offset, seq.seqlen_q, before, after);
  block.band = {first_key + (int)(threadIdx.x >> 5) * WARP_ROWS, -offset, before, after, seq.seqlen_q};
  const i64 row_values = b * p.lse_batch + head * p.lse_head + seq.first_q;
  const Passing passing = {
      p.q + b * p.q_s.batch + (i64)seq.first_q * p.q_s.row + (i64)head * p.q_s.head,
      p.dout + b * p.dout_s.batch + (i64)seq.first_q * p.dout_s.row + (i64)head * p.dout_s.head,
      p.lse + row_values, p.delta + row_values, seq.seqlen_q, offset, rows.first / TL, (rows.end + TL - 1) / TL, p.group};

  const int exponent = ds_exponent(p, 32768.f, largest_delta(p, passing, e));
  int dk_exponent[MT][2], dv_exponent[MT][2];
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      block.ds_factor[m][r] = power_of_two(exponent);
      dk_exponent[m][r] = -(exponent + P_SHIFT + e.v + e.dout + e.q);
      dv_exponent[m][r] = -(P_SHIFT + e.dout);
#if DROPOUT
      const int key = block.band.first + m * 16 + ((threadIdx.x & 31) >> 2) + r * 8;
      block.own.word[m][r] = DropoutWords(p, b, head).key(key);
#endif
    }

  const u16 *k = p.k + b * p.k_s.batch + (i64)(seq.first_k + first_key) * p.k_s.row + (i64)head_k * p.k_s.head;
  const u16 *v = p.v + b * p.v_s.batch + (i64)(seq.first_k + first_key) * p.v_s.row + (i64)head_k * p.v_s.head;
  block.load_own<REG_S>(block.own_s, 0, k, p.k_s.row, left, p.head_dim, e.k);
  if (has_dk) block.load_own<REG_P>(block.own_p, Block::OWN_P, v, p.v_s.row, left, p.head_dim_v, e.v);
  Gradient dk, dv;
  set_zero(dk);
  set_zero(dv);
  if (PARTS == 1) block.walk<true, true>(p, passing, b, head, dk, dv);
  else if (has_dk) block.walk<true, false>(p, passing, b, head, dk, dv);
  else block.walk<false, true>(p, passing, b, head, dk, dv);

  u16 *to_dk = p.dk + b * p.dk_s.batch + (i64)(seq.first_k + first_key) * p.dk_s.row + (i64)head_k * p.dk_s.head;
  u16 *to_dv = p.dv + b * p.dv_s.batch + (i64)(seq.first_k + first_key) * p.dv_s.row + (i64)head_k * p.dv_s.head;
  if (has_dv) block.write(dv, dv_exponent, DROPOUT ? p.dropout_scale : 1.f, to_dv, p.dv_s.row, left, p.head_dim_v);
  if (has_dk) block.write(dk, dk_exponent, p.softmax_scale, to_dk, p.dk_s.row, left, p.head_dim);
}
