// Register-blocked inner products: MR rows of A against 32 lanes of B.
//
// Everything is counted in units of 4 bytes along the reduction axis: one float, two bfloat16 or four 8-bit integers.
//   A  unit u of row m lies at a + u * a_unit + m * a_row bytes.
//   B  unit u of lanes 0 … 31 lies at b + u * b_unit bytes, 32 x 4 bytes, lane after lane.
//   C  float [MR][32] in registers, or 32-bit integers for the 8-bit products.
#pragma once
#include "simd.h"

namespace llmopt {

constexpr int kLanes = 32;
constexpr int kMaxRows = 12;  // 12 x 2 accumulators of 16 lanes, of 32 registers

struct F32Op { static constexpr int kPerUnit = 1; };
struct BF16Op { static constexpr int kPerUnit = 2; };

#if LLMOPT_AVX512

template <class Op>
inline __m512 multiply_add(__m512 acc, __m512i b, __m512i a);
template <>
inline __m512 multiply_add<F32Op>(__m512 acc, __m512i b, __m512i a) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(b), _mm512_castsi512_ps(a), acc);
}
template <>
inline __m512 multiply_add<BF16Op>(__m512 acc, __m512i b, __m512i a) {
  return add_pair_products(acc, b, a);
}
inline __m512i broadcast_unit(const uint8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return _mm512_set1_epi32(v);
}

template <int MR>
struct Accumulator {
  __m512 v[MR][2];
  inline void zero() {
#pragma GCC unroll 12
    for (int m = 0; m < MR; ++m) v[m][0] = v[m][1] = _mm512_setzero_ps();
  }
  inline void load(const float* c, size_t ldc) {
#pragma GCC unroll 12
    for (int m = 0; m < MR; ++m) {
      v[m][0] = _mm512_loadu_ps(c + m * ldc);
      v[m][1] = _mm512_loadu_ps(c + m * ldc + 16);
    }
  }
  inline void store(float* c, size_t ldc) const {
#pragma GCC unroll 12
    for (int m = 0; m < MR; ++m) {
      _mm512_storeu_ps(c + m * ldc, v[m][0]);
      _mm512_storeu_ps(c + m * ldc + 16, v[m][1]);
    }
  }
  // c[m] += row m, which starts again from zero.
  inline void flush(int m, float* c) {
    _mm512_storeu_ps(c, _mm512_add_ps(_mm512_loadu_ps(c), v[m][0]));
    _mm512_storeu_ps(c + 16, _mm512_add_ps(_mm512_loadu_ps(c + 16), v[m][1]));
    v[m][0] = v[m][1] = _mm512_setzero_ps();
  }
  template <class Op>
  inline void run(const uint8_t* a, size_t a_unit, size_t a_row, const uint8_t* b, size_t b_unit, int units) {
    for (int u = 0; u < units; ++u, a += a_unit, b += b_unit) {
      const __m512i b0 = _mm512_loadu_si512(b), b1 = _mm512_loadu_si512(b + 64);
#pragma GCC unroll 12
      for (int m = 0; m < MR; ++m) {
        const __m512i x = broadcast_unit(a + m * a_row);
        v[m][0] = multiply_add<Op>(v[m][0], b0, x);
        v[m][1] = multiply_add<Op>(v[m][1], b1, x);
      }
    }
  }
};

#else

// The numbers of 32 lanes by their place in a unit, and those of one unit of A, as floats.
template <class Op>
struct UnitFloats;
template <>
struct UnitFloats<F32Op> {
  float b[1][kLanes], a[1];
  inline void load_lanes(const uint8_t* p) { std::memcpy(b[0], p, sizeof b[0]); }
  inline void load_row(const uint8_t* p) { std::memcpy(a, p, sizeof a); }
};
template <>
struct UnitFloats<BF16Op> {
  float b[2][kLanes], a[2];
  inline void load_lanes(const uint8_t* p) {
    uint32_t pairs[kLanes], low[kLanes];
    std::memcpy(pairs, p, sizeof pairs);
    for (int n = 0; n < kLanes; ++n) low[n] = pairs[n] << 16;
    for (int n = 0; n < kLanes; ++n) pairs[n] &= 0xffff0000u;
    std::memcpy(b[0], low, sizeof low);
    std::memcpy(b[1], pairs, sizeof pairs);
  }
  inline void load_row(const uint8_t* p) {
    uint32_t pair;
    std::memcpy(&pair, p, 4);
    const uint32_t both[2] = {pair << 16, pair & 0xffff0000u};
    std::memcpy(a, both, sizeof both);
  }
};

template <int MR>
struct Accumulator {
  float v[MR][kLanes];
  inline void zero() { std::memset(v, 0, sizeof v); }
  inline void load(const float* c, size_t ldc) {
    for (int m = 0; m < MR; ++m) std::memcpy(v[m], c + m * ldc, sizeof v[m]);
  }
  inline void store(float* c, size_t ldc) const {
    for (int m = 0; m < MR; ++m) std::memcpy(c + m * ldc, v[m], sizeof v[m]);
  }
  inline void flush(int m, float* c) {
    for (int n = 0; n < kLanes; ++n) c[n] += v[m][n];
    std::memset(v[m], 0, sizeof v[m]);
  }
  template <class Op>
  inline void run(const uint8_t* a, size_t a_unit, size_t a_row, const uint8_t* b, size_t b_unit, int units) {
    UnitFloats<Op> unit;
    for (int u = 0; u < units; ++u, a += a_unit, b += b_unit) {
      unit.load_lanes(b);
      for (int m = 0; m < MR; ++m) {
        unit.load_row(a + m * a_row);
        for (int i = 0; i < Op::kPerUnit; ++i)
          for (int n = 0; n < kLanes; ++n) v[m][n] += unit.b[i][n] * unit.a[i];
      }
    }
  }
};

#endif

// Calls Body<MR>::run(args) for MR = rows, 1 … kMaxRows.
template <template <int> class Body, class Args>
inline void for_rows(int rows, const Args& args) {
  switch (rows) {
    case 1: return Body<1>::run(args);
    case 2: return Body<2>::run(args);
    case 3: return Body<3>::run(args);
    case 4: return Body<4>::run(args);
    case 5: return Body<5>::run(args);
    case 6: return Body<6>::run(args);
    case 7: return Body<7>::run(args);
    case 8: return Body<8>::run(args);
    case 9: return Body<9>::run(args);
    case 10: return Body<10>::run(args);
    case 11: return Body<11>::run(args);
    default: return Body<12>::run(args);
  }
}

}  // namespace llmopt
