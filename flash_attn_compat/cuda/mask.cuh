// A dense mask of (batch, nheads, rows, keys), as mask.cu has looked through it. BIAS 1: booleans, true where a key is seen, which are read as bits;
// 2: what is added to scores, in the caller's dtype; 4: the same in fp32. What sequences, heads or rows share is there once.
// BIAS_PAIRS: two neighbouring keys, the first one even, are loaded together.
#pragma once
#include "common.cuh"

constexpr int BAND = 64, REACH = 1024, PART_KEYS = REACH / 2;   // rows and keys of a word of the map, whose bits are for 32 keys
constexpr u32 HIDDEN = TYPE == 0 ? 0xfc00 : 0xff80;   // -inf

struct DenseMask {
  i64 values;      // where this head's begin
  int row, map;    // its first row and first word of the map among those of all
  DEVICE DenseMask(const Params &p, int b, int head) : values(b * p.bias_s.batch + (i64)head * p.bias_s.head), row(b * p.bias_batch + head * p.bias_head) {
    map = row * p.bias_bands * p.bias_chunks * 2, row *= p.bias_rows;
  }
  static DEVICE int own(const Params &p, int i) { return min(i, p.bias_rows - 1); }   // there is one row where all share it
  // Of ROWS rows from i on and the keys from one on, a bit for each 32: whether some are seen (`what` 0); whether the mask has to be read there (1).
  template <int ROWS> DEVICE u32 word(const Params &p, int what, int i, int key) const {
    u32 found = 0;
    UNROLLED(n, (ROWS + BAND - 1) / BAND) found |= global_load(p.bias_map + map + (own(p, i + n * BAND) / BAND * p.bias_chunks + key / REACH) * 2 + what);
    return found >> key / 32 % 32;
  }
  template <int ROWS, int KEYS> DEVICE bool has(const Params &p, int what, int i, int key) const { return word<ROWS>(p, what, i, key) & (KEYS < 64 ? 1 : (1 << KEYS / 32) - 1); }
  // From `tile` on, the next one of KEYS keys of which some are seen.
  template <int ROWS, int KEYS> DEVICE int next(const Params &p, int i, int tile, int last) const {
    for (u32 found; BIAS && tile < last; tile = (tile * KEYS / REACH + 1) * (REACH / KEYS))
      if ((found = word<ROWS>(p, 0, i, tile * KEYS))) return max(tile, (tile * KEYS / 32 + __ffs(found) - 1) * 32 / KEYS);
    return tile;
  }
  DEVICE bool sees(const Params &p, int i, int key, int offset) const { return global_load(p.bias_of_rows + (i64)(row + own(p, i)) * p.bias_chunks * 32 + key / 32) >> (key % 32 + offset) & 1; }
  // What is added to a score; to one behind the last key -inf; and 0 where the mask need not be read.
  DEVICE float at(const Params &p, int i, int key, bool is_read = true) const {
    const i64 place = values + (i64)own(p, i) * p.bias_s.row + key;
    const bool there = is_read && key < p.seqlen_k;
    return BIAS == 4 ? global_load_if(there, (const float *)p.bias + place, is_read ? NEG_INF : 0.f)
                     : bits_to_float(global_load_if(there, (const u16 *)p.bias + place, (u16)(is_read ? HIDDEN : 0)));
  }
  // The same for two neighbouring keys.
  DEVICE float2 pair(const Params &p, int i, int key, bool is_read = true) const {
    if (!BIAS_PAIRS) return make_float2(at(p, i, key, is_read), at(p, i, key + 1, is_read));
    const i64 place = values + (i64)own(p, i) * p.bias_s.row + key;
    const bool there = is_read && key < p.seqlen_k;
    const float none = is_read ? NEG_INF : 0.f;
    if (BIAS == 4) return global_load_if(there, (const float2 *)((const float *)p.bias + place), make_float2(none, none));
    const u32 both = global_load_if(there, (const u32 *)((const u16 *)p.bias + place), (u32)(is_read ? HIDDEN << 16 | HIDDEN : 0));
    return make_float2(bits_to_float((u16)both), bits_to_float((u16)(both >> 16)));
  }
  // A number of a row that there is, of booleans too: 0, or what hides. Those may lie anyhow; behind the last key it loads that one.
  DEVICE float number(const Params &p, int i, int key) const {
    if (BIAS > 1) return at(p, i, key);
    const i64 place = values + (i64)i * p.bias_s.row + (i64)min(key, p.seqlen_k - 1) * p.bias_key;
    const bool seen = global_load((const unsigned char *)p.bias + place);
    return key < p.seqlen_k && seen ? 0.f : NEG_INF;
  }
  // A row's largest bias if it is below 0: taken off once the score is rounded, it spoils nothing by its magnitude.
  DEVICE float top(const Params &p, int i) const {
    const u32 bits = 0x7fffffff - global_load(p.bias_of_rows + row + own(p, i));
    return bits < 0x7f800000 ? -__int_as_float(bits) : 0.f;
  }
};
