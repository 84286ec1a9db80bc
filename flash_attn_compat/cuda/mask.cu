// Which tiles of a dense mask hide all, and which have nothing to hide or add; booleans become bits; of biases, each row's largest is found.
// grid: chunks * bands of each head's mask, of which there may be one for all; a warp has all rows of 8 times 32 keys, a byte of each word.
#include "mask.cuh"

KERNEL(128, 8) mask(const Params p) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, heads = p.bias_head ? p.nheads : 1, slab = blockIdx.x / p.bias_chunks / p.bias_bands;
  const int first_key = blockIdx.x % p.bias_chunks * REACH + warp * 256, first = blockIdx.x / p.bias_chunks % p.bias_bands * BAND;
  const DenseMask mask(p, slab / heads, slab % heads);
  u32 some = 0, mixed = 0;
#pragma unroll 1
  for (int i = first; i < min(first + BAND, p.bias_rows); i++) {
    int word = 0, top = 0;
    UNROLLED(n, 8) {
      const int key = first_key + n * 32 + lane;
      const i64 place = mask.values + (i64)i * p.bias_s.row + (i64)key * p.bias_key;
      const float x = BIAS > 1 ? mask.at(p, i, key) : key < p.seqlen_k && global_load((const unsigned char *)p.bias + place) ? 0.f : NEG_INF;
      top = max(top, 0x7fffffff - (x < 0.f ? __float_as_int(x) & 0x7fffffff : 0));
      const u32 seen = __ballot_sync(ALL_LANES, x != NEG_INF);
      if (n == lane) word = seen;
      some |= (u32)(seen != 0) << n, mixed |= (u32)!__all_sync(ALL_LANES, x == 0.f) << n;
    }
    if (BIAS > 1) raise((int *)p.bias_of_rows + mask.row + i, top);
    else if (lane < 8) global_store(p.bias_of_rows + (i64)(mask.row + i) * p.bias_chunks * 32 + first_key / 32 + lane, (u32)word);
  }
  if (lane < 2) global_store((unsigned char *)(p.bias_map + blockIdx.x * 2 + lane) + warp, (unsigned char)(lane ? mixed : some));
}
