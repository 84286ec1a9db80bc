// For an emulated kernel: a caller's functions lie in a library of their own (mods.cu), so that a kernel is compiled once for all of them.
#pragma once
Mods emulated_mods;   // set before each launch

DEVICE float flex_score(const FlexParams &f, float score, int b, int h, int q, int kv) { return emulated_mods.score(f, score, b, h, q, kv); }
DEVICE float flex_slope(const FlexParams &f, float score, int b, int h, int q, int kv) { return emulated_mods.slope(f, score, b, h, q, kv); }
#define FLEX_STEEPEST
DEVICE float flex_steepest(const FlexParams &f, int b, int h) { return emulated_mods.steepest(f, b, h); }
DEVICE bool flex_mask(const FlexParams &f, int b, int h, int q, int kv) { return emulated_mods.mask(f, b, h, q, kv); }
#define FLEX_SIGHT
DEVICE int flex_sight(const FlexParams &f, int b, int h, int q, int q_last, int kv, int kv_last) {
  return emulated_mods.sight(f, b, h, q, q_last, kv, kv_last);
}
#if FLEX_GRADIENTS
constexpr int FLEX_SUMS = EMULATED_SUMS;
DEVICE void flex_gradients(const FlexParams &f, FlexSum (&sums)[FLEX_SUMS], float dscore, float score, int b, int h, int q, int kv) {
  emulated_mods.gradients(f, sums, dscore, score, b, h, q, kv);
}
#endif
