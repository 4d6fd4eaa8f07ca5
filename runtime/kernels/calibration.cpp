// Steps of calibrated quantization: sums of outer products of bfloat16 rows, and GPTQ's loop over columns.
#include <algorithm>
#include <mutex>
#include <vector>

#include "microkernel.h"
#include "pool.h"

using namespace llmopt;

namespace {

constexpr int kStrip = 64;  // output rows that one thread takes through a block of columns at once

#if LLMOPT_AVX512
constexpr int kRows = 1024;   // input rows packed at once; a tile's sums over them stay in registers
constexpr int kTileRows = 8;  // rows of a tile of the result

// Two input rows interleaved, lane after lane: units of two bfloat16, panel [k / kLanes][units][kLanes].
void pack_pair(const uint16_t* first, const uint16_t* second, int k, int unit, int units, uint32_t* packed) {
  for (int start = 0; start < k; start += 16) {
    const __mmask16 mask = k - start < 16 ? static_cast<__mmask16>((1u << (k - start)) - 1) : 0xffff;
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, first + start));
    __m512i high = _mm512_setzero_si512();
    if (second) high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, second + start)), 16);
    uint32_t* out = packed + (static_cast<size_t>(start / kLanes) * units + unit) * kLanes + start % kLanes;
    _mm512_storeu_si512(out, _mm512_or_si512(low, high));
  }
}

// Adds the product of two panels, rows [32 i, 32 i + 32) and columns [32 j, 32 j + 32) of the result, to `sum` [k][k].
void add_panel_product(const uint32_t* packed, int units, int i, int j, int k, float* sum) {
  const size_t panel = static_cast<size_t>(units) * kLanes;
  const uint8_t* b = reinterpret_cast<const uint8_t*>(packed + j * panel);
  const int width = std::min(kLanes, k - j * kLanes);
  for (int row = 0; row < kLanes && i * kLanes + row < k; row += kTileRows) {
    const uint8_t* a = reinterpret_cast<const uint8_t*>(packed + i * panel + row);
    const int height = std::min(kTileRows, k - i * kLanes - row);
    float* out = sum + static_cast<size_t>(i * kLanes + row) * k + j * kLanes;
    Accumulator<kTileRows> tile;
    tile.zero();
    tile.run<BF16Op>(a, 4 * kLanes, 4, b, 4 * kLanes, units);
    if (height == kTileRows && width == kLanes) {
#pragma GCC unroll 8
      for (int m = 0; m < kTileRows; ++m) tile.flush(m, out + static_cast<size_t>(m) * k);
      continue;
    }
    float c[kTileRows][kLanes];
    tile.store(c[0], kLanes);
    for (int m = 0; m < height; ++m)
      for (int n = 0; n < width; ++n) out[static_cast<size_t>(m) * k + n] += c[m][n];
  }
}
#endif

// What the columns of a block are rounded to, for output rows [begin, begin + width).
struct ColumnBlock {
  int columns;
  int64_t rows;
  float* work;
  const float *factor, *scales, *zeros;
  const int32_t *groups, *zero_groups;
  float top;
  uint8_t* codes;
  float* errors;
};

// Loops over a strip are kept apart by `settle`, so that no product is contracted into a sum: torch rounds both.
inline void settle(float* values) { asm volatile("" : : "r"(values) : "memory"); }

