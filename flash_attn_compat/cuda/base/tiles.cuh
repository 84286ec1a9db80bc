// Tiles of rows and channels: copies from global to shared memory, loads as operands of the tensor cores, and stores.
#pragma once
#include "base/sequences.cuh"

// ---- A tile in shared memory: rows of W channels, a multiple of 16, in chunks of 16 bytes. An ldmatrix reads one
// chunk of each of 8 rows. To avoid bank conflicts, these 8 chunks must lie at 8 different places of 128 bytes (at
// different addresses / 16 modulo 8). Rows begin at only 8 / SPREAD of these places. So an XOR with bits of the row's
// number swaps the chunks within groups of SPREAD.
template <int W> struct Layout {
  static constexpr int CHUNKS = W / 8, ROW_BYTES = W * 2, SPREAD = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;
  static DEVICE u32 at(int row, int chunk) {
    // Rows that begin at the same place differ in the bits of this XOR, which puts their chunks at different places.
    return row * ROW_BYTES + ((chunk ^ (row >> (SPREAD == 8 ? 0 : SPREAD == 4 ? 1 : 2) & (SPREAD - 1))) << 4);
  }
  // From the address of a row's first or second chunk, returns that of the chunk an even number `chunks` further.
  // (c ^ r) ^ n = (c ^ n) ^ r, so for any row XOR with n leads from chunk c to chunk c ^ n. This is c + n if c and n
  // share no bits: for c = 0 or 1 and even n.
  static DEVICE u32 along(u32 at, int chunks) {
    // One XOR for the widest rows, for which there are no registers to keep parts of addresses in.
    if (W % 256 == 0) return at ^ chunks << 4;
    return (at ^ (chunks & (SPREAD - 1)) << 4) + ((chunks & -SPREAD) << 4);
  }
  // The address that a lane gives to ldmatrix. For an A operand, or a B operand that is read transposed, the four
  // matrices are rows 0-7, rows 8-15, then the next chunk of both. For a B operand they are rows 0-7, the next chunk of
  // these, then the same of rows 8-15.
  static DEVICE u32 a_operand_at(int thread) { return at(thread & 15, thread >> 4 & 1); }
  static DEVICE u32 b_operand_at(int thread) { return at((thread & 7) + (thread >> 4 & 1) * 8, thread >> 3 & 1); }
};

