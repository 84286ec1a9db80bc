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
// A block has WARPS warps of MMA_M row tiles of 16, STATIONARY_ROWS = WARPS * MMA_M * 16 rows. With SPLIT_N, two warps have the same own rows: each finds P and dS of half of a
// tile's passing rows, both get both through shared memory, and each adds up every other 16 channels: half as many accumulators.
// With SPLIT_K, 2^SPLIT_K warps have; each has of the own operands as well every 2^SPLIT_K-th 16 channels only, and all add up what they find of S and dP.
// StreamedTiles tiles have STREAMED_ROWS rows; the one of S has two buffers, since it is read again for dS. Own operands lie in registers (QK_IN_REGS, VO_IN_REGS) or in shared memory. Bytes of shared memory:
//   STATIONARY_ROWS * 2 ([not QK_IN_REGS] D + [not VO_IN_REGS] DV) + max(STREAMED_ROWS * 2 (2 D + DV) + [dkdv] STREAMED_ROWS * 16, STATIONARY_ROWS * 2 max(D, DV))
// Entries: delta (delta.cu), dkdv (dkdv.cu), dq (dq.cu), launched in this order; grids are said there, tiles chosen in
// backends/fused/variants.py.
// Macros: those above, and those of common.cuh (for delta D, TYPE, VEC).
#pragma once
#include "exchange.cuh"

// ---- A block at work

// What a block owns. Compiler steering: computed again after the loop, from an `index` whose p.zero it cannot see through, so that no registers keep it meanwhile.
struct StationaryTile {
  int tile, tiles, head, b, first, rows, left;   // head: of keys, if these stay; the tile's first row, and how many there are in all and from there on
  int split;   // of the group's heads, which blocks share where keys stay
  Sequence seq;
  DEVICE StationaryTile(const Params &p, int index) {
    const TileScheduler scheduled(p, index, p.tiles);
    const int splits = KEYS_STATIONARY ? p.splits : 1, batch_head = scheduled.batch_head / splits, heads = KEYS_STATIONARY ? p.nheads_k : p.nheads;
    // A causal problem's first keys are seen by most rows, its last rows see most keys.
    const VarlenTile<STATIONARY_ROWS, !KEYS_STATIONARY> varlen(p, KEYS_STATIONARY ? p.cu_seqlens_k : p.cu_seqlens_q, KEYS_STATIONARY ? p.total_k : p.total_q, batch_head / heads, scheduled.tile);
    split = scheduled.batch_head % splits, head = batch_head % heads, b = varlen.b;
    tile = varlen.tile, tiles = varlen.tiles, first = tile * STATIONARY_ROWS;
    if (b == p.batch) return;
    seq = find_sequence(p, b);
    rows = KEYS_STATIONARY ? seq.seqlen_k : seq.seqlen_q;
    left = rows - first;
  }
  DEVICE int head_k(const Params &p) const { return KEYS_STATIONARY ? head : head / p.group; }
  // Of queries. Each split has as many of the group's heads, but the last, which has some too.
  DEVICE int heads_each(const Params &p) const { return (p.group + p.splits - 1) / p.splits; }
  DEVICE int first_head(const Params &p) const { return KEYS_STATIONARY ? head * p.group + split * heads_each(p) : head; }
  DEVICE int heads(const Params &p) const { return KEYS_STATIONARY ? min(heads_each(p), p.group - split * heads_each(p)) : 1; }
  // Where the own rows of a tensor begin.
  template <class T> DEVICE T *of(T *x, const Strides &s) const {
    return row_at(x, s, b, (KEYS_STATIONARY ? seq.first_k : seq.first_q) + first, head);
  }
  // Where LSE and delta of the sequence begin.
  DEVICE i64 row_values(const Params &p) const { return b * p.lse_batch + first_head(p) * p.lse_head + seq.first_q; }
};

