// Caches of 8-bit floats (CACHE 4: e4m3, 5: e5m2): conversion to and from fp16, by instructions that every architecture
// has. An e4m3 number becomes fp16, times 2^-8, if its sign goes to bit 15 and its exponent and mantissa to bit 7 and
// up; this holds for subnormal numbers, too. An e5m2 number is the upper byte of the same number in fp16.
#pragma once
#include "base/common.cuh"

#if CACHE
typedef u8 Cached;   // the elements of k and v

// even_bytes and odd_bytes return two of the four numbers in a word as fp16, divided by WIDENED_UNIT: those of bytes 0
// and 2, or of bytes 1 and 3. An e4m3 NaN becomes 480.
constexpr float WIDENED_UNIT = CACHE == 4 ? 256.f : 1.f;
DEVICE u32 even_bytes(u32 w) {
  return CACHE == 5 ? (w << 8) & 0xff00ff00u : ((w & 0x007f007fu) << 7) | ((w & 0x00800080u) << 8);
}
DEVICE u32 odd_bytes(u32 w) { return CACHE == 5 ? w & 0xff00ff00u : ((w >> 1) & 0x3f803f80u) | (w & 0x80008000u); }

// loud() multiplies even_bytes or odd_bytes of e4m3 by 144 * 2^8. That is exact, and turns NaN, read as 480, into
// infinity. No other number gives an infinite product or sum, and real_or_nan turns these into NaN again. It is cheaper
// to do that for the few sums than for all numbers.
constexpr float LOUD_UNIT = CACHE == 4 ? 1.f / 144.f : 1.f;
DEVICE u32 loud(u32 pair) { return CACHE == 4 ? multiply_pairs(pair, 0x78807880u) : pair; }
DEVICE float real_or_nan(float x) { return CACHE == 4 ? fmaf(x, 0.f, x) : x; }

// widened() returns four numbers as fp16 in order, divided by WIDENED_UNIT, and keeps NaN. The repeated sign of a byte
// becomes fp16's sign when the byte is shifted. loud() turns NaN into infinity, and infinity * 0 is NaN; these products
// run beside integer instructions.
template <u32 SELECTOR> DEVICE u32 widened_pair(u32 w) {
  const u32 pair = (bytes<SELECTOR>(w) << 7) & 0xbf80bf80u;
  return multiply_add_pairs(loud(pair), 0, pair);
}
DEVICE uint2 widened(u32 w) {
  if (CACHE == 5) return make_uint2(bytes<0x1404>(w), bytes<0x3424>(w));
  return make_uint2(widened_pair<0x9180>(w), widened_pair<0xb3a2>(w));
}
DEVICE uint4 widened(const uint4 &eight) {   // converts the first two words
  const uint2 a = widened(eight.x), b = widened(eight.y);
  return make_uint4(a.x, a.y, b.x, b.y);
}

// Returns the 8-bit float nearest to x, ties to even, and the largest finite one for larger x. NaN stays NaN.
DEVICE u32 narrowed(float x) {
  constexpr int SHIFT = CACHE == 4 ? 20 : 21, MIDDLE = CACHE == 4 ? 7 : 15;
  const u32 bits = __float_as_int(x), sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return sign | 0x7f;
  const u32 top = __float_as_int(CACHE == 4 ? 448.f : 57344.f), y = min(size, top);
  // A subnormal result: adding `power` rounds x to a multiple of the smallest subnormal number.
  constexpr u32 power = (128 + SHIFT - MIDDLE) << 23, rebias = (127 - MIDDLE) << 23, half = 1 << (SHIFT - 1);
  if (y < rebias + (1 << 23)) return sign | (__float_as_int(__int_as_float(y) + __int_as_float(power)) - power);
  return sign | ((y - rebias + half - 1 + ((y >> SHIFT) & 1)) >> SHIFT);
}

// Load 4, 8 or 16 channels of a row, of which `channels` exist; the others become 0.
DEVICE u32 load_four(const u8 *from, int channels) {
  u32 x = 0;
  UNROLLED(i, 4)
    if (i < channels) x |= global_load1(from + i) << 8 * i;
  return x;
}
DEVICE uint2 load_eight(const u8 *from, int channels) {
  if (VEC == 8) return global_load8_if(channels > 0, from);
  return make_uint2(load_four(from, channels), load_four(from + 4, channels - 4));
}
DEVICE uint4 load_sixteen(const u8 *from, int channels) {
  if (VEC == 8) return global_load16_if(channels > 0, (const u16 *)from);
  const uint2 a = load_eight(from, channels), b = load_eight(from + 8, channels - 8);
  return make_uint4(a.x, a.y, b.x, b.y);
}
DEVICE uint4 load_lane(const u8 *from, int channels) { return load_sixteen(from, channels); }
DEVICE uint4 load_lane_if(bool there, const u8 *from, int channels) { return load_sixteen(from, there ? channels : 0); }
// Load 8 channels of a row into the first two words, as load_chunk and load_chunk_if of common.cuh do.
DEVICE uint4 load_chunk(const u8 *from, int channels) {
  const uint2 x = load_eight(from, channels);
  return make_uint4(x.x, x.y, 0, 0);
}
DEVICE uint4 load_chunk_if(bool there, const u8 *from, int channels) { return load_chunk(from, there ? channels : 0); }

DEVICE float descale(const float *descales, const Strides &s, int b, int head_k) {
  return descales ? global_load(descales + b * s.batch + (i64)head_k * s.head) : 1.f;
}
// Return the factors by which the kernel's numbers, in multiples of `unit`, become true keys and values.
DEVICE float key_unit(const Params &p, int b, int head_k, float unit) {
  return unit * p.k_factor * descale(p.k_descale, p.k_descale_s, b, head_k);
}
DEVICE float value_unit(const Params &p, int b, int head_k, float unit) {
  return unit * p.v_factor * descale(p.v_descale, p.v_descale_s, b, head_k);
}
#else
typedef u16 Cached;
constexpr float WIDENED_UNIT = 1.f, LOUD_UNIT = 1.f;
DEVICE uint4 widened(const uint4 &x) { return x; }
DEVICE float key_unit(const Params &p, int b, int head_k, float unit) { return 1.f; }
DEVICE float value_unit(const Params &p, int b, int head_k, float unit) { return 1.f; }
DEVICE float real_or_nan(float x) { return x; }
DEVICE uint4 load_lane(const u16 *from, int channels) { return load_chunk(from, channels); }
DEVICE uint4 load_lane_if(bool there, const u16 *from, int channels) { return load_chunk_if(there, from, channels); }
#endif
