// FlashAttention-2, Algorithm 1 (Dao, 2023): attention of one tile of rows over all keys that it sees.
//
// A block holds STATIONARY_ROWS = WARPS * MMA_M * 16 rows of one head (the paper's Q_i): WARPS warps with MMA_M tiles
// of 16 rows each. With SPLIT_K, SPLIT_WARPS = 2^SPLIT_K warps have the same rows, and each takes every SPLIT_WARPS-th
// group of 16 channels. With KEY_GROUPS, both halves of the warps have the same rows (groups.cuh). In its main loop the
// block reads tiles of STREAMED_ROWS keys (the paper's K_j and V_j), which are loaded to one tile of shared memory for
// K and one for V; while the kernel multiplies one tile, the next is on its way from global memory. Q passes through
// the same shared memory to registers (QK_IN_REGS), or has its own. Scores and probabilities stay in registers: mma
// returns S in the layout in which it takes P.
//
// grid: tiles * splits * nheads * batch blocks; with cu_seqlens_q as many as for one more sequence, which clear tokens
// outside of all sequences.
#include "groups.cuh"
#include "splits.cuh"

constexpr int THREADS = WARPS * 32, SPLIT_WARPS = 1 << SPLIT_K,
              STATIONARY_ROWS = WARPS / SPLIT_WARPS / GROUP_COUNT * MMA_M * 16,
              MMA_N = STREAMED_ROWS / 8, WARP_ROWS = MMA_M * 16;
// P is multiplied by 2^15, so that small probabilities keep their bits in fp16, as they would in bf16. They matter:
// dropout may drop the largest ones.
constexpr int P_SHIFT = TYPE == 2 ? 15 : 0;
constexpr int SPLIT_UNIT = 128;   // a split has a multiple of so many keys; with fewer it would not pay
constexpr int AHEAD = CACHE && !MMA_K16 && !PAGED;   // 8-bit tiles are converted while tensor cores multiply
constexpr int BOTH = AHEAD || LOAD_V_WITH_K;   // K and V are loaded at the same time, to separate registers
static_assert(!KEY_GROUPS || (MMA_M == 2 && !QK_IN_REGS && !SPLIT_K && !STAGES && !LOAD_V_WITH_K && !CP_ASYNC),
              "each group writes one of a warp's two row tiles");
static_assert(!KEY_GROUPS || !(BIAS || FLEX || CACHE), "each group takes every second tile");
static_assert(!LOAD_V_WITH_K || !(CACHE || STAGES || CP_ASYNC), "with one stage, through registers");
constexpr bool CAN_SPLIT = D <= 192 || MMA_K16;   // Turing has no registers left to merge the widest heads
typedef Layout<D> LayoutQK;   // of Q and K
typedef Layout<DV> LayoutV;
constexpr int OUT_BLOCKS = DV / 8 / SPLIT_WARPS;
typedef TileCopy<THREADS, STATIONARY_ROWS, D> CopyQ;
typedef KeyGroup<THREADS> Group;
typedef TileCopy<Group::SIZE, STREAMED_ROWS, D> CopyK;
typedef TileCopy<Group::SIZE, STREAMED_ROWS, DV> CopyV;

// How many tiles of K and of V shared memory holds. STAGES: as in stages.cuh. There are more of V, since warps that lag
// half a turn behind still read it.
constexpr int K_SLOTS = STAGES ? 2 : 1, V_SLOTS = larger(STAGES, 1);
// Bytes of one tile of K, and of V.
constexpr u32 K_BYTES = STREAMED_ROWS * LayoutQK::ROW_BYTES, V_BYTES = STREAMED_ROWS * LayoutV::ROW_BYTES;
typedef MaskRange<WARP_ROWS, STREAMED_ROWS> WarpRange;

// Describes a warp's rows to change_scores() and hide_scores().
struct TileRows {
  const WarpRange &range;
  const ScoreRule &score_rule;
  int g;
  DEVICE int row(int m, int r) const { return range.first + m * 16 + g + r * 8; }
  DEVICE int position(int m, int r) const { return row(m, r) + range.shift; }
  DEVICE const ScoreRule &rule(int m, int r) const { return score_rule; }
  DEVICE VisibleRows visible(int m, int r, int from) const {
    return range.visible(position(m, r) - from, range.streamed - 1 - from);
  }
};