// What passes by: tiles [first, end) of a sequence's rows, for each of `heads` heads.
struct StreamedTiles {
  int b, row, head;   // the sequence, its first row, the first head
  int rows, shift;    // how many pass; own row i stands at passing row i + shift
  int first, end, heads;
  DEVICE StreamedTiles(const Params &params, const StationaryTile &own) : heads(own.heads(params)) {
    b = own.b, row = KEYS_STATIONARY ? own.seq.first_q : own.seq.first_k, head = KEYS_STATIONARY ? own.first_head(params) : own.head_k(params);
    rows = KEYS_STATIONARY ? own.seq.seqlen_q : own.seq.seqlen_k;
    shift = rows - own.rows;
    const WarpRange range = warp_range(params, own.first, shift, rows, 0);
    const Range seen = visible_keys(own.first, min(own.first + STATIONARY_ROWS, own.rows), shift, rows, range.before, range.after);
    first = seen.first / STREAMED_ROWS;
    end = (seen.end + STREAMED_ROWS - 1) / STREAMED_ROWS;
  }
  // Where a head's rows begin, and LSE and delta of them.
  DEVICE const u16 *of(const u16 *x, const Strides &s, int which, int zero) const { return x + (b + zero) * s.batch + (i64)(row + zero) * s.row + (i64)(head + which) * s.head; }
  DEVICE i64 row_values(const Params &params, int which, int zero) const { return (b + zero) * params.lse_batch + (head + which) * params.lse_head + row + zero; }
};

struct Block {
  u32 stationary_qk[QK_IN_REGS ? D / 16 >> SPLIT_K : 1][MMA_M][4], stationary_vo[VO_IN_REGS ? DV / 16 >> SPLIT_K : 1][MMA_M][4];
  StationaryRows own;
  ScoreParams score_params;
  float qk_scale, vo_scale;   // of what passes
  int ds_exponent[MMA_M][2];   // of each own row: the same for keys
  int delta_exponent;       // of passing queries
  u32 shared;

  DEVICE Block(const Params &p, u32 shared, const Exponents &e) : shared(shared) {
    score_params.set_scale(p, e);
    qk_scale = power_of_two(KEYS_STATIONARY ? e.q : e.k);
    vo_scale = power_of_two(KEYS_STATIONARY ? e.dout : e.v);
  }

  template <class L> static DEVICE u32 stationary_at(int thread) {
    return L::along(L::a_operand_at(thread) + group_of(thread) * WARP_ROWS * L::ROW_BYTES, SPLIT_K ? side_of(thread) * 2 : 0);
  }

  // Own rows to their place.
  template <bool REG, int W, int N> DEVICE void keep(u32 (&operand)[N][MMA_M][4], u32 place, const uint4 *rows, int exponent) {
    const u32 tile = shared + (REG ? QK_TILES_AT : place);
    TileCopy<THREADS, STATIONARY_ROWS, W>(threadIdx.x).keep(rows, tile, power_of_two(exponent));
    __syncthreads();
    if (REG) load_operand<W>(operand, tile + stationary_at<Layout<W>>(threadIdx.x));
  }

  // One tile of one head on its way to shared memory.
  template <class M> DEVICE void load(const Params &p, uint4 *staged, const u16 *x, const Strides &s, const StreamedTiles &streamed, int tile, int head,
                                      int head_dim, const M &mover, u32 target, int zero) const {
    mover.load(staged, p, streamed.of(x, s, head, zero), s, nullptr, tile * STREAMED_ROWS, streamed.rows - tile * STREAMED_ROWS, head_dim, target);
  }
  // This thread's part of a tile's LSE and delta.
  DEVICE float load_row_value(const Params &p, const StreamedTiles &streamed, int tile, int head, float slope, int thread, int zero) const {
    const int row = tile * STREAMED_ROWS + thread % STREAMED_ROWS;
    const bool is_lse = thread < STREAMED_ROWS;
    if (!KEYS_STATIONARY || thread >= 2 * STREAMED_ROWS || row >= streamed.rows) return is_lse ? POS_INF : 0.f;
    const i64 at = streamed.row_values(p, head, zero) + row;
    return is_lse ? row_lse(p, global_load(p.lse + at) - bias_top(p, streamed.b, streamed.head + head, row), row, -streamed.shift, slope) : times_power_of_two(-global_load(p.delta + at), delta_exponent);
  }

