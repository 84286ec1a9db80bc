// FlashAttention-2, Algorithm 2 (Dao, 2023): the main loop of dkdv.cu and dq.cu.
//
// With P = exp(S - LSE), dP = dout V^T and delta = rowsum(out * dout):
//   dS = P (dP - delta),  dv = P^T dout,  dk = scale dS^T q,  dq = scale dS k.
// Both kernels compute S and dP, so that each gradient is summed by one block. So there are no atomics and no fp32
// buffers, and results have the same bits every time.
//
// A block keeps a tile of *stationary* rows, and reads tiles of *streamed* rows one after the other. Q and K are the QK
// operands (head dim D), dout and V the VO operands (head dim DV):
//
//          stationary    streamed      S             dP                grad_qk        grad_vo
//          QK, VO        QK, VO
//   dkdv   K_j, V_j      Q_i, dout_i   S^T = K Q^T   dP^T = V dout^T   dk += dS^T Q   dv += P^T dout
//   dq     Q_i, dout_i   K_j, V_j      S = Q K^T     dP = dout V^T     dq += dS K     none
//
// dkdv streams the queries of all heads of its group. mma returns S in the layout in which it takes P and dS: they stay
// in registers.
//
// A block has WARPS warps with MMA_M tiles of 16 rows each: STATIONARY_ROWS = WARPS * MMA_M * 16. Streamed tiles have
// STREAMED_ROWS rows; the QK tile has two buffers, since it is read again for dS. Stationary operands lie in registers
// (QK_IN_REGS, VO_IN_REGS) or in shared memory.
//
// SPLIT_N: two warps share their stationary rows. Each computes P and dS of half of a tile's streamed rows, gets the
// other half through shared memory, and sums up every other group of 16 channels of the gradients. So each needs half
// as many registers for sums.
//
// SPLIT_K: as SPLIT_N, but 2^SPLIT_K warps share their stationary rows. Each also holds only every 2^SPLIT_K-th group
// of 16 channels of the operands, and the warps add up their partial sums of S and dP.
//
// Bytes of shared memory (without exchanges):
//   STATIONARY_ROWS * 2 ([not QK_IN_REGS] D + [not VO_IN_REGS] DV)
//   + max(STREAMED_ROWS * 2 (2 D + DV) + [dkdv] STREAMED_ROWS * 16, STATIONARY_ROWS * 2 max(D, DV))
// Before this header dkdv.cu and dq.cu define KEYS_STATIONARY (1 and 0) and Operands, their side of the table above.
// Launches: delta, dkdv, dq, in this order. Each file describes its grid; the backend chooses the tiles (choosing/).
#pragma once
#include "gradients/exchange.cuh"

// ---- The tiles of a block