DEVICE void apply_dropout(float (&P)[MMA_N][MMA_M][4], const DropoutWords &words, const u32 (&row_words)[MMA_M][2],
                          int key, int t, int limit) {
  UNROLLED(n, MMA_N)
    UNROLLED(e, 2) {
      const u32 key_word = words.key(key + n * 8 + 2 * t + e);
      UNROLLED(m, MMA_M)
        UNROLLED(r, 2)
          if (dropped(row_words[m][r], key_word, limit)) P[n][m][2 * r + e] = 0.f;
    }
}

// O += P V. meanwhile(k): other work to do after each 16 keys.
template <class F> DEVICE void accumulate(float (&O)[OUT_BLOCKS][MMA_M][4], const float (&P)[MMA_N][MMA_M][4], u32 v_at,
                                          const F &meanwhile) {
#pragma unroll
  for (int k = 0; k < MMA_N; k += 2) {
    u32 a[MMA_M][4];
    UNROLLED(m, MMA_M) {
      a[m][0] = pack(P[k][m][0], P[k][m][1]);
      a[m][1] = pack(P[k][m][2], P[k][m][3]);
      a[m][2] = pack(P[k + 1][m][0], P[k + 1][m][1]);
      a[m][3] = pack(P[k + 1][m][2], P[k + 1][m][3]);
    }
#pragma unroll
    for (int n = 0; n < OUT_BLOCKS; n += 2) {
      u32 b[4];
      ldmatrix_transposed(b, LayoutV::along(v_at, n * SPLIT_WARPS) + k * 8 * LayoutV::ROW_BYTES);
      multiply<MMA_M>(O[n], O[n + 1], a, b);
    }
    meanwhile(k / 2);
  }
}

#if FLEX == 2
typedef ListLengths<FLEX_BLOCK_Q, STATIONARY_ROWS, true> Lengths;
DEVICE bool are_ranked(const Params &p) { return Lengths::are_ranked(p, KV_LISTS); }
DEVICE int place_of(const Params &p, bool is_ranked, int rank, int b, int head) {
  return is_ranked ? Lengths(p, KV_LISTS, b, head).place_of(rank) : rank;
}
#else
DEVICE bool are_ranked(const Params &p) { return false; }
DEVICE int place_of(const Params &p, bool is_ranked, int rank, int b, int head) { return rank; }
#endif

