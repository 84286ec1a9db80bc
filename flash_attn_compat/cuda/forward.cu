// FlashAttention-2, Algorithm 1 (Dao, 2023): attention of one tile of rows over all the keys it sees.
//
// A block holds BM = NW / SHARE * MT * 16 rows of one head, the paper's Q_i: NW warps, MT row tiles of 16 each; with SUMS, SHARE = 2^SUMS
// warps have the same rows, and of all channels every SHARE-th 16. It walks over tiles of BN keys, the paper's K_j and V_j. While one tile
// of K or V is multiplied, the next one is on its way from global memory; K and V have one tile of shared memory each, Q shares
// theirs and lives in registers (QREG) or keeps its own. Scores and probabilities never leave the registers: the layout in which
// mma returns S is the one in which it takes P.
//
// Macros (others: common.cuh): BN, NW, MT, SUMS, QREG.
#include "splits.cuh"

constexpr int THREADS = NW * 32, SHARE = 1 << SUMS, BM = NW / SHARE * MT * 16, NB = BN / 8, WARP_ROWS = MT * 16;
// Probabilities times 2^15 use fp16's range below 1 as well: with dropout the largest ones may be gone, and bf16 keeps the rest.
constexpr int P_SHIFT = TYPE == 2 ? 15 : 0;
constexpr int SPLIT_UNIT = 128;   // keys: fewer are not worth a block of their own
constexpr bool CAN_SPLIT = D <= 192 || MMA16;   // Turing has no registers left to merge the widest heads
typedef Layout<D> OfK;    // and of Q
typedef Layout<DV> OfV;
constexpr int OUT_BLOCKS = DV / 8 / SHARE;
typedef Mover<THREADS, BM, D> QueryMover;
typedef Mover<THREADS, BN, D> KeyMover;
typedef Mover<THREADS, BN, DV> ValueMover;

typedef Band<WARP_ROWS, BN> Rows;

// Softcap and ALiBi, after which scores are in units of log2; a softmax_scale that is not positive is applied here too.
// A dense mask's biases leave them in natural units.
DEVICE void modify(float (&S)[NB][MT][4], const Params &p, const DenseMask &mask, bool mixed, float scale, float slope, int key, const Rows &rows, int g, int t) {
  const float doubled = 2.f * LOG2E * scale / p.softcap, cap = p.softcap * LOG2E;
  UNROLLED(m, MT)
    UNROLLED(r, 2) {
      const int row = rows.first + m * 16 + g + r * 8;
      const float ahead = (float)(key + 2 * t - (row + rows.shift));
      UNROLLED(n, NB) {
        const float2 bias = BIAS > 1 ? mask.pair(p, row, key + n * 8 + 2 * t, mixed) : make_float2(0.f, 0.f);
        UNROLLED(e, 2) {
          float &s = S[n][m][2 * r + e];
          if (SOFTCAP) s = fmaf(half_below_one(s * doubled), -2.f * cap, cap);
          else if (BIAS > 1) s = fmaf(s, scale, e ? bias.y : bias.x);
          else s *= scale * LOG2E;
          if (ALIBI) s = fmaf(-slope * LOG2E, fabsf(ahead + (float)(n * 8 + e)), s);
        }
      }
    }
}

DEVICE void hide(float (&S)[NB][MT][4], const Params &p, const DenseMask &mask, int key, const Rows &rows, int g, int t) {
  UNROLLED(m, MT)
    UNROLLED(r, 2) {
      int last = rows.passing - 1, first = 0;
      if (LOCAL) {
        const int position = rows.first + m * 16 + g + r * 8 + rows.shift;
        last = min(last, position + rows.after);
        first = max(first, position - rows.before);
      }
      last -= key + 2 * t;
      first -= key + 2 * t;
      UNROLLED(n, NB)
        UNROLLED(e, 2)
          if (BIAS ? !mask.sees(p, rows.first + m * 16 + g + r * 8, key + n / 4 * 32, n % 4 * 8 + 2 * t + e) : n * 8 + e > last || (LOCAL && n * 8 + e < first))
            S[n][m][2 * r + e] = NEG_INF;
    }
}

