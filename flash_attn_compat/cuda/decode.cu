// Attention of few query rows over many keys, as in decoding. Most of the time goes into reading every key and value
// once, so as many blocks as the GPU can run read them. APPEND: the call has new keys. The kernel rotates Q as it loads
// it, and writes the new keys into the cache. It reads new keys from the caller's tensor if they have 16 bits and are
// not rotated, so that no block has to wait for the cache.
//
// A row is one query of one head; the query heads that share a key head are rows of the same tile, of 16 rows. Several
// blocks share a tile's keys (FlashDecoding: Dao, Haziza, Massa, Sizov, 2023), and the warps of a block take KEYS keys
// at a time. K and V are not copied to shared memory: a lane's 16-byte loads already have the layout that mma needs. In
// the end each block merges the results of its warps, and the last block of a tile merges those of its splits.
#include "append.cuh"
#include "decode.cuh"

// How many keys a warp takes at once: a group, or two groups of 8-bit keys; and the same in blocks of 8 keys.
constexpr int GROUP = W == 256 ? 8 : 16, KEYS = CACHE ? 2 * GROUP : GROUP, MMA_N = KEYS / 8;
constexpr int PIECES = W / 32;   // a piece is 32 channels of K
constexpr int LANE = CACHE ? 16 : 8, LOADS = W / 4 / LANE;   // channels that a lane loads of K at once; how many loads
typedef float Scores[MMA_N][1][4], Result[CHUNKS][1][4];
typedef Layout<W> LayoutQ;   // of Q in shared memory
constexpr bool CONVERTS = TYPE == 2 && !CACHE;   // whether K and V are converted from bf16 to fp16
constexpr bool Q_IN_REGISTERS = W == 64 || (W == 128 && !CONVERTS);

// ---- Loads of keys and values

// New keys are read from the caller's tensor, unless they are rotated or quantised. Otherwise they are read from the
// cache, after they were written; likewise for the widest heads, for which the kernel has no registers left.
constexpr bool READS_NEW = APPEND && !CACHE && D <= 256;
DEVICE bool reads_new(const Params &p) { return READS_NEW && !p.rotary_dim; }

// Where the keys (or the values) of one head of a sequence are: in its cache; new ones in the caller's tensor, `fresh`.
struct Source {
  const Cached *cache, *fresh;
  const Strides &s;
  int fresh_row;   // elements between rows of fresh
  DEVICE Source(const u16 *x, const Strides &s, const u16 *x_new, const Strides &new_s, int b, int head, int channel)
        : cache((const Cached *)x + (PAGED ? 0 : b * s.batch) + (i64)head * s.head + channel),
          fresh(READS_NEW ? (const Cached *)(row_at(x_new, new_s, b, 0, head) + channel) : nullptr), s(s),
          fresh_row(new_s.row) {}
};

