// What emulator.h promises the kernels, and the one function that a library exports.
#define FLEX 1   // of the longest struct Params, of which kernels without FLEX read the beginning
#include "memory.h"

namespace emulator {

// ---- 16-bit numbers, rounded to nearest even
static u16 float_to_half(float value) {
  u32 x = __float_as_uint(value);
  const u16 sign = x >> 16 & 0x8000;
  x &= 0x7fffffff;
  if (x > 0x7f800000) return 0x7fff;
  if (x >= 0x47800000) return sign | 0x7c00;
  if (x < 0x38800000) return sign | (__float_as_uint(__int_as_float(x) + 0.5f) - 0x3f000000);  // 0.5's last bit is half's smallest number
  return sign | (x + 0xfff + (x >> 13 & 1) - 0x38000000) >> 13;
}
static float compute_half_to_float(u16 x) {
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
static u16 float_to_bfloat(float value) {
  const u32 x = __float_as_uint(value);
  return (x & 0x7fffffff) > 0x7f800000 ? 0x7fff : (x + 0x7fff + (x >> 16 & 1)) >> 16;
}
static float operand_to_float(u16 x, int type) { return type == 1 ? __int_as_float((u32)x << 16) : half_table.value[x]; }
float half_to_float(u16 x) { return half_table.value[x]; }
u16 float_to_operand(float x, int type) { return type == 1 ? float_to_bfloat(x) : float_to_half(x); }

// ---- The special function unit
static float flush_to_zero(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.f, x) : x; }
float exp2(float x) { return flush_to_zero(exp2f(flush_to_zero(x))); }
float reciprocal(float x) { return flush_to_zero(1.f / flush_to_zero(x)); }
float log2(float x) { return log2f(x); }

// ---- Collectives of a warp: each lane leaves its word, and reads the others' once all have come.
static const u32 *exchange(const char *what, u32 x) {
  Warp &w = warp();
  u32 *const words = w.words[w.meetings % 2];
  words[threadIdx.x & 31] = x;
  meet_warp(what);
  return words;
}
u32 exchanged(const char *what, u32 x, int lane) { return exchange(what, x)[lane & 31]; }
bool any_lane(bool x) {
  const u32 *const all = exchange("any", x);
  for (int i = 0; i < 32; i++) if (all[i]) return true;
  return false;
}

u32 ballot(bool x) {
  const u32 *const all = exchange("ballot", x);
  u32 found = 0;
  for (int i = 0; i < 32; i++) found |= (u32)(all[i] != 0) << i;
  return found;
}

// ---- Tensor cores
static bool is_truncating;

// As Fasi, Higham, Mikaitis and Pranesh (2021) found Volta's and Turing's: the sum and four products, each exact, are cut to the 24 bits
// that the largest of the five has, added, and the result is cut to 24 bits again.
static float add_products(float sum, const Operands &w, int row, int column, int k) {
  double x[5] = {0, 0, 0, 0, sum};
  for (int i = 0; i < 4; i++) x[i] = (double)w.a[k + i][row % 8][row / 8 * 2] * w.b[k + i][column];
  u64 largest = 0;
  for (double &one : x) {
    u64 bits;
    memcpy(&bits, &one, 8);
    bits &= ~(1ull << 63);
    largest = bits > largest ? bits : largest;
  }
  const int exponent = (int)(largest >> 52);   // biased; no product and no fp32 number is a subnormal double
  if (exponent == 0x7ff) return (float)(x[4] + ((x[0] + x[1]) + (x[2] + x[3])));
  if (exponent == 0) return sum;
  const u64 up_bits = (u64)(2046 + 23 - exponent) << 52, down_bits = (u64)(exponent - 23) << 52;   // 2^(23 - e) and its inverse
  double up, down;
  memcpy(&up, &up_bits, 8), memcpy(&down, &down_bits, 8);
  i64 total = 0;
  for (double one : x) total += (i64)(one * up);
  int carries = 0;
  for (i64 size = total < 0 ? -total : total; size >> 24; size >>= 1) carries++;
  return (float)((double)(total / (1ll << carries) * (1ll << carries)) * down);
}

// The warp's operands are matrices of K columns (a) and of K rows (b); every lane reads them once all have come.
template <int K> static void multiply(float (&c)[4], const u32 *a, const u32 *b, int type) {
  Warp &w = warp();
  Operands &mine = w.operands[w.meetings % 2];
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma GCC unroll 8
  for (int i = 0; i < K / 2; i++) {
    const float x = operand_to_float((u16)(a[i / 2] >> 16 * (i % 2)), type);
    float *const twice = (float *)&mine.a[i / 4 * 8 + 2 * t + i % 2][g] + i / 2 % 2 * 2;
    twice[0] = twice[1] = x;
  }
#pragma GCC unroll 4
  for (int i = 0; i < K / 4; i++) mine.b[i / 2 * 8 + 2 * t + i % 2][g] = operand_to_float((u16)(b[i / 2] >> 16 * (i % 2)), type);
  meet_warp(K == 8 ? "mma_k8" : "mma_k16");
  if (is_truncating) {
    for (int i = 0; i < 4; i++)
      for (int k = 0; k < K; k += 4) c[i] = add_products(c[i], mine, g + i / 2 * 8, 2 * t + i % 2, k);
    return;
  }
  Four sums = {};
#pragma GCC unroll 16
  for (int k = 0; k < K; k++) {
    const float *const y = &mine.b[k][2 * t];
    sums += mine.a[k][g] * Four{y[0], y[1], y[0], y[1]};
  }
  for (int i = 0; i < 4; i++) c[i] += sums[i];
}
void multiply(float (&c)[4], const u32 *a, const u32 *b, int K, int type) {
  K == 8 ? multiply<8>(c, a, b, type) : multiply<16>(c, a, b, type);
}

}  // namespace emulator

