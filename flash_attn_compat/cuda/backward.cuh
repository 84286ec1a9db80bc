// FlashAttention-2, Algorithm 2 (Dao, 2023), seen from either side.
//
// With P = exp(S - LSE), dP = dout V^T and delta = rowsum(out * dout):  dS = P (dP - delta),  dv = P^T dout,  dk = scale dS^T q,
// dq = scale dS k. Two kernels compute S and dP anew, so that every sum is one block's own: no atomics, no fp32 buffer, the same
// bits each time. dkdv keeps a tile of keys and lets the queries of all heads of its group pass by; dq keeps a tile of queries and
// lets the keys pass by. Both are walk() below. It speaks of *own* rows (this block's) and *passing* ones:
//
//              own                       passing                     S (own x passing)      dP               gradients
//   dkdv       K (of S), V (of dP)       Q (of S), dout (of dP)      S^T = K Q^T            dP^T = V dout^T  dk += dS^T Q, dv += P^T dout
//   dq         Q (of S), dout (of dP)    K (of S), V (of dP)         S = Q K^T              dP = dout V^T    dq += dS K
//
// The layout in which mma returns S is the one in which it takes P and dS: they never leave the registers.
//
// A block has NW warps of MT row tiles of 16, OWN = NW * MT * 16 rows. With PAIRS, two warps have the same own rows: each finds P and dS of half of a
// tile's passing rows, both get both through shared memory, and each adds up every other 16 channels: half as many accumulators.
// With SUMS, 2^SUMS warps have; each has of the own operands as well every 2^SUMS-th 16 channels only, and all add up what they find of S and dP. Passing tiles have TL rows; the one of S has two buffers, since
// it is read again for dS. Own operands lie in registers (REG_S, REG_P) or in shared memory. Bytes of shared memory:
//   OWN * 2 ([not REG_S] D + [not REG_P] DV) + max(TL * 2 (2 D + DV) + [dkdv] TL * 16, OWN * 2 max(D, DV))
// Entries: delta (delta.cu), dkdv (dkdv.cu), dq (dq.cu), launched in this order; grids are said there, tiles chosen in
// backends/fused/variants.py.
// Macros: those above; MINB blocks a multiprocessor, which bounds the registers; D, DV, TYPE, VEC, LOCAL, ALIBI, SOFTCAP, DROPOUT, BIAS (for delta D, TYPE,
// VEC), and MMA16 and CPA for sm_80 and newer.
#pragma once
#include "splits.cuh"

constexpr int THREADS = NW * 32, SHARE = 1 << PAIRS + SUMS, GROUPS = NW / SHARE, OWN = GROUPS * MT * 16, WARP_ROWS = MT * 16;
constexpr bool HALVES = PAIRS || SUMS;
constexpr int SEEN = HALVES ? TL / 2 : TL, NB = SEEN / 8;   // passing rows of a tile whose probabilities a warp finds
constexpr int SUMMED = SUMS ? TL / 8 : NB;                  // blocks of 8 whose products it sums up: its own come first
static_assert(D % (16 * SHARE) == 0 && DV % (16 * SHARE) == 0 && SEEN % (SUMS ? 8 : 16) == 0, "what is shared out comes in 16s");
static_assert(!SUMS || (!PAIRS && TL == 16), "two warps or four find the scores of 16 rows");
DEVICE int group_of(int thread) { return (thread >> 5) % GROUPS; }   // of warps with the same own rows
DEVICE int side_of(int thread) { return SHARE > 1 ? (thread >> 5) / GROUPS : 0; }
static_assert(!KEYS_STAY || 2 * TL <= THREADS, "a thread loads one of a tile's LSE and delta");
// Rows of S's operands have D channels, those of dP's DV.
typedef Layout<D> OfS;
typedef Layout<DV> OfP;
typedef Mover<THREADS, OWN, D> OwnMoverS;
typedef Mover<THREADS, OWN, DV> OwnMoverP;
typedef Mover<THREADS, TL, D> MoverS;
typedef Mover<THREADS, TL, DV> MoverP;
// Probabilities times 2^12 use fp16's range below 1 as well. Only where what multiplies them is scaled anyway.
constexpr int P_SHIFT = TYPE == 2 ? 12 : 0;
// Softcap's slope comes divided by 4: probabilities are 4 times as large, and so is dv.
constexpr int SLOPE_SHIFT = SOFTCAP ? 2 : 0;
typedef float Scores[SUMMED][MT][4];
typedef u32 Packed[NB][MT][2];   // scores as operands
typedef float GradientS[D / 8 / SHARE][MT][4], GradientP[DV / 8 / SHARE][MT][4];