// Finds the addresses of the keys of one step. With pages, each lane looks up one key. If all keys of a group are
// neighbours in one page, the first key's address gives the others; if not, lanes exchange addresses by shuffles.
struct KeySlots {
  int start, first_new;   // the step's first slot; the first slot that is read from Source::fresh
  // Returns `row`, the address of the step's key i in the cache, or its address in `fresh` if the key is new.
  DEVICE const Cached *or_fresh(const Cached *row, const Source &x, int i) const {
    const int fresh = start + i - first_new;
    return READS_NEW && fresh >= 0 ? x.fresh + (i64)fresh * x.fresh_row : row;
  }
#if PAGED
  int page, within, first;   // page: clamped only when it is used, so that nothing waits for its load before
  bool neighbours;
  DEVICE void find(const Params &p, const int *pages, int slot, int last_slot) {
    const int lane = threadIdx.x & (KEYS - 1);
    const u32 mine = min(slot + lane, last_slot), column = mine / (u32)p.page_size;
    within = mine - column * p.page_size;
    page = global_load(pages + min(column, (u32)(p.pages_per_sequence - 1)));
    neighbours = slot % GROUP == 0 && p.page_size % GROUP == 0 && slot + KEYS - 1 <= last_slot;
    first = within - lane, start = slot;
  }
  DEVICE const Cached *at(const Params &p, const Source &x, int page, int within) const {
    return x.cache + (i64)min((u32)page, (u32)(p.num_pages - 1)) * x.s.batch + (i64)within * x.s.row;
  }
  DEVICE const Cached *row_of_neighbours(const Params &p, const Source &x, int i) const {
    return CACHE ? row(p, x, i) : at(p, x, page, first);
  }
  DEVICE const Cached *row(const Params &p, const Source &x, int i) const {
    return or_fresh(at(p, x, __shfl_sync(ALL_LANES, page, i), __shfl_sync(ALL_LANES, within, i)), x, i);
  }
#else
  static constexpr bool neighbours = true;
  DEVICE void find(const Params &p, const int *pages, int slot, int last_slot) { start = slot; }
  DEVICE const Cached *row_of_neighbours(const Params &p, const Source &x, int i) const { return row(p, x, i); }
  DEVICE const Cached *row(const Params &p, const Source &x, int i) const {
    return or_fresh(x.cache + (i64)(start + i) * x.s.row, x, i);
  }
#endif
};

// The K of a step. Lane 4 g + t holds of key 8 n + g the channels 32 c + 8 t to 32 c + 8 t + 7; of 8-bit keys the
// channels 64 c + 16 t to 64 c + 16 t + 15. Each mma step takes two channels of each lane. Channels may be summed up in
// any order, as long as Q has the same order.
struct KeyTile {
  uint4 x[MMA_N][LOADS];
  template <bool WHOLE>
  DEVICE void load(const Params &p, const Source &from, const KeySlots &slots, int left, int head_dim) {
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    const Cached *start = slots.row_of_neighbours(p, from, 0);
    const Cached *second = CACHE && WHOLE ? slots.row_of_neighbours(p, from, GROUP) : nullptr;
    UNROLLED(n, MMA_N) {
      const int i = n * 8 + g;
      const Cached *near = (n * 8 < GROUP ? start : second) + (i64)(n * 8 % GROUP + g) * from.s.row,
                   *row = (PAGED && WHOLE ? slots.or_fresh(near, from, i) : slots.row(p, from, i)) + t * LANE;
      UNROLLED(c, LOADS) {
        const int channels = head_dim - t * LANE - c * 4 * LANE;
        x[n][c] =
            WHOLE ? load_lane(row + c * 4 * LANE, channels) : load_lane_if(i < left, row + c * 4 * LANE, channels);
      }
    }
  }
#if CACHE   // the operands of channels 0 to 7 are the pairs 0 and 2, 1 and 3, 4 and 6, 5 and 7
  DEVICE u32 operand(int n, int c, int w) const {
    const u32 four = word(x[n][c / 2], c % 2 * 2 + w / 2);
    return loud(w % 2 ? odd_bytes(four) : even_bytes(four));
  }
#else
  DEVICE u32 operand(int n, int c, int w) const { return word(x[n][c], w); }
#endif
};

