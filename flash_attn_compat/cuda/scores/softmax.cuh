// From scores to probabilities: online softmax, LSE and dropout.
#pragma once
#include "scores/score.cuh"
#include "base/tiles.cuh"

// One step of online softmax: replaces S by exp2(S * unit - m_new + P_SHIFT), and updates the row maxima m and this
// lane's part l of the row sums. Rescales O only if a maximum of the warp rose.
template <int P_SHIFT, int N, int C, int M>
DEVICE void online_softmax(float (&S)[N][M][4], float (&m)[M][2], float (&l)[M][2], float (&O)[C][M][4], float unit) {
  float shrink[M][2];
  bool rose = false;
  UNROLLED(i, M)
    UNROLLED(r, 2) {
      float highest = m[i][r];
      UNROLLED(n, N) highest = fmaxf(highest, fmaxf(S[n][i][2 * r], S[n][i][2 * r + 1]));
      highest = max_of<4>(highest);
      rose = rose || highest > m[i][r];
      const float top = highest == NEG_INF ? 0.f : highest, from = NATURAL ? 0.f : top * unit,
                  less = NATURAL ? top : 0.f;
      shrink[i][r] = exp2_approx((m[i][r] - top) * unit);   // must be exactly 1 if the maximum stays, or sums drift
      m[i][r] = highest;
      float sum = l[i][r] * shrink[i][r];
      UNROLLED(n, N) {
        S[n][i][2 * r] = exp2_approx(fmaf(S[n][i][2 * r] - less, unit, P_SHIFT - from));
        S[n][i][2 * r + 1] = exp2_approx(fmaf(S[n][i][2 * r + 1] - less, unit, P_SHIFT - from));
        sum += S[n][i][2 * r] + S[n][i][2 * r + 1];
      }
      l[i][r] = sum;
    }
  if (!__any_sync(ALL_LANES, rose)) return;
  UNROLLED(n, C)
    UNROLLED(i, M)
      UNROLLED(e, 4) O[n][i][e] *= shrink[i][e >> 1];
}

DEVICE float reciprocal_of_sum(float l) { return l == 0.f ? 0.f : 1.f / l; }   // rows that see no key: 0
// LSE = ln(2) (m + log2(l)), +inf for a row that sees no key; plus the row's position term where flash-attn adds it.
DEVICE void write_lse(const Params &p, i64 at, float m, float l, float slope, int position) {
#if FLEX   // as in PyTorch's flex_attention: of base 2, and -inf for a row that sees no key
  return global_store(p.lse + at, l == 0.f ? NEG_INF : m + __log2f(l));
#endif
  const float lse = l == 0.f ? POS_INF : (m + __log2f(l)) * LN2;
  global_store(p.lse + at, (ALIBI || BIAS > 1) && p.lse_has_position ? fmaf(slope, (float)position, lse) : lse);
  if (p.lse_true) global_store(p.lse_true + at, lse);
}

// ---- Dropout: the hash of core/dropout.py. A probability is dropped if its word is above p.dropout_limit.
#define MULTIPLIER_A 0x7FEB352Du
#define MULTIPLIER_B 0x846CA68Bu
DEVICE u32 mix(u32 x) {
  x = (x ^ (x >> 16)) * MULTIPLIER_A;
  x = (x ^ (x >> 15)) * MULTIPLIER_B;
  return x ^ (x >> 16);
}
struct DropoutWords {
  u32 row_base, key_base;   // the hash of the sequence and head; of the call
  DEVICE DropoutWords(const Params &p, int b, int head) {
    const u64 seed = global_load(p.rng_state), offset = global_load(p.rng_state + 1);
    u32 word = mix((u32)seed);
    word = mix(word + (u32)(seed >> 32));
    word = mix(word + (u32)offset);
    word = mix(word + (u32)(offset >> 32));
    row_base = mix(mix(word + b) + head);
    key_base = mix(word ^ MULTIPLIER_A);
  }
  DEVICE u32 row(int i) const { return mix(row_base + i); }
  DEVICE u32 key(int j) const { return mix(key_base + j); }
};
DEVICE bool dropped(u32 row_word, u32 key_word, int limit) {
  u32 word = row_word + key_word;
  word = (word ^ (u32)((int)word >> 16)) * MULTIPLIER_A;   // signed shifts, as PyTorch's of int32
  word = (word ^ (u32)((int)word >> 15)) * MULTIPLIER_B;
  return (int)word > limit;
}
