// A GPU's warps on a CPU, so that the kernels' very sources run where there is no GPU: what they see of it. Every function of ptx.cuh is
// here under its own name. What a GPU would let pass is an error: global memory outside of the tensors, or written by one block and read by
// another as if nobody wrote it; shared memory outside of the block's, or without a barrier between two threads' accesses; collectives that
// not all lanes of a warp reach. Shared memory starts as NaN.
//
// engine.cpp does the work and is compiled once; this is compiled with each variant, so there is little of it and no header of C's.
#pragma once
#define EMULATED 1
#include "base/ptx.cuh"

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

#ifdef TYPE   // macros of a variant
#pragma GCC visibility push(default)
#else
#pragma GCC visibility push(protected)
#endif
struct Index { u32 x, y, z; };
extern Index threadIdx, blockIdx, blockDim, gridDim;

// ---- engine.cpp
namespace emulator {
constexpr u32 SHARED_START = 1024;
// READ_ONLY: by ld.global.nc, as memory that nobody writes during the launch; FRESH: past L1, what other blocks may have written
enum Access { READ, READ_ONLY, FRESH, WRITE, ATOMIC };
void *global(const void *p, u32 bytes, u32 alignment, Access access, const void *written = nullptr);
void *shared(u32 address, u32 bytes, bool is_write);
void count_conflicts(u32 address, u32 bytes);
void copy_async(u32 address, const u16 *p, bool valid);
void copy_async_wait();
u32 exchanged(const char *what, u32 x, int lane);   // the x of a lane of this warp
bool any_lane(bool x);
u32 ballot(bool x);
void others_may_run();   // blocks, before or after this one's atomics
void multiply(float (&c)[4], const u32 *a, const u32 *b, int K, int type);
float half_to_float(u16 x);
u16 float_to_operand(float x, int type);
float exp2(float x);
float reciprocal(float x);
float log2(float x);
}  // namespace emulator
void ldmatrix(u32 (&r)[4], u32 address);
void ldmatrix_transposed(u32 (&r)[4], u32 address);
void __syncwarp();
void __syncthreads();
void wait_at(u32 barrier, u32 threads);
inline void wait_cycles(u32) {}
inline int thread_again() { return threadIdx.x; }
bool __syncthreads_or(bool x);
u32 __byte_perm(u32 low, u32 high, u32 selector);
#pragma GCC visibility pop

// ---- Arithmetic
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float max(float a, float b) { return a > b || b != b ? a : b; }
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
inline u32 max(u32 a, u32 b) { return a > b ? a : b; }
inline i64 min(i64 a, i64 b) { return a < b ? a : b; }
inline i64 max(i64 a, i64 b) { return a > b ? a : b; }
inline float __int_as_float(u32 x) { float f; __builtin_memcpy(&f, &x, 4); return f; }
inline int __float_as_int(float f) { int x; __builtin_memcpy(&x, &f, 4); return x; }
inline u32 __float_as_uint(float f) { return (u32)__float_as_int(f); }
inline float __log2f(float x) { return emulator::log2(x); }
inline int __clz(int x) { return x ? __builtin_clz((u32)x) : 32; }
inline float exp2_approx(float x) { return emulator::exp2(x); }
inline float reciprocal_approx(float x) { return emulator::reciprocal(x); }
inline float half_to_float(u16 x) { return emulator::half_to_float(x); }

#if FLEX && defined TYPE   // a caller's functions, in a library that mods.cu makes
struct FlexSum;
struct Mods {
  float (*score)(const FlexParams &, float, int, int, int, int), (*slope)(const FlexParams &, float, int, int, int, int);
  float (*steepest)(const FlexParams &, int, int);
  bool (*mask)(const FlexParams &, int, int, int, int);
  int (*sight)(const FlexParams &, int, int, int, int, int, int);
  void (*gradients)(const FlexParams &, FlexSum *, float, float, int, int, int, int);
};
extern "C" __attribute__((visibility("default"))) Mods emulated_mods;
#endif

