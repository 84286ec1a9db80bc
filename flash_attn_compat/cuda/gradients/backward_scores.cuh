// Computes P and dS of a tile from its scores, in the backward: lines 11 and 13 of Algorithm 2. KEYS_STATIONARY is 1 in
// dkdv and 0 in dq.
#pragma once
#include "splits.cuh"

constexpr int THREADS = WARPS * 32, SPLIT_WARPS = 1 << SPLIT_N + SPLIT_K + ROLES, GROUPS = WARPS / SPLIT_WARPS,
              STATIONARY_ROWS = GROUPS * MMA_M * 16, WARP_ROWS = MMA_M * 16;
constexpr bool EXCHANGES = SPLIT_N || SPLIT_K;
// How many warps divide the channels of a gradient among them.
constexpr int CHANNEL_WARPS = ROLES ? 1 : SPLIT_WARPS;
// For how many streamed rows of a tile a warp computes P and dS; and the same in blocks of 8 rows.
constexpr int SCORED_ROWS = EXCHANGES ? STREAMED_ROWS / 2 : STREAMED_ROWS, MMA_N = SCORED_ROWS / 8;
// For how many blocks of 8 streamed rows a warp computes (partial) products; those of its own half come first.
constexpr int PARTIAL_BLOCKS = SPLIT_K ? STREAMED_ROWS / 8 : MMA_N;
static_assert(D % (16 * SPLIT_WARPS) == 0 && DV % (16 * SPLIT_WARPS) == 0 && SCORED_ROWS % (SPLIT_K ? 8 : 16) == 0,
              "warps share out channels in 16s");
static_assert(!SPLIT_K || (!SPLIT_N && STREAMED_ROWS == 16), "warps share out 16 streamed rows");
DEVICE int group_of(int thread) { return (thread >> 5) % GROUPS; }   // warps of a group have the same stationary rows
DEVICE int side_of(int thread) { return SPLIT_WARPS > 1 ? (thread >> 5) / GROUPS : 0; }
static_assert(!KEYS_STATIONARY || 2 * STREAMED_ROWS <= THREADS, "a thread loads at most one LSE or delta of a tile");
// Q and K have D channels, dout and V have DV.
typedef Layout<D> LayoutQK;
typedef Layout<DV> LayoutVO;
typedef TileCopy<THREADS, STATIONARY_ROWS, D> CopyStationaryQK;
typedef TileCopy<THREADS, STATIONARY_ROWS, DV> CopyStationaryVO;
typedef TileCopy<THREADS, STREAMED_ROWS, D> CopyStreamedQK;
typedef TileCopy<THREADS, STREAMED_ROWS, DV> CopyStreamedVO;
// P is multiplied by 2^12, so that small probabilities keep their bits in fp16. Only for converted bf16, whose operands
// are scaled anyway.
constexpr int P_SHIFT = TYPE == 2 ? 12 : 0;
// Softcap's derivative is kept divided by 4. To make up for that, P is 4 times as large, and so is dv until it is
// written.
constexpr int SLOPE_SHIFT = SOFTCAP ? 2 : 0;
typedef float Scores[PARTIAL_BLOCKS][MMA_M][4];
typedef u32 Packed[MMA_N][MMA_M][2];   // P or dS as operands
typedef float GradientQK[D / 8 / CHANNEL_WARPS][MMA_M][4], GradientVO[DV / 8 / CHANNEL_WARPS][MMA_M][4];

// ---- Powers of two (converted bf16)
DEVICE int exponent_of(float x) { return ((__float_as_int(x) >> 23) & 255) - 127; }
DEVICE float power_of_two(int e) { return __int_as_float((clamp(e, -127, 127) + 127) << 23); }
// Returns x * 2^e, computed in two factors, since 2^e may be no float.
DEVICE float times_power_of_two(float x, int e) { return x * power_of_two(e / 2) * power_of_two(e - e / 2); }

