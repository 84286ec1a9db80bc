// A ladder of forward kernels, from the plain loop to nearly today's: STEP 0 to 8, each with one idea more than the step
// before. docs/kernels.md explains the steps, benchmarks/kernel_ladder.py runs and times them. fp16, no LSE.
//
// grid: tiles * nheads * batch blocks; a block has a tile of rows of one head.
#include "base/common.cuh"

constexpr int KEYS = 64;   // of a tile in shared memory
constexpr int ROW_BYTES = 2 * D, CHUNKS = D / 8;   // of 16 bytes, in a row
#if STEP < 4
constexpr int THREADS = 128, ROWS = THREADS;   // a thread for each row
#else
constexpr int WARPS = STEP == 8 && D > 64 ? 8 : 4, M = STEP == 8 && D <= 64 ? 2 : 1;   // M tiles of 16 rows for a warp
constexpr int THREADS = WARPS * 32, ROWS = WARPS * M * 16;
#endif

DEVICE float exp_of(float x) { return exp2_approx(x * LOG2E); }

// A block's rows and keys.
struct Block {
  int first_row, end;   // keys that any of the block's rows sees: [0, end)
  const u16 *q, *k, *v;
  u16 *out;
  DEVICE Block(const Params &p) {
    const int tile = blockIdx.x % p.tiles, head = blockIdx.x / p.tiles % p.nheads, b = blockIdx.x / p.tiles / p.nheads;
    first_row = tile * ROWS, end = seen(p, first_row + ROWS - 1);
    q = p.q + b * p.q_s.batch + (i64)head * p.q_s.head;
    k = p.k + b * p.k_s.batch + (i64)(head / p.group) * p.k_s.head;
    v = p.v + b * p.v_s.batch + (i64)(head / p.group) * p.v_s.head;
    out = p.out + b * p.out_s.batch + (i64)head * p.out_s.head;
  }
  // How many keys, from the first on, a row sees.
  static DEVICE int seen(const Params &p, int row) {
    return LOCAL ? clamp(row + 1 + p.seqlen_k - p.seqlen_q, 0, p.seqlen_k) : p.seqlen_k;
  }
};

// Where chunk `chunk` of a row lies in a tile. Step 6: swizzled, so that one chunk of eight rows is in all banks.
DEVICE u32 place(int row, int chunk) { return row * ROW_BYTES + ((STEP >= 6 ? chunk ^ row & 7 : chunk) << 4); }

// A tile's keys on their way from global to shared memory, 16 bytes at a time; keys past the end are 0.
struct Copy {
  static constexpr int N = KEYS * CHUNKS / THREADS;
  uint4 x[N];
  DEVICE void load(const u16 *rows, int stride, int left) {
    UNROLLED(i, N) x[i] = global_load16_if(row(i) < left, rows + (i64)row(i) * stride + threadIdx.x % CHUNKS * 8);
  }
  DEVICE void store(u32 tile) const {
    UNROLLED(i, N) shared_store(tile + place(row(i), threadIdx.x % CHUNKS), x[i]);
  }
  static DEVICE int row(int i) { return threadIdx.x / CHUNKS + i * (THREADS / CHUNKS); }
};

#if STEP < 4   // ---- A thread computes a row

// Eight channels of a row, in global memory or (step 3) in a tile. Step 2: by one load instead of eight.
DEVICE void eight(float (&x)[8], const u16 *row, u32 in_tile, int chunk) {
  uint4 v;
  if (STEP == 2) v = global_load16(row + chunk * 8);
  if (STEP == 3) v = shared_load4(in_tile + place(0, chunk));
  UNROLLED(i, 8)
    x[i] = half_to_float(STEP < 2 ? global_load2(row + chunk * 8 + i) : (u16)(word(v, i / 2) >> i % 2 * 16));
}

DEVICE float score(const float (&q)[D], const u16 *row, u32 in_tile, float scale) {
  float s = 0.f, k[8];
  UNROLLED(chunk, CHUNKS) {
    eight(k, row, in_tile, chunk);
    UNROLLED(i, 8) s = fmaf(q[chunk * 8 + i], k[i], s);
  }
  return s * scale;
}