// How THREADS copy a tile of ROWS rows from global to shared memory. LANES neighbouring threads take LANES neighbouring
// chunks, so that 8 threads store 128 bytes without a bank conflict. A thread takes every ROW_STEP-th row, and of it
// every (SIDES * LANES)-th chunk: N chunks in all. While the tensor cores work, the loaded chunks wait in registers;
// with cp.async they are on their way.
template <int THREADS, int ROWS, int W> struct TileCopy {
  typedef Layout<W> L;
  static constexpr int LANES = L::SPREAD, ROW_STEP = THREADS / LANES < ROWS ? THREADS / LANES : ROWS,
                       SIDES = THREADS / LANES / ROW_STEP;
  static constexpr int SHARES = L::CHUNKS / LANES, PASSES = (SHARES + SIDES - 1) / SIDES, N = ROWS / ROW_STEP * PASSES;
  static_assert(ROW_STEP % 8 == 0 && ROWS % ROW_STEP == 0 && THREADS % (LANES * ROW_STEP) == 0,
                "a thread's rows are swizzled alike");
  int row, chunk;   // this thread's first row and chunk
  u32 at;   // byte offset of this chunk in a tile
  template <class T> DEVICE TileCopy(T thread)   // T: u32 or int, which divide by different instructions
        : row(SIDES == 1 ? thread / LANES : thread / LANES % ROW_STEP),
          chunk(thread % LANES + (SIDES == 1 ? 0 : thread / (LANES * ROW_STEP) * LANES)), at(L::at(row, chunk)) {}
  // How many rows and chunks the thread's i-th chunk is after its first; has(i): whether it lies inside the row.
  static DEVICE constexpr int row_step(int i) { return i / PASSES * ROW_STEP; }
  static DEVICE constexpr int chunk_step(int i) { return i % PASSES * SIDES * LANES; }
  DEVICE bool has(int i) const { return (i % PASSES + 1) * SIDES <= SHARES || chunk + chunk_step(i) < L::CHUNKS; }
  DEVICE u32 offset(int i) const { return at + row_step(i) * L::ROW_BYTES + chunk_step(i) * 16; }

  // Loads the tile's rows from first_slot on, of which `left` exist. Channels beyond head_dim and rows beyond the last
  // become 0.
  DEVICE void load(uint4 *x, const Params &p, const Cached *base, const Strides &s, const int *pages, int first_slot,
                   int left, int head_dim, u32 tile) const {
    const int rows = left - row;
    if (PAGED && (u32)first_slot % (u32)p.page_size + ROWS > (u32)p.page_size) {   // several pages
      UNROLLED(i, N) {
        const bool there = row_step(i) < rows;
        const auto source = [&] { return key_row(p, base, s, pages, first_slot + row + row_step(i)); };
        load_one(x, i, there, there ? source() + (chunk + chunk_step(i)) * 8 : base, base, head_dim, tile);
      }
      return;
    }
    const Cached *from = PAGED ? key_row(p, base, s, pages, first_slot) + (i64)row * s.row + chunk * 8
                               : base + (i64)(first_slot + row) * s.row + chunk * 8;
    if (!CP_ASYNC && left >= ROWS && head_dim >= W) {
      UNROLLED(i, N)
        if (has(i)) x[i] = load_chunk(from + (i64)row_step(i) * s.row + chunk_step(i) * 8, 8);
    } else {
      UNROLLED(i, N)
        load_one(x, i, row_step(i) < rows, from + (i64)row_step(i) * s.row + chunk_step(i) * 8, base, head_dim, tile);
    }
  }
  DEVICE void load_one(uint4 *x, int i, bool there, const Cached *from, const Cached *readable, int head_dim,
                       u32 tile) const {
    const int channels = head_dim - (chunk + chunk_step(i)) * 8;
    if (!CP_ASYNC) x[i] = load_chunk_if(there, from, channels);
    else if (has(i))
      copy_async(tile + offset(i), (const u16 *)(there && channels > 0 ? from : readable), there && channels > 0);
  }
  // Converts 8-bit chunks to fp16 and stores them. STEPS calls divide the work; this is number `step` of them.
  template <int STEPS> DEVICE void store_widened(const uint4 *x, u32 tile, int step) const {
    UNROLLED(i, N)
      if (i * STEPS / N == step && has(i)) shared_store(tile + offset(i), widened(x[i]));
  }
  DEVICE void store(const uint4 *x, u32 tile, float scale) const {
    if (CACHE) return store_widened<1>(x, tile, 0);
    CP_ASYNC ? copy_async_wait() : COPIED ? store_converted<false>(x, tile, scale) : store_converted(x, tile, scale);
  }

  // Loads the rows that a block keeps, of which `left` exist; the others become 0.
  DEVICE void load_stationary(uint4 *x, const u16 *rows, int row_stride, int left, int head_dim) const {
    UNROLLED(i, N)
      x[i] = load_chunk_if(row + row_step(i) < left,
                           rows + (i64)(row + row_step(i)) * row_stride + (chunk + chunk_step(i)) * 8,
                           head_dim - (chunk + chunk_step(i)) * 8);
  }
  template <bool CONVERTS = true> DEVICE void store_converted(const uint4 *x, u32 tile, float scale) const {
    UNROLLED(i, N)
      if (has(i)) shared_store(tile + offset(i), CONVERTS ? convert(x[i], scale) : x[i]);
  }
};

// Loads the rows that a warp keeps, of W channels, from a tile in shared memory into registers. Afterwards the tile may
// be overwritten. SPLIT_K: as in product().
template <int W, int N, int M> DEVICE void load_operand(u32 (&operand)[N][M][4], u32 stationary_at) {
  UNROLLED(k, N)
    UNROLLED(m, M)
      ldmatrix(operand[k][m], Layout<W>::along(stationary_at + m * 16 * Layout<W>::ROW_BYTES, 2 * k << SPLIT_K));
  __syncthreads();
}

