// The backward's main loop with several streamed tiles in shared memory (STAGES). Each turn of the loop loads the tiles
// of the next turn, so that warps wait for each other only once a turn.
//
// With two stages all warps are in the same turn. With three stages half of the warps are half a turn behind. So of two
// warps of a scheduler, one multiplies while the other exponentiates. The warps behind pass a turn's barrier in the
// middle of their own turn, and so still read its tiles while the others read those of the next turn.
//
// ROLES, in dkdv: two warps have the same keys and different tasks. Warp 0 holds K, computes P and sums up dv. Warp 1
// holds V, computes dP, gets P from warp 0 through shared memory, and sums up dk. With three stages warp 1 is behind.
#pragma once
#include "gradients/backward.cuh"

#if STAGES
constexpr bool LAGS = STAGES == 3;
static_assert(STAGES == 2 || STAGES == 3, "warps are at most half a turn apart");
static_assert(!ROLES || (KEYS_STATIONARY && D == DV && QK_IN_REGS), "both roles have the same code");
static_assert(!SPLIT_N && !SPLIT_K && !CP_ASYNC, "left to Block::main_loop");

// ROLES: returns where warp 0 stores P of a turn.
DEVICE u32 exchanged_at(u32 shared, int thread, int step) {
  const int buffer = LAGS ? step & 1 : 0;
  return shared + HALVES_AT + (buffer * GROUPS + group_of(thread)) * MMA_N * MMA_M * 512 + (thread & 31) * 16;
}

// The address of the first chunk that this thread loads from the next tile of a streamed tensor.
template <class Copy> struct StreamedRows {
  const u16 *from;
  const Strides &strides;
  DEVICE StreamedRows(const u16 *x, const Strides &s, const StreamedTiles &streamed, int tile, int head) : strides(s) {
    const Copy copy((u32)threadIdx.x);
    from = streamed.of(x, s, head, 0) + (i64)(tile * STREAMED_ROWS + copy.row) * s.row + copy.chunk * 8;
  }
  DEVICE void advance(int rows, int heads) { from += (i64)rows * strides.row + (i64)heads * strides.head; }
  // Loads this thread's chunks without a branch, so that loads can be issued between products. left: how many rows of
  // the tile exist
  DEVICE void load(uint4 *staged, int left, int head_dim, u32 thread) const {
    const Copy copy(thread);
    UNROLLED(i, Copy::N)
      staged[i] = load_chunk_if(copy.row_step(i) < left - copy.row,
                                from + (i64)copy.row_step(i) * strides.row + copy.chunk_step(i) * 8,
                                head_dim - (copy.chunk + copy.chunk_step(i)) * 8);
  }
};

// ROLES: loads K or V, as the warp's task needs, into registers. Both pass through shared memory.
DEVICE void keep_role(Block &block, const uint4 *qk, const uint4 *vo, int qk_exponent, int vo_exponent) {
  const CopyStationaryQK copy((u32)threadIdx.x);
  copy.store_converted(qk, block.shared, power_of_two(qk_exponent));
  copy.store_converted(vo, block.shared + STATIONARY_ROWS * LayoutQK::ROW_BYTES, power_of_two(vo_exponent));
  __syncthreads();
  load_operand<D>(block.stationary_qk, block.shared + side_of(threadIdx.x) * STATIONARY_ROWS * LayoutQK::ROW_BYTES +
                                           Block::stationary_at<LayoutQK>(threadIdx.x));
}

