// How the decode kernel merges results: those of a block's warps through shared memory, those of a tile's splits
// through global memory.
#pragma once
#include "splits.cuh"

constexpr int WARPS = 4, THREADS = WARPS * 32, ROWS = 16, MAX_SPLITS = 256;
// SPLIT_K: two warps take the same keys and half of the channels each, and add up their partial scores.
constexpr int SPLIT_WARPS = 1 << SPLIT_K, WARP_GROUPS = WARPS / SPLIT_WARPS, W = D / SPLIT_WARPS, CHUNKS = W / 8;
constexpr int LOADED_TOGETHER = 8;   // how many splits are loaded together when they are merged
// Floats that a split stores: its result, then for each row the maximum in units of log2, and the sum.
constexpr int PART = ROWS * (D + 2);
constexpr int SLABS = W / 64;   // a slab is 64 channels of V and of the result
// value_channel(h, g): the first channel of slab h that the lanes 4 g to 4 g + 3 hold. From an 8-bit cache a lane loads
// 16 neighbouring channels at once, for two slabs, if there are two (TOGETHER).
constexpr int TOGETHER = CACHE && SLABS % 2 == 0 ? 2 : 1;
DEVICE constexpr int value_channel(int h, int g) {
  return h / TOGETHER * TOGETHER * 64 + g * TOGETHER * 8 + h % TOGETHER * 8;
}
// Shared memory holds the warps' results of one slab, then their maxima and sums, then 1 / sum of each row. Before
// that, the first part holds Q, and with SPLIT_K the rest holds partial scores, twice. Afterwards the first part holds
// the weights of the splits.
constexpr u32 SHARES = WARPS * ROWS * 64 * 4, STATISTICS_AT = SHARES, FACTORS_AT = STATISTICS_AT + WARPS * ROWS * 8;

// The rows of a block: row i is query i / group of head i % group.
struct RowTile {
  int sequence, head_k, first, rows;   // rows: how many all tiles of this sequence and key head have together
  Sequence seq;
  DEVICE int count() const { return min(ROWS, rows - first); }
  DEVICE int row(int i) const { return min(first + i, rows - 1); }
  DEVICE int query(const Params &p, int i) const { return row(i) / p.group; }
  DEVICE int head(const Params &p, int i) const { return head_k * p.group + row(i) % p.group; }
};

DEVICE void write_out(const Params &p, const RowTile &tile, int row, int channel, float4 x, float factor) {
  const int channels = p.head_dim_v - channel;
  if (channels <= 0) return;
  u16 *out = p.out + tile.sequence * p.out_s.batch + (i64)(tile.seq.first_q + tile.query(p, row)) * p.out_s.row +
             (i64)tile.head(p, row) * p.out_s.head + channel;
#if CACHE
  x = make_float4(real_or_nan(x.x), real_or_nan(x.y), real_or_nan(x.z), real_or_nan(x.w));
  factor *= value_unit(p, tile.sequence, tile.head_k, LOUD_UNIT);
#endif
  const uint2 bits = make_uint2(pack_out(x.x * factor, x.y * factor), pack_out(x.z * factor, x.w * factor));
  if (VEC == 8) return global_store((uint2 *)out, bits);
  const u32 pairs[2] = {bits.x, bits.y};
  UNROLLED(i, 4)
    if (i < channels) global_store2(out + i, (u16)(pairs[i / 2] >> (i % 2 * 16)));
}

DEVICE void write_lse(const Params &p, const RowTile &tile, int row, float m, float l) {
  if (!p.lse) return;
  const int head = tile.head(p, row), query = tile.query(p, row);
  const float slope = ALIBI ? alibi_slope(p, tile.sequence, head) : 0.f;
  const i64 at = tile.sequence * p.lse_batch + head * p.lse_head + tile.seq.first_q + query;
  write_lse(p, at, m, l, slope, query + tile.seq.seqlen_k - tile.seq.seqlen_q);
}

DEVICE void add_weighted(float4 &sum, float weight, const float4 &x) {
  sum.x += weight * x.x, sum.y += weight * x.y, sum.z += weight * x.z, sum.w += weight * x.w;
}

// Returns where in shared memory a warp stores four channels of a row. The XOR avoids bank conflicts.
DEVICE u32 share_at(u32 shared, int warp, int row, int quad) {
  return shared + ((warp * ROWS + row) * 16 + (quad ^ row)) * 16;
}