// c0 += a b and c1 += a b for two neighbouring blocks of 8 columns, in two steps of 8 along the inner dimension: b[0]
// and b[1] are the steps of the first block, b[2] and b[3] those of the second. a[m]: the 16 x 16 operand of row tile m
// (step 0: a0, a1; step 1: a2, a3).
template <int M> DEVICE void multiply(float (&c0)[M][4], float (&c1)[M][4], const u32 (&a)[M][4], const u32 (&b)[4]) {
  if (MMA_K16) {
    UNROLLED(m, M) mma_k16(c0[m], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
    UNROLLED(m, M) mma_k16(c1[m], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
    return;
  }
  UNROLLED(step, 2) {
    UNROLLED(m, M) mma_k8(c0[m], a[m][2 * step], a[m][2 * step + 1], b[step]);
    UNROLLED(m, M) mma_k8(c1[m], a[m][2 * step], a[m][2 * step + 1], b[2 + step]);
  }
}

template <int N, int M> DEVICE void set_zero(float (&c)[N][M][4]) {
  UNROLLED(n, N)
    UNROLLED(m, M)
      UNROLLED(e, 4) c[n][m][e] = 0.f;
}

struct Nothing {
  DEVICE void operator()(int) const {}
};

// c += the products of a warp's stationary rows and a tile's rows, over their W channels. The stationary operand is in
// registers (REG) or in shared memory. With SPLIT_K, 2^SPLIT_K warps have the same rows. Each multiplies every
// 2^SPLIT_K-th group of 16 channels, from both addresses on, and later the partial products are added up.
// meanwhile(k): other work to do after each 16 channels.
template <bool REG, int W, int N, int M, class F = Nothing>
DEVICE void product(float (*c)[M][4], const u32 (*stationary)[M][4], u32 stationary_at, u32 tile_at, int first = 0,
                    const F &meanwhile = F()) {
  typedef Layout<W> L;
  UNROLLED(k, W / 16 >> SPLIT_K) {
    u32 a[M][4];
    UNROLLED(m, M) {
      if (!REG) ldmatrix(a[m], L::along(stationary_at + m * 16 * L::ROW_BYTES, 2 * k << SPLIT_K));
      UNROLLED(i, 4)
        if (REG) a[m][i] = stationary[k][m][i];
    }
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      u32 b[4];
      ldmatrix(b, L::along(tile_at, 2 * k << SPLIT_K) + (first + n) * 8 * L::ROW_BYTES);
      multiply<M>(c[n], c[n + 1], a, b);
    }
    meanwhile(k);
  }
}

DEVICE float4 together(const float (&c)[4]) { return make_float4(c[0], c[1], c[2], c[3]); }
DEVICE void add(float (&c)[4], const float4 &x) { c[0] += x.x, c[1] += x.y, c[2] += x.z, c[3] += x.w; }
// SPLIT_K: store a lane's partial sums to shared memory; load, or add, those of another warp from there.
DEVICE void store_partial(const float (&c)[4], u32 at) { shared_store_float4(at, together(c)); }
DEVICE void load_partial(float (&c)[4], u32 at) {
  const float4 x = shared_load_float4(at);
  c[0] = x.x, c[1] = x.y, c[2] = x.z, c[3] = x.w;
}
DEVICE void add_partial(float (&c)[4], u32 at) { add(c, shared_load_float4(at)); }

// Writes the 16 * M rows of a warp, from first_row of its block's tile on, times `factor`. They pass through the warp's
// part of shared memory, from `place` on, so that global stores have 16 bytes. SPLIT warps hold the same rows, each
// with every SPLIT-th group of 16 channels; each writes a part of the rows.
template <int SPLIT, int N, int M> DEVICE void write_rows(float (&c)[N][M][4], const float (&factor)[M][2], u32 place,
                                                          int first_row, u16 *out, int row_stride, int rows,
                                                          int head_dim, int side = 0) {
  typedef Layout<N * 8 * SPLIT> L;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  UNROLLED(m, M)
    UNROLLED(r, 2)
      UNROLLED(n, N)
        shared_store(place + L::at(m * 16 + g + r * 8, SPLIT == 1 ? n : (n / 2 * SPLIT + side) * 2 + n % 2) + t * 4,
                     pack_out(c[n][m][2 * r] * factor[m][r], c[n][m][2 * r + 1] * factor[m][r]));
  SPLIT == 1 ? __syncwarp() : __syncthreads();
  UNROLLED(i, M * L::SPREAD / 2 / SPLIT)
    UNROLLED(n, L::CHUNKS / L::SPREAD) {
      const int row = lane / L::SPREAD + i * 32 / L::SPREAD + side * M * 16 / SPLIT,
                chunk = lane % L::SPREAD + n * L::SPREAD;
      if (first_row + row < rows && chunk * 8 < head_dim)
        store_chunk(out + (i64)(first_row + row) * row_stride + chunk * 8, shared_load4(place + L::at(row, chunk)),
                    head_dim - chunk * 8);
    }
  SPLIT == 1 ? __syncwarp() : __syncthreads();
}
