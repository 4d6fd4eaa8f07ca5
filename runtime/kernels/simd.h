// Numeric primitives shared by all kernels: bfloat16 conversion, exp/tanh, row reductions, aligned memory.
//
// Two instruction paths exist and are fixed at compile time, because the library is compiled on the machine that runs it:
// AVX-512 with VNNI (LLMOPT_AVX512), and portable C++ that the compiler vectorizes as it can. The former has bfloat16
// products and conversions as instructions where the processor has BF16, else as a few integer and float ones.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__) && !defined(LLMOPT_PORTABLE)
#define LLMOPT_AVX512 1
#include <immintrin.h>
#if defined(__AVX512BF16__)
#define LLMOPT_BF16 1
#endif
#endif

namespace llmopt {

inline int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

// A cache-line aligned, growing, zero-initialized buffer. Its contents are lost when it grows.
template <class T>
struct Buffer {
  T* data = nullptr;
  size_t size = 0;
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data); }
  T* reserve(size_t count) {
    if (count > size) {
      std::free(data);
      size_t bytes = (count * sizeof(T) + 127) / 64 * 64;
      data = static_cast<T*>(std::aligned_alloc(64, bytes));
      if (!data) { size = 0; throw std::bad_alloc(); }
      std::memset(static_cast<void*>(data), 0, bytes);
      size = count;
    }
    return data;
  }
};

inline float bf16_to_f32(uint16_t value) {
  uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

inline float f16_to_f32(uint16_t value) {
  const int exponent = (value >> 10) & 31, mantissa = value & 1023;
  const float magnitude = exponent == 0    ? std::ldexp(static_cast<float>(mantissa), -24)
                          : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                           : std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
  return value & 0x8000 ? -magnitude : magnitude;
}

// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t f32_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>(bits >> 16);
}

#if LLMOPT_AVX512
#if LLMOPT_BF16
// 16 floats as bfloat16, rounded to nearest, ties to even; NaN stays NaN.
inline __m256i to_bf16(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
// 32 floats, those of `low` first.
inline __m512i to_bf16(__m512 high, __m512 low) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
// acc + a1 b1 + a0 b0 of the two bfloat16 numbers in each lane of 32 bits.
inline __m512 add_pair_products(__m512 acc, __m512i b, __m512i a) { return _mm512_dpbf16_ps(acc, (__m512bh)b, (__m512bh)a); }
#else
// Each float's bfloat16 in the upper half of its lane; what the lower half holds means nothing.
inline __m512i bf16_in_upper_half(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), last);
  return _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
}
inline __m256i to_bf16(__m512 x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(bf16_in_upper_half(x), 16)); }
inline __m512i to_bf16(__m512 high, __m512 low) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(to_bf16(low)), to_bf16(high), 1);
}
inline __m512 add_pair_products(__m512 acc, __m512i b, __m512i a) {
  const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512 b1 = _mm512_castsi512_ps(_mm512_and_si512(b, odd)), a1 = _mm512_castsi512_ps(_mm512_and_si512(a, odd));
  const __m512 b0 = _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), a0 = _mm512_castsi512_ps(_mm512_slli_epi32(a, 16));
  return _mm512_fmadd_ps(b0, a0, _mm512_fmadd_ps(b1, a1, acc));
}
#endif
// exp by 2^n * p(r), r in [-ln2/2, ln2/2], degree-6 polynomial: relative error below 2e-7; underflows to 0 below -87.3.
inline __m512 exp16(__m512 x) {
  const __m512 log2e = _mm512_set1_ps(1.44269504088896341f);
  __m512 clamped = _mm512_min_ps(x, _mm512_set1_ps(88.7f));
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, log2e), 0x08);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145751953125f), clamped);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860682030941723e-6f), r);
  __m512 p = _mm512_set1_ps(1.0f / 720);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  __m512 result = _mm512_scalef_ps(p, n);
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ), result);
}
// tanh(x) = 1 - 2 / (exp(2x) + 1): absolute error near 1e-7, which the callers' sums absorb.
inline __m512 tanh16(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f), limit = _mm512_set1_ps(15.0f);
  __m512 t = _mm512_max_ps(_mm512_min_ps(x, limit), _mm512_sub_ps(_mm512_setzero_ps(), limit));
  __m512 e = exp16(_mm512_add_ps(t, t));
  return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(e, one)));
}
inline __mmask16 tail_mask(int count) { return count >= 16 ? 0xffff : static_cast<__mmask16>((1u << count) - 1); }
#endif

