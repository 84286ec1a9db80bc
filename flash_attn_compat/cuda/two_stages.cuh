// The backward's main loop where shared memory holds two stages of streamed tiles (TWO_STAGES): a turn loads the tiles
// of the next turn, so warps wait for each other only once a turn, and once more where they exchange results.
//
// SPLIT_R: two warps share their stationary rows and take a role each. Warp 0 holds the stationary QK operand and
// computes P, warp 1 holds the VO operand and computes dP. In dkdv warp 0 then adds up dv, and warp 1 gets P and adds up
// dk. In dq each gets the other's scores and adds up every other 16 channels of dq.
#pragma once
#include "backward.cuh"

constexpr u32 VO_TILE_BYTES = STREAMED_ROWS * LayoutVO::ROW_BYTES;
static_assert(!SPLIT_R || D == DV, "both roles have the same code");

// Scores of SPLIT_R for the partner.
DEVICE u32 scores_at(u32 shared, int thread, int side, int buffer) {
  constexpr int SIDES = KEYS_STATIONARY ? 1 : 2;
  return shared + HALVES_AT +
         ((buffer * GROUPS + group_of(thread)) * SIDES + (KEYS_STATIONARY ? 0 : side)) * MMA_N * MMA_M * 512 +
         (thread & 31) * 16;
}

#ifndef LOAD_AT
#define LOAD_AT 2
#endif
#ifndef ACTIVE
#define ACTIVE true
#endif
struct TwoStages {
  // Stationary rows of both operands lie in shared memory before a warp takes those of its role.
  static DEVICE void keep(u32 (&operand)[D / 16][MMA_M][4], u32 shared, const uint4 *qk, const uint4 *vo, int qk_exponent,
                          int vo_exponent) {
    TileCopy<THREADS, STATIONARY_ROWS, D> copy(threadIdx.x);
    copy.store_converted(qk, shared, power_of_two(qk_exponent));
    copy.store_converted(vo, shared + STATIONARY_ROWS * LayoutQK::ROW_BYTES, power_of_two(vo_exponent));
    __syncthreads();
    load_operand<D>(operand, shared + side_of(threadIdx.x) * STATIONARY_ROWS * LayoutQK::ROW_BYTES +
                                 Block::stationary_at<LayoutQK>(threadIdx.x));
  }