// ---- Powers of two (converted bf16)
DEVICE int exponent_of(float x) { return ((__float_as_int(x) >> 23) & 255) - 127; }
DEVICE float power_of_two(int e) { return __int_as_float((clamp(e, -127, 127) + 127) << 23); }
// x * 2^e, in two steps, so that e may be beyond a float's exponents.
DEVICE float times_power_of_two(float x, int e) { return x * power_of_two(e / 2) * power_of_two(e - e / 2); }

struct Exponents {   // tensors are multiplied by 2 to these, on the way to shared memory
  int q, k, v, dout;
  DEVICE Exponents(const Params &p, int b, int head_k)
      : q(exponent_of(scale_of(absmax_of(p, ABSMAX_Q, b, head_k)))), k(exponent_of(scale_of(absmax_of(p, ABSMAX_K, b, head_k)))),
        v(exponent_of(scale_of(absmax_of(p, ABSMAX_V, b, head_k)))), dout(exponent_of(scale_of(absmax_of_dout(p, b, head_k)))) {}
};

// dS is multiplied by 2 to this besides: then it stays below 2^15 whatever v, dout and out are. `largest_dout` is scaled, and v below 2^15;
// delta has a bound of its own, since a given out may be of other values than these.
DEVICE int exponent_of_ds(const Params &p, const Exponents &e, float largest_dout, float largest_delta) {
  if (TYPE != 2) return 0;
  const int of_dP = exponent_of(p.head_dim_v * 32768.f * largest_dout * (DROPOUT ? p.dropout_scale : 1.f));
  const int of_delta = largest_delta == 0.f ? of_dP : exponent_of(largest_delta) + e.v + e.dout;
  return 13 - P_SHIFT - max(of_dP, of_delta);   // |dP - delta| is below 2^(1 + one more than the larger of them)
}

// ---- Which passing rows a warp's own rows see. Queries from a key's own position - right to it + left see it.
typedef Band<WARP_ROWS, SEEN> Sight;
DEVICE Sight sight(const Params &p, int first, int shift, int passing, int zero) {
  const int left = window(p.window_left + zero), right = window(p.window_right + zero);
  return {first + zero, shift + zero, passing, KEYS_STAY ? right : left, KEYS_STAY ? left : right};
}

// What the given LSE has of a row's position; of its biases.
DEVICE float position_slope(const Params &p, int b, int head) { return ALIBI && p.lse_has_position ? alibi_slope(p, b, head) : 0.f; }
DEVICE float bias_top(const Params &p, int b, int head, int row) { return BIAS > 1 && p.lse_has_position ? DenseMask(p, b, head).top(p, row) : 0.f; }

// ---- What is known of a query row: LSE in units of log2 (rows without keys have +inf: their probabilities are 0), and delta.
// Less the cap, from which a capped score is reckoned down.
DEVICE float row_lse(const Params &p, float lse, int row, int offset, float slope) {
  const float shift = (float)-(P_SHIFT + SLOPE_SHIFT);
  if (fabsf(lse) == POS_INF) return POS_INF;
  return fmaf(ALIBI ? fmaf(-slope, (float)(row + offset), lse) : lse, LOG2E, SOFTCAP ? fmaf(p.softcap, -LOG2E, shift) : shift);
}

// How scores of one head become probabilities.
struct Scoring {
  float unit;              // scores times this are in units of log2
  float doubled, fall;     // softcap: a score is cap + fall / (exp2(S * doubled) + 1), in units of log2
  float slope;
  u32 row_base, key_base;  // dropout
  DEVICE void set_scale(const Params &p, const Exponents &e) {
    unit = times_power_of_two(p.softmax_scale * LOG2E, -(e.q + e.k));
    doubled = 2.f * unit / p.softcap;
    fall = -2.f * p.softcap * LOG2E;
  }
  DEVICE void set_head(const Params &p, int b, int head) {
    slope = ALIBI ? alibi_slope(p, b, head) * LOG2E : 0.f;
    if (!DROPOUT) return;
    const DropoutWords words(p, b, head);
    row_base = words.row_base;
    key_base = words.key_base;
  }
};