// ---- Global memory: every access lies in one of the tensors that the launch was given, and is aligned.
template <class T> inline T *checked(const T *p, emulator::Access access) {
  return (T *)emulator::global(p, sizeof(T), sizeof(T), access);
}
#ifdef TYPE   // and what C's headers have: not for engine.cpp
extern "C" float fmaf(float, float, float) noexcept;
inline float fmaxf(float a, float b) { return max(a, b); }
inline float fabsf(float x) { return __builtin_fabsf(x); }
extern "C" float log1pf(float) noexcept;   // of C's library, for generated functions
extern "C" float sqrtf(float) noexcept;
extern "C" float sinf(float) noexcept;
extern "C" float cosf(float) noexcept;
extern "C" float erff(float) noexcept;
extern "C" float floorf(float) noexcept;
extern "C" float ceilf(float) noexcept;
inline u32 pack(float a, float b) { return emulator::float_to_operand(a, TYPE) | (u32)emulator::float_to_operand(b, TYPE) << 16; }
inline void mma_k8(float (&c)[4], u32 a0, u32 a1, u32 b) {
  const u32 a[2] = {a0, a1};
  emulator::multiply(c, a, &b, 8, TYPE);
}
inline void mma_k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  emulator::multiply(c, a, b, 16, TYPE);
}
constexpr emulator::Access OPERANDS_READ = APPEND ? emulator::READ : emulator::READ_ONLY;
inline uint4 global_load16(const u16 *p) { return *checked((const uint4 *)p, OPERANDS_READ); }
inline uint4 global_load16_if(bool there, const u16 *p) { return there ? global_load16(p) : make_uint4(0, 0, 0, 0); }
inline uint2 global_load8_if(bool there, const u8 *p) { return there ? *checked((const uint2 *)p, OPERANDS_READ) : make_uint2(0, 0); }
inline u32 global_load1(const u8 *p) { return *checked(p, OPERANDS_READ); }
inline u32 multiply_pairs(u32 a, u32 b) {
  const float low = half_to_float((u16)a) * half_to_float((u16)b), high = half_to_float((u16)(a >> 16)) * half_to_float((u16)(b >> 16));
  return emulator::float_to_operand(low, 0) | (u32)emulator::float_to_operand(high, 0) << 16;
}
inline u32 multiply_add_pairs(u32 a, u32 b, u32 c) {   // of numbers whose products and sums are fp32's
  const float low = half_to_float((u16)a) * half_to_float((u16)b) + half_to_float((u16)c),
              high = half_to_float((u16)(a >> 16)) * half_to_float((u16)(b >> 16)) + half_to_float((u16)(c >> 16));
  return emulator::float_to_operand(low, 0) | (u32)emulator::float_to_operand(high, 0) << 16;
}
template <u32 SELECTOR> inline u32 bytes(u32 x) {
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    const u32 which = SELECTOR >> 4 * i & 15, byte = which & 4 ? 0 : x >> (which & 3) * 8 & 255;
    r |= (which < 8 ? byte : byte >> 7 ? 255 : 0) << 8 * i;
  }
  return r;
}
inline u16 global_load2(const u16 *p) { return *checked(p, OPERANDS_READ); }
template <class T> inline T global_load_if(bool there, const T *p, T x) { return there ? *checked(p, OPERANDS_READ) : x; }
#endif
template <class T> inline T global_load(const T *p) { return *checked(p, emulator::READ); }
template <class T> inline void global_store(T *p, T v) { *(T *)emulator::global(p, sizeof(T), sizeof(T), emulator::WRITE, &v) = v; }
inline void global_store16(u16 *p, uint4 v) { global_store((uint4 *)p, v); }
inline void global_store16(float *p, float4 v) { global_store((float4 *)p, v); }
inline void global_store2(u16 *p, u16 v) { global_store(p, v); }
template <class T> inline T global_load_fresh(const T *p) { return *checked(p, emulator::FRESH); }
inline void __threadfence() {}
template <class T, class F> inline T atomic(T *p, F changed) {
  emulator::others_may_run();
  const T old = *checked(p, emulator::ATOMIC);
  *p = changed(old);
  emulator::others_may_run();
  return old;
}
inline int atomicAdd(int *p, int x) { return atomic(p, [x](int old) { return old + x; }); }
inline float atomicAdd(float *p, float x) { return atomic(p, [x](float old) { return old + x; }); }
inline int atomicMax(int *p, int x) { return atomic(p, [x](int old) { return max(old, x); }); }
inline u32 atomicInc(u32 *p, u32 last) { return atomic(p, [last](u32 old) { return old >= last ? 0 : old + 1; }); }

// ---- Shared memory
template <class T> inline T shared_read(u32 address) {
  emulator::count_conflicts(address, sizeof(T));
  return *(const T *)emulator::shared(address, sizeof(T), false);
}
template <class T> inline void shared_write(u32 address, T v) {
  emulator::count_conflicts(address, sizeof(T));
  *(T *)emulator::shared(address, sizeof(T), true) = v;
}
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
inline void copy_async(u32 address, const u16 *p, bool valid) { emulator::copy_async(address, p, valid); }
inline void copy_async_wait() { emulator::copy_async_wait(); }

// ---- Collectives of a warp
inline int lane_id() { return threadIdx.x & 31; }
inline u32 __shfl_sync(u32, u32 x, int lane) { return emulator::exchanged("shfl", x, lane); }
inline int __shfl_sync(u32 mask, int x, int lane) { return (int)__shfl_sync(mask, (u32)x, lane); }
inline float __shfl_sync(u32 mask, float x, int lane) { return __int_as_float(__shfl_sync(mask, __float_as_uint(x), lane)); }
template <class T> inline T __shfl_xor_sync(u32 mask, T x, int other) { return __shfl_sync(mask, x, lane_id() ^ other); }
inline bool __any_sync(u32, bool x) { return emulator::any_lane(x); }
inline bool __all_sync(u32, bool x) { return !emulator::any_lane(!x); }
inline u32 __ballot_sync(u32, bool x) { return emulator::ballot(x); }
inline int __popc(u32 x) {
  int bits = 0;
  for (; x; x &= x - 1) bits++;
  return bits;
}
inline int __ffs(u32 x) { return __builtin_ffs(x); }
