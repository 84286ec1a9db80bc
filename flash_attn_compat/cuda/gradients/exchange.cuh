// How warps with the same stationary rows divide the work of a tile, and exchange results through shared memory. With
// SPLIT_N and SPLIT_K, each warp computes P and dS for half of the streamed rows, and gets the other half from its
// partner. With SPLIT_K, S and dP are also sums of the partial sums of several warps.
#pragma once
#include "gradients/backward_scores.cuh"

// Layout of shared memory in bytes: stationary operands that are not in registers; two tiles of the streamed QK operand
// and one of the VO operand (STAGES: QK_SLOTS and VO_SLOTS); LSE and delta of each QK tile; exchanged halves, or P of
// ROLES; partial sums.
constexpr u32 STATIONARY_VO_AT = QK_IN_REGS ? 0 : STATIONARY_ROWS * LayoutQK::ROW_BYTES,
              QK_TILES_AT = STATIONARY_VO_AT + (VO_IN_REGS ? 0 : STATIONARY_ROWS * LayoutVO::ROW_BYTES);
constexpr int QK_SLOTS = DS_OVER_Q ? 1 : larger(STAGES, 2), VO_SLOTS = !STAGES ? 1 : ROLES ? 2 : STAGES;
constexpr u32 QK_TILE_BYTES = STREAMED_ROWS * LayoutQK::ROW_BYTES, VO_TILE_BYTES = STREAMED_ROWS * LayoutVO::ROW_BYTES,
              VO_TILE_AT = QK_TILES_AT + QK_SLOTS * QK_TILE_BYTES;
// How many numbers of a tile's LSE and delta are loaded; with FEW_KEYS only the LSE.
constexpr int LOADED_ROW_VALUES = (FEW_KEYS ? 1 : 2) * STREAMED_ROWS;
constexpr u32 ROW_VALUES_AT = VO_TILE_AT + VO_SLOTS * VO_TILE_BYTES;

// Where a warp stores its half of a tile's P (`which` 0) or dS (`which` KEYS_STATIONARY) for its partner.
constexpr u32 HALVES_AT = ROW_VALUES_AT + (KEYS_STATIONARY ? STREAMED_ROWS * 8 * QK_SLOTS : 0),
              HALF_BYTES = MMA_N * MMA_M * 256;
DEVICE u32 exchange_at(u32 shared, int which, int thread, int side) {
  return shared + HALVES_AT + ((which * GROUPS + group_of(thread)) * SPLIT_WARPS + side) * HALF_BYTES +
         (thread & 31) * 4;
}
DEVICE void store_half(const u32 (*found)[MMA_M][2], u32 at) {
  UNROLLED(i, MMA_N * MMA_M * 2) shared_store(at + i * 128, found[i / 2 / MMA_M][i / 2 % MMA_M][i % 2]);
}
// c += the partner's half of P or dS times a streamed tile, in which this warp's own half begins at `tile_at`. With
// SPLIT_K this warp's own half is added here, too, because an operand needs 16 rows, and a half has 8.
template <int C> DEVICE void accumulate_exchanged(float (&c)[C][MMA_M][4], const u32 (*mine)[MMA_M][2], u32 partners_at,
                                                  u32 tile_at, int half) {
  u32 all[2 * MMA_N][MMA_M][2];
  UNROLLED(i, MMA_N * MMA_M * 2) {
    const int n = i / 2 / MMA_M, m = i / 2 % MMA_M;
    all[n][m][i % 2] = mine[n][m][i % 2];
    all[MMA_N + n][m][i % 2] = __float_as_int(shared_load_float(partners_at + i * 128));
  }
  if (SPLIT_K) accumulate<2 * MMA_N>(c, all, tile_at);
  else
    accumulate<MMA_N>(c, all + MMA_N, tile_at + (1 - 2 * half) * SCORED_ROWS * Layout<C * 8 * SPLIT_WARPS>::ROW_BYTES);
}
// Where a warp stores its partial sums: those of S in the place of the next QK tile, if that is large enough, those of
// dP behind the exchanged halves.
constexpr u32 PARTIALS_AT = HALVES_AT + 2 * WARPS * HALF_BYTES, PARTIAL_BYTES = WARPS * SPLIT_K * MMA_M * 512;
DEVICE u32 partials_at(u32 shared, bool of_S, int buffer, int thread) {
  constexpr bool FITS = PARTIAL_BYTES <= QK_TILE_BYTES && !CP_ASYNC;
  const u32 of_scores = FITS ? QK_TILES_AT + (buffer ^ 1) * QK_TILE_BYTES : PARTIALS_AT + PARTIAL_BYTES;
  const u32 place = of_S ? of_scores : PARTIALS_AT;
  return shared + place + group_of(thread) * SPLIT_WARPS * SPLIT_K * MMA_M * 512 + (thread & 31) * 16;
}
DEVICE void store_partial_scores(const float (*c)[MMA_M][4], u32 at, int side) {
  UNROLLED(i, SPLIT_K * MMA_M)
    store_partial(c[i / MMA_M + 2 - SPLIT_K][i % MMA_M], at + (side * SPLIT_K * MMA_M + i) * 512);
}
DEVICE void add_partial_scores(float (*c)[MMA_M][4], u32 at, int side) {
  UNROLLED(m, MMA_M) {
    add_partial(c[0][m], at + (((side ^ 1) * SPLIT_K + SPLIT_K - 1) * MMA_M + m) * 512);
    if (SPLIT_K == 1) continue;
    float others[4] = {0.f, 0.f, 0.f, 0.f};
    add_partial(others, at + ((side ^ 2) * SPLIT_K * MMA_M + m) * 512);
    add_partial(others, at + (((side ^ 3) * SPLIT_K + 1) * MMA_M + m) * 512);
    UNROLLED(e, 4) c[0][m][e] += others[e];
  }
}