// factor: the block's U, transposed: [column][earlier column].
void round_strip(const ColumnBlock& b, const float* factor, int64_t begin, int width, float* errors) {
  alignas(64) float w[kStrip] = {}, product[kStrip];
  for (int i = 0; i < b.columns; ++i) {
    const float* u = factor + static_cast<size_t>(i) * b.columns;
    std::memcpy(w, b.work + i * b.rows + begin, sizeof(float) * width);
    for (int j = 0; j < i; ++j) {
      const float* e = errors + static_cast<size_t>(j) * kStrip;
      for (int l = 0; l < kStrip; ++l) product[l] = u[j] * e[l];
      settle(product);
      for (int l = 0; l < kStrip; ++l) w[l] -= product[l];
      settle(w);
    }
    const float* scale = b.scales + b.groups[i] * b.rows + begin;
    const float* zero = b.zeros + b.zero_groups[i] * b.rows + begin;
    uint8_t* codes = b.codes + i * b.rows + begin;
    float* error = errors + static_cast<size_t>(i) * kStrip;
    for (int l = 0; l < width; ++l) {
      const float code = std::min(std::max(std::nearbyint(w[l] / scale[l]) + zero[l], 0.0f), b.top);
      codes[l] = static_cast<uint8_t>(code);
      product[l] = (code - zero[l]) * scale[l];
    }
    settle(product);
    for (int l = 0; l < width; ++l) error[l] = (w[l] - product[l]) / u[i];
    settle(error);
    std::memcpy(b.errors + i * b.rows + begin, error, sizeof(float) * width);
  }
}

}  // namespace

extern "C" {

// Adds x^T x to what is on and below the diagonal of `sum` [k][k], x bfloat16 [rows][k] with row stride ldx; tiles that
// the diagonal crosses are written whole. Returns 0, -1 when memory is short, -2 where the processor cannot.
int llmopt_outer_products(int rows, int k, const uint16_t* x, int64_t ldx, float* sum) try {
#if LLMOPT_AVX512
  std::lock_guard<std::mutex> lock(pool_mutex());
  static Buffer<uint32_t> packed;
  const int count = (k + kLanes - 1) / kLanes;
  const int most = (std::min(rows, kRows) + 1) / 2;
  uint32_t* data = packed.reserve(static_cast<size_t>(count) * kLanes * most);
  for (int start = 0; start < rows; start += kRows) {
    const int chunk = std::min(kRows, rows - start), units = (chunk + 1) / 2;
    pool().run(units, [&](int begin, int end, int) {
      for (int unit = begin; unit < end; ++unit) {
        const uint16_t* first = x + (start + 2 * unit) * ldx;
        pack_pair(first, 2 * unit + 1 < chunk ? first + ldx : nullptr, k, unit, units, data);
      }
    });
    pool().run(count * (count + 1) / 2, [&](int begin, int end, int) {
      int i = 0;
      while ((i + 1) * (i + 2) / 2 <= begin) ++i;
      for (int item = begin, j = begin - i * (i + 1) / 2; item < end; ++item) {
        add_panel_product(data, units, i, j, k, sum);
        if (++j > i) { ++i; j = 0; }
      }
    });
  }
  return 0;
#else
  (void)rows, (void)k, (void)x, (void)ldx, (void)sum;
  return -2;
#endif
} catch (const std::bad_alloc&) {
  return -1;
}

// One block of GPTQ's column loop; see calibration.py. work, codes, errors: [columns][rows]; scales, zeros: [groups][rows];
// factor: row stride ldf. Returns 0, or -1 when memory is short.
int llmopt_round_columns(int columns, int64_t rows, float* work, const float* factor, int64_t ldf, const float* scales,
                         const float* zeros, const int32_t* groups, const int32_t* zero_groups, float top,
                         uint8_t* codes, float* errors) try {
  std::lock_guard<std::mutex> lock(pool_mutex());
  const ColumnBlock block{columns, rows, work, factor, scales, zeros, groups, zero_groups, top, codes, errors};
  std::vector<float> transposed(static_cast<size_t>(columns) * columns);
  for (int j = 0; j < columns; ++j)
    for (int i = j; i < columns; ++i) transposed[static_cast<size_t>(i) * columns + j] = factor[j * ldf + i];
  std::vector<Buffer<float>> scratch(pool().threads());
  pool().run(static_cast<int>((rows + kStrip - 1) / kStrip), [&](int begin, int end, int thread) {
    float* own = scratch[thread].reserve(static_cast<size_t>(columns) * kStrip);
    for (int64_t strip = begin; strip < end; ++strip)
      round_strip(block, transposed.data(), strip * kStrip,
                  static_cast<int>(std::min<int64_t>(kStrip, rows - strip * kStrip)), own);
  });
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}
}
