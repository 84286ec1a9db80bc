// Algorithm 2's outer loop over tiles of keys: dk and dv of one tile, summed over the query heads of its group.
//
// grid: tiles * nheads_k * batch * PARTS, and with cu_seqlens_k tiles * nheads_k * PARTS more, which clear tokens outside of all sequences;
// tiles = ceil(longest keys (or slots) of a sequence / OWN). PARTS is 2 for D = 256, whose dk and dv do not fit into registers together:
// one block has dk, the next one dv.
#define KEYS_STAY 1
#include "backward.cuh"

constexpr int PARTS = D > 128 ? 2 : 1;

// The largest |delta| of the rows that pass: every warp finds it for itself.
DEVICE float largest_delta(const Params &p, const Passing &passing) {
  float largest = 0.f;
#if TYPE == 2
  for (int head = 0; head < passing.heads; head++)
    for (int row = passing.first * TL + (threadIdx.x & 31); row < min(passing.end * TL, passing.rows); row += 32)
      largest = fmaxf(largest, fabsf(global_load(p.delta + passing.row_values + head * p.lse_head + row)));
#pragma unroll
  for (int i = 16; i; i >>= 1) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, i));
#endif
  return largest;
}

// A block's keys. Computed again after the loop (`index` is blockIdx.x, which the compiler cannot see through): no registers keep it meanwhile.
struct Keys {
  int part, tile, head_k, b, first, left;
  Sequence seq;
  DEVICE Keys(const Params &p, int index) {
    part = index % PARTS;
    tile = index / PARTS % p.tiles;
    head_k = index / PARTS / p.tiles % p.nheads_k;
    b = index / PARTS / p.tiles / p.nheads_k;
    first = tile * OWN;
    if (b == p.batch) return;
    seq = find_sequence(p, b);
    left = seq.seqlen_k - first;
  }
  template <typename T> DEVICE T *rows(T *x, const Strides &s) const {
    return x + b * s.batch + (i64)(seq.first_k + first) * s.row + (i64)head_k * s.head;
  }
};

// Tokens outside of all sequences (b = batch), and this sequence's slots that hold no key, have no gradient.
DEVICE void clear_unused(const Params &p, u16 *x, const Strides &s, int head_dim, const Keys &keys) {
  const int b = keys.b, *starts = p.cu_seqlens_k;
  int first = 0, end = keys.seq.first_k, behind = end + keys.seq.seqlen_k, last = p.seqlen_k;
  if (b == p.batch) {
    end = clamp(global_load(starts), 0, p.total_k);
    behind = clamp(global_load(starts + b), end, p.total_k);
    last = p.total_k;
  } else if (starts) {
    first = clamp(global_load(starts + b), 0, p.total_k);
    last = clamp(global_load(starts + b + 1), first, p.total_k);
  }
  clear_rows(x + b * (starts ? 0 : s.batch), s, keys.head_k, head_dim, first, end, behind, last, keys.tile, p.tiles);
}

DEVICE void write_dk(const Params &p, Block &block, Gradient &dk) {
  const Keys keys(p, blockIdx.x + p.zero);
  const Exponents e(p, keys.b, keys.head_k);
  block.write(dk, -(P_SHIFT + e.v + e.dout + e.q), p.softmax_scale, keys.rows(p.dk, p.dk_s), p.dk_s.row, keys.left, p.head_dim, true);
}
DEVICE void write_dv(const Params &p, Block &block, Gradient &dv) {
  const Keys keys(p, blockIdx.x + p.zero);
  const Exponents e(p, keys.b, keys.head_k);
  block.write(dv, -(P_SHIFT + e.dout), (DROPOUT ? p.dropout_scale : 1.f) * (SOFTCAP ? 0.25f : 1.f), keys.rows(p.dv, p.dv_s), p.dv_s.row, keys.left, p.head_dim_v, false);
}

KERNEL(THREADS, MINB) dkdv(const Params p) {
  SHARED_MEMORY
  const Keys keys(p, blockIdx.x);
  const Sequence &seq = keys.seq;
  const int b = keys.b, head = keys.head_k * p.group;
  const bool has_dk = PARTS == 1 || keys.part == 0, has_dv = PARTS == 1 || keys.part == 1;
  if (has_dk) clear_unused(p, p.dk, p.dk_s, p.head_dim, keys);
  if (has_dv) clear_unused(p, p.dv, p.dv_s, p.head_dim_v, keys);
  if (b == p.batch || keys.left <= 0) return;

  const Exponents e(p, b, keys.head_k);
  Block block(p, SHARED_BASE, e);
  block.own_first = keys.first, block.shift = seq.seqlen_q - seq.seqlen_k;
  const Sight band = sight(p, keys.first, block.shift, seq.seqlen_q, 0);
  const Range rows = visible_keys(keys.first, min(keys.first + OWN, seq.seqlen_k), band.shift, band.passing, band.before, band.after);
  const Passing passing = {
      p.q + b * p.q_s.batch + (i64)seq.first_q * p.q_s.row + (i64)head * p.q_s.head,
      p.dout + b * p.dout_s.batch + (i64)seq.first_q * p.dout_s.row + (i64)head * p.dout_s.head,
      b * p.lse_batch + head * p.lse_head + seq.first_q, seq.seqlen_q, rows.first / TL, (rows.end + TL - 1) / TL, p.group};

  const int exponent = exponent_of_ds(p, e, 32768.f, largest_delta(p, passing));
  block.delta_exponent = e.v + e.dout + exponent;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      block.ds_exponent[m][r] = exponent;
#if DROPOUT
      const int key = keys.first + (threadIdx.x >> 5) * WARP_ROWS + m * 16 + ((threadIdx.x & 31) >> 2) + r * 8;
      block.own.word[m][r] = DropoutWords(p, b, head).key(key);
#endif
    }
  block.load_own<REG_S>(block.own_s, 0, keys.rows(p.k, p.k_s), p.k_s.row, keys.left, p.head_dim, e.k);
  if (has_dk) block.load_own<REG_P>(block.own_p, Block::OWN_P, keys.rows(p.v, p.v_s), p.v_s.row, keys.left, p.head_dim_v, e.v);

  Gradient dk, dv;
  if (PARTS == 1) {
    set_zero(dk);
    set_zero(dv);
    block.walk<true, true>(p, passing, b, head, dk, dv);
    write_dv(p, block, dv);
    write_dk(p, block, dk);
  } else if (has_dk) {
    set_zero(dk);
    block.walk<true, false>(p, passing, b, head, dk, dv);
    write_dk(p, block, dk);
  } else {
    set_zero(dv);
    block.walk<false, true>(p, passing, b, head, dk, dv);
    write_dv(p, block, dv);
  }
}
