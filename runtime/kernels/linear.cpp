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
};

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
      acc.template run<Op>(p.a, 4 * MR, 4, p.weights, 4 * kLanes, p.groups * p.units);
      acc.store(p.c, kLanes);
    }
  };
};

// Codes already unpacked to Op's element type, less the constant zero point; group sums scaled in float.
template <class Op>
struct Grouped {
  template <int MR>
  struct Body {
    static void run(const Product& p) {
      float sums[MR * kLanes];
      std::memset(p.c, 0, sizeof sums);
      for (int g = 0; g < p.groups; ++g) {
        Accumulator<MR> acc;
        acc.zero();
        acc.template run<Op>(p.a + static_cast<size_t>(g) * p.units * 4 * MR, 4 * MR, 4, p.weights + g * p.weight_step,
                             4 * kLanes, p.units);
        acc.store(sums, kLanes);
        float s[kLanes], shift[kLanes];
        for (int n = 0; n < kLanes; ++n) {
          s[n] = scale_at(p.scales + g * p.step, p.scale_format, n);
          shift[n] = p.zeros ? static_cast<float>(p.zeros[g * p.step + n]) - static_cast<float>(p.zero) : 0.0f;
        }
        for (int m = 0; m < MR; ++m) {
          const float total = p.zeros ? p.row_totals[g * MR + m] : 0.0f;
          for (int n = 0; n < kLanes; ++n) p.c[m * kLanes + n] += s[n] * (sums[m * kLanes + n] - shift[n] * total);
        }
      }
    }
  };
};

#if LLMOPT_AVX512

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

#else

template <bool kInt4>
struct Integer {
  template <int MR>
  struct Body {
    static void run(const Product& p) {
      std::memset(p.c, 0, sizeof(float) * MR * kLanes);
      const int8_t* a = reinterpret_cast<const int8_t*>(p.a);
      for (int g = 0; g < p.groups; ++g) {
        const uint8_t* w = p.weights + g * p.weight_step;
        int32_t acc[MR][kLanes];
        std::memset(acc, 0, sizeof acc);
        for (int u = 0; u < p.units; ++u, a += 4 * MR) {
          for (int m = 0; m < MR; ++m)
            for (int n = 0; n < kLanes; ++n) {
              int32_t sum = 0;
              for (int i = 0; i < 4; ++i) {
                int code = w[4 * n + i];
                if (kInt4) code = (u & 1) ? code >> 4 : code & 15;
                sum += code * a[4 * m + i];
              }
              acc[m][n] += sum;
            }
          if (!kInt4 || (u & 1)) w += 4 * kLanes;
        }
        for (int m = 0; m < MR; ++m)
          for (int n = 0; n < kLanes; ++n) {
            const int zero = p.zeros ? p.zeros[g * p.step + n] : p.zero;
            const int32_t dot = acc[m][n] - zero * p.row_sums[g * MR + m];
            p.c[m * kLanes + n] += static_cast<float>(dot) * (scale_at(p.scales + g * p.step, p.scale_format, n) * p.row_scales[g * MR + m]);
          }
      }
    }
  };
};

#endif

// Unpacks a tile of 4-bit codes to the 8-bit layout, without its scales.
void unpack_int4(const Linear& l, const uint8_t* tile, uint8_t* out) {
  for (int g = 0; g < l.groups; ++g, tile += l.group_bytes)
    for (size_t i = 0; i < l.scales_at; i += 128, out += 256)
      for (int j = 0; j < 128; ++j) {
        out[j] = tile[i + j] & 15;
        out[128 + j] = tile[i + j] >> 4;
      }
}

