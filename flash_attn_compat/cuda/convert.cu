// Maxima and fp16 copies of bf16 tensors, for GPUs whose tensor cores take only fp16. absmax finds the largest finite
// magnitude of k, v (and q) for each sequence and key head, by `splits` blocks each. It determines the power of two by
// which numbers are scaled (scale_of in common.cuh). COPIED: absmax also writes k and v as fp16, scaled by the largest
// magnitude known so far; to_half then rewrites the parts whose final power differs. In the backward all maxima are
// known, and only to_half writes the copies.
#include "base/sequences.cuh"

constexpr int THREADS = 256, CHUNKS = D / 8, STEP = THREADS / CHUNKS, AT_ONCE = 4,
              ROWS = AT_ONCE * STEP;   // AT_ONCE: rows that a thread loads together

// grid: parts * key heads * sequences * tensors (k, v and perhaps q; or q and dout). FINDS: whether to find the maxima,
// or to read the known ones.
template <bool FINDS> DEVICE void read(const Params &p) {
  const int part = blockIdx.x % p.splits, head_index = blockIdx.x / p.splits, head_k = head_index % p.nheads_k,
            b = head_index / p.nheads_k % p.batch;
  const int tensor = head_index / p.nheads_k / p.batch + (p.converts_rows ? ABSMAX_Q : ABSMAX_K);
  const bool is_key = tensor < ABSMAX_Q,
             is_first = tensor == ABSMAX_K || tensor == ABSMAX_Q;   // the first of two copied tensors
  const Sequence seq = find_sequence(p, b);
  const int heads = is_key ? 1 : p.group, rows = is_key ? seq.seqlen_k : seq.seqlen_q,
            first = is_key ? seq.first_k : seq.first_q, across = p.nheads_k * heads;
  const u16 *base = tensor == ABSMAX_Q ? p.q : tensor == ABSMAX_K ? p.k : tensor == ABSMAX_V ? p.v : p.dout;
  const Strides &s = tensor == ABSMAX_Q ? p.q_s : tensor == ABSMAX_K ? p.k_s : tensor == ABSMAX_V ? p.v_s : p.dout_s;
  const int *pages = PAGED ? p.block_table + (i64)b * p.table_stride : nullptr;
  base += (PAGED ? 0 : b * s.batch) + (i64)head_k * heads * s.head;
  const int each = (rows + p.splits - 1) / p.splits, share = (each + ROWS - 1) / ROWS * ROWS,
            end = min(rows, (part + 1) * share);
  const int chunk = threadIdx.x % CHUNKS, dim = is_first ? p.head_dim : p.head_dim_v, channels = dim - chunk * 8;
  int *maximum = tensor == ABSMAX_DOUT ? absmax_of_dout(p, b, head_k) : absmax_of(p, tensor, b, head_k);
  // The two copies are contiguous, one after the other. A mark is the maximum by which a warp has scaled its part of
  // ROWS rows.
  const i64 packed = is_key ? p.total_k : p.total_q, longest = is_key ? p.seqlen_k : p.seqlen_q;
  const i64 total = packed ? packed : p.batch * longest, slot = first + (packed ? 0 : b * longest);
  u16 *copy =
      p.copies + (is_first ? 0 : total * across * p.head_dim) + (slot * across + head_k * heads) * dim + chunk * 8;
  int *marks = p.marks + (((is_first ? 0 : p.nheads_k) + head_k) * (total / ROWS + p.batch + 1) + slot / ROWS + b) * 8 +
               threadIdx.x / 32;
  int largest = FINDS ? 0 : global_load(maximum);
  for (int head = 0; head < heads; head++, base += s.head, copy += dim)
    for (int i = part * share; i < end; i += ROWS) {
      if (!FINDS && p.marks && scale_for(global_load(marks + i / ROWS * 8), true) == scale_for(largest, true)) continue;
      const int row = i + threadIdx.x / CHUNKS;
      uint4 x[AT_ONCE];
      UNROLLED(j, AT_ONCE)
        x[j] = load_chunk_if(channels > 0, key_row(p, base, s, pages, first + min(row + j * STEP, end - 1)) + chunk * 8,
                             channels);
      if (FINDS) {
        UNROLLED(j, AT_ONCE) largest = finite_magnitude(largest, x[j]);
        largest = raise(maximum, largest);
        if (!COPIED || !is_key) continue;
        if (threadIdx.x % 32 == 0) global_store(marks + i / ROWS * 8, largest);
      }
      const float scale = scale_for(largest, p.marks);
      UNROLLED(j, AT_ONCE)
        if (row + j * STEP < end && channels > 0)
          global_store16(copy + (i64)(row + j * STEP) * across * dim, convert(x[j], scale));
    }
}

KERNEL(THREADS, 4) absmax(const Params p) { read<true>(p); }
KERNEL(THREADS, 4) to_half(const Params p) { read<false>(p); }
