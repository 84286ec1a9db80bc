// How the results of a decode block's warps come together in shared memory, and how they are written.
#pragma once
#include "splits.cuh"

constexpr int NW = 4, THREADS = NW * 32, ROWS = 16;   // warps, threads and rows of a block
constexpr int SLABS = D / 64;   // of 64 channels in V and in the result
// Shared memory: the warps' shares of a slab of the result (before: Q), then their maxima and sums.
constexpr u32 STATISTICS_AT = NW * ROWS * 64 * 4;

// The rows of a block's tile: row i is query i / group of head i % group.
struct Tile {
  int sequence, head_k, first, rows;   // rows: of all tiles of this sequence and key head
  Sequence seq;
  DEVICE int count() const { return min(ROWS, rows - first); }
  DEVICE int row(int i) const { return min(first + i, rows - 1); }
  DEVICE int query(const Params &p, int i) const { return row(i) / p.group; }
  DEVICE int head(const Params &p, int i) const { return head_k * p.group + row(i) % p.group; }
};

// Four channels of a row as one warp left them; spread over the banks.
DEVICE u32 share_at(u32 shared, int warp, int row, int quad) { return shared + ((warp * ROWS + row) * 16 + (quad ^ row)) * 16; }

// Thread 8 r + c has row r of the block's result, of every slab h channels 8 c and the 7 behind them: x[2 h] and x[2 h + 1].
typedef float Found[SLABS * 2][1][4];

// The warps' results put together through shared memory. m and l become those of the thread's row in the block, m in units of log2.
DEVICE void combine_warps(const float (&O)[CHUNKS][1][4], float (&m)[1][2], float (&l)[1][2], float unit, u32 shared, Found &found) {
  const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3, own_row = threadIdx.x / 8;
  UNROLLED(r, 2) {
    const float sum = sum_of<4>(l[0][r]);
    const u32 statistics = shared + STATISTICS_AT + (warp * ROWS + g + r * 8) * 8;
    if (t == 0) shared_store_float(statistics, m[0][r] * unit), shared_store_float(statistics + 4, sum);
  }
  __syncthreads();
  float statistics[NW][2], highest = NEG_INF, sum = 0.f;
  UNROLLED(w, NW) {
    shared_load_floats(statistics[w], shared + STATISTICS_AT + (w * ROWS + own_row) * 8);
    highest = fmaxf(highest, statistics[w][0]);
  }
  UNROLLED(w, NW) {
    statistics[w][0] = exp2_approx(statistics[w][0] - (highest == NEG_INF ? 0.f : highest));   // the warp's weight
    sum += statistics[w][0] * statistics[w][1];
  }
  m[0][0] = m[0][1] = highest, l[0][0] = l[0][1] = sum;
  set_zero(found);
  UNROLLED(h, SLABS) {
    if (h) __syncthreads();
    UNROLLED(r, 2)
      UNROLLED(i, 4) {
        const float (*x)[1][4] = O + h * 8 + i % 2 * 4;
        const int e = 2 * r + i / 2;
        shared_store_float4(share_at(shared, warp, g + r * 8, 4 * t + i), make_float4(x[0][0][e], x[1][0][e], x[2][0][e], x[3][0][e]));
      }
    __syncthreads();
    UNROLLED(w, NW)
      UNROLLED(i, 2) {
        const float4 x = shared_load_float4(share_at(shared, w, own_row, threadIdx.x % 8 * 2 + i));
        float (&o)[4] = found[2 * h + i][0];
        const float weight = statistics[w][0];
        o[0] += weight * x.x, o[1] += weight * x.y, o[2] += weight * x.z, o[3] += weight * x.w;
      }
  }
}

DEVICE void write_result(const Params &p, const Tile &tile, const Found &x, float m, float l) {
  const int row = threadIdx.x / 8, head = tile.head(p, row), query = tile.query(p, row);
  if (row >= tile.count()) return;
  const float factor = reciprocal_of_sum(l);
  u16 *out = p.out + tile.sequence * p.out_s.batch + (i64)(tile.seq.first_q + query) * p.out_s.row + (i64)head * p.out_s.head;
  UNROLLED(h, SLABS) {
    u32 pairs[4];
    UNROLLED(i, 4) pairs[i] = pack_out(x[2 * h + i / 2][0][i % 2 * 2] * factor, x[2 * h + i / 2][0][i % 2 * 2 + 1] * factor);
    const int channel = h * 64 + threadIdx.x % 8 * 8;
    if (channel < p.head_dim_v) store_chunk(out + channel, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]), p.head_dim_v - channel);
  }
  if (!p.lse || threadIdx.x % 8) return;
  const float slope = ALIBI ? global_load(p.alibi_slopes + tile.sequence * p.slopes_batch + head) : 0.f;
  const i64 at = tile.sequence * p.lse_batch + head * p.lse_head + tile.seq.first_q + query;
  write_lse(p, at, m, l, slope, query + tile.seq.seqlen_k - tile.seq.seqlen_q);
}
