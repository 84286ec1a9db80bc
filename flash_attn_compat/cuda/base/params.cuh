// struct Params, the only argument of every kernel, passed by value. launching/params.py packs the same bytes; a
// test compares the two layouts. Strides count elements: batch strides (page strides, where k and v are paged) have 64
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
  int num_b, num_h, num_row, indices_b, indices_h, indices_row, indices_column;   // elements between ...
  int rows, columns;
};
struct FlexParams {
  const int *num[4], *indices[4];   // null: none
  const void *captured[16];
  float *gradients[8];   // contiguous, of their captured tensors' shapes
  FlexList lists[4];
  int size[16][4], stride[16][4];   // of captured tensors
  i64 numbers[8];
};
#endif

struct Params {
  // The head of the struct: addresses, which differ from call to call. q, k, v hold the bits of their dtype.
  const u16 *q, *k, *v;
  const float *alibi_slopes;   // (batch, nheads) with slopes_batch, (nheads,) with slopes_batch = 0
  const int *cu_seqlens_q, *cu_seqlens_k;   // (batch + 1,) or null
  const int *seqused_k;   // (batch,) or null: keys in use, counted from the sequence's first slot
  const int *leftpad_k;   // (batch,) or null: slots skipped at the front
  const int *block_table;   // (batch, pages_per_sequence) or null
  const void *bias;   // a dense mask: see mask.cuh
  const i64 *rng_state;   // (2,), for dropout
  // Append: new keys and values are rotated and written behind the cache's keys. The first new slot of sequence b is
  // seqused_k[b], or seqlen_k - seqlen_new without seqused_k. rotary_dim = 0: no rotation.
  const u16 *k_new, *v_new, *rotary_cos, *rotary_sin;
  u16 *q_rotated;   // written by append.cu; later launches read it as their q
  const u16 *dout;
  u16 *out;   // of the dtype of q; the backward reads out and lse
  float *lse;   // fp32 (batch, nheads, seqlen_q) or (nheads, total_q), contiguous; null: the caller wants no LSE
  const float *dlse;   // gradient of lse, of its layout; null: zero
  u16 *dq, *dk, *dv;
  float *lse_true;   // lse without the position term that flash-attn adds under causal ALiBi; may be null
  int *absmax;   // converted bf16: (3, batch, nheads_k) largest finite magnitudes of k, v, q, raised from 0
  u32 *bias_map, *bias_of_rows;   // written by mask.cu: which tiles the mask hides, and its rows as bits
  int *absmax_dout;   // converted bf16, backward: (2, batch, nheads_k) maxima of dout and of delta; the delta kernel
                      // raises them from 0
  float *delta;   // rowsum(out * dout), of the layout of lse
  u16 *copies;   // converted bf16: contiguous fp16 copies of k and v; in the backward of q and dout first
  int *marks;   // (2, nheads_k, ...): the maximum with which each part of k and v was converted; null: all maxima are
                // known
  int *counters;   // splits: (tiles,), zero before and after a launch
  float *parts;   // partial results of splits: (tiles, splits, ...); see merge_splits and add_splits
  int seqlen_k;   // keys of the longest sequence (capacity for a cache)
  int zero;   // always 0, unknown to the compiler: for compiler steering

  Strides q_s, k_s, v_s, out_s, dout_s, dq_s, dk_s, dv_s, k_new_s, v_new_s, q_rotated_s, bias_s;
  i64 lse_batch;   // lse, lse_true, delta: elements between sequences (0 when packed)
  i64 lse_head;   // and between heads
  int slopes_batch;
  int table_stride;   // elements between the rows of block_table

  int batch, nheads, nheads_k, group;   // group = nheads / nheads_k
  int seqlen_q;   // longest rows a sequence is launched for
  int total_q, total_k;   // tokens of packed q and k: nothing past them is touched
  int seqlen_new;   // keys appended behind seqused_k: counted as used
  int head_dim, head_dim_v;
  int window_left, window_right;   // -1: unbounded
  int page_size, pages_per_sequence, num_pages;
  int tiles;   // tiles of the longest sequence, of one head: of queries (dkdv: of keys); SHARED_GRID: neighbouring
               // tiles of any sequences
  int splits;   // blocks that share a tile, at most. forward, decode: its keys; dkdv: the heads of its group; absmax:
                // one head's rows
  int resident;   // blocks that the GPU holds at once
  int varlen_tiles;   // SHARED_GRID: blocks of one head for all sequences together (VarlenTile)
  int rotary_dim, rotary_interleaved, rotary_rows;   // rotary_rows: rows of the cos and sin tables
  int rotary_row_stride;   // elements between rows of cos and sin
  int rotate_rows_apart;   // q row i stands at seqused_k + i (else all at seqused_k)
  int lse_has_position;   // reported LSE = true LSE + slope * row position
  int bias_key, bias_batch, bias_head;   // elements between keys; mask rows between sequences and between heads
  int bias_rows, bias_bands, bias_chunks;   // sizes of the mask and of its map
  int dropout_limit;   // a word above it drops its probability (core/dropout.py)
  float dropout_scale;   // 1 / (1 - dropout_p)
  float softmax_scale, softcap;
  int converts_rows;   // to_half converts q and dout; else k and v

  // 8-bit caches: a number of k times k_factor and its descale is a key's; v likewise. Each call packs the addresses.
  float k_factor, v_factor;
  Strides k_descale_s, v_descale_s;   // row: 0
  const float *k_descale, *v_descale;   // (batch, nheads_k), of any strides; null: 1
#if FLEX
  FlexParams flex;
#endif
};
