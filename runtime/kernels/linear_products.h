// The products of one tile of 32 outputs with one panel of rows, by weight and activation format.
#pragma once
#include "linear.h"

namespace llmopt {
namespace {

struct Product {
  const uint8_t* weights;
  const uint8_t* a;
  const float* row_scales;    // X_INT8: t [groups][r]
  const int32_t* row_sums;    // X_INT8: [groups][r]
  const float* row_totals;    // otherwise, for zero points: [groups][r]
  size_t weight_step;         // bytes from one group's weights to the next one's
  const uint8_t* scales;      // of the first group, 32 in scale_format
  int scale_format;
  const uint8_t* zeros;       // of the first group, 32, or null
  size_t step;                // bytes from one group's scales, or zeros, to the next one's
  int zero;                   // the constant zero point that the codes are read with
  int groups, units;          // units of one group
  float* c;                   // [r][32]
  int segment;                // bfloat16 products: units after which a row's sum may be cut, 0: one sum
  int chunk[2];               // units after which it is, of rows with others and of rows alone, multiples of segment
  const uint8_t* alone;       // [r], or null
  uint8_t* kept;              // where kMaxRows rows leave the bfloat16 units that they made of the codes, or null
};

// Moves the sums into c that end where `done` of all units are summed.
template <int MR>
inline __attribute__((always_inline)) void end_segment(const Product& p, Accumulator<MR>& acc, int done) {
  const bool last = done >= p.groups * p.units;
#pragma GCC unroll 12
  for (int m = 0; m < MR; ++m)
    if (last || done % p.chunk[p.alone && p.alone[m]] == 0) acc.flush(m, p.c + m * kLanes);
}

#if LLMOPT_AVX512
inline __m512 load_scales(const uint8_t* scales, int format, int lane) {
  if (format == S_F32) return _mm512_loadu_ps(scales + 4 * lane);
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(scales + 2 * lane));
  if (format == S_F16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
#endif

inline float scale_at(const uint8_t* scales, int format, int lane) {
  if (format == S_F32) {
    float v;
    std::memcpy(&v, scales + 4 * lane, 4);
    return v;
  }
  uint16_t v;
  std::memcpy(&v, scales + 2 * lane, 2);
  return format == S_BF16 ? bf16_to_f32(v) : f16_to_f32(v);
}

// y = x W^T over float or bfloat16 weights: one group, no scales.
template <class Op>
struct Plain {
  template <int MR>
  struct Body {
    static void run(const Product& p) {
      Accumulator<MR> acc;
      acc.zero();
      const int units = p.groups * p.units;
      if (!p.segment) {
        acc.template run<Op>(p.a, 4 * MR, 4, p.weights, 4 * kLanes, units);
        acc.store(p.c, kLanes);
        return;
      }
      std::memset(p.c, 0, sizeof(float) * MR * kLanes);
      for (int u = 0; u < units; u += p.segment) {
        acc.template run<Op>(p.a + static_cast<size_t>(u) * 4 * MR, 4 * MR, 4, p.weights + static_cast<size_t>(u) * 4 * kLanes,
                             4 * kLanes, std::min(p.segment, units - u));
        end_segment<MR>(p, acc, std::min(u + p.segment, units));
      }
    }
  };
};

#if LLMOPT_AVX512

// c += s_g (acc - (z_g - zero) total) for group g of float sums acc. c stays in memory: acc takes the registers.
template <int MR>
inline __attribute__((always_inline)) void add_group(const Product& p, int g, const __m512 (&acc)[MR][2]) {
  const uint8_t* scales = p.scales + g * p.step;
  const __m512 s0 = load_scales(scales, p.scale_format, 0), s1 = load_scales(scales, p.scale_format, 16);
  float* c = p.c;
  if (!p.zeros) {
#pragma GCC unroll 12
    for (int m = 0; m < MR; ++m, c += kLanes) {
      _mm512_storeu_ps(c, _mm512_fmadd_ps(s0, acc[m][0], _mm512_loadu_ps(c)));
      _mm512_storeu_ps(c + 16, _mm512_fmadd_ps(s1, acc[m][1], _mm512_loadu_ps(c + 16)));
    }
    return;
  }
  const __m512i z = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p.zeros + g * p.step)));
  const __m512i shift = _mm512_sub_epi16(z, _mm512_set1_epi16(static_cast<short>(p.zero)));
  const __m512 z0 = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(shift)));
  const __m512 z1 = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(shift, 1)));
#pragma GCC unroll 12
  for (int m = 0; m < MR; ++m, c += kLanes) {
    const __m512 total = _mm512_set1_ps(p.row_totals[g * MR + m]);
    _mm512_storeu_ps(c, _mm512_fmadd_ps(s0, _mm512_fnmadd_ps(z0, total, acc[m][0]), _mm512_loadu_ps(c)));
    _mm512_storeu_ps(c + 16, _mm512_fmadd_ps(s1, _mm512_fnmadd_ps(z1, total, acc[m][1]), _mm512_loadu_ps(c + 16)));
  }
}

// Codes already unpacked to Op's element type, less the constant zero point; group sums scaled in float.
template <class Op>
struct Grouped {
  template <int MR>
  struct Body {
    static void run(const Product& p) {
      const uint8_t* a = p.a;
      std::memset(p.c, 0, sizeof(float) * MR * kLanes);
      for (int g = 0; g < p.groups; ++g, a += static_cast<size_t>(p.units) * 4 * MR) {
        Accumulator<MR> acc;
        acc.zero();
        acc.template run<Op>(a, 4 * MR, 4, p.weights + g * p.weight_step, 4 * kLanes, p.units);
        add_group<MR>(p, g, acc.v);
      }
    }
  };
};