// Sum of x[i]^2 in the order in which torch sums a row of floats on x86: squares are rounded, four vectors of 8 lanes are
// summed side by side, in blocks of 16 and blocks of blocks once there are more than 16, then the vectors, then the lanes.
inline float sum_squares(const float* x, int n) {
#if LLMOPT_AVX512
  constexpr int kLevels = 4;
  const int vectors = n / 8, quads = vectors / 4;
  int power = 4;
  while ((1 << (power * kLevels)) < quads) ++power;
  const int step = 1 << power;
  __m256 level[kLevels][4];
  for (auto& row : level)
    for (auto& v : row) v = _mm256_setzero_ps();
  const auto square = [&](int vector) {
    __m256 v = _mm256_loadu_ps(x + 8 * vector);
    v = _mm256_mul_ps(v, v);
    asm("" : "+v"(v));  // keeps the product from being contracted into the sum
    return v;
  };
  int i = 0;
  while (i + step <= quads) {
    for (int j = 0; j < step; ++j, ++i)
      for (int k = 0; k < 4; ++k) level[0][k] = _mm256_add_ps(level[0][k], square(4 * i + k));
    for (int l = 1; l < kLevels; ++l) {
      for (int k = 0; k < 4; ++k) {
        level[l][k] = _mm256_add_ps(level[l][k], level[l - 1][k]);
        level[l - 1][k] = _mm256_setzero_ps();
      }
      if (i & ((step - 1) << (l * power))) break;
    }
  }
  for (; i < quads; ++i)
    for (int k = 0; k < 4; ++k) level[0][k] = _mm256_add_ps(level[0][k], square(4 * i + k));
  for (int l = 1; l < kLevels; ++l)
    for (int k = 0; k < 4; ++k) level[0][k] = _mm256_add_ps(level[0][k], level[l][k]);
  for (int v = 4 * quads; v < vectors; ++v) level[0][0] = _mm256_add_ps(level[0][0], square(v));
  for (int k = 1; k < 4; ++k) level[0][0] = _mm256_add_ps(level[0][0], level[0][k]);
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, level[0][0]);
  float sum = 0;
  for (int k = 8 * vectors; k < n; ++k) {
    float v = x[k] * x[k];
    asm("" : "+x"(v));
    sum += v;
  }
  for (float lane : lanes) sum += lane;
  return sum;
#else
  float sum[8] = {0};
  int i = 0;
  for (; i + 8 <= n; i += 8)
    for (int j = 0; j < 8; ++j) sum[j] += x[i + j] * x[i + j];
  for (; i < n; ++i) sum[0] += x[i] * x[i];
  return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
#endif
}

inline float abs_max(const float* x, int n) {
#if LLMOPT_AVX512
  __m512 m = _mm512_setzero_ps();
  for (int i = 0; i < n; i += 16)
    m = _mm512_max_ps(m, _mm512_abs_ps(_mm512_maskz_loadu_ps(tail_mask(n - i), x + i)));
  return _mm512_reduce_max_ps(m);
#else
  float m = 0;
  for (int i = 0; i < n; ++i) m = std::max(m, std::fabs(x[i]));
  return m;
#endif
}

// What a bfloat16 register would hold of it.
inline float bf16_round(float value) { return bf16_to_f32(f32_to_bf16(value)); }

inline void round_to_bf16(float* x, int n) {
#if LLMOPT_AVX512
  for (int i = 0; i < n; i += 16) {
    const __mmask16 k = tail_mask(n - i);
    const __m256i half = to_bf16(_mm512_maskz_loadu_ps(k, x + i));
    _mm512_mask_storeu_ps(x + i, k, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16)));
  }