// A block's stationary tile. It is computed again after the main loop, so that it takes no registers during the loop.
// p.zero is added to its `index` there, or the compiler would keep the first result. With a BlockMask the loop needs
// its place, which then comes from the tile `before` the loop: to search for the longest list again would take long.
struct StationaryTile {
  int tile, tiles, head, b;   // head: of keys in dkdv
  int first, rows, left;   // the tile's first row; the sequence's number of rows, and how many remain from `first` on
  int split;   // dkdv: which part of the group's heads
  Sequence seq;
  DEVICE StationaryTile(const Params &p, int index, const StationaryTile *before = nullptr) {
#if FLEX == 2
    const bool is_ranked = !before && Lengths::are_ranked(p, LISTS);
#else
    const bool is_ranked = false;
#endif
    const TileScheduler scheduled(p, index, p.tiles, is_ranked);
    const int splits = Operands::splits(p), batch_head = scheduled.batch_head / splits,
              heads = Operands::stationary_heads(p);
    // Under a causal mask the first keys are seen by most rows, the last rows see most keys.
    const VarlenTile<STATIONARY_ROWS, !KEYS_STATIONARY> varlen(
        p, Operands::stationary_starts(p), Operands::stationary_total(p), batch_head / heads,
        place_of(p, is_ranked, scheduled.tile, batch_head / heads, batch_head % heads));
    split = scheduled.batch_head % splits, head = batch_head % heads, b = varlen.b;
    tile = varlen.tile, tiles = varlen.tiles, first = tile * STATIONARY_ROWS;
    if (FLEX == 2 && before)
      split = before->split, head = before->head, b = before->b, first = before->first + p.zero,
      tile = first / STATIONARY_ROWS;
    if (b == p.batch) return;
    seq = find_sequence(p, b);
    rows = Operands::stationary_rows(seq);
    left = rows - first;
  }
#if FLEX == 2
  static constexpr int LISTS = KEYS_STATIONARY ? Q_LISTS : KV_LISTS;
  typedef ListLengths<KEYS_STATIONARY ? FLEX_BLOCK_K : FLEX_BLOCK_Q, STATIONARY_ROWS, !KEYS_STATIONARY> Lengths;
  static DEVICE int place_of(const Params &p, bool is_ranked, int rank, int b, int head) {
    return is_ranked ? Lengths(p, LISTS, b, KEYS_STATIONARY ? head * p.group : head).place_of(rank) : rank;
  }
#else
  static DEVICE int place_of(const Params &, bool, int rank, int, int) { return rank; }
#endif
  DEVICE int head_k(const Params &p) const { return KEYS_STATIONARY ? head : head / p.group; }
  // How many query heads a split has; the last one may have fewer.
  DEVICE int heads_each(const Params &p) const { return (p.group + p.splits - 1) / p.splits; }
  DEVICE int first_head(const Params &p) const {
    return KEYS_STATIONARY ? head * p.group + split * heads_each(p) : head;
  }
  DEVICE int heads(const Params &p) const {
    return KEYS_STATIONARY ? min(heads_each(p), p.group - split * heads_each(p)) : 1;
  }
  // Address of the tile's first row in a tensor.
  template <class T> DEVICE T *of(T *x, const Strides &s) const {
    return row_at(x, s, b, Operands::stationary_first(seq) + first, head);
  }
  // Offset of the sequence's LSE and delta.
  DEVICE i64 row_values(const Params &p) const { return b * p.lse_batch + first_head(p) * p.lse_head + seq.first_q; }
};

// Tiles that a dense mask or a BlockMask hides are skipped. Not with FEW_KEYS, where their rows of dq must be written.
constexpr bool SKIPS = (BIAS && !FEW_KEYS) || FLEX == 2;

// The streamed tiles [first, end) of a sequence, for each of `heads` heads.
struct StreamedTiles {
  int b, row, head;   // the sequence, its first row, the first head
  int rows, shift;   // streamed rows; stationary row i stands at streamed row i + shift
  int first, end, heads;
  DEVICE StreamedTiles(const Params &params, const StationaryTile &tile) : heads(tile.heads(params)) {
    b = tile.b, row = Operands::streamed_first(tile.seq);
    head = KEYS_STATIONARY ? tile.first_head(params) : tile.head_k(params);
    rows = Operands::streamed_rows(tile.seq);
    shift = rows - tile.rows;
    const WarpRange range = warp_range(params, tile.first, shift, rows, 0);
    const Range seen = range.seen_by(tile.first, min(tile.first + STATIONARY_ROWS, tile.rows));
    first = seen.first / STREAMED_ROWS;
    end = (seen.end + STREAMED_ROWS - 1) / STREAMED_ROWS;
    if (FEW_KEYS) first = 0, end = (rows + STREAMED_ROWS - 1) / STREAMED_ROWS;   // write dq of every row
  }
  // Address of a head's streamed rows; offset of their LSE and delta.
  DEVICE const u16 *of(const u16 *x, const Strides &s, int which, int zero) const {
    return x + (b + zero) * s.batch + (i64)(row + zero) * s.row + (i64)(head + which) * s.head;
  }
  DEVICE i64 row_values(const Params &params, int which, int zero) const {
    return (b + zero) * params.lse_batch + (head + which) * params.lse_head + row + zero;
  }
};