// Does what Block::main_loop does. ROLES: grad_qk is dv in warps that compute P, and dk in the others.
DEVICE void staged_loop(Block &block, const Params &p, const StationaryTile &stationary_tile,
                        const StreamedTiles &streamed, GradientQK &grad_qk, GradientVO &grad_vo) {
  const u32 shared = block.shared;
  const int b = stationary_tile.b, head = stationary_tile.first_head(p);
  Walk walk(p, stationary_tile, streamed);
  const int &tile = walk.tile, &this_head = walk.head;
  int steps = SKIPS ? walk.goes_on(streamed) : max(streamed.end - streamed.first, 0) * streamed.heads;
  StreamedRows<CopyStreamedQK> qk(Operands::streamed_qk(p), Operands::streamed_qk_strides(p), streamed, tile,
                                  this_head);
  StreamedRows<CopyStreamedVO> vo(Operands::streamed_vo(p), Operands::streamed_vo_strides(p), streamed, tile,
                                  this_head);
  const float *value_from = (threadIdx.x < STREAMED_ROWS ? p.lse : p.delta) + streamed.row_values(p, this_head, 0) +
                            tile * STREAMED_ROWS + threadIdx.x % STREAMED_ROWS;
  const auto load_value = [&](int left, u32 thread) {
    return global_load_if(KEYS_STATIONARY && thread < 2 * STREAMED_ROWS && (int)(thread % STREAMED_ROWS) < left,
                          value_from, 0.f);
  };
  uint4 staged[larger(CopyStreamedQK::N, CopyStreamedVO::N)];   // the QK and the VO tile take turns
  if (steps) {
    const u32 thread = threadIdx.x;
    const int left = streamed.rows - tile * STREAMED_ROWS;
    qk.load(staged, left, p.head_dim, thread);
    const float value = load_value(left, thread);
    CopyStreamedQK(thread).store(staged, shared + QK_TILES_AT, block.qk_scale);
    block.store_row_value(p, streamed, value, tile, this_head, position_slope(p, b, head + this_head), thread, 0);
    vo.load(staged, left, p.head_dim_v, thread);
    CopyStreamedVO(thread).store(staged, shared + VO_TILE_AT, block.vo_scale);
  }
  __syncthreads();
  int slot = 0, vo_slot = 0;
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    // A 0 that the compiler does not know, so that it keeps less in registers, as in Block::main_loop.
    const int zero = step & p.zero;
    const u32 thread = threadIdx.x + zero, g = thread >> 2 & 7, t = thread & 3;
    const int side = side_of(thread), first = tile * STREAMED_ROWS, head_now = head + this_head;
    const bool lags = LAGS && thread >= THREADS / 2;
    const int next_slot = slot + 1 == STAGES ? 0 : slot + 1, next_vo_slot = vo_slot + 1 == VO_SLOTS ? 0 : vo_slot + 1;
    const u32 qk_tile = shared + QK_TILES_AT + slot * QK_TILE_BYTES,
              vo_tile = shared + VO_TILE_AT + vo_slot * VO_TILE_BYTES;
    const u32 rows_at = shared + ROW_VALUES_AT + slot * STREAMED_ROWS * 8 + t * 8;
    const WarpRange range =
        warp_range(p, stationary_tile.first + group_of(thread) * WARP_ROWS, streamed.shift, streamed.rows, zero);
#if FLEX
    const Sight sight = see(p, range, b, head_now, walk.is_full, first, STREAMED_ROWS);
    const bool is_full = sight.all, active = !FLEX_SKIPS || sight.some;
#else
    const bool is_full = false, active = !LOCAL || range.sees_some(first);
#endif
    const int before = tile, head_before = this_head;
    walk.advance(p, stationary_tile, streamed);
    const int rows = (tile - before) * STREAMED_ROWS, heads = this_head - head_before;
    qk.advance(rows, heads), vo.advance(rows, heads), value_from += rows + (i64)heads * p.lse_head;
    if (SKIPS) steps = step + 1 + walk.goes_on(streamed);
    const int left = step + 1 == steps ? 0 : streamed.rows - tile * STREAMED_ROWS;
    float value = 0.f;
    const auto load_next = [&](int k) {   // after 16 k channels of the first product
      if (k == 0) qk.load(staged, left, p.head_dim, thread), value = load_value(left, thread);
      if (k != D / 32) return;
      CopyStreamedQK(thread).store(staged, shared + QK_TILES_AT + next_slot * QK_TILE_BYTES, block.qk_scale);
      vo.load(staged, left, p.head_dim_v, thread);
    };
    Scores X;   // S, then P; in ROLES's warp 1 dP
    Packed packed;
    if (active) {
      if (ROLES && side) start_dp(X, block.stationary, rows_at);
      else set_zero(X);
      const u32 tile_at = (ROLES && side ? vo_tile : qk_tile) + LayoutQK::b_operand_at(thread);
      product<QK_IN_REGS, D, MMA_N>(X, block.stationary_qk, shared + Block::stationary_at<LayoutQK>(thread), tile_at, 0,
                                    load_next);
    } else {
      load_next(0), load_next(D / 32);
    }
    const u32 exchanged = exchanged_at(shared, thread, step), barrier = 1 + group_of(thread);
    if (active) {
      const DenseMask mask(p, b, head_now);
      block.score_params.set_head(p, b, head_now);
      if (!ROLES || side == 0) block.recompute(X, packed, p, mask, range, is_full, rows_at, first, g, t);
      if (ROLES && side == 0) {
        UNROLLED(i, MMA_N * MMA_M) store_partial(X[i / MMA_M][i % MMA_M], exchanged + i * 512);
      }
    }
    // Both warps wait in each turn, also in one without scores: after turns without it, racecheck reported races.
    if (ROLES && !LAGS && !side) wait_at(barrier, 64);
    CopyStreamedVO(thread).store(staged, shared + VO_TILE_AT + next_vo_slot * VO_TILE_BYTES, block.vo_scale);
    const int next_head = min(this_head, streamed.heads - 1);   // behind the last tile the walk stands at no head
    block.store_row_value(p, streamed, value, tile, next_head, position_slope(p, b, head + next_head), thread,
                          next_slot);
    if (lags) __syncthreads();
    if (ROLES && !LAGS && side) wait_at(barrier, 64);
    if (active && ROLES) {
      if (side) {
        Scores P;
        UNROLLED(i, MMA_N * MMA_M) load_partial(P[i / MMA_M][i % MMA_M], exchanged + i * 512);
        compute_ds(packed, P, X, block.stationary, rows_at, p.dropout_scale, block.ds_exponent,
                   block.scores_of(p, range, first, side, g, t));
      }
      accumulate<MMA_N>(grad_qk, packed, (side ? qk_tile : vo_tile) + LayoutQK::b_operand_at(thread));
    }
    if (active && !ROLES) {
      if (KEYS_STATIONARY) accumulate<MMA_N>(grad_vo, packed, vo_tile + LayoutVO::b_operand_at(thread));
#pragma unroll
      for (int n = 0; n < MMA_N; n += AT_ONCE) {
        float dP[AT_ONCE][MMA_M][4];
        u32 dS[AT_ONCE][MMA_M][2];
        start_dp(dP, block.stationary, rows_at + n * 32);
        product<VO_IN_REGS, DV, AT_ONCE>(dP, block.stationary_vo,
                                         shared + STATIONARY_VO_AT + Block::stationary_at<LayoutVO>(thread),
                                         vo_tile + LayoutVO::b_operand_at(thread), n);
        compute_ds(dS, X + n, dP, block.stationary, rows_at + n * 32, p.dropout_scale, block.ds_exponent,
                   block.scores_of(p, range, first, side, g, t), n);
        accumulate<AT_ONCE>(grad_qk, dS, qk_tile + LayoutQK::b_operand_at(thread), n);
      }
    }
    slot = next_slot, vo_slot = next_vo_slot;
    if (!lags) __syncthreads();
  }
  if (LAGS) __syncthreads();
}
#endif
