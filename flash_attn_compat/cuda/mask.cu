// Reads a dense mask once, before the other kernels. It finds the tiles in which the mask hides every key, and those in
// which it neither hides nor adds anything; it packs booleans into bits, and finds each row's largest bias.
//
// grid: parts * bands blocks for each head's mask (one mask if heads share it). A part is PART_KEYS keys, a band BAND
// rows. A block reads BIAS_WORDS * 32 keys of a band: 16 words, or 8 or 2 for masks of at most 256 or 64 keys. A warp
// reads at most 256 keys of a quarter of the band's rows.
#include "scores/mask.cuh"

constexpr int QUARTERS = 4, AT_ONCE = 4, N = BIAS_WORDS > 8 ? 8 : BIAS_WORDS,
              WARPS = BIAS_WORDS / N * QUARTERS;   // AT_ONCE: rows that are loaded together

KERNEL(WARPS * 32, (N > 2 ? 16 : 32) / WARPS) mask(const Params p) {
  SHARED_MEMORY
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, heads = p.bias_head ? p.nheads : 1,
            parts = (p.seqlen_k + PART_KEYS - 1) / PART_KEYS;
  const int part = blockIdx.x % parts, band = blockIdx.x / parts % p.bias_bands,
            batch_head = blockIdx.x / parts / p.bias_bands;
  const int first_key = part * PART_KEYS + warp / QUARTERS * 256,
            first = band * BAND + warp % QUARTERS * (BAND / QUARTERS);
  const int end =
      first_key < p.seqlen_k ? min(first + BAND / QUARTERS, p.bias_rows) : first;   // nothing to read after the keys
  const DenseMask mask(p, batch_head / heads, batch_head % heads);
  u32 some = 0, mixed = 0;   // a bit for each 32 keys: whether one is visible; whether the mask changes anything
#pragma unroll 1
  for (int i = first; i < end; i += AT_ONCE) {
    float x[AT_ONCE][N];
    UNROLLED(r, AT_ONCE)
      UNROLLED(n, N)
        x[r][n] = mask.number(p, min(i + r, end - 1), first_key + n * 32 + lane);   // the last row may be read again
    UNROLLED(r, AT_ONCE) {
      const int row = mask.row + min(i + r, end - 1);
      int word = 0, top = 0;
      UNROLLED(n, N) {
        top = max(top, 0x7fffffff - (x[r][n] < 0.f ? __float_as_int(x[r][n]) & 0x7fffffff : 0));
        const u32 seen = __ballot_sync(ALL_LANES, x[r][n] != NEG_INF);
        if (n == lane) word = seen;
        some |= (u32)(seen != 0) << n, mixed |= (u32)!__all_sync(ALL_LANES, x[r][n] == 0.f) << n;
      }
      if (BIAS > 1) top = max_of<32>(top);
      if (BIAS > 1 && lane == 0) atomicMax((int *)p.bias_of_rows + row, top);
      if (BIAS == 1 && lane < 8)
        global_store(p.bias_of_rows + (i64)row * p.bias_chunks * 32 + first_key / 32 + lane, (u32)word);
    }
  }
  if (lane == 0) shared_store(SHARED_BASE + warp * 4, some | mixed << 8);
  __syncthreads();
  if (threadIdx.x >= 2) return;
  u32 found = 0;   // the bits of all warps: half of a word of the map
  UNROLLED(i, WARPS)
    found |= ((u32)__float_as_int(shared_load_float(SHARED_BASE + i * 4)) >> threadIdx.x * 8 & 0xff)
             << i / QUARTERS * 8;
  u16 *const word =
      (u16 *)(p.bias_map + ((batch_head * p.bias_bands + band) * p.bias_chunks + part / 2) * 2 + threadIdx.x);
  global_store2(word + part % 2, (u16)found);
  if (part % 2 == 0 && part + 1 == parts) global_store2(word + 1, (u16)0);
}