#if CACHE
// The V of a step. Lane 4 g + t holds of keys 8 n + 2 t and 8 n + 2 t + 1 the 8 channels from value_channel(h, g) on.
struct ValueTile {
  uint2 x[MMA_N][SLABS][2];
  template <bool WHOLE>
  DEVICE void load(const Params &p, const Source &from, const KeySlots &slots, int left, int head_dim) {
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    const Cached *start = slots.row_of_neighbours(p, from, 0);
    const Cached *second = CACHE && WHOLE ? slots.row_of_neighbours(p, from, GROUP) : nullptr;
    UNROLLED(n, MMA_N)
      UNROLLED(e, 2) {
        const int i = n * 8 + 2 * t + e, rest = WHOLE || i < left ? head_dim - value_channel(0, g) : 0;
        const Cached *row =
            (PAGED && WHOLE ? (n * 8 < GROUP ? start : second) + (i64)(i - n * 8 / GROUP * GROUP) * from.s.row
                            : slots.row(p, from, i)) +
            value_channel(0, g);
#pragma unroll
        for (int h = 0; h < SLABS; h += TOGETHER) {
          const int channels = WHOLE ? 16 : rest - h * 64;
          if (TOGETHER == 1) x[n][h][e] = load_eight(row + h * 64, channels);
          else {
            const uint4 both = load_sixteen(row + h * 64, channels);
            x[n][h][e] = make_uint2(both.x, both.y), x[n][h + 1][e] = make_uint2(both.z, both.w);
          }
        }
      }
  }
  DEVICE u32 operand(int n, int h, int i) const {   // the lane's two keys of channel i
    const u32 a = i < 4 ? x[n][h][0].x : x[n][h][0].y, b = i < 4 ? x[n][h][1].x : x[n][h][1].y;
    const u32 two = __byte_perm(a, b, i % 4 / 2 ? 0x7632 : 0x5410);
    return loud(i % 2 ? odd_bytes(two) : even_bytes(two));
  }
};
#else
// The V of a step. Lane 4 g + t holds of keys 8 n + 2 t and 8 n + 2 t + 1 the channels 64 h + 8 g to 64 h + 8 g + 7.
struct ValueTile {
  uint4 x[MMA_N][SLABS][2];
  template <bool WHOLE>
  DEVICE void load(const Params &p, const Source &from, const KeySlots &slots, int left, int head_dim) {
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    const u16 *start = slots.row_of_neighbours(p, from, 0);
    UNROLLED(n, MMA_N)
      UNROLLED(e, 2) {
        const int i = n * 8 + 2 * t + e;
        const u16 *near = start + (i64)i * from.s.row,
                  *row = (PAGED && WHOLE ? slots.or_fresh(near, from, i) : slots.row(p, from, i)) + g * 8;
        UNROLLED(h, SLABS) {
          const int channels = head_dim - g * 8 - h * 64;
          x[n][h][e] = WHOLE ? load_chunk(row + h * 64, channels) : load_chunk_if(i < left, row + h * 64, channels);
        }
      }
  }
  DEVICE u32 operand(int n, int h, int i) const {
    return __byte_perm(word(x[n][h][0], i / 2), word(x[n][h][1], i / 2), i % 2 ? 0x7632 : 0x5410);
  }
};
#endif

// Loads a tile of which `left` keys exist; the others become 0.
template <class T>
DEVICE void load(const Params &p, T &tile, const Source &from, const KeySlots &slots, int left, int head_dim) {
  if (left >= KEYS && head_dim >= W && slots.neighbours) tile.template load<true>(p, from, slots, left, head_dim);
  else tile.template load<false>(p, from, slots, left, head_dim);
}

// Converts bf16 to fp16, scaled by a power of two so that nothing overflows and small numbers keep their bits. The keys
// of a step, its values, and each row of Q are scaled separately; LANES lanes share a scale. Returns the inverse of the
// scale. The accumulators are fp32 and unscaled.
template <int LANES, int N>
DEVICE float convert_all(uint4 (&x)[N]) {
  if (TYPE != 2) return 1.f;
  const float scale = scale_for(max_of<LANES>(finite_magnitude(x)));
  UNROLLED(i, N) x[i] = convert(x[i], scale);
  return inverse_of_power(scale);
}

// ---- One step of Algorithm 1 (forward.cu) for a warp's KEYS keys

// S = Q K^T for rows g and g + 8 of the tile
DEVICE void compute_scores(Scores &S, const uint4 (*q)[PIECES], u32 q_at, const KeyTile &k) {
  set_zero(S);
  UNROLLED(c, PIECES) {
    const u32 at = LayoutQ::along(q_at, c * 4);
    const uint4 a = Q_IN_REGISTERS ? q[0][c] : shared_load4(at),
                b = Q_IN_REGISTERS ? q[1][c] : shared_load4(at + 8 * LayoutQ::ROW_BYTES);
    UNROLLED(w, 4)
      UNROLLED(n, MMA_N) mma_k8(S[n][0], word(a, w), word(b, w), k.operand(n, c, w));
  }
  if (CACHE == 4)
    UNROLLED(n, MMA_N)
      UNROLLED(e, 4) S[n][0][e] = real_or_nan(S[n][0][e]);
}

