// The machine instructions that the kernels use. Turing (sm_75) has all of them except those for MMA_K16
// (mma.m16n8k16) and CP_ASYNC (cp.async), which need sm_80. docs/kernels.md lists all macros. The tests' CPU emulator
// defines EMULATED, and functions of the same names.
#pragma once
#include "base/params.cuh"

// A loop that the compiler unrolls, so that arrays it indexes can lie in registers.
#define UNROLLED(i, count) _Pragma("unroll") for (int i = 0; i < (count); i++)

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define ALL_LANES 0xffffffffu

#ifndef EMULATED
#define DEVICE __device__ __forceinline__
#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define SHARED_MEMORY extern __shared__ __align__(128) unsigned char shared_memory[];
#define SHARED_BASE (u32) __cvta_generic_to_shared(shared_memory)
#define NEG_INF __int_as_float(0xff800000)
#define POS_INF __int_as_float(0x7f800000)

// Packs two floats into a register as 16-bit operands of the tensor cores, `a` in the low half.
DEVICE u32 pack(float a, float b) {
  u32 r;
#if TYPE == 1
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
#elif __CUDA_ARCH__ >= 800
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
#else
  asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}" : "=r"(r) : "f"(a), "f"(b));
#endif
  return r;
}
#define FUNCTION(name, instruction, type, constraint) \
  DEVICE float name(type x) { \
    float r; \
    asm(instruction " %0, %1;" : "=f"(r) : constraint(x)); \
    return r; \
  }
