// The functions that generated score_mods and mask_mods call: one for each operator of core/flex/operators.py, with
// PyTorch's results for NaN, infinities, negative integers and overflow. Integers wrap, as PyTorch's do; 16-bit floats
// are fp32 here.
#pragma once
#include "base/ptx.cuh"

#ifdef EMULATED   // for the CPU emulator; NVRTC has these built in
#define MATH(name) extern "C" float name(float) noexcept;
MATH(expf) MATH(exp2f) MATH(expm1f) MATH(logf) MATH(log2f) MATH(log10f) MATH(log1pf) MATH(tanhf) MATH(sqrtf)
MATH(sinf) MATH(cosf) MATH(tanf) MATH(asinf) MATH(acosf) MATH(atanf) MATH(sinhf) MATH(coshf) MATH(asinhf) MATH(acoshf)
MATH(atanhf) MATH(erff) MATH(erfcf) MATH(floorf) MATH(ceilf) MATH(truncf) MATH(rintf)
#undef MATH
extern "C" float powf(float, float) noexcept;
extern "C" float fmodf(float, float) noexcept;
extern "C" float atan2f(float, float) noexcept;
extern "C" float hypotf(float, float) noexcept;
extern "C" float copysignf(float, float) noexcept;
#endif

typedef signed char i8;
typedef short i16;

// ---- Integers: unsigned arithmetic wraps, and no division traps.
template <class T> struct OpUnsigned { typedef u32 type; };
template <> struct OpUnsigned<i64> { typedef u64 type; };
#define WRAPPING(name, symbol) \
  template <class T> DEVICE T name(T a, T b) { \
    typedef typename OpUnsigned<T>::type U; \
    return (T)((U)a symbol (U)b); \
  } \
  DEVICE float name(float a, float b) { return a symbol b; } \
  DEVICE bool name(bool a, bool b) { return ((int)a symbol (int)b) != 0; }
WRAPPING(op_add, +)
WRAPPING(op_sub, -)
WRAPPING(op_mul, *)
#undef WRAPPING
template <class T> DEVICE T op_neg(T x) { return op_sub((T)0, x); }
DEVICE float op_neg(float x) { return -x; }
template <class T> DEVICE T op_abs(T x) { return x < 0 ? op_neg(x) : x; }
DEVICE float op_abs(float x) { return fabsf(x); }
// By zero, PyTorch raises an error on a CPU and returns anything on a GPU.
template <class T> DEVICE T op_divide(T a, T b) { return b == 0 ? (T)-1 : b == (T)-1 ? op_neg(a) : (T)(a / b); }
DEVICE u8 op_divide(u8 a, u8 b) { return b == 0 ? 255 : (u8)(a / b); }
template <class T> DEVICE T op_fmod(T a, T b) { return b == 0 || b == (T)-1 ? (T)0 : (T)(a % b); }
DEVICE u8 op_fmod(u8 a, u8 b) { return b == 0 ? 0 : (u8)(a % b); }
template <class T> DEVICE T op_remainder(T a, T b) {
  const T left = op_fmod(a, b);
  return left != 0 && (left < 0) != (b < 0) ? op_add(left, b) : left;
}
template <class T> DEVICE T op_floor_divide(T a, T b) {
  return op_sub(op_divide(a, b), (T)(op_fmod(a, b) != 0 && (a < 0) != (b < 0)));
}
template <class T> DEVICE T op_pow(T x, T n) {   // a negative power of an integer: 1 and -1 have one, others give 0
  if (n < 0) return x == 1 ? (T)1 : x == (T)-1 ? (T)(n & 1 ? -1 : 1) : (T)0;
  T result = 1;
  for (; n; n = (T)(n >> 1), x = op_mul(x, x))
    if (n & 1) result = op_mul(result, x);
  return result;
}
template <class T> DEVICE T op_left_shift(T a, T n) {
  return n < 0 || n >= (T)(8 * sizeof(T)) ? (T)0 : (T)((typename OpUnsigned<T>::type)a << n);
}
template <class T> DEVICE T op_right_shift(T a, T n) {
  return n < 0 || n >= (T)(8 * sizeof(T)) ? (T)(a < 0 ? -1 : 0) : (T)(a >> n);
}
template <class T> DEVICE T op_and(T a, T b) { return (T)(a & b); }
template <class T> DEVICE T op_or(T a, T b) { return (T)(a | b); }
template <class T> DEVICE T op_xor(T a, T b) { return (T)(a ^ b); }
template <class T> DEVICE T op_not(T x) { return (T)~x; }
DEVICE bool op_not(bool x) { return !x; }

