// C interface of the linear layers: packing and the standalone product.
#include <memory>
#include <vector>

#include "linear.h"
#include "pool.h"

using namespace llmopt;

extern "C" {

// A linear layer of n x k weights (see linear.h for formats). group: columns that share a scale, a multiple of 32 that
// divides k, or 0 for one scale a row; ignored for float weights. Null when the memory is not there.
Linear* llmopt_linear_create(int weight, int activation, int n, int k, int group, int symmetric) try {
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
  const size_t bits = weight == W_F32 ? 32 : weight == W_BF16 ? 16 : weight == W_INT8 ? 8 : 4;
  l->tile_bytes = static_cast<size_t>(l->kp) * kLanes * bits / 8;
  l->data.reserve(l->tile_bytes * l->tiles);
  if (integer) {
    l->scales.reserve(static_cast<size_t>(l->tiles) * l->groups * kLanes);
    if (!symmetric) l->zeros.reserve(static_cast<size_t>(l->tiles) * l->groups * kLanes);
  }
  return l.release();
} catch (const std::bad_alloc&) {
  return nullptr;
}

void llmopt_linear_free(Linear* l) { delete l; }

int64_t llmopt_linear_bytes(const Linear* l) { return static_cast<int64_t>(l->bytes()); }

// Packs rows [row, row + count) from codes uint8 [count, k], scales float [count, groups], zeros uint8 [count, groups] or null.
void llmopt_linear_pack_codes(Linear* l, int row, int count, const uint8_t* codes, const float* scales, const uint8_t* zeros) {
  for (int i = 0; i < count; ++i) {
    const int tile = (row + i) / kLanes, lane = (row + i) % kLanes;
    uint8_t* out = l->data.data + static_cast<size_t>(tile) * l->tile_bytes + 4 * lane;
    const uint8_t* c = codes + static_cast<size_t>(i) * l->k;
    for (int k = 0; k < l->k; ++k) {
      if (l->weight == W_INT8) {
        out[(k / 4) * 128 + k % 4] = c[k];
      } else {
        uint8_t& byte = out[(k / 8) * 128 + k % 4];
        byte = (k % 8) < 4 ? static_cast<uint8_t>((byte & 0xf0) | c[k]) : static_cast<uint8_t>((byte & 0x0f) | (c[k] << 4));
      }
    }
    for (int g = 0; g < l->groups; ++g) {
      const size_t at = (static_cast<size_t>(tile) * l->groups + g) * kLanes + lane;
      l->scales.data[at] = scales[static_cast<size_t>(i) * l->groups + g];
      if (zeros) l->zeros.data[at] = zeros[static_cast<size_t>(i) * l->groups + g];
    }
  }
}

// Packs rows [row, row + count) from bfloat16 (source_bf16) or float values [count, k] into a W_BF16 or W_F32 layer.
void llmopt_linear_pack_values(Linear* l, int row, int count, const void* values, int source_bf16) {
  for (int i = 0; i < count; ++i) {
    const int tile = (row + i) / kLanes, lane = (row + i) % kLanes;
    uint8_t* out = l->data.data + static_cast<size_t>(tile) * l->tile_bytes + 4 * lane;
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

// y float [m][n] = x float [m][k] W^T + b, row strides in elements. Returns 0, or -1 when memory is short.
int llmopt_linear_forward(const Linear* l, int m, const float* x, int64_t ldx, float* y, int64_t ldy) try {
  std::lock_guard<std::mutex> lock(pool_mutex());
  Pool& threads = pool();
  Activations a;
  a.resize(m, *l);
  std::vector<Buffer<float>> rows(threads.threads());
  std::vector<TileScratch> scratch(threads.threads());
  threads.run(m, [&](int begin, int end, int t) {
    for (int i = begin; i < end; ++i) a.pack_row(i, x + i * ldx, l->k, rows[t].reserve(l->kp));
  });
  threads.run(l->tiles, [&](int begin, int end, int t) {
    alignas(64) float c[kMaxRows * kLanes];
    for (int tile = begin; tile < end; ++tile) {
      const TileView view = prepare_tile(*l, tile, m, scratch[t]);
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
