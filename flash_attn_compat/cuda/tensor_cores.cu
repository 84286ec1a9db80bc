// Measures how many cycles a quarter of a multiprocessor takes for one 16 x 8 by 8 x 8 product: 8 with Turing's tensor
// cores (T4), 16 on GeForce cards, which add in fp32 at half the rate, and 32 or more on cards without tensor cores.
//
// grid: any number of blocks of 8 warps, two for each quarter; each block writes its result to lse[block].
#include "ptx.cuh"

constexpr int ROUNDS = 256, AT_ONCE = 4, WARPS = 8, QUARTERS = 4;

KERNEL(WARPS * 32, 1) tensor_cores(const Params p) {
  float c[AT_ONCE][4] = {};   // products of zeros take as long
  const u32 a = p.zero, b = p.zero;
  u32 cycles = 0;
#pragma unroll 1
  for (int time = 0; time < 2; time++) {   // the first round fetches the code
    __syncthreads();
    const u32 start_dp = cycles_so_far();
#pragma unroll 1
    for (int i = 0; i < ROUNDS; i++)
      UNROLLED(n, AT_ONCE) mma_k8(c[n], a, a, b);
    __syncthreads();
    cycles = cycles_so_far() - start_dp;
  }
  float sum = 0.f;
  UNROLLED(n, AT_ONCE)
    UNROLLED(e, 4) sum += c[n][e];
  if (threadIdx.x == 0) global_store(p.lse + blockIdx.x, sum + cycles / (float)(ROUNDS * AT_ONCE * WARPS / QUARTERS));
}