DEVICE void drop(float (&P)[NB][MT][4], const DropoutWords &words, const u32 (&row_words)[MT][2], int key, int t, int limit) {
  UNROLLED(n, NB)
    UNROLLED(e, 2) {
      const u32 key_word = words.key(key + n * 8 + 2 * t + e);
      UNROLLED(m, MT)
        UNROLLED(r, 2)
          if (dropped(row_words[m][r], key_word, limit)) P[n][m][2 * r + e] = 0.f;
    }
}

// O += P V
DEVICE void accumulate(float (&O)[OUT_BLOCKS][MT][4], const float (&P)[NB][MT][4], u32 v_at) {
#pragma unroll
  for (int k = 0; k < NB; k += 2) {
    u32 a[MT][4];
    UNROLLED(m, MT) {
      a[m][0] = pack(P[k][m][0], P[k][m][1]);
      a[m][1] = pack(P[k][m][2], P[k][m][3]);
      a[m][2] = pack(P[k + 1][m][0], P[k + 1][m][1]);
      a[m][3] = pack(P[k + 1][m][2], P[k + 1][m][3]);
    }
#pragma unroll
    for (int n = 0; n < OUT_BLOCKS; n += 2) {
      u32 b[4];
      ldmatrix_transposed(b, OfV::along(v_at, n * SHARE) + k * 8 * OfV::ROW_BYTES);
      multiply<MT>(O[n], O[n + 1], a, b);
    }
  }
}

