// FlexAttention: a caller's score_mod and mask_mod, and the tiles that a BlockMask does not hide. flex_mods.cuh is
// generated for each pair of functions; backends/fused/flex.py says what it defines, and what it may call.
//
// FLEX 1: no BlockMask, all tiles; 2: tiles of a BlockMask with blocks of FLEX_BLOCK_Q queries and FLEX_BLOCK_K keys.
#pragma once
#include "scores/mask.cuh"

// ---- What the generated functions call
DEVICE float flex_exp2(float x) { return exp2_approx(x); }
DEVICE float flex_exp(float x) { return exp2_approx(x * LOG2E); }
DEVICE float flex_log2(float x) { return __log2f(x); }
DEVICE float flex_log(float x) { return __log2f(x) * LN2; }
DEVICE float flex_log1p(float x) { return log1pf(x); }
// 1 - 2 / (exp(2 x) + 1), good to 1e-7 as softcap's.
DEVICE float flex_tanh(float x) { return fmaf(-2.f, reciprocal_approx(exp2_approx(x * (2.f * LOG2E)) + 1.f), 1.f); }
DEVICE float flex_reciprocal(float x) { return 1.f / x; }
DEVICE float flex_sigmoid(float x) { return reciprocal_approx(1.f + exp2_approx(-x * LOG2E)); }
DEVICE float flex_sqrt(float x) { return sqrtf(x); }
DEVICE float flex_rsqrt(float x) { return 1.f / sqrtf(x); }
DEVICE float flex_sin(float x) { return sinf(x); }
DEVICE float flex_cos(float x) { return cosf(x); }
DEVICE float flex_erf(float x) { return erff(x); }
DEVICE float flex_floor(float x) { return floorf(x); }
DEVICE float flex_ceil(float x) { return ceilf(x); }
DEVICE float flex_abs(float x) { return fabsf(x); }
template <class T> DEVICE T flex_abs(T x) { return x < 0 ? -x : x; }
template <class T> DEVICE T flex_relu(T x) { return x < 0 ? 0 : x; }
template <class T> DEVICE T flex_sign(T x) { return (T)((x > 0) - (x < 0)); }
template <class T> DEVICE T flex_minimum(T a, T b) { return a < b || a != a ? a : b; }   // NaN wins, as in PyTorch
template <class T> DEVICE T flex_maximum(T a, T b) { return a > b || a != a ? a : b; }
// Division of integers towards zero and towards -inf, and what each leaves; of floats likewise. By 0: 0, not a trap.
template <class T> DEVICE T flex_divide(T a, T b) { return b == 0 ? 0 : b == -1 ? -a : a / b; }
template <class T> DEVICE T flex_fmod(T a, T b) { return b == 0 || b == -1 ? 0 : a % b; }
template <class T> DEVICE T flex_floor_divide(T a, T b) {
  return flex_divide(a, b) - (flex_fmod(a, b) != 0 && (a < 0) != (b < 0));
}
template <class T> DEVICE T flex_remainder(T a, T b) { return a - b * flex_floor_divide(a, b); }
DEVICE float flex_divide(float a, float b) { return a / b < 0.f ? ceilf(a / b) : floorf(a / b); }
DEVICE float flex_floor_divide(float a, float b) { return floorf(a / b); }
DEVICE float flex_remainder(float a, float b) { return a - b * floorf(a / b); }
// A caller's own index: negative ones count from the end, and none leads outside of the tensor.
DEVICE int flex_within(int i, int size) { return clamp(i < 0 ? i + size : i, 0, size - 1); }

// Return the element at an offset in captured tensor i.
#define FLEX_LOAD(name, result, type, x) \
  DEVICE result name(const FlexParams &f, int i, i64 offset) { \
    const type loaded = global_load((const type *)f.captured[i] + offset); \
    return x; \
  }
FLEX_LOAD(flex_float, float, float, loaded)
FLEX_LOAD(flex_half, float, u16, half_to_float(loaded))
FLEX_LOAD(flex_bfloat16, float, u16, __int_as_float((u32)loaded << 16))
FLEX_LOAD(flex_bool, bool, u8, loaded != 0)
FLEX_LOAD(flex_i64, i64, i64, loaded)
FLEX_LOAD(flex_i32, int, int, loaded)
FLEX_LOAD(flex_i16, int, short, loaded)
FLEX_LOAD(flex_i8, int, signed char, loaded)
FLEX_LOAD(flex_u8, int, u8, loaded)

