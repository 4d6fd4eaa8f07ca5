// How keys and values become codes; the definition is runtime/kernels/kv_format.py, to the bit.
#include "attention_codes.h"

namespace llmopt {
namespace {

// Round to nearest, ties to even; |value| is at most 448.
uint8_t e4m3(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  const float magnitude = std::fabs(value);
  if (magnitude < 0.015625f) return sign | static_cast<uint8_t>(std::nearbyint(magnitude * 512.0f));  // steps of 2^-9
  bits &= 0x7fffffffu;
  bits += 0x7ffffu + (bits >> 20 & 1u);
  return sign | static_cast<uint8_t>((bits >> 20) - (120 << 3));
}

inline float clamp(float value, float limit) { return std::min(std::max(value, -limit), limit); }

// One vector as codes, a byte each, and its scale; a vector that is not finite has the scale NaN.
uint16_t quantize(int format, const float* x, int d, uint8_t* codes) {
  float finite = 0;
  for (int i = 0; i < d; ++i) finite += x[i] * 0.0f;
  if (finite != 0.0f) {
    std::memset(codes, 0, d);
    return 0x7fc0;
  }
  const float limit = format == KV_INT8 ? 127.0f : format == KV_FP8 ? 448.0f : 7.5f;
  const uint16_t stored = f32_to_bf16(abs_max(x, d) / limit);
  const float scale = stored ? bf16_to_f32(stored) : 1.0f;
  if (format == KV_INT8) {
    for (int i = 0; i < d; ++i) codes[i] = static_cast<uint8_t>(static_cast<int>(clamp(std::nearbyint(x[i] / scale), 127.0f)));
  } else if (format == KV_FP8) {
    for (int i = 0; i < d; ++i) codes[i] = e4m3(clamp(x[i] / scale, 448.0f));
  } else {
    for (int i = 0; i < d; ++i) codes[i] = static_cast<uint8_t>(std::min(std::max(std::floor(x[i] / scale) + 8.0f, 0.0f), 15.0f));
  }
  return stored;
}

struct Codes {
  static constexpr int kMost = 1024;
  alignas(64) float x[kMost];
  alignas(64) uint8_t code[kMost];
};

#if LLMOPT_AVX512
inline __m512 butterfly(__m512 own, __m512 other, __mmask16 upper) {
  return _mm512_mask_sub_ps(_mm512_add_ps(own, other), upper, other, own);
}
#endif

}  // namespace

int rotate_blocks(float* x, int n) {
  const int block = n & -n;
  int h = 1;
#if LLMOPT_AVX512
  if (block >= 16) {
    for (int i = 0; i < n; i += 16) {
      __m512 v = _mm512_loadu_ps(x + i);
      v = butterfly(v, _mm512_permute_ps(v, 0xb1), 0xaaaa);
      v = butterfly(v, _mm512_permute_ps(v, 0x4e), 0xcccc);
      v = butterfly(v, _mm512_shuffle_f32x4(v, v, 0xb1), 0xf0f0);
      v = butterfly(v, _mm512_shuffle_f32x4(v, v, 0x4e), 0xff00);
      _mm512_storeu_ps(x + i, v);
    }
    h = 16;
  }
#endif
  for (; h < block; h *= 2)
    for (int i = 0; i < n; i += 2 * h)
      for (int j = i; j < i + h; ++j) {
        const float a = x[j], b = x[j + h];
        x[j] = a + b;
        x[j + h] = a - b;
      }
  return block;
}

void write_quantized(const CacheShape& shape, uint8_t* keys, uint8_t* values, int slot, const float* k, const float* v) {
  const int bs = shape.block_size, d = shape.head_dim, dp = shape.dp(), offset = slot % bs;
  const size_t base = static_cast<size_t>(slot / bs) * shape.block_bytes();
  static thread_local Codes space;
  const auto code = [&](const float* x, uint8_t* head) {
    std::memcpy(space.x, x, sizeof(float) * d);
    if (shape.rotates()) rotate_blocks(space.x, d);
    const uint16_t scale = quantize(shape.format, space.x, d, space.code);
    std::fill(space.code + d, space.code + dp, 0);
    std::memcpy(head + shape.code_bytes() + 2 * static_cast<size_t>(offset), &scale, 2);
  };
  for (int h = 0; h < shape.kv_heads; ++h, k += d, v += d) {
    uint8_t* vh = values + base + h * shape.head_bytes();
    const uint8_t* c = space.code;
    if (!shape.by_channel()) {
      uint8_t* kh = keys + base + h * shape.head_bytes();
      code(k, kh);
      for (int i = 0; i < dp; i += 2) std::memcpy(kh + static_cast<size_t>(i) * bs + 2 * offset, c + i, 2);
    }
    code(v, vh);
    if (shape.code_bits() == 8) {
      uint8_t* to = vh + static_cast<size_t>(offset / 2) * dp * 2 + offset % 2;
      for (int i = 0; i < dp; ++i) to[2 * i] = c[i];
    } else {
      constexpr int kByte[4] = {0, 2, 1, 3};
      uint8_t* to = vh + static_cast<size_t>(offset / 4) * dp * 2 + kByte[offset % 4];
      for (int i = 0; i < dp; i += 32)
        for (int l = 0; l < 16; ++l) to[2 * i + 4 * l] = static_cast<uint8_t>(c[i + l] | c[i + l + 16] << 4);
    }
  }
}

namespace {

// The exact keys of one head in a block that is full: rows float [block_size][dp].
void gather_block(const CacheShape& shape, const uint8_t* keys, const uint8_t* values, const int32_t* tail, int head, int first_new,
                  const float* k, size_t k_stride, float* rows) {
  const int bs = shape.block_size, d = shape.head_dim, dp = shape.dp(), quarter = bs / 4;
  for (int o = 0; o < bs; ++o, rows += dp) {
    std::fill(rows + d, rows + dp, 0.0f);
    if (o >= first_new) {
      const float* x = k + (o - first_new) * k_stride + static_cast<size_t>(head) * d;
      for (int i = 0; i < d; ++i) rows[i] = bf16_round(x[i]);
      continue;
    }
    const size_t at = tail_at(shape, tail, o / quarter, head);
    const uint16_t* x = reinterpret_cast<const uint16_t*>((o / quarter % 2 ? values : keys) + at) + 2 * (o % quarter);
    for (int i = 0; i < d; ++i) rows[i] = bf16_to_f32(x[static_cast<size_t>(i / 2) * quarter * 2 + i % 2]);
  }
}

// Codes, scales and zeros of one head's keys in a block, from rows float [block_size][dp], which are overwritten. stats: space
// for 4 dp floats.
void quantize_channels(const CacheShape& shape, float* rows, float* stats, const ChannelKeys& to) {
  const int bs = shape.block_size, dp = shape.dp();
  float *low = stats, *high = low + dp, *finite = high + dp, *step = finite + dp;
  uint8_t* codes = const_cast<uint8_t*>(to.codes);
  uint16_t* scales = const_cast<uint16_t*>(to.scales);
  int8_t* zeros = const_cast<int8_t*>(to.zeros);
  std::copy(rows, rows + dp, low);
  std::copy(rows, rows + dp, high);
  std::fill(finite, finite + dp, 0.0f);
  for (int o = 0; o < bs; ++o) {
    const float* x = rows + static_cast<size_t>(o) * dp;
    for (int i = 0; i < dp; ++i) {
      low[i] = std::min(low[i], x[i]);
      high[i] = std::max(high[i], x[i]);
      finite[i] += x[i] * 0.0f;
    }
  }
  for (int i = 0; i < dp; ++i) {
    const float spread = high[i] - low[i], largest = std::max(std::fabs(low[i]), std::fabs(high[i]));
    if (finite[i] != 0.0f || spread * 0.0f != 0.0f) {
      scales[i] = 0x7fc0;
      zeros[i] = 0;
      step[i] = 0.0f;
      continue;
    }
    scales[i] = f32_to_bf16(std::max(spread / 15.0f, largest / 127.0f));
    step[i] = scales[i] ? bf16_to_f32(scales[i]) : 1.0f;
    zeros[i] = static_cast<int8_t>(clamp(std::nearbyint(-low[i] / step[i]), 127.0f));
  }
  for (int o = 0; o < bs; ++o) {
    float* x = rows + static_cast<size_t>(o) * dp;
    for (int i = 0; i < dp; ++i)
      x[i] = step[i] > 0 ? std::min(std::max(std::nearbyint(x[i] / step[i]) + static_cast<float>(zeros[i]), 0.0f), 15.0f) : 0.0f;
    for (int i = 0; i < dp; i += 8) {
      uint32_t unit = 0;
      for (int e = 0; e < 8; ++e) unit |= static_cast<uint32_t>(x[i + e]) << (16 * (e % 2) + 4 * (e / 2));
      std::memcpy(codes + (static_cast<size_t>(i / 8) * bs + o) * 4, &unit, 4);
    }
  }
}

void write_tail(const CacheShape& shape, uint8_t* keys, uint8_t* values, const int32_t* tail, int offset, const float* k) {
  const int d = shape.head_dim, quarter = shape.block_size / 4, part = offset / quarter;
  for (int h = 0; h < shape.kv_heads; ++h, k += d) {
    uint16_t* to = reinterpret_cast<uint16_t*>((part % 2 ? values : keys) + tail_at(shape, tail, part, h)) + 2 * (offset % quarter);
    for (int i = 0; i < d; ++i) to[static_cast<size_t>(i / 2) * quarter * 2 + i % 2] = f32_to_bf16(k[i]);
  }
}

}  // namespace

void write_keys(Pool& pool, const CacheShape& shape, uint8_t* keys, uint8_t* values, const Batch& batch, const float* k,
                size_t k_stride) {
  const int bs = shape.block_size, heads = shape.kv_heads, dp = shape.dp();
  struct Full { int sequence, block; };
  static thread_local std::vector<Full> full;
  full.clear();
  for (int r = 0; r < batch.sequences; ++r) {
    const int length = batch.lengths[r], start = length - (batch.starts[r + 1] - batch.starts[r]), last = (length - 1) / bs;
    for (int b = start / bs; (b + 1) * bs <= length; ++b) full.push_back({r, b});
    const int32_t* tail = batch.tables + static_cast<size_t>(r) * batch.table_stride + last + 1;
    for (int p = std::max(start, last * bs); p < length; ++p)
      write_tail(shape, keys, values, tail, p % bs, k + (batch.starts[r] + p - start) * k_stride);
  }
  const Full* tasks = full.data();
  const auto body = [&](int begin, int end, int) {
    static thread_local Buffer<float> space;
    float* rows = space.reserve(static_cast<size_t>(bs + 4) * dp);
    for (int i = begin; i < end; ++i) {
      const Full& task = tasks[i / heads];
      const int head = i % heads, r = task.sequence;
      const int start = batch.lengths[r] - (batch.starts[r + 1] - batch.starts[r]), first = std::max(0, start - task.block * bs);
      const int32_t* table = batch.tables + static_cast<size_t>(r) * batch.table_stride;
      gather_block(shape, keys, values, table + task.block + 1, head, first,
                   k + (batch.starts[r] + task.block * bs + first - start) * k_stride, k_stride, rows);
      quantize_channels(shape, rows, rows + static_cast<size_t>(bs) * dp, {shape, keys, table[task.block], head});
    }
  };
  const int count = static_cast<int>(full.size()) * heads;
  if (count <= heads) body(0, count, 0);
  else pool.run(count, body);
}

}  // namespace llmopt