// ---- c += a tile, along the passing rows. On Turing the addresses are product()'s, so that they are kept once: transposed, blocks and steps
// change places. m16n8k16 wants its two steps in neighbouring registers, which a different order of addresses gives for nothing.
template <int N, int C> DEVICE void accumulate(float (&c)[C][MT][4], const u32 (*a)[MT][2], u32 tile_at, int first = 0) {
  typedef Layout<C * 8 * SHARE> L;
  UNROLLED(k, N / 2) {
    u32 both[MT][4];
    UNROLLED(m, MT)
      UNROLLED(i, 4) both[m][i] = a[2 * k + i / 2][m][i % 2];
#pragma unroll
    for (int n = 0; n < C; n += 2) {
      u32 b[4];
      ldmatrix_transposed(b, L::along(tile_at, n * SHARE) + (first + 2 * k) * 8 * L::ROW_BYTES);
      const u32 swapped[4] = {b[0], b[MMA16 ? 1 : 2], b[MMA16 ? 2 : 1], b[3]};
      multiply<MT>(c[n], c[n + 1], both, swapped);
    }
  }
}

// ---- Line 11: P = exp(S - LSE) in S's place, what is hidden 0. Where softcap's slope 1 - tanh^2 comes in, it is a factor of P already;
// a dropped probability is negative. `packed` gets the probabilities that out was made of, for dv.
struct OwnRows {   // of queries; keys need nothing but their dropout words
  float lse[MT][2], minus_delta[MT][2];   // minus_delta: in the units in which dS is packed
  u32 word[MT][2];
};

// Only MASKED serves a tile that hides something, and under ALiBi one with rows on both sides of an own position: elsewhere the distance is
// a sum, of what the own row and the passing one have of it.
constexpr bool DISTANCE_IS_SUM = ALIBI && !(TYPE == 2 && DROPOUT);   // there registers are short

template <bool MASKED>
DEVICE void probabilities(Scores &S, Packed &packed, const Params &p, const DenseMask &mask, const Scoring &f, const Sight &band, const OwnRows &own, u32 rows_at, int tile, int g, int t) {
  int first[MT][2], last[MT][2];   // visible passing rows, from this lane's first one on
  float ahead[MT][2], along[MT][2];
  const float per_row = band.is_behind(tile) ? f.slope : -f.slope;   // ALiBi's difference from one passing row to the next
  UNROLLED(m, MT)
    UNROLLED(r, 2) {
      const int position = band.first + m * 16 + g + r * 8 + band.shift - tile - 2 * t;
      first[m][r] = LOCAL ? position - band.before : 0;
      last[m][r] = band.passing - 1 - tile - 2 * t;
      if (LOCAL) last[m][r] = min(last[m][r], position + band.after);
      ahead[m][r] = (float)-position;
      along[m][r] = per_row * ahead[m][r];
    }
  UNROLLED(n, NB) {
    float lse[2];
    if (KEYS_STAY) shared_load_floats(lse, rows_at + n * 32);
    UNROLLED(e, 2) {
#if DROPOUT
      const u32 word = mix((KEYS_STAY ? f.row_base : f.key_base) + tile + n * 8 + 2 * t + e);
#endif
      UNROLLED(m, MT)
        UNROLLED(r, 2) {
          float &s = S[n][m][2 * r + e];
          const int own_row = band.first + m * 16 + g + r * 8, passing = tile + n * 8 + 2 * t + e, row = KEYS_STAY ? passing : own_row;
          float minus_lse = KEYS_STAY ? -lse[e] : -own.lse[m][r];
          if (DISTANCE_IS_SUM && !MASKED) minus_lse += KEYS_STAY ? per_row * (n * 8 + e) : along[m][r];
          const float below = SOFTCAP ? half_below_one(s * f.doubled) : 0.f;
          if (SOFTCAP) s = fmaf(below, f.fall, minus_lse);
          else if (MASKED && BIAS > 1) s = fmaf(fmaf(s, f.unit * LN2, mask.at(p, row, KEYS_STAY ? own_row : passing)) - mask.top(p, row), LOG2E, minus_lse);
          else s = fmaf(s, f.unit, minus_lse);
          if (ALIBI && (MASKED || !DISTANCE_IS_SUM)) s = fmaf(-f.slope, fabsf(ahead[m][r] + (float)(n * 8 + e)), s);
          else if (ALIBI) s = KEYS_STAY ? s + along[m][r] : fmaf(per_row, (float)(n * 8 + e), s);
          s = exp2_approx(s);
          const bool hidden = BIAS == 1 ? !(KEYS_STAY ? mask.sees(p, row, band.first, m * 16 + g + r * 8) : mask.sees(p, row, tile + n / 4 * 32, n % 4 * 8 + 2 * t + e))
                                        : !BIAS && (n * 8 + e > last[m][r] || (LOCAL && n * 8 + e < first[m][r]));
          if (MASKED && hidden) s = 0.f;
#if DROPOUT
          const bool gone = KEYS_STAY ? dropped(word, own.word[m][r], p.dropout_limit) : dropped(own.word[m][r], word, p.dropout_limit);
#else
          const bool gone = false;
#endif
          if (KEYS_STAY) {
            u32 &pair = packed[n][m][r];
            const float kept = gone ? 0.f : s;
            pair = e ? pack(__int_as_float(pair), kept) : __float_as_int(kept);
          }
          if (SOFTCAP) s *= fmaf(-below, below, below);   // (1 - tanh^2) / 4
          if (gone) s = -s;
        }
    }
  }
}

