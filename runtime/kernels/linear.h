// Linear layers y = x W^T + b over prepacked weights.
//
// Weights are cut into tiles of 32 output rows. Inside a tile, unit u (4 bytes of the reduction axis, see microkernel.h)
// of the 32 outputs lies together: float [K][32], bfloat16 [K/2][32][2], 8-bit codes [K/4][32][4]. 4-bit codes pack two
// such units into one: byte i of lane n holds k = 8u + i in its low and k = 8u + 4 + i in its high nibble.
// Two other orders serve bfloat16 activations where AVX-512 is there:
//   direct  codes within -16 … 15 of the constant zero point. The codes of a lane's 4 bytes, read as two 16-bit words, lie so
//           that even k fill the low and odd k the high word from their low bits on: 4-bit (k0 k2 k4 k6)(k1 k3 k5 k7), 8-bit
//           (k0 k2)(k1 k3). A word shifted right by one code and looked up by its low five bits in a table of 32 bfloat16
//           values is then a unit of bfloat16 weights.
//   wide    all other 8-bit codes: the same 4 bytes a lane, and 16 lanes in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15, in
//           which widening words to floats and converting two vectors of them to bfloat16 leave the lanes in order.
// Behind the codes of each group stand its 32 scales, float, or bfloat16 or IEEE half where those hold them exactly, and its
// 32 zero points uint8 where they are not the constant 2^(bits-1): a tile is one stream of memory, which is what the
// prefetcher follows.
//
// Arithmetic, for weight codes c, zero points z, scales s, and group g of the reduction axis:
//   ACT_S8    y = sum_g s_g t_g (sum_{k in g} (c - z) q), q = round(x / t_g), t_g = max_{k in g}|x| / 127, exact integers
//             inside a group, float sums over groups. A group that spans K is one scale a token.
//   ACT_BF16  y = sum_g s_g (sum_{k in g} (c - z) bf16(x)), float sums
//   ACT_F32   the same with x itself
//   ACT_BF16 and `dequantize`   y = sum_k bf16((c - z) s) bf16(x), one float sum in the order of k: the weights that
//             transformers computes when it decompresses such a layer
// With bfloat16 weights, stored or dequantized, a row's sum runs over columns in order. `chunk` cuts it as oneDNN does: each
// chunk of columns is summed from zero and then added to the total, so that with its chunks the sums have its bits.
#pragma once
#include <vector>

#include "arena.h"
#include "microkernel.h"

namespace llmopt {

enum WeightFormat { W_F32 = 0, W_BF16 = 1, W_INT8 = 2, W_INT4 = 3 };
enum ActivationFormat { X_F32 = 0, X_BF16 = 1, X_INT8 = 2 };
enum ScaleFormat { S_F32 = 0, S_BF16 = 1, S_F16 = 2 };
enum CodeOrder { CODES_PLAIN, CODES_DIRECT, CODES_WIDE };

struct Linear {
  int weight, activation;
  int n, k;          // rows and columns as given
  std::vector<int32_t> order;  // column i of the packed weight multiplies x[order[i]]; empty: x[i]
  uint64_t order_key = 0;      // tells orders apart; 0: none
  int tiles, kp;     // tiles of 32 rows; columns padded to a multiple of 32
  int group, groups; // columns of a group (kp when one group spans them)
  bool symmetric;
  int chunk[2] = {0, 0};    // columns of a chunk, for rows that stand with others and for rows alone; 0: one sum
  bool dequantize = false;  // with bfloat16 activations: weights are rounded to bfloat16 before the product
  bool narrow = false;  // 8-bit codes all lie within -16 … 15 of the constant zero point, 128
  int scale_format;
  size_t scales_at, zeros_at, group_bytes;  // inside a group: offsets behind its codes, and its size
  size_t tile_bytes;
  Block block;
  Buffer<float> bias;
  bool has_bias = false;
  uint8_t* tile(int i) const { return block.data() + static_cast<size_t>(i) * tile_bytes; }
  CodeOrder code_order() const {
#if LLMOPT_AVX512
    if (activation == X_BF16 && weight == W_INT8) return narrow ? CODES_DIRECT : CODES_WIDE;
    if (activation == X_BF16 && weight == W_INT4) return CODES_DIRECT;
#endif
    return CODES_PLAIN;
  }
  size_t bytes() const { return tile_bytes * tiles + (has_bias ? sizeof(float) * n : 0) + sizeof(int32_t) * order.size(); }
};

// Rows of activations, packed for the microkernels in panels of 12 rows: unit u of row m of a panel with r rows lies at
// panel + (u * r + m) * 4; scales and sums of group g at panel + g * r + m.
struct Activations {
  int rows = 0, kp = 0, format = X_F32, group = 0, groups = 0;
  Buffer<uint8_t> data;
  Buffer<float> scales;  // X_INT8: t_g
  Buffer<int32_t> sums;  // X_INT8: sum of q over the group
  Buffer<float> totals;  // otherwise: float sum of the group's values as they enter the products
  const int32_t* order = nullptr;  // of the linears that these are packed for, see Linear::order
  uint64_t order_key = 0;
  const uint8_t* alone = nullptr;  // per row: whether it is the only one of its matrix, see Linear::chunk; null: all are not

  int units() const { return kp * (format == X_F32 ? 4 : format == X_BF16 ? 2 : 1) / 4; }
  int panels() const { return (rows + kMaxRows - 1) / kMaxRows; }
  int panel_rows(int panel) const { return std::min(kMaxRows, rows - panel * kMaxRows); }
  void resize(int rows, const Linear& linear);
  bool wants_totals = false;  // only float products with zero points of their own need them
  static bool totals_for(const Linear& l) { return l.activation != X_INT8 && !l.symmetric && !l.dequantize; }
  bool matches(const Linear& l) const {
    return format == l.activation && group == l.group && kp == l.kp && wants_totals == totals_for(l) && order_key == l.order_key;
  }
  // Packs row `row` from x[k], k <= kp. Rows may be packed by several threads at once. `scratch` holds kp floats.
  void pack_row(int row, const float* x, int k, float* scratch);
};

// Per-thread space for one tile's unpacked weights.
struct TileScratch {
  Buffer<uint8_t> weights;
};

// c[rows][32] = tile `tile` of x W^T + b for the rows of panel `panel`.
// `prepare_tile` once per tile and number of rows, then `panel_product` for each panel in turn.
struct TileView {
  const uint8_t* weights;
  int format;  // the layer's own where the tile is used as it lies, or what it was unpacked to
  uint8_t* kept = nullptr;  // where the first panel leaves the units that it made of the codes, for the others
};
TileView prepare_tile(const Linear& linear, int tile, int rows, TileScratch& scratch);
void panel_product(const Linear& linear, TileView& view, int tile, const Activations& x, int panel, float* c);

}  // namespace llmopt
