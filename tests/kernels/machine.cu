// What the emulator is tested with: instructions of ptx.cuh against plain PyTorch, and every mistake that it must notice.
// q: the input, out or lse: the output; zero: 0, which the compiler cannot know.
#include "base/ptx.cuh"

#define LANE (threadIdx.x & 31)

// out (16, 8) = q[:16] (16, 8) times q[16:24] (8, 8), which lies as (column, row)
KERNEL(32, 1) multiply_k8(const Params p) {
  const int g = LANE / 4, t = LANE % 4;
  const u32 *q = (const u32 *)p.q;
  float c[4] = {0.f, 0.f, 0.f, 0.f};
  mma_k8(c, q[g * 4 + t], q[(g + 8) * 4 + t], q[(16 + g) * 4 + t]);
  for (int i = 0; i < 4; i++) p.lse[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = c[i];
}

// Rows of 8 through shared memory: as they are, then transposed in blocks of 8.
KERNEL(32, 1) matrices(const Params p) {
  const u32 at = SHARED_BASE + LANE * 16;
  shared_store(at, global_load16(p.q + LANE * 8));
  __syncwarp();
  u32 plain[4], transposed[4];
  ldmatrix(plain, at);
  ldmatrix_transposed(transposed, at);
  for (int i = 0; i < 4; i++) {
    ((u32 *)p.out)[i * 32 + LANE] = plain[i];
    ((u32 *)p.out)[128 + i * 32 + LANE] = transposed[i];
  }
}

// out[i] = sum over the block of q, by shuffles within warps and shared memory between them
KERNEL(128, 1) sum(const Params p) {
  float x = half_to_float(global_load2(p.q + threadIdx.x));
  for (int i = 16; i; i >>= 1) x += __shfl_xor_sync(ALL_LANES, x, i);
  if (LANE == 0) shared_store_float(SHARED_BASE + threadIdx.x / 32 * 4, x);
  __syncthreads();
  float total = 0.f;
  for (int i = 0; i < 4; i++) total += shared_load_float(SHARED_BASE + i * 4);
  global_store(p.lse + threadIdx.x, total);
}

// Chunks of 16 bytes, `page_size` of them apart from lane to lane, by an ldmatrix and by a load of each lane.
KERNEL(32, 1) banks(const Params p) {
  const u32 at = SHARED_BASE + LANE % 8 * p.page_size * 16;
  shared_store(SHARED_BASE + LANE * 16, make_uint4(0, 0, 0, 0));
  __syncwarp();
  u32 r[4];
  if (p.zero == 0) ldmatrix(r, at);
  shared_load4(at);
}

KERNEL(64, 1) wrong_no_barrier(const Params p) {
  shared_store(SHARED_BASE + threadIdx.x * 4, threadIdx.x);
  global_store(p.lse + threadIdx.x, shared_load_float(SHARED_BASE + (threadIdx.x ^ 32) * 4));
}
KERNEL(64, 1) wrong_no_barrier_before_writing(const Params p) {
  shared_store(SHARED_BASE + threadIdx.x * 4, threadIdx.x);
  __syncthreads();
  const float x = shared_load_float(SHARED_BASE + (threadIdx.x ^ 32) * 4);
  shared_store_float(SHARED_BASE + threadIdx.x * 4, x);
}
KERNEL(32, 1) wrong_no_syncwarp(const Params p) {
  shared_store(SHARED_BASE + threadIdx.x * 4, threadIdx.x);
  global_store(p.lse + threadIdx.x, shared_load_float(SHARED_BASE + (threadIdx.x ^ 1) * 4));
}
KERNEL(32, 1) wrong_behind_shared_memory(const Params p) { shared_store(SHARED_BASE + 1024 - 4 * 31 + threadIdx.x * 4, 1u); }
KERNEL(32, 1) wrong_shared_alignment(const Params p) { shared_store(SHARED_BASE + 4 + threadIdx.x * 16, make_uint4(0, 0, 0, 0)); }
KERNEL(32, 1) wrong_behind_a_tensor(const Params p) { global_store2(p.out + 8 + threadIdx.x * 8, global_load2(p.q + threadIdx.x * 8 + 8)); }
KERNEL(32, 1) wrong_global_alignment(const Params p) { global_store16(p.out, global_load16(p.q + 1)); }
KERNEL(32, 1) wrong_address(const Params p) { ((volatile int *)(i64)(p.zero + 16))[threadIdx.x] = 1; }
KERNEL(32, 1) wrong_lanes_missing(const Params p) {
  if (threadIdx.x < 16) global_store(p.lse, __shfl_xor_sync(ALL_LANES, 1.f, 1));
}
KERNEL(32, 1) wrong_lanes_elsewhere(const Params p) {
  if (threadIdx.x < 16) global_store(p.lse, __shfl_xor_sync(ALL_LANES, 1.f, 1));
  else __syncwarp();
}
KERNEL(64, 1) wrong_barrier_missed(const Params p) {
  if (threadIdx.x < 32) __syncthreads();
  else global_store(p.lse, __shfl_xor_sync(ALL_LANES, 1.f, p.zero) + (threadIdx.x < 63 ? __shfl_xor_sync(ALL_LANES, 1.f, 1) : 0.f));
}
KERNEL(32, 1) uninitialised(const Params p) { global_store(p.lse + threadIdx.x, shared_load_float(SHARED_BASE + threadIdx.x * 4)); }

// Two blocks each
KERNEL(32, 1) wrong_write_of_what_is_read_only(const Params p) {
  const u16 x = global_load2(p.q + threadIdx.x);
  __syncwarp();
  global_store2((u16 *)p.q + threadIdx.x, x);
}
KERNEL(32, 1) wrong_read_only_of_what_is_written(const Params p) {
  global_store2(p.out + threadIdx.x, 1);
  global_store2(p.out + threadIdx.x, global_load2(p.out + threadIdx.x) + 1);
}
KERNEL(32, 1) wrong_load_of_what_others_write(const Params p) {
  if (threadIdx.x) return;
  global_store(p.lse + blockIdx.x, 1.f);
  if (atomicAdd(p.counters, 1) == 1) global_store(p.lse + 2 + blockIdx.x, global_load(p.lse + 1 - blockIdx.x));   // global_load_fresh
}
KERNEL(32, 1) fresh_load_of_what_others_write(const Params p) {
  if (threadIdx.x) return;
  global_store(p.lse + blockIdx.x, 1.f);
  if (atomicAdd(p.counters, 1) == 1) global_store(p.lse + 2, global_load_fresh(p.lse + 1 - blockIdx.x));
}
KERNEL(32, 1) wrong_write_of_what_others_write(const Params p) { global_store(p.lse + threadIdx.x, (float)blockIdx.x); }
KERNEL(32, 1) same_write_of_what_others_write(const Params p) { global_store(p.lse + threadIdx.x, 1.f); }
KERNEL(32, 1) wrong_write_of_what_atomics_write(const Params p) {
  atomicAdd(p.lse, 1.f);
  global_store(p.lse, 0.f);
}
// Counts the blocks, unless another one comes between its two atomics.
KERNEL(32, 1) count_in_two_steps(const Params p) {
  if (threadIdx.x == 0) atomicMax(p.counters, atomicAdd(p.counters, 0) + 1);
}
KERNEL(32, 1) count(const Params p) { atomicAdd(p.counters, 1); }
// lse = q at 2^32 + 5 elements from its start, through 32 bits
KERNEL(32, 1) wrong_far_away(const Params p) { global_store(p.lse + threadIdx.x, half_to_float(global_load2(p.q + (p.k_s.row << 19) + 5))); }