// Merges the results of the block's warps. If the tile has one split it writes them, else it stores them for the block
// that finishes last.
DEVICE void combine_warps(const Params &p, const RowTile &tile, float (&O)[CHUNKS][1][4], float (&m)[2], float (&l)[2],
                          float unit, u32 shared, int splits, i64 part) {
  const int thread = threadIdx.x, warp = thread >> 5, g = (thread & 31) >> 2, t = thread & 3;
  UNROLLED(r, 2) l[r] = sum_of<4>(l[r]);
  UNROLLED(h, SLABS) {
    __syncthreads();
    UNROLLED(r, 2) {
      const int row = g + r * 8;
      const u32 statistics = shared + STATISTICS_AT + (warp * ROWS + row) * 8;
      if (h == 0 && t == 0)
        shared_store_float(statistics, m[r] == NEG_INF ? NEG_INF : m[r] * unit),
            shared_store_float(statistics + 4, l[r]);
      UNROLLED(e, 2)
#pragma unroll
        for (int i = 0; i < 8; i += 4)
          shared_store_float4(share_at(shared, warp, row, 4 * t + 2 * e + i / 4),
                              make_float4(O[h * 8 + i][0][2 * r + e], O[h * 8 + i + 1][0][2 * r + e],
                                          O[h * 8 + i + 2][0][2 * r + e], O[h * 8 + i + 3][0][2 * r + e]));
    }
    __syncthreads();
#pragma unroll 1
    for (int i = thread; i < tile.count() * 16 * SPLIT_WARPS; i += THREADS) {
      const int row = i / 16 / SPLIT_WARPS, side = i / 16 % SPLIT_WARPS, quad = i % 16,
                channel = side * W + (TOGETHER == 1 ? h * 64 + quad * 4 : value_channel(h, quad / 2) + quad % 2 * 4);
      float statistics[WARP_GROUPS][2], highest = NEG_INF, sum = 0.f;
      UNROLLED(w, WARP_GROUPS) {
        shared_load_floats(statistics[w], shared + STATISTICS_AT + ((w * SPLIT_WARPS + side) * ROWS + row) * 8);
        highest = fmaxf(highest, statistics[w][0]);
      }
      const float from = highest == NEG_INF ? 0.f : highest;
      float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
      UNROLLED(w, WARP_GROUPS) {
        const float weight = exp2_approx(statistics[w][0] - from);
        const float4 x = shared_load_float4(share_at(shared, w * SPLIT_WARPS + side, row, quad));
        sum += weight * statistics[w][1];
        add_weighted(total, weight, x);
      }
      if (splits == 1) {
        write_out(p, tile, row, channel, total, reciprocal_of_sum(sum));
        if (channel == 0) write_lse(p, tile, row, from, sum);
      } else {
        global_store16(p.parts + part * PART + row * D + channel, total);
        if (channel == 0)
          global_store((float2 *)(p.parts + part * PART + ROWS * D + row * 2), make_float2(highest, sum));
      }
    }
  }
}

// Merges the results of a tile's splits and writes them. Only the block that finishes last calls it.
DEVICE void combine_splits(const Params &p, const RowTile &tile, u32 shared, int splits, i64 first_part) {
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
#pragma unroll 1   // here and below: this code runs once, so unrolled copies would only be more instructions to fetch
  for (int row = warp; row < tile.count(); row += WARPS) {
    const float2 *statistics = (const float2 *)(p.parts + first_part * PART + ROWS * D + row * 2);
    float highest = NEG_INF, sum = 0.f;
    float2 x = make_float2(NEG_INF, 0.f);   // maximum and sum of the lane's last split, usually its only one
#pragma unroll 1
    for (int s = lane; s < splits; s += 32) {
      x = global_load_fresh(statistics + s * (PART / 2));
      highest = fmaxf(highest, x.x);
    }
    highest = max_of<32>(highest);
    const float from = highest == NEG_INF ? 0.f : highest;
#pragma unroll 1
    for (int s = lane; s < splits; s += 32) {
      if (splits > 32) x = global_load_fresh(statistics + s * (PART / 2));
      const float weight = exp2_approx(x.x - from);
      sum += weight * x.y;
      shared_store_float(shared + (row * MAX_SPLITS + s) * 4, weight);
    }
    sum = sum_of<32>(sum);
    if (lane == 0) {
      shared_store_float(shared + FACTORS_AT + row * 4, reciprocal_of_sum(sum));
      write_lse(p, tile, row, from, sum);
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = thread; i < tile.count() * (D / 4); i += THREADS) {
    const int row = i / (D / 4), channel = i % (D / 4) * 4;
    const float *part = p.parts + first_part * PART + row * D + channel;
    float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
    const auto part_of = [&](int s) { return global_load_fresh((const float4 *)(part + (i64)s * PART)); };
    const auto weight_of = [&](int s) { return shared_load_float(shared + (row * MAX_SPLITS + s) * 4); };
    const int whole = splits / LOADED_TOGETHER * LOADED_TOGETHER;
#pragma unroll 1
    for (int first = 0; first < whole; first += LOADED_TOGETHER)
      UNROLLED(s, LOADED_TOGETHER) add_weighted(total, weight_of(first + s), part_of(first + s));
    float4 x[LOADED_TOGETHER - 1];   // of the remaining splits
    UNROLLED(s, LOADED_TOGETHER - 1)
      if (whole + s < splits) x[s] = part_of(whole + s);
    UNROLLED(s, LOADED_TOGETHER - 1)
      if (whole + s < splits) add_weighted(total, weight_of(whole + s), x[s]);
    write_out(p, tile, row, channel, total, shared_load_float(shared + FACTORS_AT + row * 4));
  }
}
