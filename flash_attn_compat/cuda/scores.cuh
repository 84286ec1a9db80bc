// What forward and decode do to a tile of scores before its softmax. Element e of S[n][m] in lane 4 g + t is row
// m * 16 + g + 8 * (e / 2), key n * 8 + 2 t + e % 2. `row_of(m, r)` returns the ScoreRow of a lane's row.
#pragma once
#include "mask.cuh"
#include "softmax.cuh"

struct ScoreRow {
  int index, position;   // the row of a dense mask; the key at which the row stands
  float slope;   // ALiBi's
};

// Softcap, ALiBi and biases, after a factor `scale`. Scores are in units of log2 afterwards, with biases in natural
// units. reads_mask: whether a dense mask must be read for this tile.
template <int N, int M, class RowOf> DEVICE void apply_softcap_alibi_bias(float (&S)[N][M][4], const Params &p,
                                                                          const DenseMask *mask, bool reads_mask,
                                                                          float scale, int key, const RowOf &row_of) {
  const float doubled = 2.f * LOG2E * scale / p.softcap, cap = p.softcap * LOG2E;
  const int t = threadIdx.x & 3;
  UNROLLED(m, M)
    UNROLLED(r, 2) {
      const ScoreRow row = row_of(m, r);
      const float ahead = (float)(key + 2 * t - row.position);
      UNROLLED(n, N) {
        const float2 bias =
            BIAS > 1 ? mask->pair(p, row.index, key + n * 8 + 2 * t, reads_mask) : make_float2(0.f, 0.f);
        UNROLLED(e, 2) {
          float &s = S[n][m][2 * r + e];
          if (SOFTCAP) s = fmaf(half_below_one(s * doubled), -2.f * cap, cap);
          else if (BIAS > 1) s = fmaf(s, scale, e ? bias.y : bias.x);
          else s *= scale * LOG2E;
          if (ALIBI) s = fmaf(-row.slope * LOG2E, fabsf(ahead + (float)(n * 8 + e)), s);
        }
      }
    }
}

// -inf for keys that a row does not see, and for those from `end` on.
template <int N, int M, class RowOf> DEVICE void apply_mask(float (&S)[N][M][4], const Params &p, const DenseMask *mask,
                                                            int key, int end, int before, int after,
                                                            const RowOf &row_of) {
  const int t = threadIdx.x & 3;
  UNROLLED(m, M)
    UNROLLED(r, 2) {
      const ScoreRow row = row_of(m, r);
      int last = end - 1, first = 0;
      if (LOCAL) last = min(last, row.position + after), first = max(first, row.position - before);
      last -= key + 2 * t, first -= key + 2 * t;
      UNROLLED(n, N)
        UNROLLED(e, 2)
          if (BIAS ? !mask->sees(p, row.index, key + n / 4 * 32, n % 4 * 8 + 2 * t + e)
                   : n * 8 + e > last || (LOCAL && n * 8 + e < first))
            S[n][m][2 * r + e] = NEG_INF;
    }
}
