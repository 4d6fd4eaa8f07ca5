// Unpacking of tiles and the choice of a product for them.
#include "linear_products.h"

namespace llmopt {
namespace {

// Unpacks a tile of 4-bit codes to the 8-bit layout, without its scales.
void unpack_int4(const Linear& l, const uint8_t* tile, uint8_t* out) {
  for (int g = 0; g < l.groups; ++g, tile += l.group_bytes)
    for (size_t i = 0; i < l.scales_at; i += 128, out += 256)
      for (int j = 0; j < 128; ++j) {
        out[j] = tile[i + j] & 15;
        out[128 + j] = tile[i + j] >> 4;
      }
}

#if !LLMOPT_AVX512
inline uint32_t float_bits(int value) {
  const float number = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &number, 4);
  return bits;
}

// Turns a tile of codes in the plain order into bfloat16 or float units of (code - zero): both hold integers up to 255
// exactly.
void unpack_values(const Linear& l, const uint8_t* tile, uint8_t* out) {
  const int zero = l.weight == W_INT4 ? 8 : 128, units = l.group / 4;
  for (int i = 0; i < l.kp / 4; ++i) {
    const int u = i % units;
    const uint8_t* c = tile + i / units * l.group_bytes + (l.weight == W_INT4 ? (u / 2) * 128 : u * 128);
    const int shift = l.weight == W_INT4 ? (u & 1) * 4 : 0;
    const uint32_t mask = l.weight == W_INT4 ? 15 : 255;
    uint32_t words[kLanes];  // four codes each
    std::memcpy(words, c, sizeof words);
    const int parts = l.activation == X_BF16 ? 2 : 4, numbers = 4 / parts;
    for (int part = 0; part < parts; ++part, out += 4 * kLanes) {
      uint32_t unit[kLanes];
      for (int n = 0; n < kLanes; ++n) {
        const uint32_t codes = words[n] >> (8 * numbers * part + shift);
        const uint32_t first = float_bits(static_cast<int>(codes & mask) - zero);
        unit[n] = numbers == 1 ? first : first >> 16 | (float_bits(static_cast<int>((codes >> 8) & mask) - zero) & 0xffff0000u);
      }
      std::memcpy(out, unit, sizeof unit);
    }
  }
}

// Multiplies a tile of bfloat16 units of (code - the constant zero point) out to weights, rounded once, in place.
void scale_values(const Linear& l, const uint8_t* tile, uint8_t* units) {
  const int per_group = l.group / 2, zero = l.weight == W_INT4 ? 8 : 128;
  for (int g = 0; g < l.groups; ++g, tile += l.group_bytes, units += static_cast<size_t>(per_group) * 4 * kLanes) {
    const uint8_t* zeros = l.symmetric ? nullptr : tile + l.zeros_at;
    uint16_t* values = reinterpret_cast<uint16_t*>(units);
    for (int n = 0; n < kLanes; ++n) {
      const float scale = scale_at(tile + l.scales_at, l.scale_format, n);
      const float shift = zeros ? static_cast<float>(zeros[n]) - static_cast<float>(zero) : 0.0f;
      for (int u = 0; u < per_group; ++u)
        for (int b = 0; b < 2; ++b) {
          uint16_t& v = values[(static_cast<size_t>(u) * kLanes + n) * 2 + b];
          v = f32_to_bf16((bf16_to_f32(v) - shift) * scale);
        }
    }
  }
}
#endif

// Columns after which some row's sum is cut; 0: none is.
int segment_of(const Linear& l) {
  if (!l.chunk[0] || !l.chunk[1]) return std::max(l.chunk[0], l.chunk[1]);
  return std::min(l.chunk[0], l.chunk[1]);
}

}  // namespace