// ---- A lane's sum for one element of a captured tensor's gradient. Successive scores often add to the same element,
// so the sum stays in registers, and is added by an atomic when a score adds to another element.
struct FlexSum {
  float *to = nullptr, sum = 0.f;
  DEVICE void add(float *place, float x) {
    if (place != to) write(), to = place, sum = 0.f;
    sum += x;
  }
  DEVICE void write() const {
    if (to) atomicAdd(to, sum);
  }
  // If all lanes of a warp add to the same element, such as a head's slope, one lane writes the sum of all.
  DEVICE void write_together() const {
    u64 place = (u64)to;
#pragma unroll
    for (int i = 16; i; i >>= 1) {
      const u32 low = __shfl_xor_sync(ALL_LANES, (u32)place, i),
                high = __shfl_xor_sync(ALL_LANES, (u32)(place >> 32), i);
      const u64 other = (u64)high << 32 | low;
      place = place > other ? place : other;
    }
    if (!__all_sync(ALL_LANES, !to || (u64)to == place)) return write();
    const float all = sum_of<32>(sum);
    if (place && threadIdx.x % 32 == 0) atomicAdd((float *)place, all);
  }
};
// Adds x to the element at an offset in gradient i.
DEVICE void flex_add(const FlexParams &f, FlexSum &sum, int i, i64 offset, float x) {
  sum.add(f.gradients[i] + offset, x);
}

#include "flex_mods.cuh"

// The largest magnitude of flex_slope for head h of sequence b; a guess if no such function was generated.
#ifndef FLEX_STEEPEST
DEVICE float flex_steepest(const FlexParams &, int, int) { return 256.f; }
#endif
// Which scores of the rows [q, q_last] and the keys [kv, kv_last] flex_mask shows: 1 if it may show one of them, plus 2
// if it shows all. If no such function was generated, flex_mask is called for every score.
#ifndef FLEX_SIGHT
DEVICE int flex_sight(const FlexParams &, int, int, int, int, int, int) { return 1; }
#endif
struct Sight {   // the two bits of flex_sight's result
  bool some, all;
};

// ---- The tiles of TILE streamed rows that a BlockMask lists for the stationary rows from `first` on: first those of
// partial blocks, then those of full blocks, in which mask_mod hides nothing. STATIONARY, STREAMED: how many rows a
// block of the BlockMask has. A tile has a place in this list, and a number among all tiles of the sequence. Wrong
// lists never lead outside of the tensors: too large a number becomes that of the tile after the last one, in which
// everything is hidden.
template <int STATIONARY, int STREAMED, int TILE> struct FlexTiles {
  static constexpr int EACH = STREAMED / TILE;   // how many tiles a block has
  static_assert(STREAMED % TILE == 0, "tiles lie within blocks");
  int partials, count;   // the number of tiles of partial blocks, and of all tiles
  // Returns how many tiles of a block exist; a large block may exceed the sequence, which has `tiles`.
  static DEVICE int each(int tiles) { return EACH > 64 ? min(EACH, tiles) : EACH; }
  static DEVICE int number_of(const FlexParams &f, int which, int b, int h, int first, int tiles) {
    const FlexList &list = f.lists[which];
    if (!f.num[which]) return 0;
    const i64 at =
        (i64)b * list.num_b + (i64)h * list.num_h + (i64)min(first / STATIONARY, list.rows - 1) * list.num_row;
    return clamp(global_load(f.num[which] + at), 0, list.columns) * each(tiles);
  }
  DEVICE FlexTiles() : partials(0), count(0) {}
  DEVICE FlexTiles(const FlexParams &f, int which, int b, int h, int first, int tiles)
        : partials(number_of(f, which, b, h, first, tiles)),
          count(partials + number_of(f, which + 1, b, h, first, tiles)) {}
  DEVICE bool is_full(int place) const { return place >= partials; }
  // Returns the place counted from the start of its own list, of partial or of full blocks.
  DEVICE int within_list(int place) const { return is_full(place) ? place - partials : place; }
  // entries() returns the address of the first entry of the list that `place` belongs to. entry_behind() returns the
  // address of the entry of the next place, from that of `place`.
  DEVICE const int *entries(const FlexParams &f, int which, int b, int h, int first, int place) const {
    const int at = is_full(place) ? which + 1 : which;
    const FlexList &list = f.lists[at];
    return f.indices[at] + (i64)b * list.indices_b + (i64)h * list.indices_h +
           (i64)min(first / STATIONARY, list.rows - 1) * list.indices_row;
  }
  DEVICE const int *entry_behind(const int *entry, const FlexParams &f, int which, int b, int h, int first, int place,
                                 int tiles) const {
    const int next = place + 1;
    if (next == count) return entry;
    if (next == partials) return entries(f, which, b, h, first, next);
    return entry + (within_list(next) % each(tiles) ? 0 : f.lists[is_full(next) ? which + 1 : which].indices_column);
  }
  // Returns the number of the tile at a place whose entry in the list is `entry`.
  DEVICE int number(u32 entry, int place, int tiles) const {
    return min((int)min(entry, (u32)(tiles / EACH + 1)) * EACH + within_list(place) % each(tiles), tiles);
  }
  DEVICE int tile(const FlexParams &f, int which, int b, int h, int first, int place, int tiles) const {
    const int step = f.lists[is_full(place) ? which + 1 : which].indices_column;
    const int *entry = entries(f, which, b, h, first, place) + (i64)(within_list(place) / each(tiles)) * step;
    return number(global_load(entry), place, tiles);
  }
};