// The exponents of the powers of two by which q, k, v and dout are multiplied on their way to shared memory.
struct Exponents {
  int q, k, v, dout;
  DEVICE Exponents(const Params &p, int b, int head_k)
        : q(exponent_of(scale_of(absmax_of(p, ABSMAX_Q, b, head_k)))),
          k(exponent_of(scale_of(absmax_of(p, ABSMAX_K, b, head_k)))),
          v(exponent_of(scale_of(absmax_of(p, ABSMAX_V, b, head_k)))),
          dout(exponent_of(scale_of(absmax_of_dout(p, b, head_k)))) {}
};

// Returns the exponent of a power of two that no derivative of a caller's score_mod exceeds, in `heads` heads from
// `head` on. dS is scaled down by it, so that it does not overflow; or up, so that it keeps its digits.
DEVICE int exponent_of_slopes(const Params &p, int b, int head, int heads) {
  float most = 0.f;
#if FLEX_SCORE
  if (TYPE != 2) return 0;
#pragma unroll 1
  for (int i = 0; i < heads; i++) most = fmaxf(most, flex_steepest(p.flex, b, head + i));
#endif
  return FLEX_SCORE ? clamp(exponent_of(most * 0.999999f) + 1, -64, 64) : 0;
}

// Returns the exponent of a further power of two by which dS is scaled, so that it stays below 2^15 for any v, dout and
// out. `largest_dout` is scaled already, and scaled v is below 2^15. delta needs its own bound, since a caller may pass
// another out.
// steepest: the exponent of the derivative of a caller's score_mod, by which P has been multiplied
DEVICE int exponent_of_ds(const Params &p, const Exponents &e, float largest_dout, float largest_delta, int steepest) {
  if (TYPE != 2) return 0;
  const int of_dP = exponent_of(p.head_dim_v * 32768.f * largest_dout * (DROPOUT ? p.dropout_scale : 1.f));
  const int of_delta = largest_delta == 0.f ? of_dP : exponent_of(largest_delta) + e.v + e.dout;
  return 13 - P_SHIFT - steepest - max(of_dP, of_delta);   // |dP - delta| < 2^(1 + larger exponent + 1)
}

// ---- Which streamed rows a warp's stationary rows see.
typedef MaskRange<WARP_ROWS, SCORED_ROWS> WarpRange;
DEVICE WarpRange warp_range(const Params &p, int first, int shift, int streamed, int zero) {
  return WarpRange::of(p, first, shift, streamed, KEYS_STATIONARY, zero);
}

#if FLEX
// Whether a warp skips tiles in which a caller's mask_mod hides everything. In other kernels a branch for that would
// make the compiler spill registers.
constexpr bool FLEX_SKIPS =
    FLEX_MASK && (KEYS_STATIONARY ? D > 32 && D <= 80 && TYPE != 2 : D < 64 || (D >= 96 && D <= 128));
// Returns whether a caller's mask_mod shows some, or all, scores of a warp's stationary rows and `count` streamed rows
// from `streamed` on. dkdv of narrow heads, or of converted bf16, has no registers to find out, and says some.
DEVICE Sight see(const Params &p, const WarpRange &range, int b, int head, bool is_full, int streamed, int count) {
  if (KEYS_STATIONARY && (D <= 32 || TYPE == 2)) return {true, is_full || !FLEX_MASK};
  return KEYS_STATIONARY ? ScoreRule::sight(p, b, head, is_full, streamed, count, range.first, WARP_ROWS)
                         : ScoreRule::sight(p, b, head, is_full, range.first, WARP_ROWS, streamed, count);
}
#endif

// The caller's LSE may include a term slope * position, under ALiBi, and a row's largest bias. These functions return
// the slope and the bias, or 0.
DEVICE float position_slope(const Params &p, int b, int head) {
  return ALIBI && p.lse_has_position ? alibi_slope(p, b, head) : 0.f;
}
DEVICE float bias_top(const Params &p, int b, int head, int row) {
  return BIAS > 1 && p.lse_has_position ? DenseMask(p, b, head).top(p, row) : 0.f;
}

// ---- Returns the LSE of a query row in units of log2, without its position; +inf for rows that see no key, so that
// their P is 0. With softcap the cap is subtracted, since scores count down from the cap.
DEVICE float row_lse(const Params &p, float lse, int row, int offset, float slope) {
  const float shift = (float)-(P_SHIFT + SLOPE_SHIFT);
  if (fabsf(lse) == POS_INF) return POS_INF;
  if (FLEX) return lse + shift;   // flex_attention's LSE is in units of log2 already
  return fmaf(ALIBI ? fmaf(-slope, (float)(row + offset), lse) : lse, LOG2E,
              SOFTCAP ? fmaf(p.softcap, -LOG2E, shift) : shift);
}

