// FlashAttention-2, Algorithm 2, line 4: computes delta = rowsum(out * dout) in fp32, minus the gradient of the LSE. It
// is 0 for rows that see no key.
//
// grid: tiles * nheads * batch blocks of 256 threads; D / 8 threads (at most 32) share a row; tiles = ceil(rows of the
// longest sequence / ROWS). SHARED_GRID: p.varlen_tiles * nheads blocks.
#include "base/sequences.cuh"

constexpr int THREADS = 256, LANES = D > 256 ? 32 : D / 8, SHARES = D / 8 / LANES, PASSES = 4 / SHARES,
              ROWS = PASSES * THREADS / LANES;   // SHARES: how many chunks of a row each lane takes

// The largest |dout| (as bits of a float) and |delta| of all rows that a lane has read.
struct Largest {
  int of_dout;
  float of_delta;
};

DEVICE void find(const Params &p, const Sequence &seq, int b, int head, int tile, Largest &largest) {
  const int first = tile * ROWS + threadIdx.x / LANES, chunk = threadIdx.x % LANES, channels = p.head_dim_v - chunk * 8;
  const i64 values = b * p.lse_batch + head * p.lse_head + seq.first_q;
  const u16 *out = row_at(p.out, p.out_s, b, seq.first_q, head) + chunk * 8,
            *dout = row_at(p.dout, p.dout_s, b, seq.first_q, head) + chunk * 8;
  uint4 x[PASSES][SHARES], y[PASSES][SHARES];
  float lse[PASSES];
  UNROLLED(i, PASSES) {
    const i64 row = first + i * (THREADS / LANES);
    UNROLLED(j, SHARES) {
      x[i][j] = load_chunk_if(row < seq.seqlen_q, out + row * p.out_s.row + j * 256, channels - j * 256);
      y[i][j] = load_chunk_if(row < seq.seqlen_q, dout + row * p.dout_s.row + j * 256, channels - j * 256);
    }
    lse[i] = row < seq.seqlen_q ? global_load(p.lse + values + row) : POS_INF;
  }
  UNROLLED(i, PASSES) {
    const int row = first + i * (THREADS / LANES);
    float share = 0.f;
    UNROLLED(j, SHARES) {
      const uint4 &a = x[i][j], &b = y[i][j];
      share += product_of_chunks(a, b);
      largest.of_dout = finite_magnitude(largest.of_dout, b);
    }
    float of_lse = p.dlse && row < seq.seqlen_q ? global_load(p.dlse + values + row) : 0.f;
    if (FLEX) of_lse *= LOG2E;   // flex_attention's LSE is of base 2
    const float sum = sum_of<LANES>(share) - of_lse, delta = fabsf(lse[i]) == POS_INF ? 0.f : sum;
    if (chunk == 0 && row < seq.seqlen_q) global_store(p.delta + values + row, delta);
    if (fabsf(delta) < POS_INF) largest.of_delta = max(largest.of_delta, fabsf(delta));
  }
}

KERNEL(THREADS, 4) delta(const Params p) {
  const int head = blockIdx.x / p.tiles % p.nheads;
  const VarlenTile<ROWS, false> varlen(p, p.cu_seqlens_q, p.total_q, blockIdx.x / p.tiles / p.nheads,
                                       blockIdx.x % p.tiles);
  const int b = varlen.b;
  if (SHARED_GRID && b == p.batch) return;
  const Sequence seq = find_sequence(p, b);
  if (varlen.tile * ROWS >= seq.seqlen_q) return;
  Largest largest = {0, 0.f};
  // A loop, since a sequence that is longer than the caller's max_seqlen_q has more tiles than blocks.
#pragma unroll 1
  for (int tile = varlen.tile; tile * ROWS < seq.seqlen_q; tile += p.tiles) find(p, seq, b, head, tile, largest);
  if (TYPE != 2) return;
  raise(absmax_of_dout(p, b, head / p.group), largest.of_dout);
  raise(absmax_of_delta(p, b, head / p.group), __float_as_int(largest.of_delta));
}
