// KEY_GROUPS: two groups of a forward's warps compute the same rows, and share Q in shared memory. They take alternate
// tiles of keys. Each group has its own tile of K, tile of V and barrier, so that one group multiplies while the other
// exponentiates. At the end each group gives the other its results for half of the rows.
#pragma once
#include "scores/softmax.cuh"

constexpr int GROUP_COUNT = KEY_GROUPS ? 2 : 1;
// The second group starts LAG cycles later, because two groups in step need the same units at the same time. With fewer
// than LAG_TILES tiles that does not pay.
constexpr int LAG = 1000, LAG_TILES = 8;

// The group of a thread, and the thread's number in the group.
template <int THREADS> struct KeyGroup {
  static constexpr int SIZE = THREADS / GROUP_COUNT;
  int index, thread;
  DEVICE explicit KeyGroup(int of_block)
        : index(KEY_GROUPS ? of_block / SIZE : 0), thread(KEY_GROUPS ? of_block % SIZE : of_block) {}
  // The number of the thread's warp in the order of rows. In the second group the order is reversed: at a causal
  // diagonal, each scheduler of the multiprocessor then has a warp that sees more keys and one that sees fewer.
  DEVICE int warp() const { return thread >> 5 ^ (index ? SIZE / 32 - 1 : 0); }
  DEVICE void meet() const {
    if (KEY_GROUPS) wait_at(1 + index, SIZE);
    else __syncthreads();
  }
  DEVICE void lag(int tiles) const {
    if (KEY_GROUPS && index && tiles >= LAG_TILES) wait_cycles(LAG);
  }
  // If the first group had one tile more, the second passes two barriers more, because NVIDIA's racecheck compares how
  // many barriers two threads have passed, whichever barriers these were.
  DEVICE void even_out(int tiles_from_own_first) const {
    if (KEY_GROUPS && index && tiles_from_own_first % 2 == 0) meet(), meet();
  }
};

#if KEY_GROUPS
// Merges the results of both groups. Each warp has two row tiles; its group gets the merged results of one of them, the
// other group those of the other. m: maxima in units of log2; l: sums over all lanes of a row. The thread at `theirs`
// holds the same rows in the other group. Begins and ends with a barrier of the block.
template <int THREADS, int N> DEVICE void exchange_groups(float (&all_O)[N][1][4], float (&all_m)[1][2],
                                                          float (&all_l)[1][2], const float (&O)[N][2][4],
                                                          const float (&m)[2][2], const float (&l)[2][2], u32 shared,
                                                          int thread) {
  const bool second = thread >= THREADS / 2;
  const u32 mine = shared + thread * 16, theirs = shared + (thread ^ (THREADS - 32)) * 16;
  __syncthreads();   // both have read their last tiles
  shared_store_float4(mine, second ? make_float4(m[0][0], l[0][0], m[0][1], l[0][1])
                                   : make_float4(m[1][0], l[1][0], m[1][1], l[1][1]));
  __syncthreads();
  const float4 other = shared_load_float4(theirs);
  __syncthreads();
  UNROLLED(n, N) {
    float given[4];   // chosen element by element: a choice between arrays would put them into local memory
    UNROLLED(e, 4) {
      const float low = O[n][0][e], high = O[n][1][e];
      given[e] = second ? low : high, all_O[n][0][e] = second ? high : low;
    }
    shared_store_float4(mine + n * THREADS * 16, together(given));
  }
  __syncthreads();
  float own[2], others[2];
  UNROLLED(r, 2) {
    const float m_own = second ? m[1][r] : m[0][r], m_other = r ? other.z : other.x, top = fmaxf(m_own, m_other),
                from = top == NEG_INF ? 0.f : top;
    own[r] = exp2_approx(m_own - from), others[r] = exp2_approx(m_other - from);
    all_m[0][r] = top, all_l[0][r] = own[r] * (second ? l[1][r] : l[0][r]) + others[r] * (r ? other.w : other.y);
  }
  UNROLLED(n, N) {
    float x[4];
    load_partial(x, theirs + n * THREADS * 16);
    UNROLLED(e, 4) all_O[n][0][e] = all_O[n][0][e] * own[e >> 1] + x[e] * others[e >> 1];
  }
  __syncthreads();
}
#endif
