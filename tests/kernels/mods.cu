// A caller's functions, from the generated flex_mods.cuh, for emulated kernels.
#include "scores/flex.cuh"

#if FLEX_GRADIENTS
static void gradients(const FlexParams &f, FlexSum *sums, float dscore, float score, int b, int h, int q, int kv) {
  flex_gradients(f, *(FlexSum (*)[FLEX_SUMS])sums, dscore, score, b, h, q, kv);
}
#else
static constexpr decltype(Mods::gradients) gradients = nullptr;
#endif
Mods emulated_mods = {flex_score, flex_slope, flex_steepest, flex_mask, flex_sight, gradients};