// A block's place in its loop over streamed tiles: tile `tile` of head `head`, counted from the block's first head.
struct Walk {
  int tile, head = 0;
  bool is_full = false;   // FLEX: a full block of the BlockMask, in which mask_mod hides nothing
  DEVICE Walk(const Params &p, const StationaryTile &stationary, const StreamedTiles &streamed) : tile(streamed.first) {
    skip_hidden(p, stationary, streamed);
  }
  DEVICE bool goes_on(const StreamedTiles &streamed) const { return head < streamed.heads; }
  DEVICE void advance(const Params &p, const StationaryTile &stationary, const StreamedTiles &streamed) {
#if FLEX == 2
    place++;
#else
    if (++tile == streamed.end) tile = streamed.first, head++;
#endif
    skip_hidden(p, stationary, streamed);
  }
  // Moves on to the next tile of the same or a later head that no dense mask and no BlockMask hides.
#if FLEX == 2
  static constexpr int STATIONARY = KEYS_STATIONARY ? FLEX_BLOCK_K : FLEX_BLOCK_Q,
                       STREAMED = KEYS_STATIONARY ? FLEX_BLOCK_Q : FLEX_BLOCK_K,
                       LISTS = KEYS_STATIONARY ? Q_LISTS : KV_LISTS;
  static_assert(STATIONARY % STATIONARY_ROWS == 0, "a block's rows lie in one block of the BlockMask");
  typedef FlexTiles<STATIONARY, STREAMED, STREAMED_ROWS> Tiles;
  int place = 0, of_head = -1;   // in the list of `of_head`
  Tiles listed;
  const int *entry;   // address of the next place's entry in its list
  u32 loaded;   // the entry itself, loaded one tile ahead
  DEVICE void skip_hidden(const Params &p, const StationaryTile &stationary, const StreamedTiles &streamed) {
    const int b = stationary.b, first = stationary.first;
    for (; goes_on(streamed); head++, place = 0) {
      const int h = stationary.first_head(p) + head;
      const bool is_new = of_head != head;
      if (is_new) of_head = head, listed = Tiles(p.flex, LISTS, b, h, first, streamed.end);
      if (place >= listed.count) continue;
      if (is_new) entry = listed.entries(p.flex, LISTS, b, h, first, place), loaded = global_load(entry);
      tile = listed.number(loaded, place, streamed.end), is_full = listed.is_full(place);
      entry = listed.entry_behind(entry, p.flex, LISTS, b, h, first, place, streamed.end), loaded = global_load(entry);
      return;
    }
  }
#else
  DEVICE void skip_hidden(const Params &p, const StationaryTile &stationary, const StreamedTiles &streamed) {
    for (; SKIPS && goes_on(streamed); tile = streamed.first, head++) {
      const DenseMask mask(p, stationary.b, stationary.first_head(p) + head);
      if (!KEYS_STATIONARY) tile = mask.next<STATIONARY_ROWS, STREAMED_ROWS>(p, stationary.first, tile, streamed.end);
      while (KEYS_STATIONARY && tile < streamed.end &&
             !mask.has<STREAMED_ROWS, STATIONARY_ROWS>(p, 0, tile * STREAMED_ROWS, stationary.first))
        tile = tile / (BAND / STREAMED_ROWS) * (BAND / STREAMED_ROWS) + BAND / STREAMED_ROWS;
      if (tile < streamed.end) return;
    }
  }
#endif
};

struct Block {
  u32 stationary_qk[QK_IN_REGS ? D / 16 >> SPLIT_K : 1][MMA_M][4],
      stationary_vo[VO_IN_REGS ? DV / 16 >> SPLIT_K : 1][MMA_M][4];
  StationaryRows stationary;
  ScoreParams score_params;
  float qk_scale, vo_scale;   // by which the streamed operands are multiplied
  int ds_exponent[MMA_M][2];   // dS is multiplied by 2 to this power, for each stationary row; in dkdv all are equal
  int delta_exponent;   // the delta of streamed queries is multiplied by 2 to this power
  u32 shared;
  Given given;
#if FLEX_GRADIENTS && !KEYS_STATIONARY
  FlexSum sums[FLEX_SUMS];
  int first_exponent;   // dS is also multiplied by 2 to this power
#endif