KERNEL(THREADS, 1) ladder(const Params p) {
  SHARED_MEMORY
  const Block block(p);
  const int row = block.first_row + threadIdx.x, mine = row < p.seqlen_q ? Block::seen(p, row) : 0;
  const u32 k_tile = SHARED_BASE, v_tile = k_tile + KEYS * ROW_BYTES;
  float q[D], O[D], m = NEG_INF, l = 0.f;
  UNROLLED(i, D)
    q[i] = half_to_float(global_load2(block.q + (i64)min(row, p.seqlen_q - 1) * p.q_s.row + i)), O[i] = 0.f;

  if (STEP == 0)   // the maximum first: each score is computed twice
#pragma unroll 1
    for (int j = 0; j < mine; j++) m = fmaxf(m, score(q, block.k + (i64)j * p.k_s.row, 0, p.softmax_scale));
#pragma unroll 1
  for (int tile = 0; tile < block.end; tile += KEYS) {
    if (STEP == 3) {
      Copy copy;
      copy.load(block.k + (i64)tile * p.k_s.row, p.k_s.row, p.seqlen_k - tile);
      copy.store(k_tile);
      copy.load(block.v + (i64)tile * p.v_s.row, p.v_s.row, p.seqlen_k - tile);
      copy.store(v_tile);
      __syncthreads();
    }
#pragma unroll 1
    for (int j = tile; j < min(tile + KEYS, mine); j++) {
      const float s = score(q, block.k + (i64)j * p.k_s.row, k_tile + place(j - tile, 0), p.softmax_scale);
      if (STEP > 0 && s > m) {   // online softmax: what was added up so far shrinks
        const float shrink = exp_of(m - s);
        m = s, l *= shrink;
        UNROLLED(i, D) O[i] *= shrink;
      }
      const float P = exp_of(s - m);
      l += P;
      float v[8];
      UNROLLED(chunk, CHUNKS) {
        eight(v, block.v + (i64)j * p.v_s.row, v_tile + place(j - tile, 0), chunk);
        UNROLLED(i, 8) O[chunk * 8 + i] = fmaf(P, v[i], O[chunk * 8 + i]);
      }
    }
    if (STEP == 3) __syncthreads();
  }

  const float factor = l == 0.f ? 0.f : 1.f / l;
  if (row < p.seqlen_q)
    UNROLLED(i, D / 2)
      global_store((u32 *)(block.out + (i64)row * p.out_s.row) + i, pack(O[2 * i] * factor, O[2 * i + 1] * factor));
}

#else   // ---- A warp computes M tiles of 16 rows by mma.m16n8k8. Lane 4 g + t has columns 2 t, 2 t + 1 of rows g, g + 8

DEVICE u32 shared_word(u32 at) { return __float_as_int(shared_load_float(at)); }

// b[2 i + j]: keys 8 (n + i) and channels 8 (2 k + j) of K, as the right operand of Q K^T.
DEVICE void load_k(u32 (&b)[4], u32 tile, int n, int k, int lane) {
  if (STEP >= 6) return ldmatrix(b, tile + place(n * 8 + (lane & 7) + lane / 16 * 8, 2 * k + (lane >> 3 & 1)));
  UNROLLED(i, 4) b[i] = shared_word(tile + place((n + i / 2) * 8 + lane / 4, 2 * k + i % 2) + lane % 4 * 4);
}
// b[2 i + j]: channels 8 (n + i) and keys 8 (k + j) of V, as the right operand of P V.
DEVICE void load_v(u32 (&b)[4], u32 tile, int n, int k, int lane) {
  if (STEP >= 6) return ldmatrix_transposed(b, tile + place(k * 8 + (lane & 15), n + lane / 16));
  UNROLLED(i, 4) {   // a register has two keys of one channel: half of each of two words
    const u32 at = tile + place((k + i % 2) * 8 + lane % 4 * 2, n + i / 2) + lane / 8 * 4;
    b[i] = __byte_perm(shared_word(at), shared_word(at + ROW_BYTES), lane & 4 ? 0x7632 : 0x5410);
  }
}
// c0 and c1, of neighbouring columns, += a b, with 16 steps along the inner dimension.
DEVICE void multiply(float (&c0)[4], float (&c1)[4], const u32 (&a)[4], const u32 (&b)[4]) {
  UNROLLED(j, 2) mma_k8(c0, a[2 * j], a[2 * j + 1], b[j]), mma_k8(c1, a[2 * j], a[2 * j + 1], b[2 + j]);
}

