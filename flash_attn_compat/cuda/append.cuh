// Writes new keys and values into a cache, behind the keys in use. With rotary tables it first rotates keys by their
// positions (RoFormer: Su et al., 2021). The decode kernel calls it for a few new keys, append.cu for many. A piece is
// 8 channels.
#pragma once
#include "base/sequences.cuh"

// Returns the slot after sequence b's keys in use.
DEVICE int first_new_slot(const Params &p, int b) {
  return p.seqused_k ? min(global_load(p.seqused_k + b), UNBOUNDED) : p.seqlen_k - p.seqlen_new;
}

// Returns the address of a slot of sequence b's cache; null if the cache has no such slot, and nothing may be written.
DEVICE Cached *writable_slot(const Params &p, const u16 *cache, const Strides &s, int b, int slot) {
  if (!PAGED) return slot < 0 || slot >= p.seqlen_k ? nullptr : (Cached *)cache + b * s.batch + (i64)slot * s.row;
  const int page = slot / p.page_size;
  if (slot < 0 || page >= p.pages_per_sequence) return nullptr;
  const int index = global_load(p.block_table + (i64)b * p.table_stride + page);
  if (index < 0 || index >= p.num_pages) return nullptr;
  return (Cached *)cache + index * s.batch + (i64)(slot - page * p.page_size) * s.row;
}

// The two numbers in word `i` of a piece.
DEVICE void numbers(const uint4 &x, int i, float *two) {
  const u32 pair = word(x, i);
  two[0] = bits_to_float((u16)pair);
  two[1] = bits_to_float((u16)(pair >> 16));
}

// The rotation of one piece. load() only loads, and of() uses what was loaded, so that the loads of several pieces
// overlap. rotary_dim is a multiple of 16. So a piece holds both numbers of a pair, if pairs are interleaved, or the
// other numbers are in one piece of the other half.
struct Rotation {
  uint4 cos, sin, other;   // other: the piece of the other half
  bool applies, is_second;
  DEVICE void load(const Params &p, const u16 *row, int piece,
                   int position) {   // a position beyond the tables gets no rotation
    const int half = p.rotary_dim / 16;   // in pieces
    applies = piece * 8 < p.rotary_dim && position >= 0 && position < p.rotary_rows;
    is_second = p.rotary_interleaved ? piece & 1 : piece >= half;
    const int column = p.rotary_interleaved ? piece / 2 : is_second ? piece - half : piece;
    const i64 at = (i64)position * p.rotary_row_stride + column * 8;
    cos = load_chunk_if(applies, p.rotary_cos + at, 8);
    sin = load_chunk_if(applies, p.rotary_sin + at, 8);
    other = load_chunk_if(applies && !p.rotary_interleaved, row + (is_second ? column : column + half) * 8, 8);
  }
  DEVICE uint4 of(const Params &p, const uint4 &x) const {
    float c[8], s[8], a[8], b[8], y[8];
    UNROLLED(i, 4) {
      numbers(cos, i, c + 2 * i);
      numbers(sin, i, s + 2 * i);
      numbers(x, i, a + 2 * i);
      numbers(other, i, b + 2 * i);
    }
    if (p.rotary_interleaved) {
      UNROLLED(i, 4) {   // a piece of cos or sin has the angles of two pieces of the row
        const float cosine = is_second ? c[4 + i] : c[i], sine = is_second ? s[4 + i] : s[i];
        y[2 * i] = a[2 * i] * cosine - a[2 * i + 1] * sine;
        y[2 * i + 1] = a[2 * i] * sine + a[2 * i + 1] * cosine;
      }
    } else {
      UNROLLED(i, 8) y[i] = fmaf(a[i], c[i], b[i] * (is_second ? s[i] : -s[i]));
    }
    return applies ? make_uint4(pack_out(y[0], y[1]), pack_out(y[2], y[3]), pack_out(y[4], y[5]), pack_out(y[6], y[7]))
                   : x;
  }
};

#if CACHE
// Stores a piece in the cache as 8-bit floats, divided by `descale`, then by `factor`.
DEVICE void store_narrowed(Cached *to, const uint4 &x, int channels, float descale, float factor) {
  u32 y[2] = {0, 0};
  UNROLLED(i, 4) {
    float two[2];
    numbers(x, i, two);
    UNROLLED(e, 2) {
      if (descale != 1.f) two[e] /= descale;
      if (factor != 1.f) two[e] /= factor;
      y[i / 2] |= narrowed(two[e]) << (i % 2 * 16 + e * 8);
    }
  }
  if (VEC == 8) return global_store((uint2 *)to, make_uint2(y[0], y[1]));
  UNROLLED(i, 8)
    if (i < channels) global_store(to + i, (u8)(y[i / 4] >> (i % 4 * 8)));
}
#endif

// Returns how many pieces a head's new key and value have together; those of the key come first.
DEVICE int new_pieces(const Params &p) { return (p.head_dim + 7) / 8 + (p.head_dim_v + 7) / 8; }

// MAY_ROTATE: false where p.rotary_dim is known to be 0.
template <bool MAY_ROTATE> DEVICE void append_piece(const Params &p, int b, int row, int head, int piece) {
  const int of_k = (p.head_dim + 7) / 8, slot = first_new_slot(p, b) + row;
  const bool is_k = piece < of_k;
  if (!is_k) piece -= of_k;
  const Strides &cache_s = is_k ? p.k_s : p.v_s, &new_s = is_k ? p.k_new_s : p.v_new_s;
  Cached *target = writable_slot(p, is_k ? p.k : p.v, cache_s, b, slot);
  if (!target) return;
  const u16 *source = row_at(is_k ? p.k_new : p.v_new, new_s, b, row, head);
  const int channels = (is_k ? p.head_dim : p.head_dim_v) - piece * 8;
  uint4 x = load_chunk(source + piece * 8, channels);
  if (MAY_ROTATE) {
    Rotation rotation;
    rotation.load(p, source, piece, is_k ? slot : -1);
    x = rotation.of(p, x);
  }
  target += (i64)head * cache_s.head + piece * 8;
#if CACHE
  store_narrowed(target, x, channels,
                 is_k ? descale(p.k_descale, p.k_descale_s, b, head) : descale(p.v_descale, p.v_descale_s, b, head),
                 is_k ? p.k_factor : p.v_factor);
#else
  store_chunk(target, x, channels);
#endif
}

// Returns the position by which row `row` of Q is rotated.
DEVICE int query_position(const Params &p, int b, int row) {
  return first_new_slot(p, b) + (p.rotate_rows_apart ? row : 0);
}
