// A dense mask of (batch, nheads, rows, keys), after the kernel mask (mask.cu) has read it. BIAS 1: booleans, true if a
// key is visible, read as bits; BIAS 2: biases in the caller's dtype, added to scores; BIAS 4: biases in fp32.
// Sequences, heads or rows may share a mask. BIAS_PAIRS: the biases of an even key and the next are loaded together.
#pragma once
#include "base/sequences.cuh"

constexpr int BAND = 64, REACH = 1024,
              PART_KEYS = REACH / 2;   // a word of the map stands for BAND rows and REACH keys, a bit for 32 keys
constexpr u32 HIDDEN = TYPE == 0 ? 0xfc00 : 0xff80;   // -inf

struct DenseMask {
  i64 values;   // offset of this head's values
  int row, map;   // this head's first row and first word of the map
  DEVICE DenseMask(const Params &p, int b, int head)
        : values(b * p.bias_s.batch + (i64)head * p.bias_s.head), row(b * p.bias_batch + head * p.bias_head) {
    map = row * p.bias_bands * p.bias_chunks * 2, row *= p.bias_rows;
  }
  // Returns the mask's row for query row i: its only row, if all rows share it.
  static DEVICE int row_of(const Params &p, int i) { return min(i, p.bias_rows - 1); }
  // Returns a bit for each 32 keys from `key` on, for ROWS rows from i on: whether a row sees one of the keys (`what`
  // 0), or whether the mask must be read for them, since it hides some or adds something (`what` 1).
  template <int ROWS> DEVICE u32 word(const Params &p, int what, int i, int key) const {
    u32 found = 0;
    UNROLLED(n, (ROWS + BAND - 1) / BAND)
      found |=
          global_load(p.bias_map + map + (row_of(p, i + n * BAND) / BAND * p.bias_chunks + key / REACH) * 2 + what);
    return found >> key / 32 % 32;
  }
  template <int ROWS, int KEYS> DEVICE bool has(const Params &p, int what, int i, int key) const {
    return word<ROWS>(p, what, i, key) & (KEYS < 64 ? 1 : (1 << KEYS / 32) - 1);
  }
  // Returns the next tile of KEYS keys, from `tile` on, in which a row sees a key; `last` or more if there is none.
  template <int ROWS, int KEYS> DEVICE int next(const Params &p, int i, int tile, int last) const {
    for (u32 found; BIAS && tile < last; tile = (tile * KEYS / REACH + 1) * (REACH / KEYS))
      if ((found = word<ROWS>(p, 0, i, tile * KEYS)))
        return max(tile, (tile * KEYS / 32 + __ffs(found) - 1) * 32 / KEYS);
    return tile;
  }
  DEVICE bool sees(const Params &p, int i, int key, int offset) const {
    return global_load(p.bias_of_rows + (i64)(row + row_of(p, i)) * p.bias_chunks * 32 + key / 32) >>
               (key % 32 + offset) &
           1;
  }
  // Returns the bias of a score: -inf after the last key, and 0 if the mask need not be read.
  DEVICE float at(const Params &p, int i, int key, bool is_read = true) const {
    const i64 place = values + (i64)row_of(p, i) * p.bias_s.row + key;
    const bool there = is_read && key < p.seqlen_k;
    return BIAS == 4 ? global_load_if(there, (const float *)p.bias + place, is_read ? NEG_INF : 0.f)
                     : bits_to_float(global_load_if(there, (const u16 *)p.bias + place, (u16)(is_read ? HIDDEN : 0)));
  }
  // Returns the biases of `key` and the next key.
  DEVICE float2 pair(const Params &p, int i, int key, bool is_read = true) const {
    if (!BIAS_PAIRS) return make_float2(at(p, i, key, is_read), at(p, i, key + 1, is_read));
    const i64 place = values + (i64)row_of(p, i) * p.bias_s.row + key;
    const bool there = is_read && key < p.seqlen_k;
    const float none = is_read ? NEG_INF : 0.f;
    if (BIAS == 4)
      return global_load_if(there, (const float2 *)((const float *)p.bias + place), make_float2(none, none));
    const u32 both =
        global_load_if(there, (const u32 *)((const u16 *)p.bias + place), (u32)(is_read ? HIDDEN << 16 | HIDDEN : 0));
    return make_float2(bits_to_float((u16)both), bits_to_float((u16)(both >> 16)));
  }
  // Returns the bias of an existing row; for booleans 0 or -inf. Booleans may have any stride. Beyond the last key, the
  // last one is loaded and not used.
  DEVICE float number(const Params &p, int i, int key) const {
    if (BIAS > 1) return at(p, i, key);
    const i64 place = values + (i64)i * p.bias_s.row + (i64)min(key, p.seqlen_k - 1) * p.bias_key;
    const bool seen = global_load((const unsigned char *)p.bias + place);
    return key < p.seqlen_k && seen ? 0.f : NEG_INF;
  }
  // Returns a row's largest bias if it is below 0, else 0. Kernels subtract it from the row's scores, or from their
  // maximum, so that a huge negative bias costs the LSE no digits.
  DEVICE float top(const Params &p, int i) const {
    const u32 bits = 0x7fffffff - global_load(p.bias_of_rows + row + row_of(p, i));
    return bits < 0x7f800000 ? -__int_as_float(bits) : 0.f;
  }
};
