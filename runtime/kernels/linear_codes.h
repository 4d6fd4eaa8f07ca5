// Products of codes with float and bfloat16 rows, AVX-512: codes become units in registers. Included by linear_products.h,
// inside its namespaces. The orders of codes are those of linear.h.

// Scales and shifts of the zero points of one group, for 16 lanes each.
struct GroupGrid {
  __m512 scale[2], shift[2];
  bool shifted;
  GroupGrid(const uint8_t* scales, int format, const uint8_t* zeros, int zero) : shifted(zeros != nullptr) {
    for (int h = 0; h < 2; ++h) {
      scale[h] = load_scales(scales, format, 16 * h);
      shift[h] = _mm512_setzero_ps();
      if (!zeros) continue;
      const __m512i z = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros + 16 * h)));
      shift[h] = _mm512_cvtepi32_ps(_mm512_sub_epi32(z, _mm512_set1_epi32(zero)));
    }
  }
  // A unit of bfloat16 weights, rounded once, of a unit of bfloat16 differences from the constant zero point.
  __m512i weights(__m512i unit, int half) const {
    alignas(64) static const uint16_t interleave[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(unit, 16));
    __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(unit, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    if (shifted) {
      even = _mm512_sub_ps(even, shift[half]);
      odd = _mm512_sub_ps(odd, shift[half]);
    }
    const __m512i words = to_bf16(_mm512_mul_ps(odd, scale[half]), _mm512_mul_ps(even, scale[half]));
    return _mm512_permutexvar_epi16(_mm512_load_si512(interleave), words);
  }
};

// The direct order: a permutation reads five bits of each word, which costs no more than to load the values.
template <bool kInt4>
struct DirectCodes {
  static constexpr int kUnits = kInt4 ? 4 : 2;  // bfloat16 units that 128 bytes of codes hold
  using Grid = GroupGrid;
  // Sums that a row of one group is split into: few rows leave the latency uncovered.
  static constexpr int chains(int rows) { return rows == 1 ? kUnits : rows <= 3 ? 2 : 1; }

  DirectCodes() {
    alignas(64) uint16_t values[32];
    for (int i = 0; i < 32; ++i)
      values[i] = f32_to_bf16(static_cast<float>(kInt4 ? (i & 15) - 8 : i < 16 ? i : i - 32));
    table = _mm512_load_si512(values);
  }
  // Unit j of the differences from the constant zero point that the codes r of 16 lanes stand for.
  __m512i unit(__m512i r, int j) const {
    return _mm512_permutexvar_epi16(j ? _mm512_srli_epi16(r, j * (kInt4 ? 4 : 8)) : r, table);
  }
  __m512i weights(const Grid& grid, __m512i r, int j, int half) const { return grid.weights(unit(r, j), half); }

  __m512i table;
};

// The wide order. A byte is the second of a 16-bit word; interleaved with the words of 2^15 it makes the float 2^15 + code.
// The interleaving stays within 16 bytes: the order of lanes makes up for it, so that the two vectors of 16 floats convert to
// one unit.
//
// kFused: (2^15 + code) s - (2^15 + zero) s in one multiply-add. Where (2^15 + zero) s is exact in float, only the
// difference (code - zero) s is rounded, as in the product of it; without kFused it is that product.
template <bool kFused>
struct WideCodes {
  static constexpr int kUnits = 2;
  static constexpr float kBase = 32768.0f, kZero = 128.0f;
  static constexpr int chains(int) { return 1; }

