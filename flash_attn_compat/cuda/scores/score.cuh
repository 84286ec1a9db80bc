// What happens to a score between the two products, in every kernel that computes scores: forward.cu, decode.cu,
// dkdv.cu and dq.cu. The rules of softcap, biases, ALiBi and masks are here, and nowhere else:
//
//   which tiles hold a visible score, and which hide one      MaskRange; DenseMask (mask.cuh)
//   which scores of a tile are hidden                         MaskRange::visible; DenseMask
//   what a visible score becomes, and its derivative          ScoreRule
//
// FLEX: a caller's own functions (flex.cuh) take part in each of the three.
#pragma once
#if FLEX
#include "scores/flex.cuh"
#else
#include "scores/mask.cuh"
#endif

// ---- Masks by position: windows and causal masks. Row i stands at key i + offset, and sees the keys from window_left
// before to window_right behind that position. A further rule is another value of LOCAL (kernel_rule in core/mask.py).

// Rows or keys [first, end).
struct Range {
  int first, end;
};

// The streamed rows [first, last] that one stationary row sees, counted from a lane's first streamed row.
struct VisibleRows {
  int first, last;
  DEVICE VisibleRows(int position, int last, int before, int after)   // the window around the position
        : first(LOCAL ? position - before : 0), last(LOCAL ? min(last, position + after) : last) {}
  DEVICE VisibleRows() {}   // set later
  // `|` and not `||`, for which the compiler would make a branch.
  DEVICE bool hides(int i) const { return (i > last) | (LOCAL && i < first); }
};

// The ROWS stationary rows of a warp, and the streamed rows that they see, in tiles of TILE: row i sees streamed rows
// from i + shift - before to i + shift + after.
template <int ROWS, int TILE> struct MaskRange {
  int first, shift;   // the first stationary row; row i stands at streamed row i + shift
  int streamed;   // number of streamed rows
  int before, after;   // the window
  // of_keys: whether the stationary rows are keys; zero: a 0 that the compiler does not know, or 0
  static DEVICE MaskRange of(const Params &p, int first, int shift, int streamed, bool of_keys = false, int zero = 0) {
    const int left = window(p.window_left + zero), right = window(p.window_right + zero);
    return {first + zero, shift + zero, streamed, of_keys ? right : left, of_keys ? left : right};
  }
  static DEVICE int window(int size) { return LOCAL && size >= 0 ? size : UNBOUNDED; }
  // The streamed rows that any of the stationary rows [row, row_end) sees.
  DEVICE Range seen_by(int row, int row_end) const {
    if (!LOCAL) return {0, streamed};
    return {max(0, row + shift - before), min(streamed, row_end - 1 + shift + after + 1)};
  }
  // The streamed rows that the stationary row at `position` sees. last: the last streamed row that exists. Both numbers
  // count from a lane's first streamed row.
  DEVICE VisibleRows visible(int position, int last) const { return VisibleRows(position, last, before, after); }
  DEVICE bool sees_some(int tile) const {
    return tile <= first + ROWS - 1 + shift + after && tile + TILE - 1 >= first + shift - before;
  }
  DEVICE bool sees_all(int tile) const {
    if (tile + TILE > streamed) return false;
    return !LOCAL || (tile + TILE - 1 <= first + shift + after && tile >= first + ROWS - 1 + shift - before);
  }
  // The whole tile lies on one side of all stationary positions.
  DEVICE bool is_behind(int tile) const { return tile + TILE - 1 <= first + shift; }
  DEVICE bool is_ahead(int tile) const { return tile >= first + ROWS - 1 + shift; }
};

// ---- Scores

// Biases, or a caller's score_mod, may make scores huge. Such scores are kept in natural units (NATURAL), and the row's
// maximum is subtracted before exp2 scales them. Other scores that something changes are multiplied by log2(e) at once.
constexpr bool NATURAL = BIAS > 1 || FLEX_SCORE;
// Whether anything but softmax_scale changes scores.
constexpr bool CHANGES = SOFTCAP || ALIBI || NATURAL;