  DEVICE Block(const Params &p, u32 shared, const Exponents &e) : shared(shared) {
    score_params.set_scale(p, e);
    qk_scale = power_of_two(KEYS_STATIONARY ? e.q : e.k);
    vo_scale = power_of_two(KEYS_STATIONARY ? e.dout : e.v);
  }

  template <class L> static DEVICE u32 stationary_at(int thread) {
    return L::along(L::a_operand_at(thread) + group_of(thread) * WARP_ROWS * L::ROW_BYTES,
                    SPLIT_K ? side_of(thread) * 2 : 0);
  }

  // Stores stationary rows to shared memory, and from there to registers (REG).
  template <bool REG, int W, int N>
  DEVICE void keep_stationary(u32 (&operand)[N][MMA_M][4], u32 place, const uint4 *rows, int exponent) {
    const u32 tile = shared + (REG ? QK_TILES_AT : place);
    TileCopy<THREADS, STATIONARY_ROWS, W>(threadIdx.x).store_converted(rows, tile, power_of_two(exponent));
    __syncthreads();
    if (REG) load_operand<W>(operand, tile + stationary_at<Layout<W>>(threadIdx.x));
  }

  // Starts to load a streamed tile of one head.
  template <class M> DEVICE void load(const Params &p, uint4 *staged, const u16 *x, const Strides &s,
                                      const StreamedTiles &streamed, int tile, int head, int head_dim, const M &copy,
                                      u32 target, int zero) const {
    copy.load(staged, p, streamed.of(x, s, head, zero), s, nullptr, tile * STREAMED_ROWS,
              streamed.rows - tile * STREAMED_ROWS, head_dim, target);
  }
  // Loads this thread's element of a streamed tile's LSE and delta, unchanged.
  DEVICE float load_row_value(const Params &p, const StreamedTiles &streamed, int tile, int head, int thread,
                              int zero) const {
    const int row = tile * STREAMED_ROWS + thread % STREAMED_ROWS;
    if (!KEYS_STATIONARY || thread >= LOADED_ROW_VALUES || row >= streamed.rows) return 0.f;
    return global_load((thread < STREAMED_ROWS ? p.lse : p.delta) + streamed.row_values(p, head, zero) + row);
  }
  // Converts the loaded element to the units of the scores, and stores it in shared memory. Nothing is computed right
  // after the load, so that no thread waits for it there.
  DEVICE void store_row_value(const Params &p, const StreamedTiles &streamed, float x, int tile, int head, float slope,
                              int thread, int buffer) const {
    const int row = tile * STREAMED_ROWS + thread % STREAMED_ROWS;
    const bool is_lse = thread < STREAMED_ROWS;
    if (!KEYS_STATIONARY || thread >= LOADED_ROW_VALUES) return;
    if (row >= streamed.rows) x = is_lse ? POS_INF : 0.f;
    else if (is_lse)
      x = row_lse(p, x - bias_top(p, streamed.b, streamed.head + head, row), row, -streamed.shift, slope);
    else x = times_power_of_two(-x, delta_exponent);
    shared_store(shared + ROW_VALUES_AT + buffer * STREAMED_ROWS * 8 + thread * 4, __float_as_int(x));
  }