  // Lines 6 to 15: the inner loop. grad_qk += dS S's passing operand; where keys stay, grad_vo += P dP's passing operand.
  DEVICE void main_loop(const Params &p, const StationaryTile &owned, const StreamedTiles &streamed, GradientQK &grad_qk, GradientVO &grad_vo) {
    const int b = owned.b, head = owned.first_head(p);
    const Strides &qk_strides = KEYS_STATIONARY ? p.q_s : p.k_s, &vo_strides = KEYS_STATIONARY ? p.dout_s : p.v_s;
    const u16 *const streamed_qk = KEYS_STATIONARY ? p.q : p.k, *const streamed_vo = KEYS_STATIONARY ? p.dout : p.v;
    int tile = streamed.first, this_head = 0;
    const auto skip = [&] {   // tiles of which a dense mask hides all
      for (; BIAS && this_head < streamed.heads; tile = streamed.first, this_head++) {
        const DenseMask mask(p, b, head + this_head);
        if (!KEYS_STATIONARY) tile = mask.next<STATIONARY_ROWS, STREAMED_ROWS>(p, owned.first, tile, streamed.end);
        while (KEYS_STATIONARY && tile < streamed.end && !mask.has<STREAMED_ROWS, STATIONARY_ROWS>(p, 0, tile * STREAMED_ROWS, owned.first)) tile = tile / (BAND / STREAMED_ROWS) * (BAND / STREAMED_ROWS) + BAND / STREAMED_ROWS;
        if (tile < streamed.end) return;
      }
    };
    skip();
    int steps = BIAS ? this_head < streamed.heads : max(streamed.end - streamed.first, 0) * streamed.heads;
    uint4 staged[larger(CopyStreamedQK::N, CopyStreamedVO::N)];   // both take turns in it
    if (steps) {
      load(p, staged, streamed_qk, qk_strides, streamed, tile, this_head, p.head_dim, CopyStreamedQK(threadIdx.x), shared + QK_TILES_AT, 0);
      const float row_value = load_row_value(p, streamed, tile, this_head, position_slope(p, b, head), threadIdx.x, 0);
      CopyStreamedQK(threadIdx.x).store(staged, shared + QK_TILES_AT, qk_scale);
      if (KEYS_STATIONARY && threadIdx.x < 2 * STREAMED_ROWS) shared_store(shared + ROW_VALUES_AT + threadIdx.x * 4, __float_as_int(row_value));
    }
    __syncthreads();
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      // Compiler steering: a 0 that it cannot see through, so that it keeps nothing that follows from the thread's number over the loop.
      const int zero = step & p.zero, thread = threadIdx.x + zero, g = thread >> 2 & 7, t = thread & 3;
      const int anew = D > 64 && D < 128 ? zero : 0;   // compiler steering: addresses of what passes take more registers if kept; found anew, more at a time
      const int buffer = step & 1, side = side_of(thread), half = EXCHANGES ? side & 1 : 0, first = tile * STREAMED_ROWS, seen = first + half * SCORED_ROWS;
      const u32 qk_tile = shared + QK_TILES_AT + buffer * QK_TILE_BYTES + half * (SPLIT_N ? SCORED_ROWS : 0) * LayoutQK::ROW_BYTES, vo_tile = shared + VO_TILE_AT + half * (SPLIT_N ? SCORED_ROWS : 0) * LayoutVO::ROW_BYTES;
      const int row_thread = SPLIT_K ? thread ^ half << 4 : thread, transposed_thread = SPLIT_K ? thread ^ half << 3 : thread;   // so that the rows whose scores it finds come first
      const u32 qk_at = LayoutQK::along(qk_tile + LayoutQK::b_operand_at(row_thread), SPLIT_K ? side * 2 : 0), vo_at = LayoutVO::along(vo_tile + LayoutVO::b_operand_at(row_thread), SPLIT_K ? side * 2 : 0);
      // Where accumulate() reads.
      const u32 qk_transposed = LayoutQK::along(qk_tile + (MMA_K16 ? LayoutQK::a_operand_at(transposed_thread) : LayoutQK::b_operand_at(row_thread)), side * 2);
      const u32 vo_transposed = LayoutVO::along(vo_tile + (MMA_K16 ? LayoutVO::a_operand_at(transposed_thread) : LayoutVO::b_operand_at(row_thread)), side * 2);
      const u32 rows_at = shared + ROW_VALUES_AT + buffer * STREAMED_ROWS * 8 + half * SCORED_ROWS * 4 + t * 8;
      const WarpRange range = warp_range(p, owned.first + group_of(thread) * WARP_ROWS, streamed.shift, streamed.rows, zero);
      // Compiler steering: without a mask always true, but it then keeps the operands of one half of this loop out of the other, where registers are short.
      const bool active = LOCAL ? range.sees_some(first) || (EXCHANGES && range.sees_some(first + SCORED_ROWS)) : KEYS_STATIONARY || D > 128 ? zero == 0 : true;
      const DenseMask mask(p, b, head + this_head);
      load(p, staged, streamed_vo, vo_strides, streamed, tile, this_head, p.head_dim_v, CopyStreamedVO(thread), shared + VO_TILE_AT, anew);
      Scores S;
      Packed P;
      float dP[AT_ONCE][MMA_M][4];
      u32 dS[AT_ONCE][MMA_M][2];
      score_params.set_head(p, b, head + this_head);
      const auto recompute = [&] {
        if (BIAS ? !(KEYS_STATIONARY ? mask.has<SCORED_ROWS, WARP_ROWS>(p, 1, seen, range.first) : mask.has<WARP_ROWS, SCORED_ROWS>(p, 1, range.first, seen)) : range.sees_all(seen) && (!DISTANCE_IS_SUM || range.is_behind(seen) || range.is_ahead(seen)))
          recompute_probabilities<false>(S, P, p, mask, score_params, range, own, rows_at, seen, g, t);
        else recompute_probabilities<true>(S, P, p, mask, score_params, range, own, rows_at, seen, g, t);
        if (EXCHANGES && KEYS_STATIONARY) store_half(P, exchange_at(shared, 0, thread, side));
      };
      if (active) {
        set_zero(S);
        product<QK_IN_REGS, D, PARTIAL_BLOCKS>(S, stationary_qk, shared + stationary_at<LayoutQK>(thread), qk_at);
        if (SPLIT_K) store_partial_scores(S, partials_at(shared, true, buffer, thread), side);
        else recompute();
      }
      CopyStreamedVO(thread).store(staged, shared + VO_TILE_AT, vo_scale);
      __syncthreads();
      if (++tile == streamed.end) tile = streamed.first, this_head++;
      skip();
      if (BIAS) steps = step + 1 + (this_head < streamed.heads);
      const bool last = step + 1 == steps;
      float row_value;
      if (!last) {
        load(p, staged, streamed_qk, qk_strides, streamed, tile, this_head, p.head_dim, CopyStreamedQK(thread), shared + QK_TILES_AT + (buffer ^ 1) * QK_TILE_BYTES, anew);
        row_value = load_row_value(p, streamed, tile, this_head, position_slope(p, b, head + this_head), thread, anew);
      }
      if (active) {
        if (SPLIT_K) add_partial_scores(S, partials_at(shared, true, buffer, thread), side), recompute();
        if (KEYS_STATIONARY && !SPLIT_K) accumulate<MMA_N>(grad_vo, P, vo_transposed);
        if (KEYS_STATIONARY && SPLIT_N) accumulate_exchanged(grad_vo, P, exchange_at(shared, 0, thread, side ^ 1), vo_transposed, half);
#pragma unroll
        for (int n = 0; n < MMA_N; n += AT_ONCE) {
          start_dp(dP, own, rows_at + n * 32);
          product<VO_IN_REGS, DV, AT_ONCE>(dP, stationary_vo, shared + STATIONARY_VO_AT + stationary_at<LayoutVO>(thread), vo_at, n);
          if (SPLIT_K) store_partial_scores(dP, partials_at(shared, false, buffer, thread), side);
          else compute_ds(dS, S + n, dP, own, rows_at + n * 32, p.dropout_scale, ds_exponent);
          if (SPLIT_N) store_half(dS, exchange_at(shared, KEYS_STATIONARY, thread, side));
          if (!SPLIT_K) accumulate<AT_ONCE>(grad_qk, dS, qk_transposed, n);
        }
      }
      if (SPLIT_K) {
        __syncthreads();
        if (active) {
          if (KEYS_STATIONARY) accumulate_exchanged(grad_vo, P, exchange_at(shared, 0, thread, side ^ 1), vo_transposed, half);
          add_partial_scores(dP, partials_at(shared, false, buffer, thread), side);
          compute_ds(dS, S, dP, own, rows_at, p.dropout_scale, ds_exponent);
          store_half(dS, exchange_at(shared, KEYS_STATIONARY, thread, side));
        }
      }
      if (EXCHANGES) {
        __syncthreads();
        if (active) accumulate_exchanged(grad_qk, dS, exchange_at(shared, KEYS_STATIONARY, thread, side ^ 1), qk_transposed, half);
      }
      if (!last) {
        CopyStreamedQK(thread).store(staged, shared + QK_TILES_AT + (buffer ^ 1) * QK_TILE_BYTES, qk_scale);
        if (KEYS_STATIONARY && thread < 2 * STREAMED_ROWS) shared_store(shared + ROW_VALUES_AT + (buffer ^ 1) * STREAMED_ROWS * 8 + thread * 4, __float_as_int(row_value));
      }
      __syncthreads();
    }
  }

  // A gradient times `scale` and 2^exponent to its rows, through shared memory. In two steps, so that the exponent may be beyond a float's.
  template <int C> DEVICE void write(float (&c)[C][MMA_M][4], int exponent, float scale, u16 *out, int row_stride, int rows, int head_dim, bool of_dS) const {
    float factor[MMA_M][2];
    UNROLLED(m, MMA_M)
      UNROLLED(r, 2) {
        const int all = exponent - (of_dS ? ds_exponent[m][r] : 0), half = all / 2;
        UNROLLED(n, C)
          UNROLLED(e, 2)
            if (TYPE == 2) c[n][m][2 * r + e] *= power_of_two(half);
        factor[m][r] = scale * power_of_two(all - half);
      }
    const int first_row = group_of(threadIdx.x) * WARP_ROWS;
    write_rows<SPLIT_WARPS>(c, factor, shared + first_row * larger(LayoutQK::ROW_BYTES, LayoutVO::ROW_BYTES), first_row, out, row_stride, rows, head_dim, side_of(threadIdx.x));
  }
};