// Describes a lane's two rows to change_scores() and hide_scores().
struct QueryRows {
  MaskRange<ROWS, KEYS> range;   // of the block's keys
  int at[2];   // the rows' positions
  float scale[2];   // by which the products q k are multiplied first
  ScoreRule rules[2];   // for the scaled scores
  DEVICE int row(int m, int r) const { return 0; }
  DEVICE int position(int m, int r) const { return at[r]; }
  DEVICE const ScoreRule &rule(int m, int r) const { return rules[r]; }
  DEVICE VisibleRows visible(int m, int r, int from) const {
    return range.visible(at[r] - from, range.streamed - 1 - from);
  }
};

DEVICE void apply_scale(Scores &S, const QueryRows &rows, float key_unit) {
  UNROLLED(n, MMA_N)
    UNROLLED(e, 4) S[n][0][e] *= (CONVERTS ? key_unit : 1.f) * rows.scale[e >> 1];
}

// O += P V. O[8 h + i] holds channels value_channel(h, 2 t) + i (elements 0 and 2) and value_channel(h, 2 t + 1) + i.
DEVICE void accumulate(Result &O, const Scores &P, const ValueTile &v, float value_unit) {
  u32 a[MMA_N][2];
  UNROLLED(n, MMA_N) a[n][0] = pack(P[n][0][0], P[n][0][1]), a[n][1] = pack(P[n][0][2], P[n][0][3]);
  UNROLLED(h, SLABS)
    UNROLLED(i, 8) {
      float zeros[4] = {0.f, 0.f, 0.f, 0.f};
      float (&o)[4] = CONVERTS ? zeros : O[h * 8 + i][0];
      UNROLLED(n, MMA_N) mma_k8(o, a[n][0], a[n][1], v.operand(n, h, i));
      if (CONVERTS)
        UNROLLED(e, 4) O[h * 8 + i][0][e] = fmaf(o[e], value_unit, O[h * 8 + i][0][e]);
    }
}

// ---- Rows of Q: lane 4 g + t holds the channels 32 c + 8 t to 32 c + 8 t + 7 of rows g and g + 8. Over an 8-bit cache
// it holds those channels that it holds of K.
DEVICE constexpr int piece_at(int c) { return CACHE ? c / 2 * 64 + c % 2 * 8 : c * 32; }
DEVICE uint4 apart(const uint4 &x) {
  return make_uint4(__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632), __byte_perm(x.z, x.w, 0x5410),
                    __byte_perm(x.z, x.w, 0x7632));
}
DEVICE void load_rows(const Params &p, const RowTile &tile, uint4 (&q)[2][PIECES], QueryRows &rows, float scale,
                      int first) {   // first: the warp's first channel
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3, mine = first + t * LANE;
  UNROLLED(r, 2) {
    const int query = tile.query(p, g + r * 8), head = tile.head(p, g + r * 8);
    const u16 *row =
        p.q + tile.sequence * p.q_s.batch + (i64)(tile.seq.first_q + query) * p.q_s.row + (i64)head * p.q_s.head;
    UNROLLED(c, PIECES) q[r][c] = load_chunk_if(true, row + mine + piece_at(c), p.head_dim - mine - piece_at(c));
    if (APPEND && p.rotary_dim) {
      Rotation rotations[PIECES];
      UNROLLED(c, PIECES)
        rotations[c].load(p, row, mine / 8 + piece_at(c) / 8, query_position(p, tile.sequence, query));
      UNROLLED(c, PIECES) q[r][c] = rotations[c].of(p, q[r][c]);
    }
    rows.scale[r] = scale * convert_all<4>(q[r]);
    if (CACHE)
      UNROLLED(c, PIECES) q[r][c] = apart(q[r][c]);
    rows.rules[r].set_scale(p, 1.f, LOG2E), rows.rules[r].set_head(p, tile.sequence, head);
  }
}

