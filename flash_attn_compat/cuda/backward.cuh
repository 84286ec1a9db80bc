// FlashAttention-2, Algorithm 2 (Dao, 2023), seen from either side.
//
// With P = exp(S - LSE), dP = dout V^T and delta = rowsum(out * dout):  dS = P (dP - delta),  dv = P^T dout,  dk = scale dS^T q,
// dq = scale dS k. Two kernels compute S and dP anew, so that every sum is one block's own: no atomics, no fp32 buffer, the same
// bits each time. dkdv keeps a tile of keys and lets the queries of all heads of its group pass by; dq keeps a tile of queries and
// lets the keys pass by. Both are walk() below. It speaks of *own* rows (this block's) and *passing* ones:
//
// In the paper's terms: own is j (K_j, V_j) and passing i (Q_i, dO_i) in dkdv, own is i and passing j in dq.
//
//              own                       passing                     S (own x passing)      dP               gradients
//   dkdv       K (of S), V (of dP)       Q (of S), dout (of dP)      S^T = K Q^T            dP^T = V dout^T  dk += dS^T Q, dv += P^T dout
//   dq         Q (of S), dout (of dP)    K (of S), V (of dP)         S = Q K^T              dP = dout V^T    dq += dS K
//
// The layout in which mma returns S is the one in which it takes P and dS: they never leave the registers.
//
// A block has NW warps of MT row tiles of 16, OWN = NW * MT * 16 rows. With PAIRS, two warps have the same own rows: each finds P and dS of half of a
// tile's passing rows, both get both through shared memory, and each adds up every other 16 channels: half as many accumulators.
// With SUMS, 2^SUMS warps have; each has of the own operands as well every 2^SUMS-th 16 channels only, and all add up what they find of S and dP.
// Passing tiles have TL rows; the one of S has two buffers, since it is read again for dS. Own operands lie in registers (REG_S, REG_P) or in shared memory. Bytes of shared memory:
//   OWN * 2 ([not REG_S] D + [not REG_P] DV) + max(TL * 2 (2 D + DV) + [dkdv] TL * 16, OWN * 2 max(D, DV))
// Entries: delta (delta.cu), dkdv (dkdv.cu), dq (dq.cu), launched in this order; grids are said there, tiles chosen in
// backends/fused/variants.py.
// Macros: those above, and those of common.cuh (for delta D, TYPE, VEC).
#pragma once
#include "exchange.cuh"

// ---- A block at work

// What a block owns. Compiler steering: computed again after the loop, from an `index` whose p.zero it cannot see through, so that no registers keep it meanwhile.
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
  DEVICE const u16 *of(const u16 *x, const Strides &s, int which, int zero) const { return x + (b + zero) * s.batch + (i64)(row + zero) * s.row + (i64)(head + which) * s.head; }
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
      // Compiler steering: a 0 that it cannot see through, so that it keeps nothing that follows from the thread's number over the loop.
      const int zero = step & p.zero, thread = threadIdx.x + zero, g = thread >> 2 & 7, t = thread & 3;
      const int anew = D > 64 && D < 128 ? zero : 0;   // compiler steering: addresses of what passes take more registers if kept; found anew, more at a time
      const int buffer = step & 1, side = side_of(thread), half = HALVES ? side & 1 : 0, first = tile * TL, seen = first + half * SEEN;
      const u32 s_tile = shared + TILES + buffer * TILE_BYTES + half * (PAIRS ? SEEN : 0) * OfS::ROW_BYTES, p_tile = shared + TILE_P + half * (PAIRS ? SEEN : 0) * OfP::ROW_BYTES;
      const int by_rows = SUMS ? thread ^ half << 4 : thread, turned = SUMS ? thread ^ half << 3 : thread;   // so that the rows whose scores it finds come first
      const u32 s_at = OfS::along(s_tile + OfS::b_operand_at(by_rows), SUMS ? side * 2 : 0), p_at = OfP::along(p_tile + OfP::b_operand_at(by_rows), SUMS ? side * 2 : 0);
      // Where accumulate() reads.
      const u32 s_turned = OfS::along(s_tile + (MMA16 ? OfS::a_operand_at(turned) : OfS::b_operand_at(by_rows)), side * 2);
      const u32 p_turned = OfP::along(p_tile + (MMA16 ? OfP::a_operand_at(turned) : OfP::b_operand_at(by_rows)), side * 2);
      const u32 rows_at = shared + ROW_VALUES + buffer * TL * 8 + half * SEEN * 4 + t * 8;
      const Sight band = sight(p, owned.first + group_of(thread) * WARP_ROWS, passing.shift, passing.rows, zero);
      // Compiler steering: without a mask always true, but it then keeps the operands of one half of this loop out of the other, where registers are short.
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
        if (SUMS) leave_scores(S, sums_at(shared, true, buffer, thread), side);
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
        if (SUMS) add_scores(S, sums_at(shared, true, buffer, thread), side), find_probabilities();
        if (KEYS_STAY && !SUMS) accumulate<NB>(grad_p, P, p_turned);
        if (KEYS_STAY && PAIRS) accumulate_rest(grad_p, P, exchange_at(shared, 0, thread, side ^ 1), p_turned, half);
#pragma unroll
        for (int n = 0; n < NB; n += AT_ONCE) {
          start(dP, own, rows_at + n * 32);
          product<REG_P, DV, AT_ONCE>(dP, own_p, shared + OWN_P + own_at<OfP>(thread), p_at, n);
          if (SUMS) leave_scores(dP, sums_at(shared, false, buffer, thread), side);
          else score_gradients(dS, S + n, dP, own, rows_at + n * 32, p.dropout_scale, ds_exponent);
          if (PAIRS) hand_over(dS, exchange_at(shared, KEYS_STAY, thread, side));
          if (!SUMS) accumulate<AT_ONCE>(grad_s, dS, s_turned, n);
        }
      }
      if (SUMS) {
        __syncthreads();
        if (active) {
          if (KEYS_STAY) accumulate_rest(grad_p, P, exchange_at(shared, 0, thread, side ^ 1), p_turned, half);
          add_scores(dP, sums_at(shared, false, buffer, thread), side);
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

// Gradients of rows for which there are no blocks become NaN, by blocks that have no sequence.
DEVICE void mark_missing(const Params &p, u16 *x, const Strides &s, int head_dim, const Owned &own) {
  const int splits = KEYS_STAY ? p.splits : 1;
  for_missing_rows(p, KEYS_STAY ? p.cu_seqlens_k : p.cu_seqlens_q, KEYS_STAY ? p.total_k : p.total_q, p.tiles * OWN, own.tile * splits + own.split,
                   own.tiles * splits, [&](int, int first, int rows) { write_nan(x + (i64)first * s.row + (i64)own.head * s.head, s.row, rows, head_dim); });
}

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
