// The backward's main loop if one tile has all keys of its sequence (FEW_KEYS, in dkdv). It also computes delta and dq,
// so that the backward needs no other kernel, and S and dP are computed only once.
//
// The warps store dS^T of a tile of queries in shared memory, a row for each key. Then each multiplies it by K for 16
// queries. COLUMN_WARPS warps have the same queries, and take every COLUMN_WARPS-th group of 16 channels each.
// DS_OVER_Q: dS is stored over its tile of Q, and Q has only one tile. So a multiprocessor of sm_75 holds two blocks.
#pragma once
#include "gradients/backward.cuh"

#if FEW_KEYS
typedef Layout<STREAMED_ROWS> LayoutDS;
constexpr u32 DS_AT = DS_OVER_Q ? QK_TILES_AT : HALVES_AT;
constexpr int ROW_WARPS = STREAMED_ROWS / 16,
              COLUMN_WARPS = WARPS / ROW_WARPS <= LayoutQK::SPREAD / 2 ? larger(1, WARPS / ROW_WARPS) : 1;
static_assert(KEYS_STATIONARY && TYPE == 0 && !EXCHANGES && !STAGES && !MMA_K16 && !QK_IN_REGS, "dq needs K");
static_assert(!DS_OVER_Q || (D == DV && STATIONARY_ROWS <= D), "a tile of Q has room for dS");
static_assert(WARPS % ROW_WARPS == 0, "warps share out 16 queries each");
static_assert(CopyStreamedVO::SIDES == 1, "neighbouring threads share a row");

// The loaded operands of a tile, in registers on their way to shared memory. They are loaded early: those of the first
// tile together with the block's own rows, those of later tiles while the block computes.
struct StreamedLoads {
  uint4 q[CopyStreamedQK::N], dout[CopyStreamedVO::N], out[CopyStreamedVO::N];
  float row_lse;
  DEVICE void start(const Block &block, const Params &p, const StreamedTiles &queries, int tile, int head, int thread,
                    int zero) {
    const CopyStreamedVO copy(thread);
    block.load(p, q, p.q, p.q_s, queries, tile, head, p.head_dim, CopyStreamedQK(thread), 0, zero);
    block.load(p, dout, p.dout, p.dout_s, queries, tile, head, p.head_dim_v, copy, 0, zero);
    block.load(p, out, p.out, p.out_s, queries, tile, head, p.head_dim_v, copy, 0, zero);
    row_lse = block.load_row_value(p, queries, tile, head, thread, zero);
  }
};

// Computes delta of a tile of queries, from `first` on, as delta.cu does, and stores it in shared and global memory.
DEVICE void store_delta(const Block &block, const Params &p, const StreamedTiles &queries, int first, int head,
                        const StreamedLoads &loads, int buffer, int thread) {
  typedef CopyStreamedVO Copy;
  const Copy copy(thread);
  const u32 row_values = block.shared + ROW_VALUES_AT + buffer * STREAMED_ROWS * 8 + copy.row * 4;
  UNROLLED(i, Copy::N / Copy::PASSES) {
    float sum = 0.f;
    UNROLLED(j, Copy::PASSES)
      sum += product_of_chunks(loads.out[i * Copy::PASSES + j], loads.dout[i * Copy::PASSES + j]);
    sum = sum_of<Copy::LANES>(sum);
    const int step = Copy::row_step(i * Copy::PASSES), row = first + copy.row + step;
    if (copy.chunk) continue;
    if (row < queries.rows) {
      const i64 at = queries.row_values(p, head, 0) + row;
      if (p.dlse) sum -= global_load(p.dlse + at);
      if (shared_load_float(row_values + step * 4) == POS_INF) sum = 0.f;   // the row sees no key
      global_store(p.delta + at, sum);
    }
    shared_store_float(row_values + (STREAMED_ROWS + step) * 4, -sum);
  }
}

// Stores blocks of dS in shared memory, from block `first` on. For rows beyond the last key it stores 0, since their P
// may have overflowed.
template <int N> DEVICE void store_ds(const u32 (&dS)[N][MMA_M][2], u32 shared, int thread, int first, int keys) {
  const int key = group_of(thread) * WARP_ROWS + (thread >> 2 & 7);
  const u32 at = shared + DS_AT + LayoutDS::at(key, 0) + (thread & 3) * 4;
  UNROLLED(n, N)
    UNROLLED(m, MMA_M)
      UNROLLED(r, 2)
        shared_store(LayoutDS::along(at, first + n) + (m * 16 + r * 8) * LayoutDS::ROW_BYTES,
                     key + m * 16 + r * 8 < keys ? dS[n][m][r] : 0);
}

// Computes dq of a tile of `rows` queries from dS and K, and writes it through `place` in shared memory. It writes NaN
// if the sequence has more `keys` than the block, because the caller's max_seqlen_k was too small.
DEVICE void write_dq(const Params &p, u32 shared, u16 *out, int rows, int keys, u32 place, int thread) {
  const int warp = thread >> 5, first_row = warp % ROW_WARPS * 16, side = warp / ROW_WARPS;
  if (side >= COLUMN_WARPS) return;
  const u32 ds_at = LayoutDS::along(shared + DS_AT + LayoutDS::b_operand_at(thread), first_row / 8),
            keys_at = LayoutQK::along(shared + LayoutQK::b_operand_at(thread), side * 2);
  float dq[D / 8 / COLUMN_WARPS][1][4];
  set_zero(dq);
  UNROLLED(k, STATIONARY_ROWS / 16) {
    u32 ds[1][4];
    ldmatrix_transposed(ds[0], ds_at + k * 16 * LayoutDS::ROW_BYTES);
    accumulate_16<COLUMN_WARPS>(dq, ds, keys_at, k * 16);
  }
  const float scale = keys <= STATIONARY_ROWS ? p.softmax_scale : __int_as_float(0x7fffffff);
  const float factor[1][2] = {{scale, scale}};
  write_rows<COLUMN_WARPS>(dq, factor, shared + place + first_row * LayoutQK::ROW_BYTES, first_row, out, p.dq_s.row,
                           rows, p.head_dim, side);
}