using namespace emulator;

u32 __byte_perm(u32 low, u32 high, u32 selector) {
  const u64 bytes = low | (u64)high << 32;
  u32 r = 0;
  for (int i = 0; i < 4; i++) r |= (u32)(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return r;
}

// ---- Barriers
void __syncwarp() {
  meet_warp("syncwarp");
  warp().phase = warp().meetings;
}
void __syncthreads() { meet_block(); }
void wait_at(u32 barrier, u32 threads) { meet_named(barrier, threads); }
bool __syncthreads_or(bool x) {
  if (x) block->is_any = true;
  meet_block();
  const bool found = block->is_any;
  meet_block();
  if (x) block->is_any = false;
  meet_block();
  return found;
}

// ---- Matrices
template <class T> static T element(u32 address) { return *(const T *)shared(address, sizeof(T), false); }
// Each 8 rows are one access, if they lie in different banks.
static void count_rows(const u32 *rows) {
  if (threadIdx.x % 32) return;
  for (int i = 0; i < 32; i++)
    for (int j = i & ~7; j < i; j++)
      if (rows[i] != rows[j] && (rows[i] ^ rows[j]) / 16 % 8 == 0) {
        conflicts++;
        break;
      }
}
void ldmatrix(u32 (&r)[4], u32 address) {
  const u32 *rows = exchange("ldmatrix", address);
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  if (address % 16) fail("ldmatrix: address %u is not aligned", address);
  count_rows(rows);
  for (int i = 0; i < 4; i++) r[i] = element<u32>(rows[8 * i + g] + t * 4);
}
void ldmatrix_transposed(u32 (&r)[4], u32 address) {
  const u32 *rows = exchange("ldmatrix.trans", address);
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  if (address % 16) fail("ldmatrix.trans: address %u is not aligned", address);
  count_rows(rows);
  for (int i = 0; i < 4; i++) {
    const u32 low = element<u16>(rows[8 * i + 2 * t] + g * 2), high = element<u16>(rows[8 * i + 2 * t + 1] + g * 2);
    r[i] = low | high << 16;
  }
}

// The one exported function: returns null, or what went wrong.
static void (*launched)(const Params);
static Params launched_with;
struct Launch {
  u32 params_bytes, blocks, threads, shared_bytes, shared_limit, memory_count, seed, is_truncating, rows_overlap;
  u32 conflicts;   // found: how often banks of shared memory were asked by one more lane
};
extern "C" __attribute__((visibility("default"))) const char *emulate(void (*kernel)(const Params), const void *params, Launch *launch, const Memory *given) {
  if (launch->params_bytes != sizeof(Params) && launch->params_bytes != __builtin_offsetof(Params, flex))
    return "these are not the bytes of struct Params";
  if (launch->threads % 32 || launch->threads > MAX_THREADS) return "threads must be a multiple of 32, at most 1024";
  if (launch->shared_bytes > launch->shared_limit || launch->shared_bytes > SHARED_LIMIT) return "more shared memory than a block may have";
  launched = kernel;
  memcpy(&launched_with, params, launch->params_bytes);
  memories = given, memory_count = (int)launch->memory_count, launch_number++;
  shared_size = launch->shared_bytes, random_state = launch->seed, is_truncating = launch->is_truncating, rows_overlap = launch->rows_overlap;
  conflicts = 0;
  const char *const said = run_blocks([] { launched(launched_with); }, launch->blocks, launch->threads);
  launch->conflicts = conflicts;
  return said;
}
