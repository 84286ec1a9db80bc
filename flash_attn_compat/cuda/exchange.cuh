// How warps with the same own rows share the work of a tile (SPLIT_N, SPLIT_K): halves of P and dS, and shares of the sums in S and dP, through shared memory.
#pragma once
#include "backward_scores.cuh"

// Bytes of shared memory: own operands that are not in registers; two tiles of S's operand and one of dP's; LSE and delta of their queries, twice.
constexpr u32 STATIONARY_VO_AT = QK_IN_REGS ? 0 : STATIONARY_ROWS * LayoutQK::ROW_BYTES, QK_TILES_AT = STATIONARY_VO_AT + (VO_IN_REGS ? 0 : STATIONARY_ROWS * LayoutVO::ROW_BYTES);
constexpr u32 QK_TILE_BYTES = STREAMED_ROWS * LayoutQK::ROW_BYTES, VO_TILE_AT = QK_TILES_AT + 2 * QK_TILE_BYTES;
constexpr u32 ROW_VALUES_AT = VO_TILE_AT + STREAMED_ROWS * LayoutVO::ROW_BYTES;

// EXCHANGES: where a warp leaves its half of a tile's P or dS (`which`) for its partner.
constexpr u32 HALVES_AT = ROW_VALUES_AT + (KEYS_STATIONARY ? STREAMED_ROWS * 16 : 0), HALF_BYTES = MMA_N * MMA_M * 256;
DEVICE u32 exchange_at(u32 shared, int which, int thread, int side) {
  return shared + HALVES_AT + ((which * GROUPS + group_of(thread)) * SPLIT_WARPS + side) * HALF_BYTES + (thread & 31) * 4;
}
DEVICE void store_half(const u32 (*found)[MMA_M][2], u32 at) {
  UNROLLED(i, MMA_N * MMA_M * 2) shared_store(at + i * 128, found[i / 2 / MMA_M][i / 2 % MMA_M][i % 2]);
}
// c += its partner's half times a tile, whose rows that are its own begin at `turned`; with SPLIT_K its own half too, since 8 rows are no operand.
template <int C> DEVICE void accumulate_exchanged(float (&c)[C][MMA_M][4], const u32 (*own)[MMA_M][2], u32 partners_at, u32 transposed_thread, int half) {
  u32 all[2 * MMA_N][MMA_M][2];
  UNROLLED(i, MMA_N * MMA_M * 2) {
    const int n = i / 2 / MMA_M, m = i / 2 % MMA_M;
    all[n][m][i % 2] = own[n][m][i % 2], all[MMA_N + n][m][i % 2] = __float_as_int(shared_load_float(partners_at + i * 128));
  }
  if (SPLIT_K) accumulate<2 * MMA_N>(c, all, transposed_thread);
  else accumulate<MMA_N>(c, all + MMA_N, transposed_thread + (1 - 2 * half) * SCORED_ROWS * Layout<C * 8 * SPLIT_WARPS>::ROW_BYTES);
}
// SPLIT_K: what a warp leaves for others, of S in the next tile's place if that has room, and of dP. Of four warps, two have the same half to find.
constexpr u32 PARTIALS_AT = HALVES_AT + 2 * WARPS * HALF_BYTES, PARTIAL_BYTES = WARPS * SPLIT_K * MMA_M * 512;
DEVICE u32 partials_at(u32 shared, bool of_S, int buffer, int thread) {
  const u32 place = !of_S ? PARTIALS_AT : PARTIAL_BYTES <= QK_TILE_BYTES && !CP_ASYNC ? QK_TILES_AT + (buffer ^ 1) * QK_TILE_BYTES : PARTIALS_AT + PARTIAL_BYTES;
  return shared + place + group_of(thread) * SPLIT_WARPS * SPLIT_K * MMA_M * 512 + (thread & 31) * 16;
}
DEVICE void store_partial_scores(const float (*c)[MMA_M][4], u32 at, int side) {
  UNROLLED(i, SPLIT_K * MMA_M) store_partial(c[i / MMA_M + 2 - SPLIT_K][i % MMA_M], at + (side * SPLIT_K * MMA_M + i) * 512);
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
