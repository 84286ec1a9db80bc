// How warps with the same own rows share the work of a tile (PAIRS, SUMS): halves of P and dS, and shares of the sums in S and dP, through shared memory.
#pragma once
#include "backward_scores.cuh"

// Bytes of shared memory: own operands that are not in registers; two tiles of S's operand and one of dP's; LSE and delta of their queries, twice.
constexpr u32 OWN_P = REG_S ? 0 : OWN * OfS::ROW_BYTES, TILES = OWN_P + (REG_P ? 0 : OWN * OfP::ROW_BYTES);
constexpr u32 TILE_BYTES = TL * OfS::ROW_BYTES, TILE_P = TILES + 2 * TILE_BYTES;
constexpr u32 ROW_VALUES = TILE_P + TL * OfP::ROW_BYTES;

// HALVES: where a warp leaves its half of a tile's P or dS (`which`) for its partner.
constexpr u32 EXCHANGE = ROW_VALUES + (KEYS_STAY ? TL * 16 : 0), OF_HALF = NB * MT * 256;
DEVICE u32 exchange_at(u32 shared, int which, int thread, int side) {
  return shared + EXCHANGE + ((which * GROUPS + group_of(thread)) * SHARE + side) * OF_HALF + (thread & 31) * 4;
}
DEVICE void hand_over(const u32 (*found)[MT][2], u32 at) {
  UNROLLED(i, NB * MT * 2) shared_store(at + i * 128, found[i / 2 / MT][i / 2 % MT][i % 2]);
}
// c += its partner's half times a tile, whose rows that are its own begin at `turned`; with SUMS its own half too, since 8 rows are no operand.
template <int C> DEVICE void accumulate_rest(float (&c)[C][MT][4], const u32 (*own)[MT][2], u32 partners_at, u32 turned, int half) {
  u32 all[2 * NB][MT][2];
  UNROLLED(i, NB * MT * 2) {
    const int n = i / 2 / MT, m = i / 2 % MT;
    all[n][m][i % 2] = own[n][m][i % 2], all[NB + n][m][i % 2] = __float_as_int(shared_load_float(partners_at + i * 128));
  }
  if (SUMS) accumulate<2 * NB>(c, all, turned);
  else accumulate<NB>(c, all + NB, turned + (1 - 2 * half) * SEEN * Layout<C * 8 * SHARE>::ROW_BYTES);
}
// SUMS: what a warp leaves for others, of S in the next tile's place if that has room, and of dP. Of four warps, two have the same half to find.
constexpr u32 SUMS_END = EXCHANGE + 2 * NW * OF_HALF, OF_SUMS = NW * SUMS * MT * 512;
DEVICE u32 sums_at(u32 shared, bool of_S, int buffer, int thread) {
  const u32 place = !of_S ? SUMS_END : OF_SUMS <= TILE_BYTES && !CPA ? TILES + (buffer ^ 1) * TILE_BYTES : SUMS_END + OF_SUMS;
  return shared + place + group_of(thread) * SHARE * SUMS * MT * 512 + (thread & 31) * 16;
}
DEVICE void leave_scores(const float (*c)[MT][4], u32 at, int side) {
  UNROLLED(i, SUMS * MT) leave_sums(c[i / MT + 2 - SUMS][i % MT], at + (side * SUMS * MT + i) * 512);
}
DEVICE void add_scores(float (*c)[MT][4], u32 at, int side) {
  UNROLLED(m, MT) {
    add_sums(c[0][m], at + (((side ^ 1) * SUMS + SUMS - 1) * MT + m) * 512);
    if (SUMS == 1) continue;
    float others[4] = {0.f, 0.f, 0.f, 0.f};
    add_sums(others, at + ((side ^ 2) * SUMS * MT + m) * 512);
    add_sums(others, at + (((side ^ 3) * SUMS + 1) * MT + m) * 512);
    UNROLLED(e, 4) c[0][m][e] += others[e];
  }
}