// Turns a tile of codes into bfloat16 or float units of (code - zero): both hold integers up to 255 exactly.
void unpack_values(const Linear& l, const uint8_t* tile, uint8_t* out) {
  const int zero = l.weight == W_INT4 ? 8 : 128, units = l.group / 4;
  for (int i = 0; i < l.kp / 4; ++i) {
    const int u = i % units;
    const uint8_t* c = tile + i / units * l.group_bytes + (l.weight == W_INT4 ? (u / 2) * 128 : u * 128);
    const int shift = l.weight == W_INT4 ? (u & 1) * 4 : 0, mask = l.weight == W_INT4 ? 15 : 255;
    if (l.activation == X_BF16) {
#if LLMOPT_AVX512
      // Bytes b0 b1 b2 b3 of a lane become the words (b0, b1) and (b2, b3), then bfloat16 by a table or by conversion.
      const __m512i first = _mm512_broadcast_i32x4(_mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1));
      const __m512i second = _mm512_broadcast_i32x4(_mm_setr_epi8(2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1));
      const __m512i words = _mm512_set1_epi16(static_cast<short>(zero));
      for (int j = 0; j < 2; ++j) {
        __m512i v = _mm512_loadu_si512(c + 64 * j);
        if (l.weight == W_INT4) {
          if (shift) v = _mm512_srli_epi16(v, 4);
          v = _mm512_and_si512(v, _mm512_set1_epi8(0x0f));
        }
        for (int h = 0; h < 2; ++h) {
          const __m512i w = _mm512_sub_epi16(_mm512_shuffle_epi8(v, h ? second : first), words);
          const __m512 lo = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(w)));
          const __m512 hi = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(w, 1)));
          _mm512_storeu_si512(out + h * 128 + 64 * j, (__m512i)_mm512_cvtne2ps_pbh(hi, lo));
        }
      }
#else
      uint16_t* o = reinterpret_cast<uint16_t*>(out);
      for (int n = 0; n < kLanes; ++n)
        for (int b = 0; b < 4; ++b)
          o[(b / 2) * 64 + 2 * n + b % 2] = f32_to_bf16(static_cast<float>(((c[4 * n + b] >> shift) & mask) - zero));
#endif
      out += 2 * 4 * kLanes;
    } else {
      float* o = reinterpret_cast<float*>(out);
      for (int b = 0; b < 4; ++b)
        for (int n = 0; n < kLanes; ++n)
          o[b * kLanes + n] = static_cast<float>(((c[4 * n + b] >> shift) & mask) - zero);
      out += 4 * 4 * kLanes;
    }
  }
}

}  // namespace

TileView prepare_tile(const Linear& l, int tile, int rows, TileScratch& scratch) {
  const uint8_t* weights = l.tile(tile);
  if (l.weight == W_F32 || l.weight == W_BF16) return {weights, l.weight};
  if (l.activation != X_INT8) {
    const size_t bytes = static_cast<size_t>(l.kp) * kLanes * (l.activation == X_BF16 ? 2 : 4);
    unpack_values(l, weights, scratch.weights.reserve(bytes));
    return {scratch.weights.data, l.activation == X_BF16 ? W_BF16 : W_F32};
  }
  if (l.weight == W_INT4 && rows > kMaxRows) {
    unpack_int4(l, weights, scratch.weights.reserve(static_cast<size_t>(l.kp) * kLanes));
    return {scratch.weights.data, W_INT8};
  }
  return {weights, l.weight};
}

void panel_product(const Linear& l, const TileView& view, int tile, const Activations& x, int panel, float* c) {
  const int r = x.panel_rows(panel);
  const size_t base = static_cast<size_t>(panel) * kMaxRows;
  Product p;
  p.weights = view.weights;
  p.a = x.data.data + base * x.units() * 4;
  p.row_scales = x.scales.data + base * x.groups;
  p.row_sums = x.sums.data + base * x.groups;
  p.row_totals = x.totals.data + base * x.groups;
  p.units = x.units() / l.groups;
  // Weights as they lie have their scales between the groups, unpacked ones have not.
  p.weight_step = view.weights == l.tile(tile) ? l.group_bytes : static_cast<size_t>(p.units) * 4 * kLanes;
  p.scales = l.tile(tile) + l.scales_at;
  p.scale_format = l.scale_format;
  p.zeros = l.symmetric ? nullptr : l.tile(tile) + l.zeros_at;
  p.step = l.group_bytes;
  p.zero = l.weight == W_INT4 ? 8 : 128;
  p.groups = l.groups;
  p.c = c;
  const bool grouped = l.weight == W_INT8 || l.weight == W_INT4;
  if (x.format == X_INT8) {
    if (view.format == W_INT4) for_rows<Integer<true>::template Body>(r, p);
    else for_rows<Integer<false>::template Body>(r, p);
  } else if (view.format == W_BF16) {
    if (grouped) for_rows<Grouped<BF16Op>::template Body>(r, p);
    else for_rows<Plain<BF16Op>::template Body>(r, p);
  } else {
    if (grouped) for_rows<Grouped<F32Op>::template Body>(r, p);
    else for_rows<Plain<F32Op>::template Body>(r, p);
  }
  if (l.has_bias)
    for (int m = 0; m < r; ++m)
      for (int n = 0; n < kLanes; ++n) c[m * kLanes + n] += l.bias.data[tile * kLanes + n];
}

}  // namespace llmopt