  // Computes P of a tile of streamed rows from `seen` on, by faster code if no score of the tile is masked.
  DEVICE void recompute(Scores &S, Packed &P, const Params &p, const DenseMask &mask, const WarpRange &range,
                        bool is_full, u32 rows_at, int seen, int g, int t) {
    if (BIAS ? !(KEYS_STATIONARY ? mask.has<SCORED_ROWS, WARP_ROWS>(p, 1, seen, range.first)
                                 : mask.has<WARP_ROWS, SCORED_ROWS>(p, 1, range.first, seen))
             : range.sees_all(seen) && (!FLEX_MASK || is_full) &&
                   (!DISTANCE_IS_SUM || range.is_behind(seen) || range.is_ahead(seen)))
      recompute_probabilities<false>(S, P, given, p, mask, score_params, range, stationary, rows_at, seen, g, t);
    else recompute_probabilities<true>(S, P, given, p, mask, score_params, range, stationary, rows_at, seen, g, t);
  }
#if FLEX_GRADIENTS && !KEYS_STATIONARY
  DEVICE GivenScores scores_of(const Params &p, const WarpRange &range, int seen, int side, int g, int t) {
    return {p, score_params.rule, sums, given, ds_exponent, first_exponent, range.first + g, seen + 2 * t, side < 2};
  }
  DEVICE void write_captured() {
    UNROLLED(i, FLEX_SUMS) sums[i].write_together();
  }
#else
  DEVICE GivenScores scores_of(const Params &, const WarpRange &, int, int, int, int) const { return {}; }
  DEVICE void write_captured() const {}
#endif

