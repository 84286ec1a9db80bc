// FlashDecoding (Dao, Haziza, Massa, Sizov, 2023): several blocks, the splits, share the keys of a tile. The block that
// finishes last merges their results.
#pragma once
#include "scores/softmax.cuh"

// The keys of one split, a multiple of `unit`; all splits but the last have equally many. If few keys are visible,
// `splits` is less than p.splits.
struct SplitRange {
  Range keys;
  int splits;
  DEVICE SplitRange(const Params &p, Range seen, int unit, int split) {
    const int count = max(0, seen.end - seen.first),
              each = max(1, ((count + p.splits - 1) / p.splits + unit - 1) / unit) * unit;
    keys.first = seen.first + split * each, keys.end = min(seen.end, keys.first + each);
    splits = max(1, (count + each - 1) / each);
  }
};

// Whether all other splits of the tile have stored their results.
DEVICE bool is_last(const Params &p, i64 tile, int splits) {
  __threadfence();
  __syncthreads();
  const bool last = threadIdx.x == 0 && atomicInc((u32 *)p.counters + tile, splits - 1) ==
                                            splits - 1;   // the counter wraps to 0 for the next launch
  const bool found = __syncthreads_or(last);
  __threadfence();
  return found;
}

// Stores a split's results in global memory. In the block that arrives last it then merges the results of all splits,
// in order of splits, and returns true; in other blocks it returns false. O: not yet divided by l; elements 0 and 1 are
// of one row, 2 and 3 of another; m: maxima in units of log2; l: sums over all lanes of a row. is_used: whether this
// thread holds rows of the sequence; if not, nothing is stored. AT_ONCE: how many splits are loaded together.
template <int AT_ONCE, int N, int M> DEVICE bool merge_splits(const Params &p, float (&O)[N][M][4], float (&m)[M][2],
                                                              float (&l)[M][2], bool is_used, i64 tile, int split,
                                                              int splits) {
  const int stride = blockDim.x, size = (N + 1) * M * stride;
  float4 *parts = (float4 *)p.parts + tile * p.splits * size + threadIdx.x, *mine = parts + (i64)split * size;
  if (is_used)
    UNROLLED(i, M) {
      global_store(mine + i * (N + 1) * stride, make_float4(m[i][0], l[i][0], m[i][1], l[i][1]));
      UNROLLED(n, N) global_store(mine + (i * (N + 1) + n + 1) * stride, together(O[n][i]));
    }
  if (!is_last(p, tile, splits)) return false;
  if (!is_used) return true;
  set_zero(O);
  UNROLLED(i, M) m[i][0] = m[i][1] = NEG_INF, l[i][0] = l[i][1] = 0.f;
#pragma unroll 1
  for (int first = 0; first < splits; first += AT_ONCE)
    UNROLLED(i, M) {
      float4 x[AT_ONCE][N + 1];
      UNROLLED(s, AT_ONCE)
        UNROLLED(n, N + 1)
          x[s][n] = global_load_fresh(parts + min(first + s, splits - 1) * size + (i * (N + 1) + n) * stride);
      float from[2] = {m[i][0], m[i][1]}, shrink[2];
      UNROLLED(s, AT_ONCE) from[0] = fmaxf(from[0], x[s][0].x), from[1] = fmaxf(from[1], x[s][0].z);
      UNROLLED(r, 2) {
        shrink[r] = from[r] == NEG_INF ? 1.f : exp2_approx(m[i][r] - from[r]);
        m[i][r] = from[r], from[r] = from[r] == NEG_INF ? 0.f : from[r], l[i][r] *= shrink[r];
      }
      UNROLLED(n, N)
        UNROLLED(e, 4) O[n][i][e] *= shrink[e >> 1];
      UNROLLED(s, AT_ONCE)
        if (first + s < splits) {
          const float a = exp2_approx(x[s][0].x - from[0]), b = exp2_approx(x[s][0].z - from[1]);
          l[i][0] += a * x[s][0].y, l[i][1] += b * x[s][0].w;
          UNROLLED(n, N)
            O[n][i][0] += a * x[s][n + 1].x, O[n][i][1] += a * x[s][n + 1].y, O[n][i][2] += b * x[s][n + 1].z,
                O[n][i][3] += b * x[s][n + 1].w;
        }
    }
  return true;
}