KERNEL(THREADS, MINB) forward(const Params p) {
  SHARED_MEMORY
  const int thread = threadIdx.x, lane = thread & 31, warp = (thread >> 5) / SHARE, side = SUMS ? thread >> 5 & SHARE - 1 : 0, g = lane >> 2, t = lane & 3;   // warp: of those with rows of their own
  // The last rows of a causal problem see most keys.
  const Turn turn(p, blockIdx.x, p.tiles * p.splits);
  const int head = turn.slab % p.nheads, head_k = head / p.group, split = turn.tile % p.splits;
  const Seat<BM, true> seat(p, p.cu_seqlens_q, p.total_q, turn.slab / p.nheads, turn.tile / p.splits);
  const int tile = seat.tile, b = seat.b;
  if (b == p.batch) {
    mark_missing_rows(p, head, p.tiles * BM, turn.tile, p.tiles * p.splits);
    return clear_outside(p, head, SEATS ? tile : turn.tile, seat.tiles * p.splits);
  }
  const Sequence seq = find_sequence(p, b);
  const int first_row = tile * BM;
  if (first_row >= seq.seqlen_q) return;

  const u16 *q = row_at(p.q, p.q_s, b, seq.first_q + first_row, head);
  const u16 *k = p.k + (PAGED ? 0 : b * p.k_s.batch) + (i64)head_k * p.k_s.head;
  const u16 *v = p.v + (PAGED ? 0 : b * p.v_s.batch) + (i64)head_k * p.v_s.head;
  const int *pages = PAGED ? p.block_table + (i64)b * p.table_stride : nullptr;
  const int left = window(p.window_left), right = window(p.window_right);
  const Rows rows = {first_row + warp * WARP_ROWS, seq.seqlen_k - seq.seqlen_q, seq.seqlen_k, left, right};
  Range keys = visible_keys(first_row, min(first_row + BM, seq.seqlen_q), rows.shift, seq.seqlen_k, left, right);
  keys.first = keys.first / BN * BN;
  int splits = 1;
  if (CAN_SPLIT && p.splits > 1) {
    const Share share(p, keys, SPLIT_UNIT, split);
    if (split >= share.splits) return;
    keys = share.keys, splits = share.splits;
  }
  const DenseMask mask(p, b, head);
  const int last_tile = (keys.end + BN - 1) / BN, first_tile = mask.next<BM, BN>(p, first_row, keys.first / BN, last_tile);   // [first, last)

  // Everything that the block has to wait for is asked for first.
  const QueryMover queries(thread);
  const KeyMover of_k(thread);
  const ValueMover of_v(thread);
  const u32 shared = SHARED_BASE, q_tile = shared, k_tile = QREG ? shared : shared + BM * OfK::ROW_BYTES, v_tile = k_tile + BN * OfK::ROW_BYTES;
  const float k_scale = scale_of(absmax_of(p, ABSMAX_K, b, head_k), COPIED), v_scale = scale_of(absmax_of(p, ABSMAX_V, b, head_k), COPIED);
  uint4 own[QueryMover::N], transit[larger(KeyMover::N, ValueMover::N)];   // K and V take turns in it
#define LOAD(mover, base, strides, j, dim, target) \
  mover.load(transit, p, base, strides, pages, seq.first_k + (j) * BN, seq.seqlen_k - (j) * BN, dim, target)
#define LOAD_KEYS(j) LOAD(of_k, k, p.k_s, j, p.head_dim, k_tile)
  const bool at_once = !(CPA && QREG), some = first_tile < last_tile;   // cp.async may write K only where Q is no more
  queries.load_own(own, q, p.q_s.row, seq.seqlen_q - first_row, p.head_dim);
  if (at_once && some) LOAD_KEYS(first_tile);
  float q_scale = 1.f;
#if TYPE == 2   // the block's rows have a power of their own; the backward is told the head's
  int largest = max_of<32>(finite_magnitude(own));
  raise(absmax_of(p, ABSMAX_Q, b, head_k), largest);
  if (lane == 0) shared_store(shared + (thread >> 5) * 4, (u32)largest);
  __syncthreads();
  UNROLLED(i, NW) largest = max(largest, __float_as_int(shared_load_float(shared + i * 4)));
  __syncthreads();
  q_scale = scale_for(largest);
#endif

  const float scale = p.softmax_scale * inverse_of_power(q_scale) * inverse_of_power(k_scale);
  // Scores are compared as they come and scaled inside exp2, where nothing else happens to them.
  const bool modified = SOFTCAP || ALIBI || BIAS > 1 || !(scale > 0.f);
  const float unit = BIAS > 1 ? LOG2E : modified ? 1.f : scale * LOG2E;
  const float slope = ALIBI ? alibi_slope(p, b, head) : 0.f;
#if DROPOUT
  const DropoutWords words(p, b, head);
  u32 row_words[MT][2];
  UNROLLED(m, MT)
    UNROLLED(r, 2) row_words[m][r] = words.row(rows.first + m * 16 + g + r * 8);
#endif

  const u32 q_at = OfK::along(q_tile + OfK::a_operand_at(lane) + warp * WARP_ROWS * OfK::ROW_BYTES, side * 2);
  const u32 k_at = OfK::along(k_tile + OfK::b_operand_at(lane), side * 2), v_at = OfV::along(v_tile + OfV::a_operand_at(lane), side * 2);
  const u32 sums_at = v_tile + BN * OfV::ROW_BYTES + (warp * SHARE * NB * MT * 32 + lane) * 16;

  queries.keep(own, q_tile, q_scale);
  __syncthreads();
  u32 qf[QREG ? D / 16 / SHARE : 1][MT][4];
  if (QREG) keep_rows<D>(qf, q_at);
  if (!at_once && some) LOAD_KEYS(first_tile);
  if (some) of_k.store(transit, k_tile, k_scale);
  __syncthreads();

  float O[OUT_BLOCKS][MT][4], m[MT][2], l[MT][2];
  set_zero(O);
  UNROLLED(i, MT) m[i][0] = m[i][1] = NEG_INF, l[i][0] = l[i][1] = 0.f;

  // For row i and tile j: S_ij = Q_i K_j^T; m' = max(m, rowmax(S_ij)); P = exp(S_ij - m'); l' = exp(m - m') l + rowsum(P);
  // O' = exp(m - m') O + P V_j. Behind the last one, out = O / l and LSE = m + ln(l).
#pragma unroll 1
  for (int j = first_tile, next; j < last_tile; j = next) {
    const int key = j * BN;
    next = mask.next<BM, BN>(p, first_row, j + 1, last_tile);
    const bool active = BIAS ? mask.has<WARP_ROWS, BN>(p, 0, rows.first, key) : !LOCAL || rows.sees_some(key);   // of this warp's rows
    LOAD(of_v, v, p.v_s, j, p.head_dim_v, v_tile);
    float S[NB][MT][4];
    if (active) {   // S = Q K^T
      set_zero(S);
      product<QREG, D, NB>(S, qf, q_at, k_at);
      if (SUMS) UNROLLED(i, NB * MT) leave_sums(S[i / MT][i % MT], sums_at + (side * NB * MT + i) * 512);
    }
    of_v.store(transit, v_tile, v_scale);
    __syncthreads();
    if (next < last_tile) LOAD_KEYS(next);
    if (active) {
      if (SUMS) UNROLLED(i, NB * MT) add_sums(S[i / MT][i % MT], sums_at + ((side ^ 1) * NB * MT + i) * 512);
      const bool mixed = BIAS ? mask.has<WARP_ROWS, BN>(p, 1, rows.first, key) : !rows.sees_all(key);
      if (modified) modify(S, p, mask, mixed, scale, slope, key, rows, g, t);
      if (mixed && BIAS < 2) hide(S, p, mask, key, rows, g, t);
      online_softmax<P_SHIFT>(S, m, l, O, unit);
#if DROPOUT
      drop(S, words, row_words, key, t, p.dropout_limit);
#endif
      accumulate(O, S, v_at);
    }
    if (next < last_tile) of_k.store(transit, k_tile, k_scale);
    __syncthreads();
  }

  // out = O / l, LSE = m + ln(l); rows that see no key: 0 and +inf.
  UNROLLED(i, MT)
    UNROLLED(r, 2) m[i][r] = (m[i][r] - (BIAS > 1 ? mask.top(p, rows.first + i * 16 + g + r * 8) : 0.f)) * unit, l[i][r] = sum_of<4>(l[i][r]);
  constexpr int AT_ONCE = OUT_BLOCKS * MT < 16 ? 16 / (OUT_BLOCKS * MT) : 1;
  const int numbered = (b * p.nheads + head) * p.tiles + tile;
  if (CAN_SPLIT && splits > 1 && !merge_splits<AT_ONCE>(p, O, m, l, rows.first < seq.seqlen_q, numbered, split, splits)) return;
  float factor[MT][2];
  const i64 lse_at = b * p.lse_batch + head * p.lse_head + seq.first_q;
  UNROLLED(i, MT)
    UNROLLED(r, 2) {
      factor[i][r] = reciprocal_of_sum(l[i][r]) * (DROPOUT ? p.dropout_scale : 1.f) * inverse_of_power(v_scale);
      const int row = rows.first + i * 16 + g + r * 8;
      if (p.lse && t == 0 && side == 0 && row < seq.seqlen_q) write_lse(p, lse_at + row, m[i][r] - P_SHIFT, l[i][r], BIAS > 1 ? mask.top(p, row) : slope, BIAS ? 1 : row + rows.shift);
    }
  u16 *out = row_at(p.out, p.out_s, b, seq.first_q + first_row, head);
  write_rows<SHARE>(O, factor, shared + warp * WARP_ROWS * OfV::ROW_BYTES, warp * WARP_ROWS, out, p.out_s.row, seq.seqlen_q - first_row, p.head_dim_v, side);
}