// ---- Line 13: dS = P (dP - delta), packed. A dropped probability has dP = 0. Where nothing scales dP, it starts at -delta.
constexpr bool FROM_DELTA = TYPE != 2 && !DROPOUT && !SUMS;
// Blocks of 8 passing rows whose dP is in registers at once: all, where the own operand would be read again for each, or the scales of dP would.
constexpr int AT_ONCE = SUMS ? SUMMED : REG_P && FROM_DELTA ? 2 : NB;

DEVICE void start(float (*dP)[MT][4], const OwnRows &own, u32 rows_at) {
  UNROLLED(n, AT_ONCE) {
    float minus_delta[2];
    if (KEYS_STAY && FROM_DELTA) shared_load_floats(minus_delta, rows_at + TL * 4 + n * 32);
    UNROLLED(m, MT)
      UNROLLED(e, 4) dP[n][m][e] = !FROM_DELTA ? 0.f : KEYS_STAY ? minus_delta[e & 1] : own.minus_delta[m][e >> 1];
  }
}

DEVICE void score_gradients(u32 (*dS)[MT][2], const float (*P)[MT][4], const float (*dP)[MT][4], const OwnRows &own, u32 rows_at, float dropout_scale, const int (&exponent)[MT][2]) {
  UNROLLED(n, SUMS ? NB : AT_ONCE) {
    float minus_delta[2];
    if (KEYS_STAY && !FROM_DELTA) shared_load_floats(minus_delta, rows_at + TL * 4 + n * 32);
    UNROLLED(m, MT)
      UNROLLED(r, 2) {
        const float scale = (TYPE == 2 ? power_of_two(exponent[m][r]) : 1.f) * (DROPOUT ? dropout_scale : 1.f);
        float x[2];
        UNROLLED(e, 2) {
          const float probability = P[n][m][2 * r + e], d = dP[n][m][2 * r + e], minus = KEYS_STAY ? minus_delta[e] : own.minus_delta[m][r];
          x[e] = probability * (FROM_DELTA ? d : DROPOUT && !(probability >= 0.f) ? -minus : fmaf(d, scale, minus));
        }
        dS[n][m][r] = pack(x[0], x[1]);
      }
  }
}

// ---- A block at work

// What a block owns. Computed again after the loop (`index` is blockIdx.x, which the compiler cannot see through): no registers keep it meanwhile.
struct Owned {
  int tile, tiles, head, b, first, rows, left;   // head: of keys, if these stay; the tile's first row, and how many there are in all and from there on
  int split;   // of the group's heads, which blocks share where keys stay
  Sequence seq;
  DEVICE Owned(const Params &p, int index) {
    const Turn turn(p, index, p.tiles);
    const int splits = KEYS_STAY ? p.splits : 1, slab = turn.slab / splits, heads = KEYS_STAY ? p.nheads_k : p.nheads;
    // A causal problem's first keys are seen by most rows, its last rows see most keys.
    const Seat<OWN, !KEYS_STAY> seat(p, KEYS_STAY ? p.cu_seqlens_k : p.cu_seqlens_q, KEYS_STAY ? p.total_k : p.total_q, slab / heads, turn.tile);
    split = turn.slab % splits, head = slab % heads, b = seat.b;
    tile = seat.tile, tiles = seat.tiles, first = tile * OWN;
    if (b == p.batch) return;
    seq = find_sequence(p, b);
    rows = KEYS_STAY ? seq.seqlen_k : seq.seqlen_q;
    left = rows - first;
  }
  DEVICE int head_k(const Params &p) const { return KEYS_STAY ? head : head / p.group; }
  // Of queries. Each split has as many of the group's heads, but the last, which has some too.
  DEVICE int heads_each(const Params &p) const { return (p.group + p.splits - 1) / p.splits; }
  DEVICE int first_head(const Params &p) const { return KEYS_STAY ? head * p.group + split * heads_each(p) : head; }
  DEVICE int heads(const Params &p) const { return KEYS_STAY ? min(heads_each(p), p.group - split * heads_each(p)) : 1; }
  // Where the own rows of a tensor begin.
  template <class T> DEVICE T *of(T *x, const Strides &s) const {
    return row_at(x, s, b, (KEYS_STAY ? seq.first_k : seq.first_q) + first, head);
  }
  // Where LSE and delta of the sequence begin.
  DEVICE i64 row_values(const Params &p) const { return b * p.lse_batch + first_head(p) * p.lse_head + seq.first_q; }
};

