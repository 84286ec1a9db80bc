// What bf16 needs on a GPU whose tensor cores take fp16: the largest finite magnitude of q, k, v and dout of each sequence and key head,
// found in absmax_splits parts. Forward and backward make powers of two of them (scale_of in common.cuh).
#include "common.cuh"

constexpr int THREADS = 128, STEP = THREADS / CHUNKS;

// Grid: parts, key heads, sequences, tensors, which is the order of p.absmax.
KERNEL(THREADS, 8) absmax(const Params p) {
  SHARED_MEMORY
  const int part = blockIdx.x % p.absmax_splits, head_index = blockIdx.x / p.absmax_splits;
  const int head_k = head_index % p.nheads_k, b = head_index / p.nheads_k % p.batch, tensor = head_index / p.nheads_k / p.batch;
  const bool is_key = tensor == ABSMAX_K || tensor == ABSMAX_V;
  const Sequence seq = find_sequence(p, b);
  const int heads = is_key ? 1 : p.group, rows = (is_key ? seq.seqlen_k : seq.seqlen_q) * heads;
  const int head_dim = tensor == ABSMAX_Q || tensor == ABSMAX_K ? p.head_dim : p.head_dim_v;
  const u16 *base = tensor == ABSMAX_Q ? p.q : tensor == ABSMAX_K ? p.k : tensor == ABSMAX_V ? p.v : p.dout;
  const Strides &s = tensor == ABSMAX_Q ? p.q_s : tensor == ABSMAX_K ? p.k_s : tensor == ABSMAX_V ? p.v_s : p.dout_s;
  const int *pages = PAGED ? p.block_table + (i64)b * p.table_stride : nullptr;
  base += (PAGED && is_key ? 0 : b * s.batch) + (i64)head_k * heads * s.head;

  const int share = (rows + p.absmax_splits - 1) / p.absmax_splits, end = min(rows, (part + 1) * share);
  const int chunk = threadIdx.x % CHUNKS, channels = head_dim - chunk * 8;
  int largest = 0;
  if (channels > 0)
    for (int i = part * share + threadIdx.x / CHUNKS; i < end; i += STEP) {
      const u16 *row = is_key ? key_row(p, base, s, pages, seq.first_k + i) : base + (i64)(seq.first_q + i / heads) * s.row + (i64)(i % heads) * s.head;
      largest = finite_magnitude(largest, load_chunk(row + chunk * 8, channels));
    }
#pragma unroll
  for (int i = 16; i; i >>= 1) largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, i));
  const u32 shared = SHARED_BASE;
  if (threadIdx.x % 32 == 0) shared_store(shared + threadIdx.x / 32 * 4, (u32)largest);
  __syncthreads();
  if (threadIdx.x) return;
  for (int i = 1; i < THREADS / 32; i++) largest = max(largest, (int)shared_load(shared + i * 4));
  global_store(p.absmax + blockIdx.x, __int_as_float(largest));
}