  template <class G> static DEVICE void main_loop(Block &block, const Params &p, const StationaryTile &stationary_tile,
                                                  const StreamedTiles &streamed, const u32 (&operand)[D / 16][MMA_M][4],
                                                  G &grad) {
    const u32 shared = block.shared;
    const int b = stationary_tile.b, head = stationary_tile.first_head(p);
    const Strides &qk_strides = Roles::streamed_qk_strides(p), &vo_strides = Roles::streamed_vo_strides(p);
    const u16 *const streamed_qk = Roles::streamed_qk(p), *const streamed_vo = Roles::streamed_vo(p);
    int tile = streamed.first, this_head = 0;
    const auto skip = [&] {   // tiles that a dense mask hides
      for (; BIAS && this_head < streamed.heads; tile = streamed.first, this_head++) {
        const DenseMask mask(p, b, head + this_head);
        if (!KEYS_STATIONARY)
          tile = mask.next<STATIONARY_ROWS, STREAMED_ROWS>(p, stationary_tile.first, tile, streamed.end);
        while (KEYS_STATIONARY && tile < streamed.end &&
               !mask.has<STREAMED_ROWS, STATIONARY_ROWS>(p, 0, tile * STREAMED_ROWS, stationary_tile.first))
          tile = tile / (BAND / STREAMED_ROWS) * (BAND / STREAMED_ROWS) + BAND / STREAMED_ROWS;
        if (tile < streamed.end) return;
      }
    };
    skip();
    int steps = BIAS ? this_head < streamed.heads : max(streamed.end - streamed.first, 0) * streamed.heads;
    // This thread's first chunk of the next QK and VO tile, and the next element of LSE or delta.
    const u32 me = threadIdx.x;
    const u16 *qk_from = streamed.of(streamed_qk, qk_strides, this_head, 0), *vo_from = streamed.of(streamed_vo, vo_strides, this_head, 0);
    {
      const CopyStreamedQK copy(me);
      qk_from += (i64)(tile * STREAMED_ROWS + copy.row) * qk_strides.row + copy.chunk * 8;
      vo_from += (i64)(tile * STREAMED_ROWS + copy.row) * vo_strides.row + copy.chunk * 8;
    }
    const bool is_lse = me < STREAMED_ROWS;
    const float *value_from = (is_lse ? p.lse : p.delta) + streamed.row_values(p, this_head, 0) + tile * STREAMED_ROWS + me % STREAMED_ROWS;
    uint4 staged[CopyStreamedQK::N];   // the QK and the VO tile take turns
    const auto load = [&](const u16 *from, int stride, int left, int head_dim, u32 thread) {
      const CopyStreamedQK copy(thread);
      UNROLLED(i, CopyStreamedQK::N)
        staged[i] = load_chunk_if(copy.row_step(i) < left - copy.row, from + (i64)copy.row_step(i) * stride + copy.chunk_step(i) * 8,
                      head_dim - (copy.chunk + copy.chunk_step(i)) * 8);
    };
    const auto load_value = [&](int left, u32 thread) {
      return global_load_if(KEYS_STATIONARY && thread < 2 * STREAMED_ROWS && (int)(thread % STREAMED_ROWS) < left, value_from, 0.f);
    };
    const auto advance = [&] {   // to the next tile
      const int before = tile, before_head = this_head;
      if (++tile == streamed.end) tile = streamed.first, this_head++;
      skip();
      const int rows = (tile - before) * STREAMED_ROWS, heads = this_head - before_head;
      qk_from += (i64)rows * qk_strides.row + (i64)heads * qk_strides.head;
      vo_from += (i64)rows * vo_strides.row + (i64)heads * vo_strides.head;
      value_from += rows + heads * p.lse_head;
    };
    int left = steps ? streamed.rows - tile * STREAMED_ROWS : 0;
    if (steps) {
      load(qk_from, qk_strides.row, left, p.head_dim, me);
      const float row_value = load_value(left, me);
      CopyStreamedQK(me).store(staged, shared + QK_TILES_AT, block.qk_scale);
      block.store_row_value(p, streamed, row_value, tile, this_head, position_slope(p, b, head + this_head), me, 0);
      load(vo_from, vo_strides.row, left, p.head_dim_v, me);
      CopyStreamedVO(me).store(staged, shared + VO_TILE_AT, block.vo_scale);
    }
    __syncthreads();
    int slot = 0;   // of the QK tile
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      const int zero = step & p.zero;
      const u32 thread = threadIdx.x + zero, g = thread >> 2 & 7, t = thread & 3;
      const int buffer = step & 1, side = side_of(thread), first = tile * STREAMED_ROWS, this_row_head = this_head;
      const bool lags = KEYS_STATIONARY ? side : thread >= THREADS / 2;
      const int next_slot = slot == 2 ? 0 : slot + 1;
      const u32 next_qk = shared + QK_TILES_AT + next_slot * QK_TILE_BYTES,
                next_vo = shared + VO_TILE_AT + (buffer ^ 1) * VO_TILE_BYTES;
      const u32 qk_tile = shared + QK_TILES_AT + slot * QK_TILE_BYTES,
                vo_tile = shared + VO_TILE_AT + buffer * VO_TILE_BYTES;
      const u32 rows_at = shared + ROW_VALUES_AT + slot * STREAMED_ROWS * 8 + t * 8;
      const WarpRange range =
          warp_range(p, stationary_tile.first + group_of(thread) * WARP_ROWS, streamed.shift, streamed.rows, zero);
      const bool active = LOCAL ? range.sees_some(first) : ACTIVE;
      advance();
      if (BIAS) steps = step + 1 + (this_head < streamed.heads);
      left = step + 1 == steps ? 0 : streamed.rows - tile * STREAMED_ROWS;
      Scores X;
      Packed packed;
      const u32 first_at = (side ? vo_tile : qk_tile) + LayoutQK::b_operand_at(thread),
                second_at = (KEYS_STATIONARY && side == 0 ? vo_tile : qk_tile) +
                            (MMA_K16 ? LayoutQK::a_operand_at(thread) : LayoutQK::b_operand_at(thread));
      float row_value = 0.f;
      const auto load_next = [&](int k) {
        if (k == 0) {
          load(qk_from, qk_strides.row, left, p.head_dim, thread);
          row_value = load_value(left, thread);
        }
        if (k == D / 32) {
          CopyStreamedQK(thread).store(staged, next_qk, block.qk_scale);
          load(vo_from, vo_strides.row, left, p.head_dim_v, thread);
        }
      };
      if (active) {
        if (side) start_dp(X, block.stationary, rows_at);
        else set_zero(X);
        product<true, D, MMA_N>(X, operand, 0, first_at, 0, load_next);
      } else {
        load_next(0), load_next(D / 32);
      }
      const u32 scores = scores_at(shared, thread, side, buffer);
      if (active) {
        const DenseMask mask(p, b, head + this_row_head);
        block.score_params.set_head(p, b, head + this_row_head);
        if (side == 0) {
          if (BIAS ? !(KEYS_STATIONARY ? mask.has<SCORED_ROWS, WARP_ROWS>(p, 1, first, range.first)
                                       : mask.has<WARP_ROWS, SCORED_ROWS>(p, 1, range.first, first))
                   : range.sees_all(first) && (!DISTANCE_IS_SUM || range.is_behind(first) || range.is_ahead(first)))
            recompute_probabilities<false>(X, packed, p, mask, block.score_params, range, block.stationary, rows_at,
                                           first, g, t);
          else
            recompute_probabilities<true>(X, packed, p, mask, block.score_params, range, block.stationary, rows_at,
                                          first, g, t);
        }
        if (!KEYS_STATIONARY || side == 0)
          UNROLLED(i, MMA_N * MMA_M) store_partial(X[i / MMA_M][i % MMA_M], scores + i * 512);
      }
      CopyStreamedVO(thread).store(staged, next_vo, block.vo_scale);
      block.store_row_value(p, streamed, row_value, tile, this_head, position_slope(p, b, head + this_head), thread,
                            next_slot);
      if (lags) __syncthreads();
      if (active) {
        if (!KEYS_STATIONARY) wait_at(1 + group_of(thread), 32 * SPLIT_WARPS);
        if (!KEYS_STATIONARY || side) {
          Scores theirs;
          UNROLLED(i, MMA_N * MMA_M)
            load_partial(theirs[i / MMA_M][i % MMA_M], (KEYS_STATIONARY ? scores : scores_at(shared, thread, side ^ 1, buffer)) + i * 512);
          if (side) compute_ds(packed, theirs, X, block.stationary, rows_at, p.dropout_scale, block.ds_exponent);
          else compute_ds(packed, X, theirs, block.stationary, rows_at, p.dropout_scale, block.ds_exponent);
        }
        accumulate<MMA_N>(grad, packed, KEYS_STATIONARY ? second_at : LayoutQK::along(second_at, side * 2));
      }
      slot = next_slot;
      if (!lags) __syncthreads();
    }
    __syncthreads();
  }
};