  // Lines 6 to 15 of Algorithm 2: grad_qk += dS times the streamed QK operand; in dkdv also grad_vo += P times the
  // streamed VO operand.
  DEVICE void main_loop(const Params &p, const StationaryTile &stationary_tile, const StreamedTiles &streamed,
                        GradientQK &grad_qk, GradientVO &grad_vo) {
    const int b = stationary_tile.b, head = stationary_tile.first_head(p);
    const Strides &qk_strides = Operands::streamed_qk_strides(p), &vo_strides = Operands::streamed_vo_strides(p);
    const u16 *const streamed_qk = Operands::streamed_qk(p), *const streamed_vo = Operands::streamed_vo(p);
    Walk walk(p, stationary_tile, streamed);
    const int &tile = walk.tile, &this_head = walk.head;
    int steps = SKIPS ? walk.goes_on(streamed) : max(streamed.end - streamed.first, 0) * streamed.heads;
    uint4 staged[larger(CopyStreamedQK::N, CopyStreamedVO::N)];   // the QK and the VO tile take turns
    float row_value;   // of LSE or delta
    if (steps) {
      load(p, staged, streamed_qk, qk_strides, streamed, tile, this_head, p.head_dim, CopyStreamedQK(threadIdx.x),
           shared + QK_TILES_AT, 0);
      row_value = load_row_value(p, streamed, tile, this_head, threadIdx.x, 0);
      CopyStreamedQK(threadIdx.x).store(staged, shared + QK_TILES_AT, qk_scale);
      store_row_value(p, streamed, row_value, tile, this_head, position_slope(p, b, head + this_head), threadIdx.x, 0);
    }
    __syncthreads();
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      // `zero` is 0, but the compiler does not know. So it computes everything that depends on the thread's number
      // again in each turn, and keeps none of it in registers.
      const int zero = step & p.zero, thread = threadIdx.x + zero, g = thread >> 2 & 7, t = thread & 3;
      // Likewise for the addresses of streamed rows, if they would take too many registers.
      const int anew = D > 64 && D < 128 ? zero : 0;
      const int buffer = step & 1, next_buffer = buffer ^ 1;
      const int side = side_of(thread), half = EXCHANGES ? side & 1 : 0, first = tile * STREAMED_ROWS,
                seen = first + half * SCORED_ROWS;
      const u32 qk_tile = shared + QK_TILES_AT + buffer * QK_TILE_BYTES +
                          half * (SPLIT_N ? SCORED_ROWS : 0) * LayoutQK::ROW_BYTES,
                vo_tile = shared + VO_TILE_AT + half * (SPLIT_N ? SCORED_ROWS : 0) * LayoutVO::ROW_BYTES;
      // Addresses such that this warp's half of the streamed rows comes first.
      const int row_thread = SPLIT_K ? thread ^ half << 4 : thread,
                transposed_thread = SPLIT_K ? thread ^ half << 3 : thread;
      const u32 qk_at = LayoutQK::along(qk_tile + LayoutQK::b_operand_at(row_thread), SPLIT_K ? side * 2 : 0),
                vo_at = LayoutVO::along(vo_tile + LayoutVO::b_operand_at(row_thread), SPLIT_K ? side * 2 : 0);
      // Addresses for accumulate().
      const u32 qk_transposed = LayoutQK::along(
          qk_tile + (MMA_K16 ? LayoutQK::a_operand_at(transposed_thread) : LayoutQK::b_operand_at(row_thread)),
          side * 2);
      const u32 vo_transposed = LayoutVO::along(
          vo_tile + (MMA_K16 ? LayoutVO::a_operand_at(transposed_thread) : LayoutVO::b_operand_at(row_thread)),
          side * 2);
      const u32 rows_at = shared + ROW_VALUES_AT + buffer * STREAMED_ROWS * 8 + half * SCORED_ROWS * 4 + t * 8;
      const WarpRange range =
          warp_range(p, stationary_tile.first + group_of(thread) * WARP_ROWS, streamed.shift, streamed.rows, zero);
      // Whether this warp computes the tile. Without a mask it is always true, as `zero == 0` is. The compiler does not
      // know that, and so does not move operands between the two halves of this loop, which lack registers.
      const bool sees = !LOCAL || range.sees_some(first) || (EXCHANGES && range.sees_some(first + SCORED_ROWS));
      const DenseMask mask(p, b, head + this_head);
#if FLEX
      const Sight sight = see(p, range, b, head + this_head, walk.is_full, first, STREAMED_ROWS);
      const bool is_full = sight.all, active = FLEX_SKIPS ? sight.some : !(KEYS_STATIONARY || D > 128) || zero == 0;
#else
      const bool is_full = false, active = !LOCAL && (KEYS_STATIONARY || D > 128) ? zero == 0 : sees;
#endif
      load(p, staged, streamed_vo, vo_strides, streamed, tile, this_head, p.head_dim_v, CopyStreamedVO(thread),
           shared + VO_TILE_AT, anew);
      Scores S;
      Packed P;
      float dP[AT_ONCE][MMA_M][4];
      u32 dS[AT_ONCE][MMA_M][2];
      score_params.set_head(p, b, head + this_head);
      const auto recompute = [&] {
        this->recompute(S, P, p, mask, range, is_full, rows_at, seen, g, t);
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
      walk.advance(p, stationary_tile, streamed);
      if (SKIPS) steps = step + 1 + walk.goes_on(streamed);
      const bool last = step + 1 == steps;
      if (!last) {
        load(p, staged, streamed_qk, qk_strides, streamed, tile, this_head, p.head_dim, CopyStreamedQK(thread),
             shared + QK_TILES_AT + next_buffer * QK_TILE_BYTES, anew);
        row_value = load_row_value(p, streamed, tile, this_head, thread, anew);
      }
      if (active) {
        if (SPLIT_K) add_partial_scores(S, partials_at(shared, true, buffer, thread), side), recompute();
        if (KEYS_STATIONARY && !SPLIT_K) accumulate<MMA_N>(grad_vo, P, vo_transposed);
        if (KEYS_STATIONARY && SPLIT_N)
          accumulate_exchanged(grad_vo, P, exchange_at(shared, 0, thread, side ^ 1), vo_transposed, half);
#pragma unroll
        for (int n = 0; n < MMA_N; n += AT_ONCE) {
          start_dp(dP, stationary, rows_at + n * 32);
          product<VO_IN_REGS, DV, AT_ONCE>(dP, stationary_vo,
                                           shared + STATIONARY_VO_AT + stationary_at<LayoutVO>(thread), vo_at, n);
          if (SPLIT_K) store_partial_scores(dP, partials_at(shared, false, buffer, thread), side);
          else
            compute_ds(dS, S + n, dP, stationary, rows_at + n * 32, p.dropout_scale, ds_exponent,
                       scores_of(p, range, seen, side, g, t), n);
          if (SPLIT_N) store_half(dS, exchange_at(shared, KEYS_STATIONARY, thread, side));
          if (!SPLIT_K) accumulate<AT_ONCE>(grad_qk, dS, qk_transposed, n);
        }
      }
      if (SPLIT_K) {
        __syncthreads();
        if (active) {
          if (KEYS_STATIONARY)
            accumulate_exchanged(grad_vo, P, exchange_at(shared, 0, thread, side ^ 1), vo_transposed, half);
          add_partial_scores(dP, partials_at(shared, false, buffer, thread), side);
          compute_ds(dS, S, dP, stationary, rows_at, p.dropout_scale, ds_exponent,
                     scores_of(p, range, seen, side, g, t));
          store_half(dS, exchange_at(shared, KEYS_STATIONARY, thread, side));
        }
      }
      if (EXCHANGES) {
        __syncthreads();
        if (active)
          accumulate_exchanged(grad_qk, dS, exchange_at(shared, KEYS_STATIONARY, thread, side ^ 1), qk_transposed,
                               half);
      }
      if (!last) {
        CopyStreamedQK(thread).store(staged, shared + QK_TILES_AT + next_buffer * QK_TILE_BYTES, qk_scale);
        store_row_value(p, streamed, row_value, tile, this_head, position_slope(p, b, head + this_head), thread,
                        next_buffer);
      }
      __syncthreads();
    }
  }

