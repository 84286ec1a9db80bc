// What bf16 needs on a GPU whose tensor cores take fp16: the largest finite magnitude of q, k and v of each sequence and key head,
// by `splits` blocks each. Forward and backward make powers of two of them (scale_of in common.cuh).
#include "common.cuh"

constexpr int THREADS = 256, CHUNKS = D / 8, STEP = THREADS / CHUNKS, AT_ONCE = 4;   // rows that a thread waits for together

// Grid: parts, key heads, sequences, tensors.
KERNEL(THREADS, 4) absmax(const Params p) {
  const int part = blockIdx.x % p.splits, head_index = blockIdx.x / p.splits;
  const int head_k = head_index % p.nheads_k, b = head_index / p.nheads_k % p.batch, tensor = head_index / p.nheads_k / p.batch;
  const bool is_key = tensor != ABSMAX_Q;
  const Sequence seq = find_sequence(p, b);
  const int heads = is_key ? 1 : p.group, rows = is_key ? seq.seqlen_k : seq.seqlen_q;
  const u16 *base = tensor == ABSMAX_Q ? p.q : tensor == ABSMAX_K ? p.k : p.v;
  const Strides &s = tensor == ABSMAX_Q ? p.q_s : tensor == ABSMAX_K ? p.k_s : p.v_s;
  const int *pages = PAGED ? p.block_table + (i64)b * p.table_stride : nullptr;
  base += (PAGED && is_key ? 0 : b * s.batch) + (i64)head_k * heads * s.head;

  const int share = (rows + p.splits - 1) / p.splits, first = part * share + threadIdx.x / CHUNKS, end = min(rows, (part + 1) * share);
  const int chunk = threadIdx.x % CHUNKS, channels = (tensor == ABSMAX_V ? p.head_dim_v : p.head_dim) - chunk * 8;
  int largest = 0;
  for (int head = 0; head < heads; head++, base += s.head)
    for (int i = first; i < end; i += AT_ONCE * STEP) {
      uint4 x[AT_ONCE];
      UNROLLED(j, AT_ONCE) {
        const int row = min(i + j * STEP, end - 1);
        const u16 *at = is_key ? key_row(p, base, s, pages, seq.first_k + row) : base + (i64)(seq.first_q + row) * s.row;
        x[j] = load_chunk_if(channels > 0, at + chunk * 8, channels);
      }
      UNROLLED(j, AT_ONCE) largest = finite_magnitude(largest, x[j]);
    }
  raise(absmax_of(p, tensor, b, head_k), largest);
}