// The parameters by which the scores of one head become P.
struct ScoreParams {
  ScoreRule rule;
  u32 row_base, key_base;   // dropout
  DEVICE void set_scale(const Params &p, const Exponents &e) {
    const float unit = times_power_of_two(p.softmax_scale * LOG2E, -(e.q + e.k));
    rule.set_scale(p, unit * LN2, unit);
  }
  DEVICE void set_head(const Params &p, int b, int head) {
    rule.set_head(p, b, head);
#if DROPOUT
    const DropoutWords words(p, b, head);
    row_base = words.row_base;
    key_base = words.key_base;
#endif
  }
};

// ---- c += P or dS times a streamed tile. On Turing the tile is read from the same addresses as in product(), so that
// these take registers only once; since it is read transposed, blocks and steps swap places. The instruction m16n8k16
// needs its two steps in neighbouring registers, which another order of addresses gives at no cost.
// accumulate_16 takes 16 rows of the tile, from `row` on; SPLIT warps divide its channels among them.
template <int SPLIT, int C, int M>
DEVICE void accumulate_16(float (&c)[C][M][4], const u32 (&a)[M][4], u32 tile_at, int row) {
  typedef Layout<C * 8 * SPLIT> L;
#pragma unroll
  for (int n = 0; n < C; n += 2) {
    u32 b[4];
    ldmatrix_transposed(b, L::along(tile_at, n * SPLIT) + row * L::ROW_BYTES);
    const u32 swapped[4] = {b[0], b[MMA_K16 ? 1 : 2], b[MMA_K16 ? 2 : 1], b[3]};
    multiply<M>(c[n], c[n + 1], a, swapped);
  }
}
template <int N, int C>
DEVICE void accumulate(float (&c)[C][MMA_M][4], const u32 (*a)[MMA_M][2], u32 tile_at, int first = 0) {
  UNROLLED(k, N / 2) {
    u32 both[MMA_M][4];
    UNROLLED(m, MMA_M)
      UNROLLED(i, 4) both[m][i] = a[2 * k + i / 2][m][i % 2];
    accumulate_16<CHANNEL_WARPS>(c, both, tile_at, (first + 2 * k) * 8);
  }
}

// ---- Line 11: replaces S by P = exp(S - LSE), 0 for masked scores. With softcap P is multiplied by softcap's
// derivative, 1 - tanh^2. A dropped probability is made negative. `packed` gets the probabilities for dv: without the
// derivative, and 0 if dropped.
struct StationaryRows {   // values of a lane's stationary rows; stationary keys (dkdv) have only the dropout words
  float lse[MMA_M][2], minus_delta[MMA_M][2];   // minus_delta: -delta, scaled as dS is
  u32 word[MMA_M][2];
};

// MASKED: a score of the tile is masked, or under ALiBi the tile has rows on both sides of a stationary row's position.
// In other tiles ALiBi's distance is simply a term of the stationary row plus a term of the streamed row.
constexpr bool DISTANCE_IS_SUM = ALIBI && !(TYPE == 2 && DROPOUT);   // the excepted kernel lacks registers for it

// FLEX_GRADIENTS, in dq: P is kept without score_mod's derivative, together with the scores that score_mod got.
#if FLEX_GRADIENTS && !KEYS_STATIONARY
struct Given {
  float score[MMA_N][MMA_M][4];
  static constexpr bool IS_KEPT = true;
  DEVICE void keep(int n, int m, int i, float x) { score[n][m][i] = x; }
};
#else
struct Given {
  static constexpr bool IS_KEPT = false;
  DEVICE void keep(int, int, int, float) {}
};
#endif