  // Writes a gradient times `scale` and 2^exponent to its rows, through shared memory. The power is applied in two
  // factors, since 2^exponent may be no float.
  template <int C> DEVICE void write(float (&c)[C][MMA_M][4], int exponent, float scale, u16 *out, int row_stride,
                                     int rows, int head_dim, bool of_dS) const {
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
    const int place = first_row + (ROLES ? side_of(threadIdx.x) * STATIONARY_ROWS : 0);
    write_rows<CHANNEL_WARPS>(c, factor, shared + place * larger(LayoutQK::ROW_BYTES, LayoutVO::ROW_BYTES), first_row,
                              out, row_stride, rows, head_dim, ROLES ? 0 : side_of(threadIdx.x));
  }
};

// Writes NaN to the gradients of rows for which there is no block, since the caller's max_seqlen was too small. Blocks
// without a sequence do that.
DEVICE void mark_missing(const Params &p, u16 *x, const Strides &s, int head_dim, const StationaryTile &tile) {
  const int splits = Operands::splits(p);
  for_missing_rows(p, Operands::stationary_starts(p), Operands::stationary_total(p), p.tiles * STATIONARY_ROWS,
                   tile.tile * splits + tile.split, tile.tiles * splits, [&](int, int first, int rows) {
                     write_nan(x + (i64)first * s.row + (i64)tile.head * s.head, s.row, rows, head_dim);
                   });
}

// Writes gradients of 0 to tokens outside of all sequences (b = batch), and to this sequence's slots without a key: the
// rows [first, end) and [behind, last). The blocks of a head share these rows.
DEVICE void clear_unused(const Params &p, u16 *x, const Strides &s, int head_dim, const StationaryTile &tile) {
  const int b = tile.b, *starts = Operands::stationary_starts(p), total = Operands::stationary_total(p);
  int first = 0, end = tile.seq.first_k, behind = end + tile.seq.seqlen_k, last = p.seqlen_k;
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
  const int splits = Operands::splits(p);
  for (int i = tile.tile * splits + tile.split; i < rows; i += tile.tiles * splits) {
    u16 *row = x + b * (starts ? 0 : s.batch) + (i64)(i < before ? first + i : behind + i - before) * s.row +
               (i64)tile.head * s.head;
    for (int c = threadIdx.x; c < head_dim; c += THREADS) global_store2(row + c, 0);
  }
}
