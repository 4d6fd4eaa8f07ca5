// C interface of the linear layers: packing and the standalone product.
#include <algorithm>
#include <memory>
#include <vector>

#include "linear.h"
#include "pool.h"

using namespace llmopt;

namespace {

// Where a lane stands in the wide order (see linear.h).
int wide_place(int lane) { return lane / 16 * 16 + lane % 8 / 2 * 4 + lane / 8 % 2 * 2 + lane % 2; }

}  // namespace

extern "C" {

// A linear layer of n x k weights (see linear.h for formats). group: columns that share a scale, a multiple of 32 that
// divides k, or 0 for one scale a row; ignored for float weights. scale_format: how scales are stored. dequantize: see
// linear.h. Null without memory.
Linear* llmopt_linear_create(int weight, int activation, int n, int k, int group, int symmetric, int scale_format,
                             int dequantize) try {
  auto l = std::make_unique<Linear>();
  l->weight = weight;
  l->activation = activation;
  l->n = n;
  l->k = k;
  l->tiles = (n + kLanes - 1) / kLanes;
  l->kp = round_up(k, 32);
  const bool integer = weight == W_INT8 || weight == W_INT4;
  l->group = integer && group > 0 ? group : l->kp;
  l->groups = l->kp / l->group;
  l->symmetric = symmetric != 0;
  l->scale_format = scale_format;
  l->dequantize = integer && activation == X_BF16 && dequantize;
  const size_t bits = weight == W_F32 ? 32 : weight == W_BF16 ? 16 : weight == W_INT8 ? 8 : 4;
  l->scales_at = static_cast<size_t>(l->group) * kLanes * bits / 8;
  l->zeros_at = l->scales_at + (integer ? kLanes * (scale_format == S_F32 ? 4 : 2) : 0);
  l->group_bytes = l->zeros_at + (integer && !symmetric ? kLanes : 0);
  l->tile_bytes = (l->group_bytes * l->groups + 63) / 64 * 64;
  l->block = Block(l->tile_bytes * l->tiles);
  return l.release();
} catch (const std::bad_alloc&) {
  return nullptr;
}

void llmopt_linear_free(Linear* l) { delete l; }

int64_t llmopt_linear_bytes(const Linear* l) { return static_cast<int64_t>(l->bytes()); }

// Packs rows [row, row + count) from codes uint8 [count, k], scales [count, groups] in the layer's scale format,
// zeros uint8 [count, groups], null if symmetric. Only a call that packs all rows can find 8-bit codes to be narrow.
void llmopt_linear_pack_codes(Linear* l, int row, int count, const uint8_t* codes, const void* scales, const uint8_t* zeros) {
  if (l->weight == W_INT8 && count == l->n) {
    const size_t size = static_cast<size_t>(count) * l->k;
    l->narrow = std::all_of(codes, codes + size, [](uint8_t c) { return c >= 112 && c < 144; });
  }
  const CodeOrder order = l->code_order();
  for (int i = 0; i < count; ++i) {
    const int tile = (row + i) / kLanes, lane = (row + i) % kLanes;
    uint8_t* base = l->tile(tile);
    const uint8_t* c = codes + static_cast<size_t>(i) * l->k;
    for (int g = 0; g < l->groups; ++g, base += l->group_bytes) {
      uint8_t* out = base + 4 * (order == CODES_WIDE ? wide_place(lane) : lane);
      for (int j = 0; j < l->group && g * l->group + j < l->k; ++j, ++c) {
        const int per = l->weight == W_INT8 ? 4 : 8, at = j % per;  // codes of a lane's 4 bytes
        const int place = order != CODES_PLAIN ? at % 2 * (per / 2) + at / 2 : per == 4 ? at : at % 4 * 2 + at / 4;
        uint8_t& byte = out[(j / per) * 128 + place * 4 / per];
        if (per == 4) byte = *c;
        else byte = place % 2 ? static_cast<uint8_t>((byte & 0x0f) | (*c << 4)) : static_cast<uint8_t>((byte & 0xf0) | *c);
      }
      const size_t from = static_cast<size_t>(i) * l->groups + g;
      if (l->scale_format == S_F32) std::memcpy(base + l->scales_at + 4 * lane, static_cast<const float*>(scales) + from, 4);
      else std::memcpy(base + l->scales_at + 2 * lane, static_cast<const uint16_t*>(scales) + from, 2);
      if (!l->symmetric) base[l->zeros_at + lane] = zeros[from];
    }
  }
}

// Packs rows [row, row + count) from bfloat16 (source_bf16) or float values [count, k] into a W_BF16 or W_F32 layer.
void llmopt_linear_pack_values(Linear* l, int row, int count, const void* values, int source_bf16) {
  for (int i = 0; i < count; ++i) {
    const int tile = (row + i) / kLanes, lane = (row + i) % kLanes;
    uint8_t* out = l->tile(tile) + 4 * lane;
    for (int k = 0; k < l->k; ++k) {
      const size_t at = static_cast<size_t>(i) * l->k + k;
      if (l->weight == W_BF16) {
        const uint16_t v = source_bf16 ? static_cast<const uint16_t*>(values)[at]
                                       : f32_to_bf16(static_cast<const float*>(values)[at]);
        std::memcpy(out + (k / 2) * 128 + 2 * (k % 2), &v, 2);
      } else {
        const float v = source_bf16 ? bf16_to_f32(static_cast<const uint16_t*>(values)[at])
                                    : static_cast<const float*>(values)[at];
        std::memcpy(out + k * 128, &v, 4);
      }
    }
  }
}

void llmopt_linear_set_bias(Linear* l, const float* bias) {
  l->bias.reserve(static_cast<size_t>(l->tiles) * kLanes);
  std::memcpy(l->bias.data, bias, sizeof(float) * l->n);
  l->has_bias = true;
}

// Lets column i of the packed weight multiply x[order[i]]; order int32 [k], a permutation.
void llmopt_linear_set_order(Linear* l, const int32_t* order) {
  l->order.assign(order, order + l->k);
  uint64_t key = 14695981039346656037ull;  // FNV-1a
  for (const int32_t column : l->order) key = (key ^ static_cast<uint32_t>(column)) * 1099511628211ull;
  l->order_key = key ? key : 1;
}

// Columns of a chunk (see linear.h) of rows that stand with others and of rows alone, multiples of 32, 0: one sum. One must
// divide the other.
void llmopt_linear_set_chunks(Linear* l, int together, int alone) {
  l->chunk[0] = together;
  l->chunk[1] = alone;
}

// y float [m][n] = x float [m][k] W^T + b, row strides in elements. Returns 0, or -1 when memory is short.
int llmopt_linear_forward(const Linear* l, int m, const float* x, int64_t ldx, float* y, int64_t ldy) try {
  std::lock_guard<std::mutex> lock(pool_mutex());
  Pool& threads = pool();
  Activations a;
  const uint8_t alone = m == 1;
  a.resize(m, *l);
  a.alone = alone ? &alone : nullptr;
  std::vector<Buffer<float>> rows(threads.threads());
  std::vector<TileScratch> scratch(threads.threads());
  threads.run(m, [&](int begin, int end, int t) {
    for (int i = begin; i < end; ++i) a.pack_row(i, x + i * ldx, l->k, rows[t].reserve(l->kp));
  });
  threads.run(l->tiles, [&](int begin, int end, int t) {
    alignas(64) float c[kMaxRows * kLanes];
    for (int tile = begin; tile < end; ++tile) {
      TileView view = prepare_tile(*l, tile, m, scratch[t]);
      const int width = std::min(kLanes, l->n - tile * kLanes);
      for (int panel = 0; panel < a.panels(); ++panel) {
        panel_product(*l, view, tile, a, panel, c);
        for (int r = 0; r < a.panel_rows(panel); ++r)
          std::memcpy(y + (panel * kMaxRows + r) * ldy + tile * kLanes, c + r * kLanes, sizeof(float) * width);
      }
    }
  });
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}
}