template <bool MASKED> DEVICE void recompute_probabilities(Scores &S, Packed &packed, Given &given, const Params &p,
                                                           const DenseMask &mask, const ScoreParams &f,
                                                           const WarpRange &range, const StationaryRows &stationary,
                                                           u32 rows_at, int tile, int g, int t) {
  VisibleRows visible[MMA_M][2];
  float ahead[MMA_M][2], along[MMA_M][2];
  // By how much ALiBi changes a score from one streamed row to the next.
  const float per_row = range.is_behind(tile) ? f.rule.slope : -f.rule.slope;
  UNROLLED(m, MMA_M)
    UNROLLED(r, 2) {
      const int position = range.first + m * 16 + g + r * 8 + range.shift - tile - 2 * t;
      visible[m][r] = range.visible(position, range.streamed - 1 - tile - 2 * t);
      ahead[m][r] = (float)-position;
      along[m][r] = per_row * ahead[m][r];
    }
  UNROLLED(n, MMA_N) {
    float lse[2];
    if (KEYS_STATIONARY) shared_load_floats(lse, rows_at + n * 32);
    float2 bias[MMA_M][2];   // of a stationary row and two keys
    if (MASKED && BIAS_PAIRS)
      UNROLLED(m, MMA_M)
        UNROLLED(r, 2) bias[m][r] = mask.pair(p, range.first + m * 16 + g + r * 8, tile + n * 8 + 2 * t);
    UNROLLED(e, 2) {
#if DROPOUT
      const u32 word = mix((KEYS_STATIONARY ? f.row_base : f.key_base) + tile + n * 8 + 2 * t + e);
#endif
      UNROLLED(m, MMA_M)
        UNROLLED(r, 2) {
          float &s = S[n][m][2 * r + e];
          const int stationary_row = range.first + m * 16 + g + r * 8, streamed = tile + n * 8 + 2 * t + e,
                    row = KEYS_STATIONARY ? streamed : stationary_row,
                    key = KEYS_STATIONARY ? stationary_row : streamed;
          float minus_lse = KEYS_STATIONARY ? -lse[e] : -stationary.lse[m][r];
          if (DISTANCE_IS_SUM && !MASKED) minus_lse += KEYS_STATIONARY ? per_row * (n * 8 + e) : along[m][r];
          const float below = f.rule.below_cap(s), score = s * f.rule.scale;
          if (FLEX_SCORE) s = fmaf(f.rule.natural(p, s, 0.f, row, key), LOG2E, minus_lse);
          else if (MASKED && BIAS > 1) {
            const float added = BIAS_PAIRS ? e ? bias[m][r].y : bias[m][r].x : mask.at(p, row, key);
            s = fmaf(f.rule.natural(p, s, added, row, key) - mask.top(p, row), LOG2E, minus_lse);
          } else s = f.rule.scaled(p, s, below, minus_lse);
          if (MASKED || !DISTANCE_IS_SUM) s = f.rule.with_alibi(s, ahead[m][r] + (float)(n * 8 + e));
          else if (ALIBI) s = KEYS_STATIONARY ? s + along[m][r] : fmaf(per_row, (float)(n * 8 + e), s);
          s = exp2_approx(s);
          const bool hidden = BIAS == 1
                                  ? !(KEYS_STATIONARY ? mask.sees(p, row, range.first, m * 16 + g + r * 8)
                                                      : mask.sees(p, row, tile + n / 4 * 32, n % 4 * 8 + 2 * t + e))
                                  : !BIAS && (visible[m][r].hides(n * 8 + e) | (MASKED && !f.rule.sees(p, row, key)));
          if (MASKED && hidden) s = 0.f;
#if DROPOUT
          const bool gone = KEYS_STATIONARY ? dropped(word, stationary.word[m][r], p.dropout_limit)
                                            : dropped(stationary.word[m][r], word, p.dropout_limit);
#else
          const bool gone = false;
#endif
          if (KEYS_STATIONARY) {
            u32 &pair = packed[n][m][r];
            const float kept = gone ? 0.f : s;
            pair = e ? pack(__int_as_float(pair), kept) : __float_as_int(kept);
          }
          if (SOFTCAP) s *= f.rule.quarter_slope(below);
          // 0 for hidden scores, for which score_mod's derivative may be NaN.
          if (Given::IS_KEPT) given.keep(n, m, 2 * r + e, score);
          else if (FLEX_SCORE) s = MASKED && hidden ? 0.f : s * f.rule.slope_at(p, score, row, key);
          if (gone) s = -s;
        }
    }
  }
}