// How the scores of one head are changed. S: the product q k, as the tensor cores return it.
struct ScoreRule {
  float scale, unit;   // S times scale is in natural units, S times unit in units of log2
  float doubled;   // softcap: 2 S unit / softcap is S times doubled
  float slope;   // ALiBi: how much each key of distance lowers a score, in units of log2
  DEVICE void set_scale(const Params &p, float natural, float log2) {
    scale = natural, unit = log2;
    if (SOFTCAP) doubled = 2.f * unit / p.softcap;
  }
#if FLEX
  int b, head;
#endif
  DEVICE void set_head(const Params &p, int b, int head) {
#if FLEX
    this->b = b, this->head = head;
#endif
    if (ALIBI) slope = alibi_slope(p, b, head) * LOG2E;
  }
  // (1 - tanh(x)) / 2 = 1 / (exp(2 x) + 1) of x = score / softcap, good to 1e-7.
  DEVICE float below_cap(float S) const { return SOFTCAP ? reciprocal_approx(exp2_approx(S * doubled) + 1.f) : 0.f; }
  // The score in units of log2, plus `from`. With softcap the score counts down from the cap, which `from` must add.
  DEVICE float scaled(const Params &p, float S, float below, float from) const {
    return SOFTCAP ? fmaf(below, -2.f * p.softcap * LOG2E, from) : fmaf(S, unit, from);
  }
  // ahead: the distance from the row's position to the key, negative for earlier keys
  DEVICE float with_alibi(float score, float ahead) const { return ALIBI ? fmaf(-slope, fabsf(ahead), score) : score; }
  // NATURAL: the score of a row and a key in natural units. A caller's functions never get a row or key that does not
  // exist: instead they get the last one.
#if FLEX
  DEVICE float natural(const Params &p, float S, float bias, int row, int key) const {
    return FLEX_SCORE ? flex_score(p.flex, S * scale, b, head, existing_row(p, row), existing_key(p, key)) : S * scale;
  }
  DEVICE bool sees(const Params &p, int row, int key) const {
    return !FLEX_MASK || flex_mask(p.flex, b, head, existing_row(p, row), existing_key(p, key));
  }
  DEVICE float slope_at(const Params &p, float score, int row, int key) const {
    return flex_slope(p.flex, score, b, head, existing_row(p, row), existing_key(p, key));
  }
#if FLEX_GRADIENTS
  // dscore: the derivative of the loss by score_mod's result for `score`
  DEVICE void add_gradients(const Params &p, FlexSum (&sums)[FLEX_SUMS], float dscore, float score, int row,
                            int key) const {
    flex_gradients(p.flex, sums, dscore, score, b, head, existing_row(p, row), existing_key(p, key));
  }
#endif
  // What a caller's mask shows of `rows` rows from `row` on and `keys` keys from `key` on. is_full: asks no mask_mod
  static DEVICE Sight sight(const Params &p, int b, int head, bool is_full, int row, int rows, int key, int keys) {
    if (!FLEX_MASK) return {true, true};
    const int seen = flex_sight(p.flex, b, head, existing_row(p, row), existing_row(p, row + rows - 1),
                                existing_key(p, key), existing_key(p, key + keys - 1));
    return {is_full | (seen & 1), is_full | (seen >> 1)};
  }
  static DEVICE int existing_row(const Params &p, int i) { return min(i, p.seqlen_q - 1); }
  static DEVICE int existing_key(const Params &p, int i) { return min(i, p.seqlen_k - 1); }
#else
  DEVICE float natural(const Params &p, float S, float bias, int row, int key) const { return fmaf(S, scale, bias); }
  DEVICE bool sees(const Params &p, int row, int key) const { return true; }
  DEVICE float slope_at(const Params &p, float score, int row, int key) const { return 1.f; }
#endif
  // A quarter of softcap's derivative, 1 - tanh^2.
  static DEVICE float quarter_slope(float below) { return fmaf(-below, below, below); }
};

// change_scores() changes, and hide_scores() hides, the scores of a tile of keys from `key` on. `rows` describes a
// lane's rows by m and r, which are row 16 m + g + 8 r of the warp: row(m, r), position(m, r), rule(m, r), and
// visible(m, r, from), its visible keys counted from key `from` on. is_read: whether the dense mask has to be read.
template <int N, int M, class Rows> DEVICE void change_scores(float (&S)[N][M][4], const Params &p,
                                                              const DenseMask &mask, bool is_read, const Rows &rows,
                                                              int key, int t) {
  UNROLLED(m, M)
    UNROLLED(r, 2) {
      const ScoreRule &rule = rows.rule(m, r);
      const float ahead = (float)(key + 2 * t - rows.position(m, r));
      UNROLLED(n, N) {
        float2 bias = make_float2(0.f, 0.f);
        if (BIAS > 1) bias = mask.pair(p, rows.row(m, r), key + n * 8 + 2 * t, is_read);
        UNROLLED(e, 2) {
          float &s = S[n][m][2 * r + e];
          if (NATURAL) s = rule.natural(p, s, e ? bias.y : bias.x, rows.row(m, r), key + n * 8 + 2 * t + e);
          else if (SOFTCAP) s = rule.scaled(p, s, rule.below_cap(s), p.softcap * LOG2E);
          else s *= rule.unit;
          s = rule.with_alibi(s, ahead + (float)(n * 8 + e));
        }
      }
    }
}
template <int N, int M, class Rows>
DEVICE void hide_scores(float (&S)[N][M][4], const Params &p, const DenseMask &mask, const Rows &rows, int key, int t) {
  UNROLLED(m, M)
    UNROLLED(r, 2) {
      const VisibleRows visible = rows.visible(m, r, key + 2 * t);
      UNROLLED(n, N)
        UNROLLED(e, 2) {
          // `|` and not `||`: after a branch, each load of a caller's mask_mod would wait for the one before.
          const bool hides =
              visible.hides(n * 8 + e) | !rows.rule(m, r).sees(p, rows.row(m, r), key + n * 8 + 2 * t + e);
          if (BIAS ? !mask.sees(p, rows.row(m, r), key + n / 4 * 32, n % 4 * 8 + 2 * t + e) : hides)
            S[n][m][2 * r + e] = NEG_INF;
        }
    }
}
