// Which tiles of a dense mask hide all, and which have nothing to hide or add; booleans become bits; of biases, each row's largest is found.
// grid: chunks * bands of each head's mask, of which there may be one for all. Of its REACH keys a warp has 256, and of its BAND rows a quarter.
#include "mask.cuh"

constexpr int QUARTERS = 4, WARPS = REACH / 256 * QUARTERS, AT_ONCE = 4;   // AT_ONCE: rows that are on their way together

KERNEL(WARPS * 32, 1) mask(const Params p) {
  SHARED_MEMORY
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, heads = p.bias_head ? p.nheads : 1, slab = blockIdx.x / p.bias_chunks / p.bias_bands;
  const int first_key = blockIdx.x % p.bias_chunks * REACH + warp / QUARTERS * 256;
  const int first = blockIdx.x / p.bias_chunks % p.bias_bands * BAND + warp % QUARTERS * (BAND / QUARTERS);
  const int end = first_key < p.seqlen_k ? min(first + BAND / QUARTERS, p.bias_rows) : first;   // nobody asks what lies behind the last key
  const DenseMask mask(p, slab / heads, slab % heads);
  u32 some = 0, mixed = 0;   // of 8 times 32 keys
#pragma unroll 1
  for (int i = first; i < end; i += AT_ONCE) {
    float x[AT_ONCE][8];
    UNROLLED(r, AT_ONCE)
      UNROLLED(n, 8) x[r][n] = mask.number(p, min(i + r, end - 1), first_key + n * 32 + lane);   // the last row may come again
    UNROLLED(r, AT_ONCE) {
      const int row = mask.row + min(i + r, end - 1);
      int word = 0, top = 0;
      UNROLLED(n, 8) {
        top = max(top, 0x7fffffff - (x[r][n] < 0.f ? __float_as_int(x[r][n]) & 0x7fffffff : 0));
        const u32 seen = __ballot_sync(ALL_LANES, x[r][n] != NEG_INF);
        if (n == lane) word = seen;
        some |= (u32)(seen != 0) << n, mixed |= (u32)!__all_sync(ALL_LANES, x[r][n] == 0.f) << n;
      }
      if (BIAS > 1) top = max_of<32>(top);
      if (BIAS > 1 && lane == 0) atomicMax((int *)p.bias_of_rows + row, top);
      if (BIAS == 1 && lane < 8) global_store(p.bias_of_rows + (i64)row * p.bias_chunks * 32 + first_key / 32 + lane, (u32)word);
    }
  }
  if (lane == 0) shared_store(SHARED_BASE + warp * 4, some | mixed << 8);
  __syncthreads();
  if (threadIdx.x >= 2) return;
  u32 word = 0;   // of all rows, a byte for each 256 keys
  UNROLLED(i, WARPS) word |= ((u32)__float_as_int(shared_load_float(SHARED_BASE + i * 4)) >> threadIdx.x * 8 & 0xff) << i / QUARTERS * 8;
  global_store(p.bias_map + blockIdx.x * 2 + threadIdx.x, word);
}