// What passes by: tiles [first, end) of a sequence's rows, for each of `heads` heads.
struct Passing {
  int b, row, head;   // the sequence, its first row, the first head
  int rows, shift;    // how many pass; own row i stands at passing row i + shift
  int first, end, heads;
  DEVICE Passing(const Params &params, const Owned &own) : heads(own.heads(params)) {
    b = own.b, row = KEYS_STAY ? own.seq.first_q : own.seq.first_k, head = KEYS_STAY ? own.first_head(params) : own.head_k(params);
    rows = KEYS_STAY ? own.seq.seqlen_q : own.seq.seqlen_k;
    shift = rows - own.rows;
    const Sight band = sight(params, own.first, shift, rows, 0);
    const Range seen = visible_keys(own.first, min(own.first + OWN, own.rows), shift, rows, band.before, band.after);
    first = seen.first / TL;
    end = (seen.end + TL - 1) / TL;
  }
  // Where a head's rows begin, and LSE and delta of them.
  DEVICE const u16 *of(const u16 *x, const Strides &s, int which, int zero) const { return row_at(x, s, b + zero, row + zero, head + which); }
  DEVICE i64 row_values(const Params &params, int which, int zero) const { return (b + zero) * params.lse_batch + (head + which) * params.lse_head + row + zero; }
};

struct Block {
  u32 own_s[REG_S ? D / 16 >> SUMS : 1][MT][4], own_p[REG_P ? DV / 16 >> SUMS : 1][MT][4];
  OwnRows own;
  Scoring scoring;
  float s_scale, p_scale;   // of what passes
  int ds_exponent[MT][2];   // of each own row: the same for keys
  int delta_exponent;       // of passing queries
  u32 shared;

  static constexpr u32 OWN_P = REG_S ? 0 : OWN * OfS::ROW_BYTES, TILES = OWN_P + (REG_P ? 0 : OWN * OfP::ROW_BYTES);
  static constexpr u32 TILE_BYTES = TL * OfS::ROW_BYTES, TILE_P = TILES + 2 * TILE_BYTES;
  static constexpr u32 ROW_VALUES = TILE_P + TL * OfP::ROW_BYTES;   // LSE and delta of a passing tile's queries, twice

  DEVICE Block(const Params &p, u32 shared, const Exponents &e) : shared(shared) {
    scoring.set_scale(p, e);
    s_scale = power_of_two(KEYS_STAY ? e.q : e.k);
    p_scale = power_of_two(KEYS_STAY ? e.dout : e.v);
  }

  template <class L> static DEVICE u32 own_at(int thread) {
    return L::along(L::a_operand_at(thread) + group_of(thread) * WARP_ROWS * L::ROW_BYTES, SUMS ? side_of(thread) * 2 : 0);
  }

  // Own rows to their place.
  template <bool REG, int W, int N> DEVICE void keep(u32 (&operand)[N][MT][4], u32 place, const uint4 *rows, int exponent) {
    const u32 tile = shared + (REG ? TILES : place);
    Mover<THREADS, OWN, W>(threadIdx.x).keep(rows, tile, power_of_two(exponent));
    __syncthreads();
    if (REG) keep_rows<W>(operand, tile + own_at<Layout<W>>(threadIdx.x));
  }

  // One tile of one head on its way to shared memory.
  template <class M> DEVICE void load(const Params &p, uint4 *transit, const u16 *x, const Strides &s, const Passing &passing, int tile, int head,
                                      int head_dim, const M &mover, u32 target, int zero) const {
    mover.load(transit, p, passing.of(x, s, head, zero), s, nullptr, tile * TL, passing.rows - tile * TL, head_dim, target);
  }
  // This thread's part of a tile's LSE and delta.
  DEVICE float load_row_value(const Params &p, const Passing &passing, int tile, int head, float slope, int thread, int zero) const {
    const int row = tile * TL + thread % TL;
    const bool is_lse = thread < TL;
    if (!KEYS_STAY || thread >= 2 * TL || row >= passing.rows) return is_lse ? POS_INF : 0.f;
    const i64 at = passing.row_values(p, head, zero) + row;
    return is_lse ? row_lse(p, global_load(p.lse + at) - bias_top(p, passing.b, passing.head + head, row), row, -passing.shift, slope) : times_power_of_two(-global_load(p.delta + at), delta_exponent);
  }