// ---- Any type
template <class T> DEVICE bool op_eq(T a, T b) { return a == b; }
template <class T> DEVICE bool op_ne(T a, T b) { return a != b; }
template <class T> DEVICE bool op_lt(T a, T b) { return a < b; }
template <class T> DEVICE bool op_le(T a, T b) { return a <= b; }
template <class T> DEVICE bool op_gt(T a, T b) { return a > b; }
template <class T> DEVICE bool op_ge(T a, T b) { return a >= b; }
// Without branches, after which each load of a captured tensor would have to wait for the one before.
DEVICE bool op_logical_and(bool a, bool b) { return a & b; }
DEVICE bool op_logical_or(bool a, bool b) { return a | b; }
DEVICE bool op_logical_xor(bool a, bool b) { return a != b; }
template <class T> DEVICE T op_where(bool condition, T a, T b) { return condition ? a : b; }
template <class T> DEVICE T op_minimum(T a, T b) { return a < b || a != a ? a : b; }   // NaN wins
template <class T> DEVICE T op_maximum(T a, T b) { return a > b || a != a ? a : b; }
template <class T> DEVICE T op_fmin(T a, T b) { return a < b || b != b ? a : b; }   // numbers win
template <class T> DEVICE T op_fmax(T a, T b) { return a > b || b != b ? a : b; }
template <class T> DEVICE T op_sign(T x) { return (T)((x > 0) - (x < 0)); }
template <class T> DEVICE T op_relu(T x) { return x < 0 ? (T)0 : x; }
template <class T> DEVICE T op_floor(T x) { return x; }
template <class T> DEVICE T op_ceil(T x) { return x; }
template <class T> DEVICE T op_trunc(T x) { return x; }
template <class T> DEVICE T op_round(T x) { return x; }
DEVICE float op_floor(float x) { return floorf(x); }
DEVICE float op_ceil(float x) { return ceilf(x); }
DEVICE float op_trunc(float x) { return truncf(x); }
DEVICE float op_round(float x) { return rintf(x); }   // halves to even
DEVICE bool op_isnan(float x) { return x != x; }
DEVICE bool op_isinf(float x) { return fabsf(x) == POS_INF; }
DEVICE bool op_isneginf(float x) { return x == NEG_INF; }
DEVICE bool op_isposinf(float x) { return x == POS_INF; }
DEVICE bool op_signbit(float x) { return __float_as_int(x) < 0; }

// ---- Floats
// Converts an integer x below 2^23: 0x4b000000 + x are the bits of the float 2^23 + x. A subtraction is four times as
// fast as a conversion.
DEVICE float op_index_to_float(int x) { return __int_as_float(0x4b000000 + x) - 8388608.f; }
DEVICE float op_true_divide(float a, float b) { return a / b; }
DEVICE float op_divide(float a, float b) { return truncf(a / b); }
DEVICE float op_fmod(float a, float b) { return fmodf(a, b); }
DEVICE float op_remainder(float a, float b) {
  const float left = fmodf(a, b);
  return left != 0.f && (left < 0.f) != (b < 0.f) ? left + b : left;
}
DEVICE float op_floor_divide(float a, float b) {   // as in Python, consistent with the remainder
  if (b == 0.f) return a / b;
  const float left = fmodf(a, b);
  const float quotient = (a - left) / b - (left != 0.f && (left < 0.f) != (b < 0.f) ? 1.f : 0.f);
  const float below = floorf(quotient);
  return quotient == 0.f ? copysignf(0.f, a / b) : quotient - below > 0.5f ? below + 1.f : below;
}
DEVICE float op_pow(float x, float y) { return powf(x, y); }
DEVICE float op_square(float x) { return x * x; }
DEVICE float op_cube(float x) { return x * x * x; }
DEVICE float op_exp(float x) { return expf(x); }
DEVICE float op_exp2(float x) { return exp2f(x); }
DEVICE float op_expm1(float x) { return expm1f(x); }
DEVICE float op_log(float x) { return logf(x); }
DEVICE float op_log2(float x) { return log2f(x); }
DEVICE float op_log10(float x) { return log10f(x); }
DEVICE float op_log1p(float x) { return log1pf(x); }
DEVICE float op_tanh(float x) { return tanhf(x); }
// tanh within 1e-7, as in the kernels' softcap, for results that are then multiplied by at most 1024.
DEVICE float op_tanh_near(float x) {
  return fmaf(-2.f, reciprocal_approx(exp2_approx(x * (2.f * LOG2E)) + 1.f), 1.f);
}
DEVICE float op_sigmoid(float x) { return reciprocal_approx(1.f + exp2_approx(-x * LOG2E)); }
DEVICE float op_sqrt(float x) { return sqrtf(x); }
DEVICE float op_rsqrt(float x) { return 1.f / sqrtf(x); }
DEVICE float op_reciprocal(float x) { return 1.f / x; }
DEVICE float op_sin(float x) { return sinf(x); }
DEVICE float op_cos(float x) { return cosf(x); }
DEVICE float op_tan(float x) { return tanf(x); }
DEVICE float op_asin(float x) { return asinf(x); }
DEVICE float op_acos(float x) { return acosf(x); }
DEVICE float op_atan(float x) { return atanf(x); }
DEVICE float op_atan2(float y, float x) { return atan2f(y, x); }
DEVICE float op_sinh(float x) { return sinhf(x); }
DEVICE float op_cosh(float x) { return coshf(x); }
DEVICE float op_asinh(float x) { return asinhf(x); }
DEVICE float op_acosh(float x) { return acoshf(x); }
DEVICE float op_atanh(float x) { return atanhf(x); }
DEVICE float op_erf(float x) { return erff(x); }
DEVICE float op_erfc(float x) { return erfcf(x); }
DEVICE float op_hypot(float a, float b) { return hypotf(a, b); }
DEVICE float op_copysign(float a, float b) { return copysignf(a, b); }
DEVICE float op_tanh_backward(float grad, float y) { return grad * (1.f - y * y); }
DEVICE float op_sigmoid_backward(float grad, float y) { return grad * (1.f - y) * y; }
DEVICE float op_threshold_backward(float grad, float x, float threshold) { return x <= threshold ? 0.f : grad; }

