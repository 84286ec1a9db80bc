// struct Params, the only argument of every kernel, passed by value. launching/params.py packs the same bytes; a
// test compares the two layouts. Strides count elements. Batch strides (page strides if k and v are paged) have 64
// bits, row and head strides 32.
#pragma once

typedef unsigned int u32;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

struct Strides {
  i64 batch;
  int row, head;
};

#if FLEX
// FlexAttention (flex.cuh). Lists of a BlockMask: partial and full blocks of keys for queries (KV_LISTS), and of
// queries for keys (Q_LISTS). num (batch, heads, rows), indices (batch, heads, rows, columns).
enum { KV_LISTS = 0, Q_LISTS = 2 };
struct FlexList {
  int num_b, num_h, num_row, indices_b, indices_h, indices_row, indices_column;   // strides of num and indices
  int rows, columns;
};
struct FlexParams {
  const int *num[4], *indices[4];   // null if there is no such list
  const void *captured[16];
  float *gradients[8];   // of captured tensors: contiguous, of the same shape
  FlexList lists[4];
  int size[16][4], stride[16][4];   // of captured tensors
  i64 numbers[8];
};
#endif

struct Params {
  // The head of the struct: addresses, which differ from call to call. q, k and v are fp16, or bf16 by TYPE.
  const u16 *q, *k, *v;
  const float *alibi_slopes;   // (batch, nheads) with slopes_batch, (nheads,) with slopes_batch = 0
  const int *cu_seqlens_q, *cu_seqlens_k;   // (batch + 1,) or null
  const int *seqused_k;   // (batch,) or null: keys in use, counted from the sequence's first slot
  const int *leftpad_k;   // (batch,) or null: slots skipped at the front
  const int *block_table;   // (batch, pages_per_sequence) or null
  const void *bias;   // a dense mask: see mask.cuh
  const i64 *rng_state;   // (2,), for dropout
  // New keys and values to append to a cache; keys are rotated first, unless rotary_dim is 0. The first new slot of
  // sequence b is seqused_k[b], or seqlen_k - seqlen_new without seqused_k.
  const u16 *k_new, *v_new, *rotary_cos, *rotary_sin;
  u16 *q_rotated;   // written by append.cu; later launches read it as their q
  const u16 *dout;
  u16 *out;   // of the dtype of q; the backward reads out and lse
  float *lse;   // fp32 (batch, nheads, seqlen_q) or (nheads, total_q), contiguous; null: the caller wants no LSE
  const float *dlse;   // gradient of lse, of its layout; null: zero
  u16 *dq, *dk, *dv;
  float *lse_true;   // lse without the position term that flash-attn adds under causal ALiBi; may be null
  int *absmax;   // if bf16 is converted: (3, batch, nheads_k) largest finite magnitudes of k, v, q; kernels raise them
                 // from 0
  u32 *bias_map, *bias_of_rows;   // written by mask.cu: which tiles the mask hides, and its rows as bits
  int *absmax_dout;   // if bf16 is converted, in a backward: (2, batch, nheads_k) maxima of dout and of delta; the
                      // delta kernel raises them from 0
  float *delta;   // rowsum(out * dout), of the layout of lse
  u16 *copies;   // contiguous fp16 copies of bf16 k and v; in the backward first of q and dout
  int *marks;   // (2, nheads_k, ...): the maximum by which each part of the copies was scaled; null if the final maxima
                // are known
  int *counters;   // (tiles,): how many splits of a tile have finished; zero before and after a launch
  float *parts;   // partial results of splits: (tiles, splits, ...); see merge_splits and add_splits
  int seqlen_k;   // keys of the longest sequence (capacity for a cache)
  int zero;   // always 0, but the compiler does not know: code uses it to prevent some of its optimizations

  Strides q_s, k_s, v_s, out_s, dout_s, dq_s, dk_s, dv_s, k_new_s, v_new_s, q_rotated_s, bias_s;
  i64 lse_batch;   // lse, lse_true, delta: elements between sequences (0 when packed)
  i64 lse_head;   // and between heads
  int slopes_batch;
  int table_stride;   // elements between the rows of block_table

  int batch, nheads, nheads_k, group;   // group = nheads / nheads_k
  int seqlen_q;   // rows of the longest sequence, by which the grid is chosen
  int total_q, total_k;   // tokens of packed q and k: no kernel reads or writes beyond them
  int seqlen_new;   // keys appended behind seqused_k; they count as used
  int head_dim, head_dim_v;
  int window_left, window_right;   // -1: unbounded
  int page_size, pages_per_sequence, num_pages;
  int tiles;   // tiles of one head of the longest sequence: of queries, in dkdv of keys; SHARED_GRID: how many
               // neighbouring tiles of any sequences form a group
  int splits;   // how many blocks share a tile at most. They share its keys (forward, decode), the heads of its group
                // (dkdv), or the rows of one head (absmax)
  int resident;   // how many blocks the GPU runs at once
  int varlen_tiles;   // SHARED_GRID: blocks of one head for all sequences together (VarlenTile)
  int rotary_dim, rotary_interleaved, rotary_rows;   // rotary_rows: rows of the cos and sin tables
  int rotary_row_stride;   // elements between rows of cos and sin
  int rotate_rows_apart;   // 1: rotate row i of q at position seqused_k + i; 0: every row at seqused_k
  int lse_has_position;   // reported LSE = true LSE + slope * row position
  int bias_key, bias_batch, bias_head;   // the stride of keys; how many masks lie between sequences and between heads
  int bias_rows, bias_bands, bias_chunks;   // sizes of the mask and of its map
  int dropout_limit;   // a probability whose pseudo-random word is above it is dropped (core/dropout.py)
  float dropout_scale;   // 1 / (1 - dropout_p)
  float softmax_scale, softcap;
  int converts_rows;   // to_half converts q and dout; else k and v

  // 8-bit caches: a key is the cache's number times k_factor times k_descale; values likewise. The addresses are the
  // tail of the struct, which each call packs.
  float k_factor, v_factor;
  Strides k_descale_s, v_descale_s;   // row: 0
  const float *k_descale, *v_descale;   // (batch, nheads_k), of any strides; null: 1
#if FLEX
  FlexParams flex;
#endif
};