KERNEL(THREADS, MIN_BLOCKS) forward(const Params p) {
  SHARED_MEMORY
  const int thread = threadIdx.x, lane = thread & 31, g = lane >> 2, t = lane & 3;
  // `warp` numbers the warps that have different rows, `side` those that have the same rows.
  const Group group(thread);
  const int warp = (KEY_GROUPS ? group.warp() : thread >> 5) / SPLIT_WARPS,
            side = SPLIT_K ? thread >> 5 & SPLIT_WARPS - 1 : 0;
  // Blocks start with the last tiles (VarlenTile with LAST_FIRST): under a causal mask these see most keys.
  const bool is_ranked = are_ranked(p);
  const TileScheduler scheduled(p, blockIdx.x, p.tiles * p.splits, is_ranked);
  const int head = scheduled.batch_head % p.nheads, head_k = head / p.group, split = scheduled.tile % p.splits;
  const VarlenTile<STATIONARY_ROWS, true> varlen(
      p, p.cu_seqlens_q, p.total_q, scheduled.batch_head / p.nheads,
      place_of(p, is_ranked, scheduled.tile / p.splits, scheduled.batch_head / p.nheads, head));
  const int tile = varlen.tile, b = varlen.b;
  if (b == p.batch) {
    mark_missing_rows(p, head, p.tiles * STATIONARY_ROWS, scheduled.tile, p.tiles * p.splits);
    return clear_outside(p, head, SHARED_GRID ? tile : scheduled.tile, varlen.tiles * p.splits);
  }
  const Sequence seq = find_sequence(p, b);
  const int first_row = tile * STATIONARY_ROWS;
  if (first_row >= seq.seqlen_q) return;

  const u16 *q = row_at(p.q, p.q_s, b, seq.first_q + first_row, head);
  const Cached *k = (const Cached *)p.k + (PAGED ? 0 : b * p.k_s.batch) + (i64)head_k * p.k_s.head;
  const Cached *v = (const Cached *)p.v + (PAGED ? 0 : b * p.v_s.batch) + (i64)head_k * p.v_s.head;
  const int *pages = PAGED ? p.block_table + (i64)b * p.table_stride : nullptr;
  const WarpRange range = WarpRange::of(p, first_row + warp * WARP_ROWS, seq.seqlen_k - seq.seqlen_q, seq.seqlen_k);
#if FLEX == 2   // `keys` then holds places in the block's list of tiles, times STREAMED_ROWS
  static_assert(FLEX_BLOCK_Q % STATIONARY_ROWS == 0, "a block's rows lie in one block of the BlockMask");
  const int all_tiles = (seq.seqlen_k + STREAMED_ROWS - 1) / STREAMED_ROWS;
  const FlexTiles<FLEX_BLOCK_Q, FLEX_BLOCK_K, STREAMED_ROWS> listed(p.flex, KV_LISTS, b, head, first_row, all_tiles);
  Range keys = {0, listed.count * STREAMED_ROWS};
#else
  Range keys = range.seen_by(first_row, min(first_row + STATIONARY_ROWS, seq.seqlen_q));
  keys.first = keys.first / STREAMED_ROWS * STREAMED_ROWS;
#endif
  int splits = 1;
  if (CAN_SPLIT && p.splits > 1) {
    const SplitRange share(p, keys, SPLIT_UNIT, split);
    if (split >= share.splits) return;
    keys = share.keys, splits = share.splits;
  }
  const DenseMask mask(p, b, head);
#if FLEX == 2
  const int first_place = keys.first / STREAMED_ROWS, last_place = keys.end / STREAMED_ROWS;   // [first, last)
  const auto tile_at = [&](int place) { return listed.tile(p.flex, KV_LISTS, b, head, first_row, place, all_tiles); };
  const bool some = first_place < last_place;
  const int first_tile = some ? tile_at(first_place) : 0;
#else
  const int last_tile = (keys.end + STREAMED_ROWS - 1) / STREAMED_ROWS,
            first_tile = mask.next<STATIONARY_ROWS, STREAMED_ROWS>(
                p, first_row, keys.first / STREAMED_ROWS + group.index, last_tile);   // [first, last)
  const bool some = first_tile < last_tile;
#endif

  // Start the first loads as early as possible, since the block has to wait for them.
  const CopyQ copy_q(thread);
  const CopyK copy_k(group.thread);
  const CopyV copy_v(group.thread);
  const u32 shared = SHARED_BASE, q_tile = shared,
            k_tile = (QK_IN_REGS ? shared : shared + STATIONARY_ROWS * LayoutQK::ROW_BYTES) +
                     group.index * (K_SLOTS * K_BYTES + V_SLOTS * V_BYTES),
            v_tile = k_tile + K_SLOTS * K_BYTES;
  const float k_scale = CACHE ? 1.f : scale_of(absmax_of(p, ABSMAX_K, b, head_k), COPIED),
              v_scale = CACHE ? 1.f : scale_of(absmax_of(p, ABSMAX_V, b, head_k), COPIED);
  // `staged` holds the loaded chunks of K and of V in turn. It holds both at once for small tiles, whose loads take
  // longer than their products (LOAD_V_WITH_K), and for 8-bit tiles, which are loaded half a turn before they are
  // converted.
  uint4 q_staged[CopyQ::N], staged[1 + BOTH][larger(CopyK::N, CopyV::N)];
#define LOAD(mover, place, base, strides, j, there, dim, target) \
  mover.load(staged[place], p, base, strides, pages, seq.first_k + (j) * STREAMED_ROWS, \
             there ? seq.seqlen_k - (j) * STREAMED_ROWS : 0, dim, target)
#define LOAD_KEYS(j, there) LOAD(copy_k, 0, k, p.k_s, j, there, p.head_dim, k_tile)
#define LOAD_VALUES(j, there) LOAD(copy_v, BOTH, v, p.v_s, j, there, p.head_dim_v, v_tile)
  // With cp.async and QK_IN_REGS, K may be loaded only once Q has left the shared memory that it will use.
  const bool at_once = !(CP_ASYNC && QK_IN_REGS);
  copy_q.load_stationary(q_staged, q, p.q_s.row, seq.seqlen_q - first_row, p.head_dim);
  if (at_once && some) LOAD_KEYS(first_tile, true);
  if (LOAD_V_WITH_K && some) LOAD_VALUES(first_tile, true);
  float q_scale = 1.f;
#if TYPE == 2   // scale Q by the maximum of this block's rows; raise the head's maximum for the backward
  int largest = max_of<32>(finite_magnitude(q_staged));
  if (!CACHE) raise(absmax_of(p, ABSMAX_Q, b, head_k), largest);
  if (lane == 0) shared_store(shared + (thread >> 5) * 4, (u32)largest);
  __syncthreads();
  UNROLLED(i, WARPS) largest = max(largest, __float_as_int(shared_load_float(shared + i * 4)));
  __syncthreads();
  q_scale = scale_for(largest);
#endif

  const float scale =
      p.softmax_scale * inverse_of_power(q_scale) * inverse_of_power(k_scale) * key_unit(p, b, head_k, WIDENED_UNIT);
  // If only softmax_scale changes scores, their maximum is found unscaled, and exp2's multiply-add scales them.
  const bool modified = CHANGES || !(scale > 0.f);
  const float unit = NATURAL ? LOG2E : modified ? 1.f : scale * LOG2E;
  ScoreRule rule;
  rule.set_scale(p, scale, scale * LOG2E), rule.set_head(p, b, head);
  const float slope = ALIBI ? alibi_slope(p, b, head) : 0.f;   // for the position in the LSE
  const TileRows rows = {range, rule, g};
#if DROPOUT
  const DropoutWords words(p, b, head);
  u32 row_words[MMA_M][2];
  UNROLLED(m, MMA_M)
    UNROLLED(r, 2) row_words[m][r] = words.row(range.first + m * 16 + g + r * 8);
#endif

  const u32 q_at =
      LayoutQK::along(q_tile + LayoutQK::a_operand_at(lane) + warp * WARP_ROWS * LayoutQK::ROW_BYTES, side * 2);
  const u32 k_at = LayoutQK::along(k_tile + LayoutQK::b_operand_at(lane), side * 2),
            v_at = LayoutV::along(v_tile + LayoutV::a_operand_at(lane), side * 2);
  const u32 partials_at = v_tile + V_SLOTS * V_BYTES + (warp * SPLIT_WARPS * MMA_N * MMA_M * 32 + lane) * 16;

  copy_q.store_converted(q_staged, q_tile, q_scale);
  __syncthreads();
  u32 qf[QK_IN_REGS ? D / 16 / SPLIT_WARPS : 1][MMA_M][4];
  if (QK_IN_REGS) load_operand<D>(qf, q_at);
  if (!at_once && some) LOAD_KEYS(first_tile, true);
  if (AHEAD && some) LOAD_VALUES(first_tile, true);
  if (some) copy_k.store(staged[0], k_tile, k_scale);
  if (STAGES && some) {
    LOAD_VALUES(first_tile, true);
    copy_v.store(staged[0], v_tile, v_scale);
  }
  __syncthreads();

  float O[OUT_BLOCKS][MMA_M][4], m[MMA_M][2], l[MMA_M][2];
  set_zero(O);
  UNROLLED(i, MMA_M) m[i][0] = m[i][1] = NEG_INF, l[i][0] = l[i][1] = 0.f;

  // For row i and tile j: S_ij = Q_i K_j^T; m' = max(m, rowmax(S_ij)); P = exp(S_ij - m');
  // l' = exp(m - m') l + rowsum(P); O' = exp(m - m') O + P V_j. After the last tile, out = O / l and LSE = m + ln(l).
  u32 k_stage = 0, v_stage = 0;
#if KEY_GROUPS
  group.lag(last_tile - first_tile);
#endif
  const bool lags = STAGES == 3 && thread >= THREADS / 2;
#pragma unroll 1
#if FLEX == 2
  for (int place = first_place, j = first_tile, next; place < last_place; place++, j = next) {
    const int key = j * STREAMED_ROWS;
    const bool more = place + 1 < last_place, is_full = listed.is_full(place);
    next = tile_at(min(place + 1, last_place - 1));
#else
  for (int j = first_tile, next; j < last_tile; j = next) {
    const int key = j * STREAMED_ROWS;
    next = mask.next<STATIONARY_ROWS, STREAMED_ROWS>(p, first_row, j + GROUP_COUNT, last_tile);
    const bool more = next < last_tile, is_full = false;
#endif
#if FLEX
    const Sight sight = ScoreRule::sight(p, b, head, is_full, range.first, WARP_ROWS, key, STREAMED_ROWS);
    const bool is_seen = sight.some, has_hidden = !sight.all;
#else
    const bool is_seen = true, has_hidden = false;
#endif
    // Whether this warp computes the tile: whether its rows may see a key of it. With STAGES and KEY_GROUPS it computes
    // also tiles that a causal mask or window hides, since a branch costs more. `p.zero == 0` is always true. At 256
    // channels the compiler does not know that, and so moves fewer operands across the loop.
    const bool active = BIAS        ? mask.has<WARP_ROWS, STREAMED_ROWS>(p, 0, range.first, key)
                        : LOCAL     ? STAGES || KEY_GROUPS || range.sees_some(key)
                        : FLEX_MASK ? STAGES || is_seen
                                : D != 256 || MMA_K16 || p.zero == 0;
    if (AHEAD) LOAD_KEYS(next, more);
    else if (STAGES && more) LOAD_KEYS(next, true);
    else if (!STAGES && !LOAD_V_WITH_K) LOAD_VALUES(j, true);
    float S[MMA_N][MMA_M][4];
    if (active) {   // S = Q K^T
      set_zero(S);
      product<QK_IN_REGS, D, MMA_N>(S, qf, q_at, k_at + k_stage, 0, [&](int step) {
        if (AHEAD) copy_v.store_widened<D / 16 / SPLIT_WARPS>(staged[AHEAD], v_tile, step);
      });
      if (SPLIT_K)
        UNROLLED(i, MMA_N * MMA_M)
          store_partial(S[i / MMA_M][i % MMA_M], partials_at + (side * MMA_N * MMA_M + i) * 512);
    }
    if (STAGES) {
      k_stage ^= K_BYTES;
      if (more) copy_k.store(staged[0], k_tile + k_stage, k_scale);
      if (SPLIT_K) __syncthreads();
      if (more) LOAD_VALUES(next, true);
    } else {
      if (!AHEAD || !active) copy_v.store(staged[BOTH], v_tile, v_scale);
      group.meet();
      if (!AHEAD && more) LOAD_KEYS(next, true);
      if (AHEAD || (LOAD_V_WITH_K && more)) LOAD_VALUES(next, more);
    }
    const auto exponentiate = [&] {
      if (SPLIT_K)
        UNROLLED(i, MMA_N * MMA_M)
          add_partial(S[i / MMA_M][i % MMA_M], partials_at + ((side ^ 1) * MMA_N * MMA_M + i) * 512);
      const bool mixed =
          BIAS ? mask.has<WARP_ROWS, STREAMED_ROWS>(p, 1, range.first, key) : has_hidden || !range.sees_all(key);
      if (modified) change_scores(S, p, mask, mixed, rows, key, t);
      if (mixed && BIAS < 2) hide_scores(S, p, mask, rows, key, t);
      online_softmax<P_SHIFT>(S, m, l, O, unit);
#if DROPOUT
      apply_dropout(S, words, row_words, key, t, p.dropout_limit);
#endif
    };
#if STAGES
    if (active) exponentiate();
    const u32 next_v = v_stage == (STAGES - 1) * V_BYTES ? 0 : v_stage + V_BYTES;
    if (more) copy_v.store(staged[0], v_tile + next_v, v_scale);
    if (lags) __syncthreads();
    if (active) accumulate(O, S, v_at + v_stage, Nothing());
    v_stage = next_v;
    if (!lags) __syncthreads();
#else
    if (active) {
      exponentiate();
      accumulate(O, S, v_at, [&](int step) {
        if (AHEAD) copy_k.store_widened<MMA_N / 2>(staged[0], k_tile, step);
      });
    }
    if (AHEAD ? !active : more) copy_k.store(staged[0], k_tile, k_scale);
    group.meet();
#endif
  }
  if (STAGES) __syncthreads();
#if KEY_GROUPS
  group.even_out(last_tile - first_tile);
#endif

  // out = O / l, LSE = m + ln(l). For rows that see no key, out is 0 and the LSE +inf.
  UNROLLED(i, MMA_M)
    UNROLLED(r, 2)
      m[i][r] = (m[i][r] - (BIAS > 1 ? mask.top(p, range.first + i * 16 + g + r * 8) : 0.f)) * unit,
      l[i][r] = sum_of<4>(l[i][r]);
#if KEY_GROUPS   // each group writes one of its warps' two row tiles
  constexpr int WRITTEN_M = 1;
  // Read the thread's number again, since the loop leaves no registers to keep what was computed from it.
  const int again = thread_again(), written_g = again >> 2 & 7, written_t = again & 3;
  const Group writer(again);
  const int written_row = writer.warp() * WARP_ROWS + writer.index * 16, written_first = first_row + written_row;
  float written_O[OUT_BLOCKS][1][4], written_m[1][2], written_l[1][2];
  exchange_groups<THREADS>(written_O, written_m, written_l, O, m, l, SHARED_BASE, again);
#else
  constexpr int WRITTEN_M = MMA_M;
  const int written_g = g, written_t = t, written_row = warp * WARP_ROWS, written_first = range.first;
  auto &written_O = O;
  auto &written_m = m, &written_l = l;
#endif
  constexpr int AT_ONCE = OUT_BLOCKS * WRITTEN_M < 16 ? 16 / (OUT_BLOCKS * WRITTEN_M) : 1;
  const int tile_index = (b * p.nheads + head) * p.tiles + tile;
  if (CAN_SPLIT && splits > 1 &&
      !merge_splits<AT_ONCE>(p, written_O, written_m, written_l, written_first < seq.seqlen_q, tile_index, split,
                             splits))
    return;
  float factor[WRITTEN_M][2];
  const float v_unit = value_unit(p, b, head_k, WIDENED_UNIT);
  const i64 lse_at = b * p.lse_batch + head * p.lse_head + seq.first_q;
  UNROLLED(i, WRITTEN_M)
    UNROLLED(r, 2) {
      factor[i][r] =
          reciprocal_of_sum(written_l[i][r]) * (DROPOUT ? p.dropout_scale : 1.f) * inverse_of_power(v_scale) * v_unit;
      const int row = written_first + i * 16 + written_g + r * 8;
      if (p.lse && written_t == 0 && side == 0 && row < seq.seqlen_q)
        write_lse(p, lse_at + row, written_m[i][r] - P_SHIFT, written_l[i][r], BIAS > 1 ? mask.top(p, row) : slope,
                  BIAS ? 1 : row + range.shift);
    }
  u16 *out = row_at(p.out, p.out_s, b, seq.first_q + first_row, head);
  write_rows<SPLIT_WARPS>(written_O, factor, (KEY_GROUPS ? SHARED_BASE : shared) + written_row * LayoutV::ROW_BYTES,
                          written_row, out, p.out_s.row, seq.seqlen_q - first_row, p.head_dim_v, side);
}