// Writes all new keys of a tile's sequence and key head.
template <bool MAY_ROTATE> DEVICE void append_new(const Params &p, const RowTile &tile) {
  const int pieces = new_pieces(p);
  for (int i = threadIdx.x; i < p.seqlen_new * pieces; i += THREADS)
    append_piece<MAY_ROTATE>(p, tile.sequence, i / pieces, tile.head_k, i % pieces);
}

KERNEL(THREADS, MIN_BLOCKS) decode(const Params p) {
  SHARED_MEMORY
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
  // The first splits of all tiles start first. If keys are few, the blocks that get none of them then start last.
  const int tile_count = gridDim.x / p.splits, tile_index = blockIdx.x % tile_count, split = blockIdx.x / tile_count,
            head_index = tile_index / p.tiles;
  RowTile tile;
  tile.sequence = head_index / p.nheads_k, tile.head_k = head_index % p.nheads_k;
  tile.first = tile_index % p.tiles * ROWS;
  if (tile.sequence == p.batch) {
    const int part = tile_index % p.tiles * p.splits + split, parts = p.tiles * p.splits;
    for (int i = 0; i < p.group; i++) {
      clear_outside(p, tile.head_k * p.group + i, part, parts);
      mark_missing_rows(p, tile.head_k * p.group + i, (p.tiles * ROWS - i + p.group - 1) / p.group, part, parts);
    }
    return;
  }
  const Sequence seq = tile.seq = find_sequence(p, tile.sequence);
  tile.rows = seq.seqlen_q * p.group;
  if (tile.first >= tile.rows || lacks_mask(p, seq.seqlen_q)) return;

  // The keys that the tile's rows see, and this block's share of them.
  const int offset = seq.seqlen_k - seq.seqlen_q;
  MaskRange<ROWS, KEYS> range = MaskRange<ROWS, KEYS>::of(p, 0, offset, seq.seqlen_k);
  const Range seen = range.seen_by(tile.query(p, 0), tile.query(p, ROWS - 1) + 1);
  const int unit_keys = WARP_GROUPS * KEYS, group = warp / SPLIT_WARPS, side = warp % SPLIT_WARPS;
  const SplitRange share(p, seen, unit_keys, split);
  const int splits = share.splits, first = share.keys.first, end = share.keys.end;
  if (split >= splits) return;

  // A block that sees a new key, and has to read it from the cache, first writes it there. The last split of every tile
  // always writes the new keys, because otherwise nobody might: perhaps no row sees them. Several blocks may write the
  // same numbers.
  const bool is_last_share = split == splits - 1;
  const int first_new = APPEND ? first_new_slot(p, tile.sequence) : UNBOUNDED;
  if (APPEND && !reads_new(p) && (is_last_share || seq.first_k + end > first_new)) {
    append_new<true>(p, tile);
    __syncthreads();
  }
  const u32 shared = SHARED_BASE, q_at = shared + (side * ROWS + g) * LayoutQ::ROW_BYTES + ((t ^ (g & 1) << 2) << 4);
  const Source k(p.k, p.k_s, p.k_new, p.k_new_s, tile.sequence, tile.head_k, side * W),
      v(p.v, p.v_s, p.v_new, p.v_new_s, tile.sequence, tile.head_k, side * W);
  const int *pages = PAGED ? p.block_table + (i64)tile.sequence * p.table_stride : nullptr;

  QueryRows rows;
  uint4 q[2][PIECES];
  const float scale = p.softmax_scale * key_unit(p, tile.sequence, tile.head_k, LOUD_UNIT);
  load_rows(p, tile, q, rows, scale, side * W);
  rows.at[0] = tile.query(p, g) + offset, rows.at[1] = tile.query(p, g + 8) + offset;
  rows.range = range, rows.range.streamed = end;
  if (!Q_IN_REGISTERS) {
    if (group == 0)
      UNROLLED(c, PIECES)
        UNROLLED(r, 2) shared_store(LayoutQ::along(q_at, c * 4) + r * 8 * LayoutQ::ROW_BYTES, q[r][c]);
    __syncthreads();
  }
  // If only softmax_scale changes scores, their maximum is found unscaled, and exp2's multiply-add scales them.
  const bool modified = CHANGES || TYPE == 2 || !(scale > 0.f);
  const float unit = modified ? 1.f : scale * LOG2E;

  const DenseMask mask(p, tile.sequence, 0);   // unused, since this kernel takes no dense mask
  Result O;
  set_zero(O);
  float m[1][2] = {{NEG_INF, NEG_INF}}, l[1][2] = {{0.f, 0.f}};
  KeySlots slots, next_slots;
  slots.first_new = next_slots.first_new = reads_new(p) ? first_new : UNBOUNDED;
  KeyTile key_tile;
  ValueTile value_tile;
  const int last_slot = seq.first_k + end - 1;
  // The first step only loads and computes nothing, so that the code of the loads exists only once.
  const int begin = first + group * KEYS;
  int key = begin - unit_keys, buffer = 0;
  const int stop = SPLIT_K ? end + group * KEYS : end;   // SPLIT_K: all warps must take equally many steps
  const int k_channels = p.head_dim - side * W, v_channels = p.head_dim_v - side * W;
  if (begin < stop) slots.find(p, pages, seq.first_k + begin, last_slot);
#pragma unroll 1
  for (; key < stop; key += unit_keys) {
    const bool computes = key >= begin;
    const int next = key + unit_keys;
    next_slots.find(p, pages, seq.first_k + next + unit_keys, last_slot);   // page numbers arrive during this step
    Scores S;
#if CACHE
    const float k_unit = 1.f, v_unit = 1.f;
#else
    const float k_unit = computes ? convert_all<32>(reinterpret_cast<uint4(&)[MMA_N * PIECES]>(key_tile.x)) : 1.f;
#endif
    if (computes) compute_scores(S, q, q_at, key_tile);
    if (next < stop) load(p, key_tile, k, slots, end - next, k_channels);
    if (computes) {
      if (modified) apply_scale(S, rows, k_unit);
      if (SPLIT_K) {
        const u32 partials_at = shared + SHARES + buffer + (group * SPLIT_WARPS * MMA_N * 32 + lane) * 16;
        UNROLLED(n, MMA_N) store_partial(S[n][0], partials_at + (side * MMA_N + n) * 512);
        __syncthreads();
        UNROLLED(n, MMA_N) add_partial(S[n][0], partials_at + ((side ^ 1) * MMA_N + n) * 512);
        buffer ^= WARPS * MMA_N * 512;
      }
      if (modified) change_scores(S, p, mask, false, rows, key, t);
      if (LOCAL || key + KEYS > end) hide_scores(S, p, mask, rows, key, t);
      online_softmax<0>(S, m, l, O, unit);
#if !CACHE
      const float v_unit = convert_all<32>(reinterpret_cast<uint4(&)[MMA_N * SLABS * 2]>(value_tile.x));
#endif
      accumulate(O, S, value_tile, v_unit);
    }
    if (next < stop) load(p, value_tile, v, slots, end - next, v_channels);
    // Here no block reads the new keys from the cache, so they are written now, while the loads above are on their way.
    if (!computes && reads_new(p) && is_last_share && tile.first == 0) append_new<false>(p, tile);
    slots = next_slots;
  }

  const i64 first_part = (i64)tile_index * p.splits;
  combine_warps(p, tile, O, m[0], l[0], unit, shared, splits, first_part + split);
  if (splits > 1 && is_last(p, tile_index, splits)) combine_splits(p, tile, shared, splits, first_part);
}