  // HALVES: where a warp leaves its half of a tile's P or dS (`which`) for its partner.
  static constexpr u32 EXCHANGE = ROW_VALUES + (KEYS_STAY ? TL * 16 : 0), OF_HALF = NB * MT * 256;
  static DEVICE u32 exchange_at(u32 shared, int which, int thread, int side) {
    return shared + EXCHANGE + ((which * GROUPS + group_of(thread)) * SHARE + side) * OF_HALF + (thread & 31) * 4;
  }
  static DEVICE void hand_over(const u32 (*found)[MT][2], u32 at) {
    UNROLLED(i, NB * MT * 2) shared_store(at + i * 128, found[i / 2 / MT][i / 2 % MT][i % 2]);
  }
  // c += its partner's half times a tile, whose rows that are its own begin at `turned`; with SUMS its own half too, since 8 rows are no operand.
  template <int C> static DEVICE void accumulate_rest(float (&c)[C][MT][4], const u32 (*own)[MT][2], u32 partners_at, u32 turned, int half) {
    u32 all[2 * NB][MT][2];
    UNROLLED(i, NB * MT * 2) {
      const int n = i / 2 / MT, m = i / 2 % MT;
      all[n][m][i % 2] = own[n][m][i % 2], all[NB + n][m][i % 2] = __float_as_int(shared_load_float(partners_at + i * 128));
    }
    if (SUMS) accumulate<2 * NB>(c, all, turned);
    else accumulate<NB>(c, all + NB, turned + (1 - 2 * half) * SEEN * Layout<C * 8 * SHARE>::ROW_BYTES);
  }
  // SUMS: what a warp leaves for others, of S in the next tile's place if that has room, and of dP. Of four warps, two have the same half to find.
  static constexpr u32 SUMS_END = EXCHANGE + 2 * NW * OF_HALF, OF_SUMS = NW * SUMS * MT * 512;
  static DEVICE u32 sums_at(u32 shared, bool of_S, int buffer, int thread) {
    const u32 place = !of_S ? SUMS_END : OF_SUMS <= TILE_BYTES && !CPA ? TILES + (buffer ^ 1) * TILE_BYTES : SUMS_END + OF_SUMS;
    return shared + place + group_of(thread) * SHARE * SUMS * MT * 512 + (thread & 31) * 16;
  }
  static DEVICE void leave(const float (*c)[MT][4], u32 at, int side) {
    UNROLLED(i, SUMS * MT) leave_sums(c[i / MT + 2 - SUMS][i % MT], at + (side * SUMS * MT + i) * 512);
  }
  static DEVICE void add(float (*c)[MT][4], u32 at, int side) {
    UNROLLED(m, MT) {
      add_sums(c[0][m], at + (((side ^ 1) * SUMS + SUMS - 1) * MT + m) * 512);
      if (SUMS == 1) continue;
      float others[4] = {0.f, 0.f, 0.f, 0.f};
      add_sums(others, at + ((side ^ 2) * SUMS * MT + m) * 512);
      add_sums(others, at + (((side ^ 3) * SUMS + 1) * MT + m) * 512);
      UNROLLED(e, 4) c[0][m][e] += others[e];
    }
  }

