// Algorithm 2's outer loop over tiles of keys: dk and dv of one tile, summed over the query heads of its group.
//
// grid: tiles * nheads_k * batch * PARTS, and with cu_seqlens_k tiles * nheads_k * PARTS more, which clear tokens outside of all sequences;
// tiles = ceil(longest keys (or slots) of a sequence / OWN).
#define KEYS_STAY 1
#include "backward.cuh"

DEVICE void write_dk(const Params &p, Block &block, Gradient &dk) {
  const Owned keys(p, blockIdx.x + p.zero);
  const Exponents e(p, keys.b, keys.head);
  block.write(dk, -(P_SHIFT + e.v + e.dout + e.q), p.softmax_scale, keys.of(p.dk, p.dk_s), p.dk_s.row, keys.left, p.head_dim, true);
}
DEVICE void write_dv(const Params &p, Block &block, Gradient &dv) {
  const Owned keys(p, blockIdx.x + p.zero);
  const Exponents e(p, keys.b, keys.head);
  const float scale = (DROPOUT ? p.dropout_scale : 1.f) * (SOFTCAP ? 0.25f : 1.f);
  block.write(dv, -(P_SHIFT + e.dout), scale, keys.of(p.dv, p.dv_s), p.dv_s.row, keys.left, p.head_dim_v, false);
}

KERNEL(THREADS, MINB) dkdv(const Params p) {
  SHARED_MEMORY
  const Owned keys(p, blockIdx.x);
  const bool has_dk = PARTS == 1 || keys.part == 0, has_dv = PARTS == 1 || keys.part == 1;
  if (has_dk) clear_unused(p, p.dk, p.dk_s, p.head_dim, keys);
  if (has_dv) clear_unused(p, p.dv, p.dv_s, p.head_dim_v, keys);
  if (keys.b == p.batch || keys.left <= 0) return;

  const Exponents e(p, keys.b, keys.head);
  const float delta = TYPE == 2 ? __int_as_float(global_load(absmax_of_delta(p, keys.b, keys.head))) : 0.f;
  OwnTransfer<THREADS, OWN> k, v;
  k.load(keys.of(p.k, p.k_s), p.k_s.row, keys.left, p.head_dim);
  if (has_dk) v.load(keys.of(p.v, p.v_s), p.v_s.row, keys.left, p.head_dim_v);
  Block block(p, SHARED_BASE, e);
  const Passing queries(p, keys);
  const int exponent = exponent_of_ds(p, e, 32768.f, delta);
  block.delta_exponent = e.v + e.dout + exponent;
  UNROLLED(m, MT)
    UNROLLED(r, 2) {
      block.ds_exponent[m][r] = exponent;
#if DROPOUT
      const int key = keys.first + (threadIdx.x >> 5) * WARP_ROWS + m * 16 + ((threadIdx.x & 31) >> 2) + r * 8;
      block.own.word[m][r] = DropoutWords(p, keys.b, keys.first_head(p)).key(key);
#endif
    }
  block.keep<REG_S>(block.own_s, 0, k, e.k);
  if (has_dk) block.keep<REG_P>(block.own_p, Block::OWN_P, v, e.v);

  Gradient dk, dv;
  set_zero(dk);
  set_zero(dv);
  if (PARTS == 1) {
    block.walk<true, true>(p, keys, queries, dk, dv);
    write_dv(p, block, dv);
    write_dk(p, block, dk);
  } else if (has_dk) {
    block.walk<true, false>(p, keys, queries, dk, dv);
    write_dk(p, block, dk);
  } else {
    block.walk<false, true>(p, keys, queries, dk, dv);
    write_dv(p, block, dv);
  }
}