TileView prepare_tile(const Linear& l, int tile, int rows, TileScratch& scratch) {
  const uint8_t* weights = l.tile(tile);
  if (l.weight == W_F32 || l.weight == W_BF16) return {weights, l.weight};
#if LLMOPT_AVX512
  if (l.activation == X_BF16 && rows > kMaxRows && (l.dequantize || l.code_order() == CODES_WIDE))
    return {weights, l.weight, scratch.weights.reserve(static_cast<size_t>(l.kp) * kLanes * 2)};
  if (l.activation != X_INT8) return {weights, l.weight};
#else
  if (l.activation != X_INT8) {
    const size_t bytes = static_cast<size_t>(l.kp) * kLanes * (l.activation == X_BF16 ? 2 : 4);
    unpack_values(l, weights, scratch.weights.reserve(bytes));
    if (l.dequantize) scale_values(l, weights, scratch.weights.data);
    return {scratch.weights.data, l.activation == X_BF16 ? W_BF16 : W_F32};
  }
#endif
  if (l.weight == W_INT4 && rows > kMaxRows) {
    unpack_int4(l, weights, scratch.weights.reserve(static_cast<size_t>(l.kp) * kLanes));
    return {scratch.weights.data, W_INT8};
  }
  return {weights, l.weight};
}

#if LLMOPT_AVX512
namespace {

// The product of codes as they lie with float or bfloat16 rows.
void codes_product(const Linear& l, int rows, const Product& p) {
  if (l.activation == X_F32) {
    if (l.weight == W_INT4) for_rows<Floats<true>::template Body>(rows, p);
    else for_rows<Floats<false>::template Body>(rows, p);
  } else if (l.weight == W_INT4) {
    if (l.dequantize) for_rows<Dequantized<DirectCodes<true>>::template Body>(rows, p);
    else for_rows<Direct<DirectCodes<true>>::template Body>(rows, p);
  } else if (l.code_order() == CODES_DIRECT) {
    if (l.dequantize) for_rows<Dequantized<DirectCodes<false>>::template Body>(rows, p);
    else for_rows<Direct<DirectCodes<false>>::template Body>(rows, p);
  } else if (!l.dequantize) {
    for_rows<Direct<WideCodes<false>>::template Body>(rows, p);
  } else if (fuses(l.scale_format, l.symmetric)) {
    for_rows<Dequantized<WideCodes<true>>::template Body>(rows, p);
  } else {
    for_rows<Dequantized<WideCodes<false>>::template Body>(rows, p);
  }
}

}  // namespace
#endif

void panel_product(const Linear& l, TileView& view, int tile, const Activations& x, int panel, float* c) {
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
  p.segment = view.format == W_F32 || x.format != X_BF16 ? 0 : segment_of(l) / 2;
  for (int i = 0; i < 2; ++i) p.chunk[i] = l.chunk[i] ? l.chunk[i] / 2 : p.groups * p.units;
  p.alone = x.alone ? x.alone + base : nullptr;
  p.kept = view.kept;
  const bool grouped = (l.weight == W_INT8 || l.weight == W_INT4) && !l.dequantize;
  if (x.format == X_INT8) {
    if (view.format == W_INT4) for_rows<Integer<true>::template Body>(r, p);
    else for_rows<Integer<false>::template Body>(r, p);
#if LLMOPT_AVX512
  } else if (view.format == W_INT4 || view.format == W_INT8) {
    codes_product(l, r, p);
    if (view.kept) view = {view.kept, W_BF16};
#endif
  } else if (view.format == W_BF16) {
    if (grouped) for_rows<Grouped<BF16Op>::template Body>(r, p);
    else for_rows<Plain<BF16Op>::template Body>(r, p);
#if !LLMOPT_AVX512
  } else if (grouped) {
    for_rows<Grouped<F32Op>::template Body>(r, p);
#endif
  } else {
    for_rows<Plain<F32Op>::template Body>(r, p);
  }
  if (l.has_bias)
    for (int m = 0; m < r; ++m)
      for (int n = 0; n < kLanes; ++n) c[m * kLanes + n] += l.bias.data[tile * kLanes + n];
}

}  // namespace llmopt