// ---- The order of a head's tiles. As it is, it suits masks that grow from row to row, such as a causal one. Of other
// BlockMasks the tiles with the longest lists start first.
#if FLEX == 2
// How many blocks the BlockMask lists for each tile of a head, in 16 steps of the longest list. Place i is the tile
// that starts as number i without ranks; LAST_FIRST: place 0 is the last tile. BLOCK_ROWS: the stationary rows of a
// block of the BlockMask; ROWS: of a tile. Each warp has all lengths, and finds everything by votes: it needs no shared
// memory and no barrier.
template <int BLOCK_ROWS, int ROWS, bool LAST_FIRST> struct ListLengths {
  // MOST: how many tiles' lengths, of BITS bits each, have room in 64 bits a lane.
  static constexpr int BITS = 4, MOST = 64 / BITS * 32;
  int tiles, groups, lane;   // a lane has every 32nd place: one of each group
  u64 lengths = 0;
  DEVICE ListLengths(const Params &p, int which, int b, int h)
        : tiles(p.tiles), groups((p.tiles + 31) / 32), lane(threadIdx.x & 31) {
    int longest = 0;
#pragma unroll 4
    for (int i = 0; i < groups; i++) longest = max(longest, count(p.flex, which, b, h, i * 32 + lane));
    const int shift = max(0, 32 - __clz(max_of<32>(longest)) - BITS);
#pragma unroll 1
    for (int i = 0; i < groups; i++)
      lengths |= (u64)(count(p.flex, which, b, h, i * 32 + lane) >> shift) << i * BITS;
  }
  // Returns how many blocks are listed for a place; 0 behind the last place.
  DEVICE int count(const FlexParams &f, int which, int b, int h, int place) const {
    const int row = (LAST_FIRST ? tiles - 1 - place : place) * ROWS / BLOCK_ROWS;
    int sum = 0;
    UNROLLED(i, 2) {
      const FlexList &list = f.lists[which + i];
      const int *num = f.num[which + i] + ((i64)b * list.num_b + (i64)h * list.num_h);
      if (place < tiles && f.num[which + i])
        sum += clamp(global_load(num + (i64)min(row, list.rows - 1) * list.num_row), 0, min(list.columns, 1 << 29));
    }
    return sum;
  }
  static DEVICE int length(u64 lengths, int group) { return (int)(lengths >> group * BITS) & ((1 << BITS) - 1); }
  // Whether some list is longer than the one before it.
  DEVICE bool are_uneven() const {
    const u32 from = lane < 31 ? lane + 1 : 0;
    const u64 low = __shfl_sync(ALL_LANES, (u32)lengths, from),
              high = __shfl_sync(ALL_LANES, (u32)(lengths >> 32), from);
    const u64 next = (high << 32 | low) >> (lane < 31 ? 0 : BITS);
    bool rises = false;
#pragma unroll 1
    for (int i = 0; i < groups; i++) rises |= length(next, i) > length(lengths, i);
    return __any_sync(ALL_LANES, rises);
  }
  // Returns which lanes' places of a group have lengths from `least` to `most`.
  DEVICE u32 vote(int group, int least, int most) const {
    const int mine = length(lengths, group);
    return __ballot_sync(ALL_LANES, group * 32 + lane < tiles && mine >= least && mine <= most);
  }
  // Returns the place of a rank: 0 has the longest list; of equally long lists, the order of places holds. For any
  // lists, each place has one rank. All branches are uniform, and so is a vote: so the compiler knows that all lanes
  // have the same result, and keeps it in uniform registers. The main loops have no others left.
  DEVICE int place_of(int rank) const {
    int size = 0, longer = 0;   // the length of the list of this rank, found bit by bit; how many lists are longer
#pragma unroll 1
    for (int bit = 1 << (BITS - 1); bit; bit >>= 1) {
      int found = 0;
#pragma unroll 1
      for (int i = 0; i < groups; i++) found += __popc(vote(i, size + bit, 1 << BITS));
      size += found > rank ? bit : 0, longer = found > rank ? longer : found;
    }
    int before = rank - longer, place = 0;   // before: how many lists of this length precede those of the group
#pragma unroll 1
    for (int i = 0; i < groups; i++) {
      const u32 equal = vote(i, size, size);
      const u32 it = __ballot_sync(ALL_LANES, (equal >> lane & 1) && __popc(equal & ((1u << lane) - 1)) == before);
      place = it ? i * 32 + __ffs(it) - 1 : place;
      before -= __popc(equal);
    }
    return place;
  }
  // Whether tiles are ranked: in all blocks alike, so the first head's lists decide. If all blocks run at once, their
  // order does not matter.
  static DEVICE bool are_ranked(const Params &p, int which) {
    return p.tiles <= MOST && gridDim.x > p.resident && ListLengths(p, which, 0, 0).are_uneven();
  }
};
#endif