  // Lines 6 to 15: the inner loop. grad_s += dS S's passing operand; where keys stay, grad_p += P dP's passing operand.
  DEVICE void walk(const Params &p, const Owned &owned, const Passing &passing, GradientS &grad_s, GradientP &grad_p) {
    const int b = owned.b, head = owned.first_head(p);
    const Strides &s_strides = KEYS_STAY ? p.q_s : p.k_s, &p_strides = KEYS_STAY ? p.dout_s : p.v_s;
    const u16 *const of_s = KEYS_STAY ? p.q : p.k, *const of_p = KEYS_STAY ? p.dout : p.v;
    int tile = passing.first, this_head = 0;
    const auto skip = [&] {   // tiles of which a dense mask hides all
      for (; BIAS && this_head < passing.heads; tile = passing.first, this_head++) {
        const DenseMask mask(p, b, head + this_head);
        if (!KEYS_STAY) tile = mask.next<OWN, TL>(p, owned.first, tile, passing.end);
        while (KEYS_STAY && tile < passing.end && !mask.has<TL, OWN>(p, 0, tile * TL, owned.first)) tile = tile / (BAND / TL) * (BAND / TL) + BAND / TL;
        if (tile < passing.end) return;
      }
    };
    skip();
    int steps = BIAS ? this_head < passing.heads : max(passing.end - passing.first, 0) * passing.heads;
    uint4 transit[larger(MoverS::N, MoverP::N)];   // both take turns in it
    if (steps) {
      load(p, transit, of_s, s_strides, passing, tile, this_head, p.head_dim, MoverS(threadIdx.x), shared + TILES, 0);
      const float row_value = load_row_value(p, passing, tile, this_head, position_slope(p, b, head), threadIdx.x, 0);
      MoverS(threadIdx.x).store(transit, shared + TILES, s_scale);
      if (KEYS_STAY && threadIdx.x < 2 * TL) shared_store(shared + ROW_VALUES + threadIdx.x * 4, __float_as_int(row_value));
    }
    __syncthreads();
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      // A 0 that the compiler cannot see through: so it keeps nothing that follows from the thread's number over the loop.
      const int zero = step & p.zero, thread = threadIdx.x + zero, g = thread >> 2 & 7, t = thread & 3;
      const int anew = D > 64 && D < 128 ? zero : 0;   // addresses of what passes: kept, they take more registers; found anew, more at a time
      const int buffer = step & 1, side = side_of(thread), half = HALVES ? side & 1 : 0, first = tile * TL, seen = first + half * SEEN;
      const u32 s_tile = shared + TILES + buffer * TILE_BYTES + half * (PAIRS ? SEEN : 0) * OfS::ROW_BYTES, p_tile = shared + TILE_P + half * (PAIRS ? SEEN : 0) * OfP::ROW_BYTES;
      const int by_rows = SUMS ? thread ^ half << 4 : thread, turned = SUMS ? thread ^ half << 3 : thread;   // so that the rows whose scores it finds come first
      const u32 s_at = OfS::along(s_tile + OfS::b_operand_at(by_rows), SUMS ? side * 2 : 0), p_at = OfP::along(p_tile + OfP::b_operand_at(by_rows), SUMS ? side * 2 : 0);
      // Where accumulate() reads.
      const u32 s_turned = OfS::along(s_tile + (MMA16 ? OfS::a_operand_at(turned) : OfS::b_operand_at(by_rows)), side * 2);
      const u32 p_turned = OfP::along(p_tile + (MMA16 ? OfP::a_operand_at(turned) : OfP::b_operand_at(by_rows)), side * 2);
      const u32 rows_at = shared + ROW_VALUES + buffer * TL * 8 + half * SEEN * 4 + t * 8;
      const Sight band = sight(p, owned.first + group_of(thread) * WARP_ROWS, passing.shift, passing.rows, zero);
      // Without a mask always true: the compiler then keeps the operands of one half of this loop out of the other, where registers are short.
      const bool active = LOCAL ? band.sees_some(first) || (HALVES && band.sees_some(first + SEEN)) : KEYS_STAY || D > 128 ? zero == 0 : true;
      const DenseMask mask(p, b, head + this_head);
      load(p, transit, of_p, p_strides, passing, tile, this_head, p.head_dim_v, MoverP(thread), shared + TILE_P, anew);
      Scores S;
      Packed P;
      float dP[AT_ONCE][MT][4];
      u32 dS[AT_ONCE][MT][2];
      scoring.set_head(p, b, head + this_head);
      const auto find_probabilities = [&] {
        if (BIAS ? !(KEYS_STAY ? mask.has<SEEN, WARP_ROWS>(p, 1, seen, band.first) : mask.has<WARP_ROWS, SEEN>(p, 1, band.first, seen)) : band.sees_all(seen) && (!DISTANCE_IS_SUM || band.is_behind(seen) || band.is_ahead(seen)))
          probabilities<false>(S, P, p, mask, scoring, band, own, rows_at, seen, g, t);
        else probabilities<true>(S, P, p, mask, scoring, band, own, rows_at, seen, g, t);
        if (HALVES && KEYS_STAY) hand_over(P, exchange_at(shared, 0, thread, side));
      };
      if (active) {
        set_zero(S);
        product<REG_S, D, SUMMED>(S, own_s, shared + own_at<OfS>(thread), s_at);
        if (SUMS) leave(S, sums_at(shared, true, buffer, thread), side);
        else find_probabilities();
      }
      MoverP(thread).store(transit, shared + TILE_P, p_scale);
      __syncthreads();
      if (++tile == passing.end) tile = passing.first, this_head++;
      skip();
      if (BIAS) steps = step + 1 + (this_head < passing.heads);
      const bool last = step + 1 == steps;
      float row_value;
      if (!last) {
        load(p, transit, of_s, s_strides, passing, tile, this_head, p.head_dim, MoverS(thread), shared + TILES + (buffer ^ 1) * TILE_BYTES, anew);
        row_value = load_row_value(p, passing, tile, this_head, position_slope(p, b, head + this_head), thread, anew);
      }
      if (active) {
        if (SUMS) add(S, sums_at(shared, true, buffer, thread), side), find_probabilities();
        if (KEYS_STAY && !SUMS) accumulate<NB>(grad_p, P, p_turned);
        if (KEYS_STAY && PAIRS) accumulate_rest(grad_p, P, exchange_at(shared, 0, thread, side ^ 1), p_turned, half);
#pragma unroll
        for (int n = 0; n < NB; n += AT_ONCE) {
          start(dP, own, rows_at + n * 32);
          product<REG_P, DV, AT_ONCE>(dP, own_p, shared + OWN_P + own_at<OfP>(thread), p_at, n);
          if (SUMS) leave(dP, sums_at(shared, false, buffer, thread), side);
          else score_gradients(dS, S + n, dP, own, rows_at + n * 32, p.dropout_scale, ds_exponent);
          if (PAIRS) hand_over(dS, exchange_at(shared, KEYS_STAY, thread, side));
          if (!SUMS) accumulate<AT_ONCE>(grad_s, dS, s_turned, n);
        }
      }
      if (SUMS) {
        __syncthreads();
        if (active) {
          if (KEYS_STAY) accumulate_rest(grad_p, P, exchange_at(shared, 0, thread, side ^ 1), p_turned, half);
          add(dP, sums_at(shared, false, buffer, thread), side);
          score_gradients(dS, S, dP, own, rows_at, p.dropout_scale, ds_exponent);
          hand_over(dS, exchange_at(shared, KEYS_STAY, thread, side));
        }
      }
      if (HALVES) {
        __syncthreads();
        if (active) accumulate_rest(grad_s, dS, exchange_at(shared, KEYS_STAY, thread, side ^ 1), s_turned, half);
      }
      if (!last) {
        MoverS(thread).store(transit, shared + TILES + (buffer ^ 1) * TILE_BYTES, s_scale);
        if (KEYS_STAY && thread < 2 * TL) shared_store(shared + ROW_VALUES + (buffer ^ 1) * TL * 8 + thread * 4, __float_as_int(row_value));
      }
      __syncthreads();
    }
  }

  // A gradient times `scale` and 2^exponent to its rows, through shared memory. In two steps, so that the exponent may be beyond a float's.
  template <int C> DEVICE void write(float (&c)[C][MT][4], int exponent, float scale, u16 *out, int row_stride, int rows, int head_dim, bool of_dS) const {
    float factor[MT][2];
    UNROLLED(m, MT)
      UNROLLED(r, 2) {
        const int all = exponent - (of_dS ? ds_exponent[m][r] : 0), half = all / 2;
        UNROLLED(n, C)
          UNROLLED(e, 2)
            if (TYPE == 2) c[n][m][2 * r + e] *= power_of_two(half);
        factor[m][r] = scale * power_of_two(all - half);
      }
    const int first_row = group_of(threadIdx.x) * WARP_ROWS;
    write_rows<SHARE>(c, factor, shared + first_row * larger(OfS::ROW_BYTES, OfP::ROW_BYTES), first_row, out, row_stride, rows, head_dim, side_of(threadIdx.x));
  }
};

