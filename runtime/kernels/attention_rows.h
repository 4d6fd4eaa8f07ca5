// What every form of attention does with a row of scores and of sums.
#pragma once
#include <limits>

#include "attention.h"

namespace llmopt {
namespace {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

#if LLMOPT_AVX512
// exp for numerators that are rounded to bfloat16 (relative step 2^-9): 2^t with a degree-4 polynomial, relative error below
// 5e-5; no result is below 2^-126.
inline __m512 exp_short(__m512 x, __m512 shift) {
  const __m512 log2e = _mm512_set1_ps(1.44269504088896341f);
  const __m512 t = _mm512_max_ps(_mm512_mul_ps(_mm512_sub_ps(x, shift), log2e), _mm512_set1_ps(-126.0f));
  const __m512 n = _mm512_roundscale_ps(t, 0x08), r = _mm512_sub_ps(t, n);
  __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.00961813f), r, _mm512_set1_ps(0.05550411f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.24022651f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.69314718f));
  return _mm512_scalef_ps(_mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f)), n);
}

inline __attribute__((always_inline)) void prefetch(const uint8_t* p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T1);
}
#else
inline void prefetch(const uint8_t*, size_t) {}
#endif

// Divides by the softmax sum, the sink included, and writes one row of one head.
inline void finish_row(const AttentionArgs& a, int token, int head, const float* o, float maximum, float sum) {
  float factor = 1.0f;
  if (a.sinks) {
    const float sink = a.sinks[head];
    if (sink > maximum) {
      factor = maximum == kNegInf ? 0.0f : std::exp(maximum - sink);
      sum = sum * factor + 1.0f;
    } else {
      sum += std::exp(sink - maximum);
    }
  }
  const float r = sum > 0 ? factor / sum : 0.0f;
  float* out = a.out + token * a.out_stride + static_cast<size_t>(head) * a.shape.head_dim;
  for (int d = 0; d < a.shape.head_dim; ++d) out[d] = o[d] * r;
}

// Adds other keys' share to a row's: both are {maximum, sum, o[dp]}.
inline void fold(float* total, const float* other, int dp) {
  const float peak = std::max(total[0], other[0]);
  if (peak == kNegInf) return;
  const float x = std::exp(total[0] - peak), y = std::exp(other[0] - peak);
  total[0] = peak;
  for (int i = 1; i < dp + 2; ++i) total[i] = total[i] * x + other[i] * y;
}

}  // namespace
}  // namespace llmopt