#if STEP == 4
constexpr int SCORES_ROW = (KEYS + 4) * 4;   // bytes; 4 floats more, so that eight rows begin in different banks
// S -> P through shared memory, where a warp has 16 rows of scores: a pair of lanes for each row, as if nobody knew which
// lane has which score. m is of row lane / 2 then.
DEVICE void softmax(const Params &p, const float (&S)[KEYS / 8][M][4], u32 (&P)[KEYS / 16][M][4], float (&m)[M][2],
                    float (&l)[M][2], float (&shrink)[M][2], int row, int key, u32 scores, int lane) {
  const int g = lane / 4, t = lane % 4, side = lane % 2 * 2;   // of each four keys the first or the second two
  const u32 mine = scores + lane / 2 * SCORES_ROW;
  UNROLLED(n, KEYS / 8)
    UNROLLED(e, 4) shared_store_float(scores + (g + e / 2 * 8) * SCORES_ROW + (n * 8 + 2 * t + e % 2) * 4, S[n][0][e]);
  __syncwarp();
  float x[KEYS / 2], top = m[0][0], sum = 0.f;
  const int seen = Block::seen(p, row + lane / 2) - key - side;
  UNROLLED(i, KEYS / 2) {
    x[i] = shared_load_float(mine + (i / 2 * 4 + side + i % 2) * 4);
    x[i] = i / 2 * 4 + i % 2 < seen ? x[i] * p.softmax_scale : NEG_INF;
    top = fmaxf(top, x[i]);
  }
  top = max_of<2>(top);
  const float base = top == NEG_INF ? 0.f : top, shrinks = exp_of(m[0][0] - base);
  m[0][0] = top;
  UNROLLED(i, KEYS / 2) x[i] = exp_of(x[i] - base), sum += x[i];
  sum = sum_of<2>(sum);
  __syncwarp();
  UNROLLED(i, KEYS / 4) shared_store(mine + (i * 4 + side) * 2, pack(x[2 * i], x[2 * i + 1]));
  UNROLLED(r, 2) {
    shrink[0][r] = __shfl_sync(ALL_LANES, shrinks, (g + r * 8) * 2);
    const float added = __shfl_sync(ALL_LANES, sum, (g + r * 8) * 2);
    l[0][r] = l[0][r] * shrink[0][r] + (t == 0 ? added : 0.f);
  }
  __syncwarp();
  UNROLLED(k, KEYS / 16)
    UNROLLED(i, 4)
      P[k][0][i] = shared_word(scores + (g + i % 2 * 8) * SCORES_ROW + (k * 16 + i / 2 * 8 + 2 * t) * 2);
  __syncwarp();
}
#else
// S -> P in registers: the result of a product lies as the left operand of the next.
DEVICE void softmax(const Params &p, float (&S)[KEYS / 8][M][4], u32 (&P)[KEYS / 16][M][4], float (&m)[M][2],
                    float (&l)[M][2], float (&shrink)[M][2], int row, int key, u32, int lane) {
  UNROLLED(i, M)
    UNROLLED(r, 2) {
      const int seen = Block::seen(p, row + i * 16 + lane / 4 + r * 8) - key - lane % 4 * 2;
      float top = m[i][r];
      UNROLLED(n, KEYS / 8)
        UNROLLED(e, 2) {
          float &s = S[n][i][2 * r + e];
          s = n * 8 + e < seen ? s * p.softmax_scale : NEG_INF;
          top = fmaxf(top, s);
        }
      top = max_of<4>(top);   // four lanes share a row
      const float base = top == NEG_INF ? 0.f : top;
      shrink[i][r] = exp_of(m[i][r] - base);
      m[i][r] = top, l[i][r] *= shrink[i][r];
      UNROLLED(n, KEYS / 8) {
        const float P0 = exp_of(S[n][i][2 * r] - base), P1 = exp_of(S[n][i][2 * r + 1] - base);
        l[i][r] += P0 + P1;
        P[n / 2][i][n % 2 * 2 + r] = pack(P0, P1);
      }
    }
}
#endif