template <bool kInt4>
struct Integer {
  template <int MR>
  struct Body {
    static void run(const Product& p) {
      const uint8_t* a = p.a;
      const __m512i low = _mm512_set1_epi8(0x0f);
      __m512 f[MR][2];
#pragma GCC unroll 12
      for (int m = 0; m < MR; ++m) f[m][0] = f[m][1] = _mm512_setzero_ps();
      for (int g = 0; g < p.groups; ++g) {
        const uint8_t* w = p.weights + g * p.weight_step;
        __m512i acc[MR][2], high[MR][2];
        const int32_t* sums = p.row_sums + g * MR;
#pragma GCC unroll 12
        for (int m = 0; m < MR; ++m) {
          acc[m][0] = acc[m][1] = p.zeros ? _mm512_setzero_si512() : _mm512_set1_epi32(-p.zero * sums[m]);
          if (kInt4 && MR <= 2) high[m][0] = high[m][1] = _mm512_setzero_si512();
        }
        if (kInt4) {
          for (int u = 0; u < p.units; u += 2, a += 8 * MR, w += 128) {
            const __m512i r0 = _mm512_loadu_si512(w), r1 = _mm512_loadu_si512(w + 64);
            _mm_prefetch(reinterpret_cast<const char*>(w + 2048), _MM_HINT_T0);
            _mm_prefetch(reinterpret_cast<const char*>(w + 2112), _MM_HINT_T0);
            __m512i b0 = _mm512_and_si512(r0, low), b1 = _mm512_and_si512(r1, low);
#pragma GCC unroll 12
            for (int m = 0; m < MR; ++m) {
              const __m512i x = broadcast_unit(a + 4 * m);
              acc[m][0] = _mm512_dpbusd_epi32(acc[m][0], b0, x);
              acc[m][1] = _mm512_dpbusd_epi32(acc[m][1], b1, x);
            }
            b0 = _mm512_and_si512(_mm512_srli_epi16(r0, 4), low);
            b1 = _mm512_and_si512(_mm512_srli_epi16(r1, 4), low);
#pragma GCC unroll 12
            for (int m = 0; m < MR; ++m) {
              const __m512i x = broadcast_unit(a + 4 * MR + 4 * m);
              if (MR <= 2) {  // separate chains: few rows leave the multiplier's latency uncovered
                high[m][0] = _mm512_dpbusd_epi32(high[m][0], b0, x);
                high[m][1] = _mm512_dpbusd_epi32(high[m][1], b1, x);
              } else {
                acc[m][0] = _mm512_dpbusd_epi32(acc[m][0], b0, x);
                acc[m][1] = _mm512_dpbusd_epi32(acc[m][1], b1, x);
              }
            }
          }
        } else {
          for (int u = 0; u < p.units; ++u, a += 4 * MR, w += 128) {
            const __m512i b0 = _mm512_loadu_si512(w), b1 = _mm512_loadu_si512(w + 64);
            if (MR <= 4) {
              _mm_prefetch(reinterpret_cast<const char*>(w + 2048), _MM_HINT_T0);
              _mm_prefetch(reinterpret_cast<const char*>(w + 2112), _MM_HINT_T0);
            }
#pragma GCC unroll 12
            for (int m = 0; m < MR; ++m) {
              const __m512i x = broadcast_unit(a + 4 * m);
              acc[m][0] = _mm512_dpbusd_epi32(acc[m][0], b0, x);
              acc[m][1] = _mm512_dpbusd_epi32(acc[m][1], b1, x);
            }
          }
        }
        const uint8_t* scales = p.scales + g * p.step;
        const __m512 s0 = load_scales(scales, p.scale_format, 0), s1 = load_scales(scales, p.scale_format, 16);
        __m512i z0 = low, z1 = low;
        if (p.zeros) {
          z0 = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p.zeros + g * p.step)));
          z1 = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p.zeros + g * p.step + 16)));
        }
#pragma GCC unroll 12
        for (int m = 0; m < MR; ++m) {
          if (kInt4 && MR <= 2) {
            acc[m][0] = _mm512_add_epi32(acc[m][0], high[m][0]);
            acc[m][1] = _mm512_add_epi32(acc[m][1], high[m][1]);
          }
          if (p.zeros) {
            const __m512i sum = _mm512_set1_epi32(sums[m]);
            acc[m][0] = _mm512_sub_epi32(acc[m][0], _mm512_mullo_epi32(z0, sum));
            acc[m][1] = _mm512_sub_epi32(acc[m][1], _mm512_mullo_epi32(z1, sum));
          }
          const __m512 t = _mm512_set1_ps(p.row_scales[g * MR + m]);
          f[m][0] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[m][0]), _mm512_mul_ps(s0, t), f[m][0]);
          f[m][1] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[m][1]), _mm512_mul_ps(s1, t), f[m][1]);
        }
      }
#pragma GCC unroll 12
      for (int m = 0; m < MR; ++m) {
        _mm512_storeu_ps(p.c + m * kLanes, f[m][0]);
        _mm512_storeu_ps(p.c + m * kLanes + 16, f[m][1]);
      }
    }
  };
};

#include "linear_codes.h"
#else
#include "linear_products_portable.h"
#endif

}  // namespace
}  // namespace llmopt