// ---- Line 13: dS = P (dP - delta), packed as operands. For a dropped probability dP is 0. FROM_DELTA: nothing scales
// dP, so its sum can start at -delta.
constexpr bool FROM_DELTA = TYPE != 2 && !DROPOUT && !SPLIT_K;
// For how many blocks of 8 streamed rows dP is in registers at once. For all, if otherwise the stationary operand or
// the scales would have to be read again.
constexpr int AT_ONCE = ROLES ? MMA_N : SPLIT_K ? PARTIAL_BLOCKS : VO_IN_REGS && FROM_DELTA ? 2 : MMA_N;

DEVICE void start_dp(float (*dP)[MMA_M][4], const StationaryRows &stationary, u32 rows_at) {
  UNROLLED(n, AT_ONCE) {
    float minus_delta[2];
    if (KEYS_STATIONARY && FROM_DELTA) shared_load_floats(minus_delta, rows_at + STREAMED_ROWS * 4 + n * 32);
    UNROLLED(m, MMA_M)
      UNROLLED(e, 4)
        dP[n][m][e] = !FROM_DELTA ? 0.f : KEYS_STATIONARY ? minus_delta[e & 1] : stationary.minus_delta[m][e >> 1];
  }
}

// FLEX_GRADIENTS, in dq: for each score, adds its terms to the gradients of captured tensors, and multiplies its dS by
// score_mod's derivative.
#if FLEX_GRADIENTS && !KEYS_STATIONARY
struct GivenScores {
  const Params &p;
  const ScoreRule &rule;
  FlexSum (&sums)[FLEX_SUMS];
  const Given &given;
  const int (&exponent)[MMA_M][2];   // as ds_exponent of Block
  int first_exponent, row, key;   // all dS are also multiplied by 2^first_exponent; a lane's first row and key
  bool counts;   // whether this warp adds gradients: only one of the warps that compute the same scores does
  DEVICE float slope_times(int n, int m, int r, int e, float P, float dS) const {
    if (P == 0.f) return dS;   // hidden, or too far below its row's maximum
    const float score = given.score[n][m][2 * r + e];
    const int at_row = row + m * 16 + r * 8, at_key = key + n * 8 + e;
    if (counts && at_row < p.seqlen_q)
      rule.add_gradients(p, sums, TYPE == 2 ? times_power_of_two(dS, -(first_exponent + exponent[m][r])) : dS, score,
                         at_row, at_key);
    return dS * rule.slope_at(p, score, at_row, at_key);
  }
};
#else
struct GivenScores {
  DEVICE float slope_times(int n, int m, int r, int e, float P, float dS) const { return dS; }
};
#endif

DEVICE void compute_ds(u32 (*dS)[MMA_M][2], const float (*P)[MMA_M][4], const float (*dP)[MMA_M][4],
                       const StationaryRows &stationary, u32 rows_at, float dropout_scale,
                       const int (&exponent)[MMA_M][2], GivenScores given, int n0 = 0) {
  UNROLLED(n, SPLIT_K ? MMA_N : AT_ONCE) {
    float minus_delta[2];
    if (KEYS_STATIONARY && !FROM_DELTA) shared_load_floats(minus_delta, rows_at + STREAMED_ROWS * 4 + n * 32);
    UNROLLED(m, MMA_M)
      UNROLLED(r, 2) {
        const float scale = (TYPE == 2 ? power_of_two(exponent[m][r]) : 1.f) * (DROPOUT ? dropout_scale : 1.f);
        float x[2];
        UNROLLED(e, 2) {
          const float probability = P[n][m][2 * r + e], d = dP[n][m][2 * r + e],
                      minus = KEYS_STATIONARY ? minus_delta[e] : stationary.minus_delta[m][r];
          x[e] = probability * (FROM_DELTA ? d : DROPOUT && !(probability >= 0.f) ? -minus : fmaf(d, scale, minus));
          x[e] = given.slope_times(n0 + n, m, r, e, probability, x[e]);
        }
        dS[n][m][r] = pack(x[0], x[1]);
      }
  }
}