// Tokens outside of all sequences (b = batch), and this sequence's slots that hold no key, have no gradient: rows [first, end) and [behind, last)
// get 0. The blocks of a head share them out.
DEVICE void clear_unused(const Params &p, u16 *x, const Strides &s, int head_dim, const Owned &own) {
  const int b = own.b, *starts = KEYS_STAY ? p.cu_seqlens_k : p.cu_seqlens_q, total = KEYS_STAY ? p.total_k : p.total_q;
  int first = 0, end = own.seq.first_k, behind = end + own.seq.seqlen_k, last = p.seqlen_k;
  if (b == p.batch) {
    end = clamp(global_load(starts), 0, total);
    behind = clamp(global_load(starts + b), end, total);
    last = total;
  } else if (!KEYS_STAY) {
    return;
  } else if (starts) {
    first = clamp(global_load(starts + b), 0, total);
    last = clamp(global_load(starts + b + 1), first, total);
  }
  const int before = end - first, rows = before + last - behind;
  const int splits = KEYS_STAY ? p.splits : 1;
  for (int i = own.tile * splits + own.split; i < rows; i += own.tiles * splits) {
    u16 *row = x + b * (starts ? 0 : s.batch) + (i64)(i < before ? first + i : behind + i - before) * s.row + (i64)own.head * s.head;
    for (int c = threadIdx.x; c < head_dim; c += THREADS) global_store2(row + c, 0);
  }
}
