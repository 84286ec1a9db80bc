// What every kernel includes: reductions over lanes, 16-bit numbers, bf16 conversion, loads and stores of 8 channels.
// docs/kernels.md lists the macros. D and DV are the head dims that registers and tiles are made for; p.head_dim and
// p.head_dim_v are the call's.
#pragma once
#include "base/ptx.cuh"

#ifndef DV
#define DV D
#endif

DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }
DEVICE int clamp(int x, int low, int high) { return max(low, min(x, high)); }
// Returns to each of LANES neighbouring lanes their maximum. Four lanes share a row of an mma result.
template <int LANES, class T> DEVICE T max_of(T x) {
#pragma unroll
  for (int i = LANES / 2; i; i >>= 1) x = max(x, __shfl_xor_sync(ALL_LANES, x, i));
  return x;
}
template <int LANES> DEVICE float sum_of(float x) {
#pragma unroll
  for (int i = LANES / 2; i; i >>= 1) x += __shfl_xor_sync(ALL_LANES, x, i);
  return x;
}

// ---- 16-bit numbers
DEVICE u32 word(const uint4 &x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }
DEVICE float bits_to_float(u16 x) {
  return TYPE == 0 ? half_to_float(x) : __int_as_float((u32)x << 16);
}   // x has the bits of the caller's dtype

// out * dout, summed over 8 channels.
DEVICE float product_of_pairs(u32 a, u32 b) {
  return fmaf(bits_to_float((u16)a), bits_to_float((u16)b),
              bits_to_float((u16)(a >> 16)) * bits_to_float((u16)(b >> 16)));
}
DEVICE float product_of_chunks(const uint4 &a, const uint4 &b) {
  return product_of_pairs(a.x, b.x) + product_of_pairs(a.y, b.y) + product_of_pairs(a.z, b.z) +
         product_of_pairs(a.w, b.w);
}

// Rounds two floats to the caller's dtype.
DEVICE u32 pack_out(float a, float b) {
  if (TYPE != 2) return pack(a, b);
  u32 x = __float_as_int(a), y = __float_as_int(b);
  x = (x & 0x7fffffff) > 0x7f800000 ? 0x7fffffff : x + 0x7fff + ((x >> 16) & 1);
  y = (y & 0x7fffffff) > 0x7f800000 ? 0x7fffffff : y + 0x7fff + ((y >> 16) & 1);
  return (x >> 16) | (y & 0xffff0000u);
}

// ---- bf16 converted to fp16 (TYPE 2). Each tensor is scaled by a power of two for each (sequence, key head), which
// brings the largest finite magnitude to [2^14, 2^15). So nothing overflows, numbers down to 2^-29 of the largest keep
// all bits, and an inf or NaN affects no other head. The absmax kernel finds the maxima of k and v, forward that of q,
// delta those of dout and |delta|. A maximum is stored as the bits of a float; as integers they compare alike. For the
// copies of the forward only every other power is used, which brings the maximum to [2^14, 2^16): so the power seldom
// changes while the maximum still rises.
enum { ABSMAX_K, ABSMAX_V, ABSMAX_Q, ABSMAX_DOUT };
DEVICE int *absmax_of(const Params &p, int tensor, int b, int head_k) {
  return p.absmax + (i64)(tensor * p.batch + b) * p.nheads_k + head_k;
}
DEVICE int *absmax_of_dout(const Params &p, int b, int head_k) { return p.absmax_dout + b * p.nheads_k + head_k; }
DEVICE int *absmax_of_delta(const Params &p, int b, int head_k) { return absmax_of_dout(p, b + p.batch, head_k); }
// Raises a maximum in global memory to the largest x of a warp's lanes; returns the maximum known afterwards.
DEVICE int raise(int *maximum, int x) {
  const int known = threadIdx.x % 32 == 0 ? global_load_fresh(maximum) : 0;
  x = max_of<32>(x);
  if (threadIdx.x % 32 == 0 && x > known) atomicMax(maximum, x);
  return __shfl_sync(ALL_LANES, max(x, known), 0);
}
// The larger of `largest` and the finite magnitudes of two bf16 numbers, as bits of floats, which compare as integers.
DEVICE int finite_magnitude(int largest, u32 pair) {
  const int low = pair << 16 & 0x7fff0000, high = pair & 0x7fff0000;
  return max(largest, max(low < 0x7f800000 ? low : 0, high < 0x7f800000 ? high : 0));
}
DEVICE int finite_magnitude(int largest, const uint4 &x) {
  return finite_magnitude(finite_magnitude(finite_magnitude(finite_magnitude(largest, x.x), x.y), x.z), x.w);
}
template <int N> DEVICE int finite_magnitude(const uint4 (&x)[N]) {
  int largest = 0;
  UNROLLED(i, N) largest = finite_magnitude(largest, x[i]);
  return largest;
}
DEVICE float scale_for(int largest, bool is_copied = false) {
  if (largest == 0) return 1.f;
  const int exponent = max((largest >> 23) - 127, -111);
  return __int_as_float(((is_copied ? 15 - (exponent + 1 & ~1) : 14 - exponent) + 127) << 23);
}
DEVICE float inverse_of_power(float scale) { return __int_as_float((254 << 23) - __float_as_int(scale)); }
DEVICE float scale_of(const int *absmax, bool is_copied = false) {
  return TYPE == 2 ? scale_for(global_load(absmax), is_copied) : 1.f;
}

DEVICE u32 convert(u32 x, float scale) {
  return pack(__int_as_float(x << 16) * scale, __int_as_float(x & 0xffff0000u) * scale);
}
DEVICE uint4 convert(uint4 x, float scale) {
  return TYPE == 2 ? make_uint4(convert(x.x, scale), convert(x.y, scale), convert(x.z, scale), convert(x.w, scale)) : x;
}

// Loads 8 channels of a row, of which `channels` exist; the others become 0.
DEVICE uint4 load_chunk(const u16 *from, int channels) {
  if (VEC == 8) return global_load16(from);
  u32 x[8];
  UNROLLED(i, 8) x[i] = i < channels ? global_load2(from + i) : 0;
  return make_uint4(x[0] | x[1] << 16, x[2] | x[3] << 16, x[4] | x[5] << 16, x[6] | x[7] << 16);
}

DEVICE uint4 load_chunk_if(bool there, const u16 *from, int channels) {   // zeros if not `there`
  return VEC == 8 ? global_load16_if(there && channels > 0, from) : load_chunk(from, there ? channels : 0);
}

DEVICE void store_chunk(u16 *to, uint4 v, int channels) {
  if (VEC == 8) return global_store16(to, v);
  const u32 x[4] = {v.x, v.y, v.z, v.w};
  UNROLLED(i, 8)
    if (i < channels) global_store2(to + i, (u16)(x[i / 2] >> (i % 2 * 16)));
}
