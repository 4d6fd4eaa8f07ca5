// Quantizing and packing rows of activations for the microkernels.
#include "linear.h"

namespace llmopt {

void Activations::resize(int new_rows, const Linear& l) {
  rows = new_rows;
  kp = l.kp;
  format = l.activation;
  group = l.group;
  groups = l.groups;
  wants_totals = totals_for(l);
  order = l.order.empty() ? nullptr : l.order.data();
  order_key = l.order_key;
  const size_t padded = static_cast<size_t>(rows);
  data.reserve(padded * units() * 4);
  if (format == X_INT8) {
    scales.reserve(padded * groups);
    sums.reserve(padded * groups);
  } else if (wants_totals) {
    totals.reserve(padded * groups);
  }
}

void Activations::pack_row(int row, const float* x, int k, float* scratch) {
  if (k < kp || order) {
    if (order)
      for (int i = 0; i < k; ++i) scratch[i] = x[order[i]];
    else
      std::memcpy(scratch, x, sizeof(float) * k);
    std::memset(scratch + k, 0, sizeof(float) * (kp - k));
    x = scratch;
  }
  const int panel = row / kMaxRows, m = row % kMaxRows, r = panel_rows(panel);
  uint8_t* out = data.data + static_cast<size_t>(panel) * kMaxRows * units() * 4 + 4 * m;
  const size_t base = static_cast<size_t>(panel) * kMaxRows * groups + m, step = static_cast<size_t>(4) * r;
  if (format != X_INT8) {
    for (int g = 0; g < (wants_totals ? groups : 0); ++g) {
      float total = 0;
      for (int i = g * group; i < (g + 1) * group; ++i)
        total += format == X_BF16 ? bf16_to_f32(f32_to_bf16(x[i])) : x[i];
      totals.data[base + static_cast<size_t>(g) * r] = total;
    }
    if (format == X_F32) {
      for (int i = 0; i < kp; ++i, out += step) std::memcpy(out, x + i, 4);
    } else {
#if LLMOPT_AVX512
      for (int i = 0; i < kp; i += 32) {
        alignas(64) uint8_t units[64];
        _mm512_store_si512(units, to_bf16(_mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i)));
        for (int u = 0; u < 16; ++u, out += step) std::memcpy(out, units + 4 * u, 4);
      }
#else
      for (int i = 0; i < kp; i += 2, out += step) {
        const uint16_t pair[2] = {f32_to_bf16(x[i]), f32_to_bf16(x[i + 1])};
        std::memcpy(out, pair, 4);
      }
#endif
    }
    return;
  }
  for (int g = 0; g < groups; ++g) {
    const float* v = x + g * group;
    const float peak = abs_max(v, group), inverse = peak > 0 ? 127.0f / peak : 0.0f;
    int32_t sum = 0;
#if LLMOPT_AVX512
    __m512i total = _mm512_setzero_si512();
    const __m512 by = _mm512_set1_ps(inverse);
    for (int i = 0; i < group; i += 16) {
      const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(v + i), by));
      total = _mm512_add_epi32(total, q);
      const __m128i bytes = _mm512_cvtepi32_epi8(q);
      if (r == 1) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), bytes);
        out += 16;
      } else {
        alignas(16) uint8_t units[16];
        _mm_store_si128(reinterpret_cast<__m128i*>(units), bytes);
        for (int u = 0; u < 4; ++u, out += step) std::memcpy(out, units + 4 * u, 4);
      }
    }
    sum = _mm512_reduce_add_epi32(total);
#else
    for (int i = 0; i < group; i += 4, out += step) {
      int8_t unit[4];
      for (int j = 0; j < 4; ++j) {
        const int q = static_cast<int>(std::nearbyint(v[i + j] * inverse));
        unit[j] = static_cast<int8_t>(q);
        sum += q;
      }
      std::memcpy(out, unit, 4);
    }
#endif
    scales.data[base + static_cast<size_t>(g) * r] = peak / 127.0f;
    sums.data[base + static_cast<size_t>(g) * r] = sum;
  }
}

}  // namespace llmopt