KERNEL(THREADS, 1) ladder(const Params p) {
  SHARED_MEMORY
  const Block block(p);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int row = block.first_row + warp * M * 16;   // the warp's first
  const u32 k_tile = SHARED_BASE, v_tile = k_tile + KEYS * ROW_BYTES,
            scores = v_tile + KEYS * ROW_BYTES + warp * 16 * (KEYS + 4) * 4;   // step 4
  u32 q[D / 16][M][4];
  UNROLLED(k, D / 16)
    UNROLLED(i, M)
      UNROLLED(e, 4) {
        const int from = min(row + i * 16 + g + e % 2 * 8, p.seqlen_q - 1);
        q[k][i][e] = global_load((const u32 *)(block.q + (i64)from * p.q_s.row + k * 16 + e / 2 * 8 + 2 * t));
      }
  float O[CHUNKS][M][4] = {}, m[M][2], l[M][2] = {}, shrink[M][2];
  UNROLLED(i, M) m[i][0] = m[i][1] = NEG_INF;

  Copy copy;
  if (STEP >= 7) {   // from step 7 on a tile is on its way while the tile before is multiplied
    copy.load(block.k, p.k_s.row, p.seqlen_k);
    copy.store(k_tile);
    __syncthreads();
  }
#pragma unroll 1
  for (int key = 0; key < block.end; key += KEYS) {
    if (STEP < 7) {
      copy.load(block.k + (i64)key * p.k_s.row, p.k_s.row, p.seqlen_k - key);
      copy.store(k_tile);
    }
    copy.load(block.v + (i64)key * p.v_s.row, p.v_s.row, p.seqlen_k - key);
    if (STEP < 7) {
      copy.store(v_tile);
      __syncthreads();
    }
    float S[KEYS / 8][M][4] = {};
    UNROLLED(k, D / 16)
#pragma unroll
      for (int n = 0; n < KEYS / 8; n += 2) {
        u32 b[4];
        load_k(b, k_tile, n, k, lane);
        UNROLLED(i, M) multiply(S[n][i], S[n + 1][i], q[k][i], b);
      }
    if (STEP >= 7) {
      copy.store(v_tile);
      __syncthreads();
      copy.load(block.k + (i64)(key + KEYS) * p.k_s.row, p.k_s.row, p.seqlen_k - key - KEYS);
    }
    u32 P[KEYS / 16][M][4];
    softmax(p, S, P, m, l, shrink, row, key, scores, lane);
    UNROLLED(n, CHUNKS)
      UNROLLED(i, M)
        UNROLLED(e, 4) O[n][i][e] *= shrink[i][e / 2];
    UNROLLED(k, KEYS / 16)
#pragma unroll
      for (int n = 0; n < CHUNKS; n += 2) {
        u32 b[4];
        load_v(b, v_tile, n, 2 * k, lane);
        UNROLLED(i, M) multiply(O[n][i], O[n + 1][i], P[k][i], b);
      }
    if (STEP >= 7) copy.store(k_tile);
    __syncthreads();
  }

  UNROLLED(i, M)
    UNROLLED(r, 2) {
      const int to = row + i * 16 + g + r * 8;
      const float sum = sum_of<4>(l[i][r]), factor = sum == 0.f ? 0.f : 1.f / sum;
      u32 *const out = (u32 *)(block.out + (i64)to * p.out_s.row + 2 * t);
      UNROLLED(n, CHUNKS)
        if (to < p.seqlen_q) global_store(out + n * 4, pack(O[n][i][2 * r] * factor, O[n][i][2 * r + 1] * factor));
    }
}
#endif