  // For the first and second 8 lanes of the first and second half, every lane twice.
  struct Grid {
    __m512 scale[4], offset[4];
    Grid(const uint8_t* scales, int format, const uint8_t* zeros, int zero) {
      const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
      for (int q = 0; q < 4; ++q) {
        const __m512i lanes = _mm512_add_epi32(twice, _mm512_set1_epi32(q % 2 * 8));
        scale[q] = _mm512_permutexvar_ps(lanes, load_scales(scales, format, q / 2 * 16));
        offset[q] = _mm512_set1_ps(kBase + static_cast<float>(zero));
        if (zeros) {
          const __m512i z = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros + q / 2 * 16)));
          offset[q] = _mm512_add_ps(_mm512_cvtepi32_ps(_mm512_permutexvar_epi32(lanes, z)), _mm512_set1_ps(kBase));
        }
        if (kFused) offset[q] = _mm512_mul_ps(offset[q], _mm512_sub_ps(_mm512_setzero_ps(), scale[q]));
      }
    }
    __m512 weight(__m512 value, int quarter) const {
      if (kFused) return _mm512_fmadd_ps(value, scale[quarter], offset[quarter]);
      return _mm512_mul_ps(_mm512_sub_ps(value, offset[quarter]), scale[quarter]);
    }
  };

  // 2^15 + code of unit j, for the first or second 8 lanes.
  static __m512 value(__m512i r, int j, int second) {
    const __m512i base = _mm512_set1_epi16(0x4700);
    const __m512i words = j ? _mm512_and_si512(r, _mm512_set1_epi16(static_cast<short>(0xff00))) : _mm512_slli_epi16(r, 8);
    return _mm512_castsi512_ps(second ? _mm512_unpackhi_epi16(words, base) : _mm512_unpacklo_epi16(words, base));
  }
  __m512i unit(__m512i r, int j) const {
    const __m512 zero = _mm512_set1_ps(kBase + kZero);
    return to_bf16(_mm512_sub_ps(value(r, j, 1), zero), _mm512_sub_ps(value(r, j, 0), zero));
  }
  __m512i weights(const Grid& grid, __m512i r, int j, int half) const {
    return to_bf16(grid.weight(value(r, j, 1), 2 * half + 1), grid.weight(value(r, j, 0), 2 * half));
  }
};

// Whether (2^15 + zero) s is exact for every scale of the format (below 2^112): 16 bits by 8, or 9 by 11 with the constant zero
// point.
inline bool fuses(int scale_format, bool symmetric) { return scale_format == S_BF16 || (scale_format == S_F16 && symmetric); }

// Adds the products of `count` units. unit(r, j, half) makes unit j of the codes r of 16 lanes; w, a and out move on.
template <class Codes, int MR, int kChains, class Unit>
inline __attribute__((always_inline)) void add_codes(const Unit& unit, int count, const uint8_t*& w, const uint8_t*& a,
                                                     uint8_t*& out, Accumulator<MR> (&acc)[kChains]) {
  for (int u = 0; u < count; u += Codes::kUnits, a += Codes::kUnits * 4 * MR, w += 128) {
    const __m512i r0 = _mm512_loadu_si512(w), r1 = _mm512_loadu_si512(w + 64);
    _mm_prefetch(reinterpret_cast<const char*>(w + 2048), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(w + 2112), _MM_HINT_T0);
#pragma GCC unroll 4
    for (int j = 0; j < Codes::kUnits; ++j) {
      const __m512i b0 = unit(r0, j, 0), b1 = unit(r1, j, 1);
      if (MR == kMaxRows && out) {
        _mm512_storeu_si512(out, b0);
        _mm512_storeu_si512(out + 64, b1);
        out += 4 * kLanes;
      }
#pragma GCC unroll 12
      for (int m = 0; m < MR; ++m) {
        const __m512i x = broadcast_unit(a + 4 * (j * MR + m));
        __m512(&v)[2] = acc[j % kChains].v[m];
        v[0] = multiply_add<BF16Op>(v[0], b0, x);
        v[1] = multiply_add<BF16Op>(v[1], b1, x);
      }
    }
  }
}

// Differences from the constant zero point; group sums scaled in float.
template <class Codes>
struct Direct {
  template <int MR>
  struct Body {
    static constexpr int kChains = Codes::chains(MR);
    static void run(const Product& p) {
      const Codes codes;
      const auto unit = [&](__m512i r, int j, int) __attribute__((always_inline)) { return codes.unit(r, j); };
      const uint8_t* a = p.a;
      uint8_t* out = p.kept;
      std::memset(p.c, 0, sizeof(float) * MR * kLanes);
      for (int g = 0; g < p.groups; ++g) {
        const uint8_t* w = p.weights + g * p.weight_step;
        Accumulator<MR> acc[kChains];
#pragma GCC unroll 4
        for (int j = 0; j < kChains; ++j) acc[j].zero();
        add_codes<Codes>(unit, p.units, w, a, out, acc);
#pragma GCC unroll 4
        for (int j = 1; j < kChains; ++j)
#pragma GCC unroll 12
          for (int m = 0; m < MR; ++m)
            for (int h = 0; h < 2; ++h) acc[0].v[m][h] = _mm512_add_ps(acc[0].v[m][h], acc[j].v[m][h]);
        add_group<MR>(p, g, acc[0].v);
      }
    }
  };
};