// Does what Block::main_loop does. `loads`: the loads of the first tile, already started.
DEVICE void few_keys_loop(Block &block, const Params &p, const StationaryTile &keys, const StreamedTiles &queries,
                          StreamedLoads &loads, GradientQK &dk, GradientVO &dv) {
  const u32 shared = block.shared;
  const int b = keys.b, head = keys.first_head(p);
  Walk walk(p, keys, queries);
  const int &tile = walk.tile, &this_head = walk.head;
  const int steps = max(queries.end - queries.first, 0) * queries.heads;
  const auto store_q = [&](int thread, int buffer) {
    CopyStreamedQK(thread).store(loads.q, shared + QK_TILES_AT + buffer * QK_TILE_BYTES, block.qk_scale);
    block.store_row_value(p, queries, loads.row_lse, tile, this_head, position_slope(p, b, head + this_head), thread,
                          buffer);
  };
  if (steps) store_q(threadIdx.x, 0);
  __syncthreads();
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    // A 0 that the compiler does not know, so that it keeps less in registers, as in Block::main_loop.
    const int zero = step & p.zero, thread = threadIdx.x + zero, g = thread >> 2 & 7, t = thread & 3;
    const int anew = D > 64 && D < 128 ? zero : 0;
    const int buffer = DS_OVER_Q ? 0 : step & 1, next_buffer = DS_OVER_Q ? 0 : buffer ^ 1;
    const int first = tile * STREAMED_ROWS, scored_head = this_head;
    const u32 q_at = shared + QK_TILES_AT + buffer * QK_TILE_BYTES + LayoutQK::b_operand_at(thread),
              dout_at = shared + VO_TILE_AT + LayoutVO::b_operand_at(thread),
              rows_at = shared + ROW_VALUES_AT + buffer * STREAMED_ROWS * 8 + t * 8;
    const WarpRange range = warp_range(p, keys.first + group_of(thread) * WARP_ROWS, queries.shift, queries.rows, zero);
    const bool active = !LOCAL ? zero == 0 : range.sees_some(first);
    Scores S;
    Packed P;
    block.score_params.set_head(p, b, head + this_head);
    if (active) {
      set_zero(S);
      product<QK_IN_REGS, D, MMA_N>(S, block.stationary_qk, shared + Block::stationary_at<LayoutQK>(thread), q_at);
      block.recompute(S, P, p, DenseMask(p, b, head + this_head), range, false, rows_at, first, g, t);
    }
    CopyStreamedVO(thread).store(loads.dout, shared + VO_TILE_AT, block.vo_scale);
    store_delta(block, p, queries, first, this_head, loads, buffer, thread);
    __syncthreads();
    walk.advance(p, keys, queries);
    const bool last = step + 1 == steps;
    if (!last) loads.start(block, p, queries, tile, this_head, thread, anew);
    u32 whole_dS[DS_OVER_Q ? MMA_N : 1][MMA_M][2] = {};
    if (active) {
      accumulate<MMA_N>(dv, P, dout_at);
#pragma unroll
      for (int n = 0; n < MMA_N; n += AT_ONCE) {
        float dP[AT_ONCE][MMA_M][4];
        u32 dS[AT_ONCE][MMA_M][2];
        start_dp(dP, block.stationary, rows_at + n * 32);
        product<VO_IN_REGS, DV, AT_ONCE>(
            dP, block.stationary_vo, shared + STATIONARY_VO_AT + Block::stationary_at<LayoutVO>(thread), dout_at, n);
        compute_ds(dS, S + n, dP, block.stationary, rows_at + n * 32, p.dropout_scale, block.ds_exponent,
                   block.scores_of(p, range, first, 0, g, t), n);
        if (!DS_OVER_Q) store_ds(dS, shared, thread, n, keys.rows);
        UNROLLED(i, DS_OVER_Q ? AT_ONCE * MMA_M * 2 : 0)
          whole_dS[n + i / 2 / MMA_M][i / 2 % MMA_M][i % 2] = dS[i / 2 / MMA_M][i / 2 % MMA_M][i % 2];
        accumulate<AT_ONCE>(dk, dS, q_at, n);
      }
    } else if (!DS_OVER_Q) {
      const u32 none[MMA_N][MMA_M][2] = {};
      store_ds(none, shared, thread, 0, keys.rows);
    }
    if (DS_OVER_Q) {
      __syncthreads();   // Q and dout are no longer read
      store_ds(whole_dS, shared, thread, 0, keys.rows);
    } else if (!last) {
      store_q(thread, next_buffer);
    }
    __syncthreads();
    u16 *const out = row_at(p.dq, p.dq_s, b, queries.row + first, queries.head + scored_head);
    const u32 place = DS_OVER_Q ? VO_TILE_AT : QK_TILES_AT + buffer * QK_TILE_BYTES;
    write_dq(p, shared, out, queries.rows - first, keys.rows, place, thread);
    if (DS_OVER_Q && !last) {
      __syncthreads();
      store_q(thread, 0);
      __syncthreads();
    }
  }
}
#endif
