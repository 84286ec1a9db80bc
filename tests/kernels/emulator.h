// A GPU's warps on a CPU, so that the kernels' very sources run where there is no GPU. Every function of ptx.cuh is here under its own
// name. What a GPU would let pass is an error: global memory outside of the tensors, shared memory outside of the block's or without a
// barrier between two threads' accesses, collectives that not all lanes of a warp reach. Shared memory starts as NaN.
//
// Each thread is a fiber (fibers.h). A warp runs until all its lanes wait for the block; then another one, at random, is next.
#pragma once
#define EMULATED 1
#include "ptx.cuh"
#include "fibers.h"

#define DEVICE inline
#define KERNEL(threads, blocks) extern "C" __attribute__((visibility("default"))) void
#define SHARED_MEMORY
#define SHARED_BASE emulator::SHARED_START
#define NEG_INF (-__builtin_inff())
#define POS_INF __builtin_inff()

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- Arithmetic
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float max(float a, float b) { return fmaxf(a, b); }
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
inline u32 max(u32 a, u32 b) { return a > b ? a : b; }
inline i64 min(i64 a, i64 b) { return a < b ? a : b; }
inline i64 max(i64 a, i64 b) { return a > b ? a : b; }
inline float __int_as_float(u32 x) { float f; memcpy(&f, &x, 4); return f; }
inline int __float_as_int(float f) { int x; memcpy(&x, &f, 4); return x; }
inline u32 __float_as_uint(float f) { return (u32)__float_as_int(f); }
inline float __log2f(float x) { return log2f(x); }
inline int __clz(int x) { return x ? __builtin_clz((u32)x) : 32; }
inline float flush_to_zero(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.f, x) : x; }
inline float exp2_approx(float x) { return flush_to_zero(exp2f(flush_to_zero(x))); }
inline float reciprocal_approx(float x) { return flush_to_zero(1.f / flush_to_zero(x)); }
inline u32 __byte_perm(u32 low, u32 high, u32 selector) {
  const u64 bytes = low | (u64)high << 32;
  u32 r = 0;
  for (int i = 0; i < 4; i++) r |= (u32)(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return r;
}

// ---- 16-bit numbers, rounded to nearest even
inline u16 float_to_half(float value) {
  u32 x = __float_as_uint(value);
  const u16 sign = x >> 16 & 0x8000;
  x &= 0x7fffffff;
  if (x > 0x7f800000) return 0x7fff;
  if (x >= 0x47800000) return sign | 0x7c00;
  if (x < 0x38800000) return sign | (__float_as_uint(__int_as_float(x) + 0.5f) - 0x3f000000);  // 0.5's last bit is half's smallest number
  return sign | (x + 0xfff + (x >> 13 & 1) - 0x38000000) >> 13;
}
inline float compute_half_to_float(u16 x) {
  const float magnitude = (x & 0x7c00) == 0x7c00 ? __int_as_float(0x7f800000 | (x & 0x3ff) << 13)
                          : x & 0x7c00           ? __int_as_float(((x & 0x7fff) << 13) + 0x38000000)
                                                 : (x & 0x3ff) * 0x1p-24f;
  return x & 0x8000 ? -magnitude : magnitude;
}
struct HalfTable {
  float value[65536];
  HalfTable() { for (u32 i = 0; i < 65536; i++) value[i] = compute_half_to_float((u16)i); }
};
static const HalfTable half_table;
inline float half_to_float(u16 x) { return half_table.value[x]; }
inline u16 float_to_bfloat(float value) {
  const u32 x = __float_as_uint(value);
  return (x & 0x7fffffff) > 0x7f800000 ? 0x7fff : (x + 0x7fff + (x >> 16 & 1)) >> 16;
}
inline float operand_to_float(u16 x) { return TYPE == 1 ? __int_as_float((u32)x << 16) : half_to_float(x); }
inline u16 float_to_operand(float x) { return TYPE == 1 ? float_to_bfloat(x) : float_to_half(x); }
inline u32 pack(float a, float b) { return float_to_operand(a) | (u32)float_to_operand(b) << 16; }

// ---- Global memory: every access lies in one of the tensors that the launch was given, and is aligned.
template <class T> inline T *checked(T *p, size_t alignment = sizeof(T)) {
  emulator::check_global(p, sizeof(T), alignment);
  return p;
}
inline uint4 global_load16(const u16 *p) { return *checked((const uint4 *)p, 16); }
inline uint4 global_load16_if(bool there, const u16 *p) { return there ? global_load16(p) : make_uint4(0, 0, 0, 0); }
inline u16 global_load2(const u16 *p) { return *checked(p); }
inline void global_store16(u16 *p, uint4 v) { *checked((uint4 *)p, 16) = v; }
inline void global_store2(u16 *p, u16 v) { *checked(p) = v; }
template <class T> inline T global_load(const T *p) { return *checked(p); }
template <class T> inline void global_store(T *p, T v) { *checked(p) = v; }
template <class T> inline T global_load_fresh(const T *p) { return *checked(p); }
inline int atomicAdd(int *p, int x) { const int old = *checked(p); *p += x; return old; }
inline float atomicAdd(float *p, float x) { const float old = *checked(p); *p += x; return old; }
inline int atomicMax(int *p, int x) { const int old = *checked(p); *p = max(old, x); return old; }
inline u32 atomicInc(u32 *p, u32 last) { const u32 old = *checked(p); *p = old >= last ? 0 : old + 1; return old; }
inline void __threadfence() {}

// ---- Shared memory
template <class T> inline T shared_read(u32 address) {
  T v;
  memcpy(&v, emulator::check_shared(address, sizeof(T), false), sizeof(T));
  return v;
}
template <class T> inline void shared_write(u32 address, T v) { memcpy(emulator::check_shared(address, sizeof(T), true), &v, sizeof(T)); }
inline void shared_store(u32 address, uint4 v) { shared_write(address, v); }
inline void shared_store(u32 address, u32 v) { shared_write(address, v); }
inline void shared_store_float(u32 address, float v) { shared_write(address, v); }
inline void shared_store_float4(u32 address, float4 v) { shared_write(address, v); }
inline uint4 shared_load4(u32 address) { return shared_read<uint4>(address); }
inline float shared_load_float(u32 address) { return shared_read<float>(address); }
inline float4 shared_load_float4(u32 address) { return shared_read<float4>(address); }
inline void shared_load_floats(float (&x)[2], u32 address) {
  const float2 v = shared_read<float2>(address);
  x[0] = v.x, x[1] = v.y;
}
// What cp.async brings is there after the wait, and NaN before.
struct PendingCopy { u32 address; const u16 *p; bool valid; };
static PendingCopy pending[emulator::MAX_THREADS][64];
static int pending_count[emulator::MAX_THREADS];
inline void copy_async(u32 address, const u16 *p, bool valid) {
  int &n = pending_count[threadIdx.x];
  if (n == 64) emulator::fail("more than 64 copies in flight");
  shared_write(address, make_uint4(~0u, ~0u, ~0u, ~0u));
  pending[threadIdx.x][n++] = {address, p, valid};
}
inline void copy_async_wait() {
  int &n = pending_count[threadIdx.x];
  for (int i = 0; i < n; i++) {
    const PendingCopy &copy = pending[threadIdx.x][i];
    shared_write(copy.address, copy.valid ? global_load16(copy.p) : make_uint4(0, 0, 0, 0));
  }
  n = 0;
}

// ---- Collectives of a warp: each lane leaves its words, and reads the others' once all have come.
struct Words { u32 x[2]; };
static Words words[2][emulator::MAX_THREADS];   // of this collective and of the last one, which slow lanes may still read
inline const Words *exchange(const char *what, u32 a, u32 b = 0) {
  const u32 turn = emulator::meeting_number() % 2;
  words[turn][threadIdx.x] = {{a, b}};
  emulator::meet_warp(what);
  return words[turn] + (threadIdx.x & ~31);
}
inline int lane_id() { return threadIdx.x & 31; }
inline u32 shuffled(u32 x, int from) { return exchange("shfl", x)[from & 31].x[0]; }
inline float __shfl_xor_sync(u32, float x, int mask) { return __int_as_float(shuffled(__float_as_uint(x), lane_id() ^ mask)); }
inline int __shfl_xor_sync(u32, int x, int mask) { return (int)shuffled((u32)x, lane_id() ^ mask); }
inline u32 __shfl_xor_sync(u32, u32 x, int mask) { return shuffled(x, lane_id() ^ mask); }
inline float __shfl_sync(u32, float x, int lane) { return __int_as_float(shuffled(__float_as_uint(x), lane)); }
inline int __shfl_sync(u32, int x, int lane) { return (int)shuffled((u32)x, lane); }
inline u32 __shfl_sync(u32, u32 x, int lane) { return shuffled(x, lane); }
inline bool __any_sync(u32, bool x) {
  const Words *all = exchange("any", x);
  for (int i = 0; i < 32; i++) if (all[i].x[0]) return true;
  return false;
}
inline bool __all_sync(u32 mask, bool x) { return !__any_sync(mask, !x); }
inline void __syncwarp() { emulator::meet_warp("syncwarp"); emulator::order_warp(); }
inline void __syncthreads() { emulator::meet_block(); }
inline bool __syncthreads_or(bool x) {
  static bool any;   // false between calls
  if (x) any = true;
  __syncthreads();
  const bool found = any;
  __syncthreads();
  if (x) any = false;
  __syncthreads();
  return found;
}

inline void ldmatrix(u32 (&r)[4], u32 address) {
  const Words *rows = exchange("ldmatrix", address);
  const int g = lane_id() >> 2, t = lane_id() & 3;
  if (address % 16) emulator::fail("ldmatrix: address %u is not aligned", address);
  for (int i = 0; i < 4; i++) r[i] = shared_read<u32>(rows[8 * i + g].x[0] + t * 4);
}
inline void ldmatrix_transposed(u32 (&r)[4], u32 address) {
  const Words *rows = exchange("ldmatrix.trans", address);
  const int g = lane_id() >> 2, t = lane_id() & 3;
  if (address % 16) emulator::fail("ldmatrix.trans: address %u is not aligned", address);
  for (int i = 0; i < 4; i++) {
    const u32 low = shared_read<u16>(rows[8 * i + 2 * t].x[0] + g * 2), high = shared_read<u16>(rows[8 * i + 2 * t + 1].x[0] + g * 2);
    r[i] = low | high << 16;
  }
}

// The warp's operands as matrices of K columns (a) and of K rows (b, transposed); every lane reads them once all have come.
template <int K> struct Operands {
  float a[16][K], b[8][K];
};
template <int K, int N> inline void mma(float (&c)[4], const u32 (&a)[N], const u32 (&b)[N / 2], const char *what) {
  static Operands<K> operands[2][emulator::MAX_THREADS / 32];
  const int g = lane_id() >> 2, t = lane_id() & 3;
  Operands<K> &mine = operands[emulator::meeting_number() % 2][threadIdx.x / 32];
  for (int i = 0; i < N; i++)
    for (int e = 0; e < 2; e++) mine.a[g + i % 2 * 8][i / 2 * 8 + 2 * t + e] = operand_to_float((u16)(a[i] >> 16 * e));
  for (int i = 0; i < N / 2; i++)
    for (int e = 0; e < 2; e++) mine.b[g][i * 8 + 2 * t + e] = operand_to_float((u16)(b[i] >> 16 * e));
  emulator::meet_warp(what);
  for (int i = 0; i < 4; i++) {
    const float *row = mine.a[g + i / 2 * 8], *column = mine.b[2 * t + i % 2];
    float sum = 0.f;
    for (int k = 0; k < K; k++) sum += row[k] * column[k];
    c[i] += sum;
  }
}
inline void mma_k8(float (&c)[4], u32 a0, u32 a1, u32 b) {
  mma<8, 2>(c, {a0, a1}, {b}, "mma_k8");
}
inline void mma_k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  mma<16, 4>(c, {a0, a1, a2, a3}, {b0, b1}, "mma_k16");
}

// The one exported function: returns null, or what went wrong.
static void (*launched)(const Params);
static Params launched_with;
extern "C" __attribute__((visibility("default"))) const char *emulate(
    void (*kernel)(const Params), const void *params, u32 bytes, u32 blocks, u32 threads, u32 shared_bytes, const emulator::Memory *memories, int count,
    u32 seed) {
  if (bytes != sizeof(Params)) return "these are not the bytes of struct Params";
  launched = kernel;
  memcpy(&launched_with, params, sizeof(Params));
  memset(pending_count, 0, sizeof pending_count);
  return emulator::launch([] { launched(launched_with); }, blocks, threads, shared_bytes, memories, count, seed);
}
