// How the blocks that share the keys of one tile of rows put together what each has found (FlashDecoding: Dao, Haziza, Massa, Sizov, 2023).
#pragma once
#include "common.cuh"

// The keys of one split: whole units, as many as of every other split but the last. Where few keys are seen, splits are fewer than p.splits.
struct Share {
  Range keys;
  int splits;
  DEVICE Share(const Params &p, Range seen, int unit, int split) {
    const int count = max(0, seen.end - seen.first), each = max(1, ((count + p.splits - 1) / p.splits + unit - 1) / unit) * unit;
    keys.first = seen.first + split * each, keys.end = min(seen.end, keys.first + each);
    splits = max(1, (count + each - 1) / each);
  }
};

// The last block of a tile to come here gets what all of its splits have found, put together in their order; the others get false.
// O: elements 0 and 1 of one row, 2 and 3 of another, not yet divided by l; m: maxima in units of log2; l: whole sums.
// is_used: whether this thread holds rows of the sequence; those of others are left as they are.
template <int N, int M>
DEVICE bool merge_splits(const Params &p, float (&O)[N][M][4], float (&m)[M][2], float (&l)[M][2], bool is_used, i64 tile, int split, int splits) {
  constexpr int SIZE = (N + 1) * M, TOGETHER = N * M < 16 ? 16 / (N * M) : 1;
  const int stride = blockDim.x;
  float4 *parts = (float4 *)p.parts + tile * p.splits * SIZE * stride + threadIdx.x, *own = parts + (i64)split * SIZE * stride;
  if (is_used)
    UNROLLED(i, M) {
      global_store(own + i * stride, make_float4(m[i][0], l[i][0], m[i][1], l[i][1]));
      UNROLLED(n, N) global_store(own + (M + i * N + n) * stride, make_float4(O[n][i][0], O[n][i][1], O[n][i][2], O[n][i][3]));
    }
  __threadfence();
  __syncthreads();
  const bool is_last = threadIdx.x == 0 && atomicInc((u32 *)p.counters + tile, splits - 1) == splits - 1;   // which leaves 0 for the next launch
  if (!__syncthreads_or(is_last)) return false;
  __threadfence();
  if (!is_used) return true;
  set_zero(O);
  UNROLLED(i, M) {
    m[i][0] = m[i][1] = NEG_INF, l[i][0] = l[i][1] = 0.f;
#pragma unroll 8
    for (int s = 0; s < splits; s++) {
      const float4 x = global_load_fresh(parts + (s * SIZE + i) * stride);
      m[i][0] = fmaxf(m[i][0], x.x), m[i][1] = fmaxf(m[i][1], x.z);
    }
    UNROLLED(r, 2)
      if (m[i][r] == NEG_INF) m[i][r] = 0.f;
  }
#pragma unroll TOGETHER
  for (int s = 0; s < splits; s++, parts += SIZE * stride)
    UNROLLED(i, M) {
      const float4 x = global_load_fresh(parts + i * stride);
      const float a = exp2_approx(x.x - m[i][0]), b = exp2_approx(x.z - m[i][1]);
      l[i][0] += a * x.y, l[i][1] += b * x.w;
      UNROLLED(n, N) {
        const float4 o = global_load_fresh(parts + (M + i * N + n) * stride);
        O[n][i][0] += a * o.x, O[n][i][1] += a * o.y, O[n][i][2] += b * o.z, O[n][i][3] += b * o.w;
      }
    }
  return true;
}
