// FlashAttention-2, Algorithm 2, line 4: delta = rowsum(out * dout), in fp32. Rows that see no key have 0.
//
// grid: tiles * nheads * batch blocks of 256 threads, a row for D / 8 of them; tiles = ceil(longest rows of a sequence / (2048 / D)).
#include "common.cuh"

constexpr int THREADS = 256, ROWS = THREADS / CHUNKS;

DEVICE float product_of_pairs(u32 a, u32 b) {
  return fmaf(bits_to_float((u16)a), bits_to_float((u16)b), bits_to_float((u16)(a >> 16)) * bits_to_float((u16)(b >> 16)));
}

KERNEL(THREADS, 4) delta(const Params p) {
  const int tile = blockIdx.x % p.tiles, head = blockIdx.x / p.tiles % p.nheads, b = blockIdx.x / p.tiles / p.nheads;
  const Sequence seq = find_sequence(p, b);
  const int row = tile * ROWS + threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS, channels = p.head_dim_v - chunk * 8;
  if (tile * ROWS >= seq.seqlen_q) return;
  const bool there = row < seq.seqlen_q;
  const i64 token = seq.first_q + row, at = b * p.lse_batch + head * p.lse_head + token;
  float sum = 0.f;
  if (there && channels > 0) {
    const uint4 x = load_chunk(p.out + b * p.out_s.batch + token * p.out_s.row + (i64)head * p.out_s.head + chunk * 8, channels);
    const uint4 y = load_chunk(p.dout + b * p.dout_s.batch + token * p.dout_s.row + (i64)head * p.dout_s.head + chunk * 8, channels);
    sum = product_of_pairs(x.x, y.x) + product_of_pairs(x.y, y.y) + product_of_pairs(x.z, y.z) + product_of_pairs(x.w, y.w);
  }
#pragma unroll
  for (int i = CHUNKS / 2; i; i >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, i);
  if (!there || chunk) return;
  const float delta = fabsf(global_load(p.lse + at)) == POS_INF ? 0.f : sum;
  global_store(p.delta + at, delta);
}