// Weights, rounded once, in one sum over all columns that is cut as `segment` and `chunk` say.
template <class Codes>
struct Dequantized {
  template <int MR>
  struct Body {
    static void run(const Product& p) {
      const Codes codes;
      const int all = p.groups * p.units, segment = p.segment ? p.segment : all;
      const uint8_t* a = p.a;
      uint8_t* out = p.kept;
      Accumulator<MR> acc[1];
      acc[0].zero();
      std::memset(p.c, 0, sizeof(float) * MR * kLanes);
      for (int g = 0, done = 0; g < p.groups; ++g) {
        const uint8_t* w = p.weights + g * p.weight_step;
        const typename Codes::Grid grid(p.scales + g * p.step, p.scale_format, p.zeros ? p.zeros + g * p.step : nullptr, p.zero);
        const auto unit = [&](__m512i r, int j, int h) __attribute__((always_inline)) { return codes.weights(grid, r, j, h); };
        for (const int end = (g + 1) * p.units; done < end;) {
          const int count = std::min(end - done, segment - done % segment);
          add_codes<Codes>(unit, count, w, a, out, acc);
          done += count;
          if (done == all || done % segment == 0) end_segment<MR>(p, acc[0], done);
        }
      }
    }
  };
};

// Codes in the plain order against float rows: set into the second byte of 2^15 and taken from 2^15 + zero they are floats.
// Group sums are scaled in float.
template <bool kInt4>
struct Floats {
  static constexpr int kColumns = kInt4 ? 8 : 4;  // that 128 bytes of codes hold
  // Column j of 16 lanes, as the difference from the constant zero point.
  static __m512 difference(__m512i r, int j) {
    const int shift = j % 4 * 8 + j / 4 * 4 - 8;
    const __m512i moved = shift < 0 ? _mm512_slli_epi32(r, -shift) : _mm512_srli_epi32(r, shift);
    const __m512i mask = _mm512_set1_epi32(kInt4 ? 0x0f00 : 0xff00), base = _mm512_set1_epi32(0x47000000);
    const __m512 value = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(moved, mask, base, 0xea));  // moved & mask | base
    return _mm512_sub_ps(value, _mm512_set1_ps(32768.0f + (kInt4 ? 8 : 128)));
  }
  template <int MR>
  struct Body {
    static void run(const Product& p) {
      const uint8_t* a = p.a;
      std::memset(p.c, 0, sizeof(float) * MR * kLanes);
      for (int g = 0; g < p.groups; ++g) {
        const uint8_t* w = p.weights + g * p.weight_step;
        Accumulator<MR> acc;
        acc.zero();
        for (int u = 0; u < p.units; u += kColumns, a += kColumns * 4 * MR, w += 128) {
          const __m512i r0 = _mm512_loadu_si512(w), r1 = _mm512_loadu_si512(w + 64);
          _mm_prefetch(reinterpret_cast<const char*>(w + 2048), _MM_HINT_T0);
          _mm_prefetch(reinterpret_cast<const char*>(w + 2112), _MM_HINT_T0);
#pragma GCC unroll 8
          for (int j = 0; j < kColumns; ++j) {
            const __m512i b0 = _mm512_castps_si512(difference(r0, j)), b1 = _mm512_castps_si512(difference(r1, j));
#pragma GCC unroll 12
            for (int m = 0; m < MR; ++m) {
              const __m512i x = broadcast_unit(a + 4 * (j * MR + m));
              acc.v[m][0] = multiply_add<F32Op>(acc.v[m][0], b0, x);
              acc.v[m][1] = multiply_add<F32Op>(acc.v[m][1], b1, x);
            }
          }
        }
        add_group<MR>(p, g, acc.v);
      }
    }
  };
};
