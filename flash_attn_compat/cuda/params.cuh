// The one argument of every kernel, by value. backends/fused/params.py writes the same bytes; a test compares the layouts.
// Strides count elements. Batch strides (of pages, where k and v are paged) are 64 bits wide, row and head strides 32.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

struct Strides {
  i64 batch;
  int row, head;
};

struct Params {
  // The head, which differs from call to call. q, k, v are in their dtype's bits.
  const u16 *q, *k, *v;
  const float *alibi_slopes;               // (batch, nheads) with slopes_batch, (nheads,) with slopes_batch = 0
  const int *cu_seqlens_q, *cu_seqlens_k;  // (batch + 1,) or null
  const int *seqused_k;                    // (batch,) or null: keys in use, counted from the sequence's first slot
  const int *leftpad_k;                    // (batch,) or null: slots skipped at the front
  const int *block_table;                  // (batch, pages_per_sequence) or null
  const void *bias;                        // a dense mask, as mask.cuh says
  const i64 *rng_state;                    // (2,), for dropout
  // Append: new keys and values, rotated and written behind the cache's. Sequence b's first new slot is seqused_k[b], without seqused_k it
  // is seqlen_k - seqlen_new. rotary_dim = 0: nothing is rotated.
  const u16 *k_new, *v_new, *rotary_cos, *rotary_sin;
  u16 *q_rotated;    // by append.cu: the launches behind it have it as their q
  const u16 *dout;
  u16 *out;          // as q; the backward reads out and lse
  float *lse;        // fp32 (batch, nheads, seqlen_q) or (nheads, total_q), contiguous; null where nobody wants it
  const float *dlse; // as lse, its gradient; null where there is none
  u16 *dq, *dk, *dv;
  float *lse_true;   // as lse without the position that flash-attn adds under causal ALiBi; may be null
  int *absmax;       // converted bf16: (3, batch, nheads_k) largest finite magnitudes of k, v, q, raised from 0
  u32 *bias_map, *bias_of_rows;   // what mask.cu has found in it
  int *absmax_dout;  // backward of converted bf16: (2, batch, nheads_k) maxima that delta raises from 0
  float *delta;      // (.., like lse): rowsum(out * dout)
  u16 *copies;       // converted bf16: k and v as fp16, in the backward q and dout first; all contiguous
  int *marks;        // (2, nheads_k, ...): the maxima by which k and v have been copied before all were known; else null
  int *counters;     // splits: (tiles,), zero before a launch and after it
  float *parts;      // where tiles have several splits, what these hand to the last one: (tiles, splits, ...), as merge_splits or add_splits says
  int seqlen_k;      // keys of the longest sequence (capacity for a cache)
  int zero;          // always 0, which the compiler cannot know: for compiler steering

  Strides q_s, k_s, v_s, out_s, dout_s, dq_s, dk_s, dv_s, k_new_s, v_new_s, q_rotated_s, bias_s;
  i64 lse_batch;     // lse, lse_true, delta: elements between sequences (0 when packed)
  i64 lse_head;      // and between heads
  int slopes_batch;
  int table_stride;  // elements between the rows of block_table

  int batch, nheads, nheads_k, group;       // group = nheads / nheads_k
  int seqlen_q;                             // longest rows a sequence is launched for
  int total_q, total_k;                     // tokens of packed q and k: nothing past them is touched
  int seqlen_new;                           // keys appended behind seqused_k: counted as used
  int head_dim, head_dim_v;
  int window_left, window_right;            // -1: unbounded
  int page_size, pages_per_sequence, num_pages;
  int tiles;                                // row tiles (key tiles for dk, dv) of the longest sequence, a head; SHARED_GRID: of any sequences, neighbours
  int splits;                               // forward, decode: blocks that share the keys of a tile, at most; dkdv: those that share a group; absmax: blocks of a head
  int resident;                             // blocks that the GPU holds at once
  int varlen_tiles;                                // SHARED_GRID: blocks of a head for all sequences together (VarlenTile in common.cuh)
  int rotary_dim, rotary_interleaved, rotary_rows;   // rotary_rows: rows of the cos and sin tables
  int rotary_row_stride;                    // elements between rows of cos and sin
  int rotate_rows_apart;                    // q row i stands at seqused_k + i (else all at seqused_k)
  int lse_has_position;                     // reported LSE = true LSE + slope * row position
  int bias_key, bias_batch, bias_head, bias_rows, bias_bands, bias_chunks;   // elements between keys; heads' masks from one sequence and head to the next; their sizes
  int dropout_limit;                        // a word above it drops its probability (core/dropout.py)
  float dropout_scale;                      // 1 / (1 - dropout_p)
  float softmax_scale, softcap;
  int converts_rows;                        // to_half: q and dout, else k and v
};
