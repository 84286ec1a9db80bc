// New keys and values on their way into a cache, behind the ones in use: rotated by their positions (RoFormer: Su et al., 2021) if there
// are tables, otherwise untouched. Q is rotated into q_rotated, and the counters of the decode kernel behind are set to 0.
//
// A thread takes pieces of 8 channels, wherever they are; any number of blocks does it all.
#define D 64   // nothing here depends on it
#include "common.cuh"

constexpr int THREADS = 128;

// Pieces of all tokens of a tensor, dealt to the threads of the grid: token and piece advance without a division.
struct Walk {
  u32 token, piece, token_step, piece_step, pieces;
  DEVICE Walk(u32 thread, u32 pieces) : pieces(pieces) {
    const u32 threads = gridDim.x * THREADS;
    token = thread / pieces, piece = thread % pieces;
    token_step = threads / pieces, piece_step = threads % pieces;
  }
  DEVICE void advance() {
    token += token_step, piece += piece_step;
    if (piece >= pieces) piece -= pieces, token++;
  }
};

// The slot behind sequence b's keys in use.
DEVICE int first_new_slot(const Params &p, int b) { return p.seqused_k ? min(global_load(p.seqused_k + b), UNBOUNDED) : p.seqlen_k - p.seqlen_new; }

// Where a slot of sequence b lies in a cache; null where there is no such slot, which is left alone.
DEVICE u16 *writable_slot(const Params &p, const u16 *cache, const Strides &s, int b, int slot) {
#if PAGED
  const int page = slot / p.page_size;
  if (slot < 0 || page >= p.pages_per_sequence) return nullptr;
  const int index = global_load(p.block_table + (i64)b * p.table_stride + page);
  if (index < 0 || index >= p.num_pages) return nullptr;
  return (u16 *)cache + index * s.batch + (i64)(slot - page * p.page_size) * s.row;
#else
  return slot < 0 || slot >= p.seqlen_k ? nullptr : (u16 *)cache + b * s.batch + (i64)slot * s.row;
#endif
}

DEVICE float channel_of(const uint4 &x, int i) {
  const u32 pair = i / 2 == 0 ? x.x : i / 2 == 1 ? x.y : i / 2 == 2 ? x.z : x.w;
  return bits_to_float((u16)(pair >> i % 2 * 16));
}

// Channels 8 * chunk and the 7 behind them of a row that stands at `position`. rotary_dim is a multiple of 16, so that both numbers of
// a pair, or both halves' pieces, are whole. Positions past the tables are not rotated.
DEVICE uint4 rotated_chunk(const Params &p, const u16 *row, int chunk, int head_dim, int position) {
  const uint4 x = load_chunk(row + chunk * 8, head_dim - chunk * 8);
  if (chunk * 8 >= p.rotary_dim || position < 0 || position >= p.rotary_rows) return x;
  const u16 *cos = p.rotary_cos + (i64)position * p.rotary_row_stride, *sin = p.rotary_sin + (i64)position * p.rotary_row_stride;
  float y[8];
  if (p.rotary_interleaved) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float a = channel_of(x, 2 * i), b = channel_of(x, 2 * i + 1);
      const float c = bits_to_float(global_load2(cos + chunk * 4 + i)), s = bits_to_float(global_load2(sin + chunk * 4 + i));
      y[2 * i] = a * c - b * s;
      y[2 * i + 1] = a * s + b * c;
    }
  } else {
    const int half = p.rotary_dim / 16;   // in pieces
    const bool is_second = chunk >= half;
    const int first = is_second ? chunk - half : chunk;
    const uint4 other = load_chunk(row + (is_second ? first : first + half) * 8, 8);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float c = bits_to_float(global_load2(cos + first * 8 + i)), s = bits_to_float(global_load2(sin + first * 8 + i));
      y[i] = fmaf(channel_of(x, i), c, channel_of(other, i) * (is_second ? s : -s));
    }
  }
  return make_uint4(pack_out(y[0], y[1]), pack_out(y[2], y[3]), pack_out(y[4], y[5]), pack_out(y[6], y[7]));
}

KERNEL(THREADS, 8) append(const Params p) {
  const u32 thread = blockIdx.x * THREADS + threadIdx.x, threads = gridDim.x * THREADS;
  if (p.counters)
    for (u32 i = thread; i < (u32)(p.tiles * p.nheads_k * p.batch); i += threads) global_store(p.counters + i, 0);

  const int k_chunks = (p.head_dim + 7) / 8, v_chunks = (p.head_dim_v + 7) / 8, k_pieces = k_chunks * p.nheads_k;
  for (Walk walk(thread, k_pieces + v_chunks * p.nheads_k); walk.token < (u32)p.batch * p.seqlen_new; walk.advance()) {
    const int b = walk.token / p.seqlen_new, row = walk.token % p.seqlen_new, slot = first_new_slot(p, b) + row;
    const bool is_k = (int)walk.piece < k_pieces;
    const int piece = is_k ? walk.piece : walk.piece - k_pieces, chunks = is_k ? k_chunks : v_chunks;
    const int head = piece / chunks, chunk = piece % chunks, head_dim = is_k ? p.head_dim : p.head_dim_v;
    const Strides &cache_s = is_k ? p.k_s : p.v_s, &new_s = is_k ? p.k_new_s : p.v_new_s;
    u16 *target = writable_slot(p, is_k ? p.k : p.v, cache_s, b, slot);
    if (!target) continue;
    const u16 *source = (is_k ? p.k_new : p.v_new) + b * new_s.batch + (i64)row * new_s.row + (i64)head * new_s.head;
    const uint4 x = is_k && p.rotary_dim ? rotated_chunk(p, source, chunk, head_dim, slot) : load_chunk(source + chunk * 8, head_dim - chunk * 8);
    store_chunk(target + (i64)head * cache_s.head + chunk * 8, x, head_dim - chunk * 8);
  }

  if (!p.rotary_dim) return;
  // From the other end, so that few rows of Q and few new keys are different threads' work.
  for (Walk walk(threads - 1 - thread, k_chunks * p.nheads); walk.token < (u32)p.batch * p.seqlen_q; walk.advance()) {
    const int b = walk.token / p.seqlen_q, row = walk.token % p.seqlen_q, head = walk.piece / k_chunks, chunk = walk.piece % k_chunks;
    const u16 *source = p.q + b * p.q_s.batch + (i64)row * p.q_s.row + (i64)head * p.q_s.head;
    u16 *target = p.q_rotated + b * p.q_rotated_s.batch + (i64)row * p.q_rotated_s.row + (i64)head * p.q_rotated_s.head;
    const int position = first_new_slot(p, b) + (p.rotate_rows_apart ? row : 0);
    store_chunk(target + chunk * 8, rotated_chunk(p, source, chunk, p.head_dim, position), p.head_dim - chunk * 8);
  }
}
