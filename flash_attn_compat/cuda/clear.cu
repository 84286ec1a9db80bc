// Writes 0 to the tokens of packed results that another kernel has left unwritten: before the first sequence, after the
// last one, and in each sequence beyond the longest length. Results are `out` (out or dq) and LSE, of queries, and dk
// and dv, of keys; a null address stands for no result. Channels come in pieces of 8, aligned to 16 bytes.
//
// grid: any number of blocks. All blocks share the tokens outside of all sequences; each takes some of the sequences.
#include "base/ptx.cuh"

constexpr int THREADS = 256;

// The tokens [first, end), which `threads` threads clear together; this is number `thread` of them.
struct Turn {
  int first, end;
  i64 thread, threads;
};

DEVICE void clear_rows(const Params &p, u16 *rows, const Strides &s, int heads, const Turn &turn) {
  const int pieces = p.head_dim / 8;
  const i64 each = (i64)heads * pieces, count = (turn.end - turn.first) * each;
  for (i64 i = turn.thread; i < count; i += turn.threads) {
    const int of_token = (int)(i % each);
    u16 *const row = rows + (turn.first + i / each) * (i64)s.row + (i64)(of_token / pieces) * s.head;
    global_store16(row + of_token % pieces * 8, make_uint4(0, 0, 0, 0));
  }
}

DEVICE void clear_lse(const Params &p, const Turn &turn) {
  const i64 tokens = turn.end - turn.first, count = tokens * p.nheads;
  for (i64 i = turn.thread; i < count; i += turn.threads)
    global_store(p.lse + i / tokens * p.lse_head + turn.first + i % tokens, 0.f);
}

template <bool IS_KEYS> DEVICE void clear(const Params &p, const Turn &turn) {
  if (turn.first >= turn.end) return;
  if (IS_KEYS) {
    clear_rows(p, p.dk, p.dk_s, p.nheads_k, turn);
    clear_rows(p, p.dv, p.dv_s, p.nheads_k, turn);
    return;
  }
  if (p.out) clear_rows(p, p.out, p.out_s, p.nheads, turn);
  if (p.lse) clear_lse(p, turn);
}

// Returns where sequence b starts, clamped to the tensor, since cu_seqlens may be wrong.
DEVICE int start_of(const int *starts, int b, int total) { return min(max(global_load(starts + b), 0), total); }

template <bool IS_KEYS> DEVICE void clear_all(const Params &p, const int *starts, int total, int longest) {
  const i64 thread = (i64)blockIdx.x * THREADS + threadIdx.x, threads = (i64)gridDim.x * THREADS;
  clear<IS_KEYS>(p, {0, start_of(starts, 0, total), thread, threads});
  clear<IS_KEYS>(p, {start_of(starts, p.batch, total), total, thread, threads});
  if (longest >= total) return;
  for (int b = blockIdx.x; b < p.batch; b += gridDim.x) {
    const int start = start_of(starts, b, total), stop = start_of(starts, b + 1, total);
    if (stop - start > longest) clear<IS_KEYS>(p, {start + longest, stop, threadIdx.x, THREADS});
  }
}

KERNEL(THREADS, 4) clear(const Params p) {
  clear_all<false>(p, p.cu_seqlens_q, p.total_q, p.seqlen_q);
  if (p.dk) clear_all<true>(p, p.cu_seqlens_k, p.total_k, p.seqlen_k);
}