FUNCTION(half_to_float, "cvt.f32.f16", u16, "h")
FUNCTION(exp2_approx, "ex2.approx.ftz.f32", float, "f")   // special function unit, within 2 ulp
FUNCTION(reciprocal_approx, "rcp.approx.ftz.f32", float, "f")   // within 1 ulp
// Accesses to shared memory clobber "memory", so that the compiler moves none past another one or past a barrier. Loads
// from global memory need no clobber: no other block writes to it, and a block's own writes precede a __syncthreads().
// Loads four 8 x 8 matrices from shared memory; lane l gives the address of row l % 8 of matrix l / 8.
DEVICE void ldmatrix(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
DEVICE void ldmatrix_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
#if TYPE == 1
#define OPERANDS "bf16.bf16"
#else
#define OPERANDS "f16.f16"
#endif
// c += a b, with a 16 x 8 and b 8 x 8. Lane 4 g + t holds a[g][2t, 2t+1], a[g+8][2t, 2t+1], b[2t, 2t+1][g], c[g][2t,
// 2t+1] and c[g+8][2t, 2t+1].
DEVICE void mma_k8(float (&c)[4], u32 a0, u32 a1, u32 b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32." OPERANDS ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}
DEVICE void mma_k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." OPERANDS
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// A barrier number `barrier` for `threads` of the block. All of them wait (bar.sync): with bar.arrive, NVIDIA's
// racecheck reported races.
DEVICE void wait_at(u32 barrier, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
DEVICE void wait_cycles(u32 cycles) {
  u32 began, now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(began));
  do asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  while (now - began < cycles);
}
// Returns threadIdx.x, read again. So the compiler need not keep it in a register until here.
DEVICE int thread_again() {
  int r;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r));
  return r;
}
DEVICE void shared_store(u32 address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
DEVICE void shared_store(u32 address, u32 v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
DEVICE uint4 shared_load4(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
DEVICE void shared_store_float(u32 address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
DEVICE void shared_store_float4(u32 address, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}
DEVICE float4 shared_load_float4(u32 address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
DEVICE float shared_load_float(u32 address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
DEVICE void shared_load_floats(float (&x)[2], u32 address) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(address) : "memory");
}
// Loads from global memory that no other block writes during the launch, of 16 bytes or of one element.
#if APPEND   // not .nc, so that a block sees what it has written itself
#define READ "ld.global."
#else
#define READ "ld.global.nc."
#endif
DEVICE uint4 global_load16(const u16 *from) {
  uint4 v;
  asm volatile(READ "v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}
DEVICE uint4 global_load16_if(bool there, const u16 *from) {   // zeros if not `there`; without a branch
  uint4 v = make_uint4(0, 0, 0, 0);
  asm volatile("{.reg .pred there; setp.ne.s32 there, %5, 0; @there " READ "v4.b32 {%0, %1, %2, %3}, [%4];}"
               : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
               : "l"(from), "r"((int)there));
  return v;
}
#if CACHE
DEVICE uint2 global_load8_if(bool there, const u8 *from) {   // zeros if not `there`; without a branch
  uint2 v = make_uint2(0, 0);
  asm volatile("{.reg .pred there; setp.ne.s32 there, %3, 0; @there " READ "v2.b32 {%0, %1}, [%2];}"
               : "+r"(v.x), "+r"(v.y)
               : "l"(from), "r"((int)there));
  return v;
}
DEVICE u32 global_load1(const u8 *from) {
  u32 v;
  asm volatile(READ "u8 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}
// The products of two pairs of fp16 numbers.
DEVICE u32 multiply_pairs(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEVICE u32 multiply_add_pairs(u32 a, u32 b, u32 c) {   // a b + c
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// Returns four bytes by the digits of SELECTOR, the lowest first: 0 to 3 selects a byte of x, 4 to 7 a zero. 8 more
// selects the byte's sign, repeated eight times.
template <u32 SELECTOR> DEVICE u32 bytes(u32 x) {
  u32 r;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(r) : "r"(x), "n"(SELECTOR));
  return r;
}
#endif
DEVICE u16 global_load2(const u16 *from) {
  u16 v;
  asm volatile(READ "u16 %0, [%1];" : "=h"(v) : "l"(from));
  return v;
}
// Loads a number, or returns x if not `there`. It has no branch: with branches a warp would wait for each load in turn.
#define LOAD_IF(type, instruction, constraint) \
  DEVICE type global_load_if(bool there, const type *from, type x) { \
    asm volatile("{.reg .pred there; setp.ne.s32 there, %2, 0; @there " READ instruction " %0, [%1];}" \
                 : "+" constraint(x) \
                 : "l"(from), "r"((int)there)); \
    return x; \
  }
LOAD_IF(u16, "u16", "h")
LOAD_IF(u32, "b32", "r")
LOAD_IF(float, "f32", "f")
DEVICE float2 global_load_if(bool there, const float2 *from, float2 x) {
  asm volatile("{.reg .pred there; setp.ne.s32 there, %3, 0; @there " READ "v2.f32 {%0, %1}, [%2];}"
               : "+f"(x.x), "+f"(x.y)
               : "l"(from), "r"((int)there));
  return x;
}
// Stores 16 bytes in one instruction. The compiler may split a plain store of 16 bytes into four.
DEVICE void global_store16(void *to, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
DEVICE void global_store16(u16 *to, uint4 v) { global_store16(to, v.x, v.y, v.z, v.w); }
DEVICE void global_store16(float *to, float4 v) {
  global_store16(to, __float_as_int(v.x), __float_as_int(v.y), __float_as_int(v.z), __float_as_int(v.w));
}
DEVICE void global_store2(u16 *to, u16 v) { *to = v; }
// Loads and stores of lengths, page numbers, maxima and sums: functions, so that the emulator can check the addresses.
template <class T> DEVICE T global_load(const T *from) { return *from; }
template <class T> DEVICE void global_store(T *to, T v) { *to = v; }
// Loads what other blocks of this launch have written: from L2, since L1 may hold older values.
template <class T> DEVICE T global_load_fresh(const T *from) { return __ldcg(from); }
DEVICE void copy_async(u32 address, const u16 *from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
DEVICE void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
#endif  // EMULATED
