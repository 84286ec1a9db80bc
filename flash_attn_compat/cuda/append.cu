// Appends new keys and values to a cache, and writes the rotated Q to q_rotated, for calls with too many rows or new
// keys for the decode kernel. Each thread takes pieces of 8 channels. grid: any number of blocks.
#define D 64   // the headers need a value; this kernel does not
#include "append.cuh"

constexpr int THREADS = 128;

// The pieces of a tensor that one thread takes: every n-th piece of all tokens, for n threads. advance() moves to the
// next one without a division.
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

KERNEL(THREADS, 8) append(const Params p) {
  const u32 thread = blockIdx.x * THREADS + threadIdx.x, threads = gridDim.x * THREADS;
  const int pieces = new_pieces(p), q_pieces = (p.head_dim + 7) / 8;
  for (Walk walk(thread, pieces * p.nheads_k); walk.token < (u32)p.batch * p.seqlen_new; walk.advance())
    append_piece<true>(p, walk.token / p.seqlen_new, walk.token % p.seqlen_new, walk.piece / pieces,
                       walk.piece % pieces);

  if (!p.rotary_dim) return;
  // Count threads from the last one, so that if there is little work, other threads take Q than take the new keys.
  for (Walk walk(threads - 1 - thread, q_pieces * p.nheads); walk.token < (u32)p.batch * p.seqlen_q; walk.advance()) {
    const int b = walk.token / p.seqlen_q, row = walk.token % p.seqlen_q, head = walk.piece / q_pieces,
              piece = walk.piece % q_pieces;
    const u16 *source = row_at(p.q, p.q_s, b, row, head);
    u16 *target = row_at(p.q_rotated, p.q_rotated_s, b, row, head);
    const uint4 x = load_chunk(source + piece * 8, p.head_dim - piece * 8);
    Rotation rotation;
    rotation.load(p, source, piece, query_position(p, b, row));
    store_chunk(target + piece * 8, rotation.of(p, x), p.head_dim - piece * 8);
  }
}