// Gradients of rows for which there are no blocks become NaN, by blocks that have no sequence.
DEVICE void mark_missing(const Params &p, u16 *x, const Strides &s, int head_dim, const StationaryTile &own) {
  const int splits = KEYS_STATIONARY ? p.splits : 1;
  for_missing_rows(p, KEYS_STATIONARY ? p.cu_seqlens_k : p.cu_seqlens_q, KEYS_STATIONARY ? p.total_k : p.total_q, p.tiles * STATIONARY_ROWS, own.tile * splits + own.split,
                   own.tiles * splits, [&](int, int first, int rows) { write_nan(x + (i64)first * s.row + (i64)own.head * s.head, s.row, rows, head_dim); });
}

// Tokens outside of all sequences (b = batch), and this sequence's slots that hold no key, have no gradient: rows [first, end) and [behind, last)
// get 0. The blocks of a head share them out.
DEVICE void clear_unused(const Params &p, u16 *x, const Strides &s, int head_dim, const StationaryTile &own) {
  const int b = own.b, *starts = KEYS_STATIONARY ? p.cu_seqlens_k : p.cu_seqlens_q, total = KEYS_STATIONARY ? p.total_k : p.total_q;
  int first = 0, end = own.seq.first_k, behind = end + own.seq.seqlen_k, last = p.seqlen_k;
  if (b == p.batch) {
    end = clamp(global_load(starts), 0, total);
    behind = clamp(global_load(starts + b), end, total);
    last = total;
  } else if (!KEYS_STATIONARY) {
    return;
  } else if (starts) {
    first = clamp(global_load(starts + b), 0, total);
    last = clamp(global_load(starts + b + 1), first, total);
  }
  const int before = end - first, rows = before + last - behind;
  const int splits = KEYS_STATIONARY ? p.splits : 1;
  for (int i = own.tile * splits + own.split; i < rows; i += own.tiles * splits) {
    u16 *row = x + b * (starts ? 0 : s.batch) + (i64)(i < before ? first + i : behind + i - before) * s.row + (i64)own.head * s.head;
    for (int c = threadIdx.x; c < head_dim; c += THREADS) global_store2(row + c, 0);
  }
}