#else
  for (int i = 0; i < n; ++i) x[i] = bf16_round(x[i]);
#endif
}

// Where a norm rounds to bfloat16: nowhere, after the weight, or before it as well.
enum NormRounding { NORM_EXACT = 0, NORM_ROUND_ONCE = 1, NORM_ROUND_TWICE = 2 };

// y[i] = x[i] * rsqrt(mean(x^2) + eps) * weight[i] (RMSNorm, Zhang & Sennrich 2019). y may be x.
inline void rms_norm(const float* x, const float* weight, float eps, int n, float* y, int rounding) {
  const float r = 1.0f / std::sqrt(sum_squares(x, n) / static_cast<float>(n) + eps);
  if (rounding == NORM_ROUND_TWICE) {
    for (int i = 0; i < n; ++i) y[i] = x[i] * r;
    round_to_bf16(y, n);
    for (int i = 0; i < n; ++i) y[i] *= weight[i];
  } else {
    for (int i = 0; i < n; ++i) y[i] = x[i] * r * weight[i];
  }
  if (rounding != NORM_EXACT) round_to_bf16(y, n);
}

enum Activation { ACT_SILU = 0, ACT_GELU_TANH = 1, ACT_GELU = 2, ACT_RELU = 3 };

inline float activate(int kind, float v) {
  switch (kind) {
    case ACT_SILU: return v / (1.0f + std::exp(-v));
    case ACT_GELU_TANH: return 0.5f * v * (1.0f + std::tanh(0.7978845608028654f * (v + 0.044715f * v * v * v)));
    case ACT_GELU: return 0.5f * v * (1.0f + std::erf(v * 0.7071067811865476f));
    default: return v > 0 ? v : 0.0f;
  }
}

// out[i] = act(gate[i]) * up[i], n a multiple of 16. With a table, bfloat16 by the bits of a bfloat16 gate, the activation is
// read from it and the product is rounded to bfloat16.
inline void gated(int kind, const uint16_t* table, const float* gate, const float* up, int n, float* out) {
  if (table) {
    for (int i = 0; i < n; ++i) out[i] = bf16_to_f32(table[f32_to_bf16(gate[i])]) * up[i];
    round_to_bf16(out, n);
    return;
  }
#if LLMOPT_AVX512
  if (kind == ACT_SILU || kind == ACT_GELU_TANH) {
    for (int i = 0; i < n; i += 16) {
      __m512 g = _mm512_loadu_ps(gate + i), u = _mm512_loadu_ps(up + i), a;
      const __m512 one = _mm512_set1_ps(1.0f);
      if (kind == ACT_SILU) {
        a = _mm512_div_ps(g, _mm512_add_ps(one, exp16(_mm512_sub_ps(_mm512_setzero_ps(), g))));
      } else {
        __m512 g3 = _mm512_mul_ps(_mm512_mul_ps(g, g), g);
        __m512 t = tanh16(_mm512_mul_ps(_mm512_set1_ps(0.7978845608028654f),
                                        _mm512_fmadd_ps(_mm512_set1_ps(0.044715f), g3, g)));
        a = _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(0.5f), g), _mm512_add_ps(one, t));
      }
      _mm512_storeu_ps(out + i, _mm512_mul_ps(a, u));
    }
    return;
  }
#endif
  for (int i = 0; i < n; ++i) out[i] = activate(kind, gate[i]) * up[i];
}

// x[i] = cap * tanh(x[i] / cap)
inline void soft_cap(float* x, int n, float cap) {
#if LLMOPT_AVX512
  const __m512 c = _mm512_set1_ps(cap), inverse = _mm512_set1_ps(1.0f / cap);
  for (int i = 0; i < n; i += 16) {
    __mmask16 k = tail_mask(n - i);
    __m512 v = tanh16(_mm512_mul_ps(_mm512_maskz_loadu_ps(k, x + i), inverse));
    _mm512_mask_storeu_ps(x + i, k, _mm512_mul_ps(v, c));
  }
#else
  for (int i = 0; i < n; ++i) x[i] = cap * std::tanh(x[i] / cap);
#endif
}

}  // namespace llmopt
