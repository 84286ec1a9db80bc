// A bare loop of 16 x 8 by 8 x 8 products, without a load: the peak beside which kernel_ladder.py shows its steps.
//
// grid: any number of blocks of 8 warps; each block writes a sum of its products to lse[block].
#include "base/ptx.cuh"

constexpr int ROUNDS = 512, AT_ONCE = 4, WARPS = 8;

KERNEL(WARPS * 32, 1) tensor_peak(const Params p) {
  float c[AT_ONCE][4] = {};   // products of zeros take as long
  const u32 a = p.zero, b = p.zero;
#pragma unroll 1
  for (int i = 0; i < ROUNDS; i++)
    UNROLLED(n, AT_ONCE) mma_k8(c[n], a, a, b);
  float sum = 0.f;
  UNROLLED(n, AT_ONCE)
    UNROLLED(e, 4) sum += c[n][e];
  if (threadIdx.x == 0) global_store(p.lse + blockIdx.x, sum);
}
