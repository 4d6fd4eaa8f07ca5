// Scores of a panel of query rows against codes: of int8 and fp8, of int4 keys by channel, and against one block's exact keys.
#pragma once
#include "attention_codes.h"
#include "attention_rows.h"

namespace llmopt {
namespace {

// One panel of query rows against the blocks of one span.
struct Piece {
  const AttentionArgs* args;
  const uint8_t* const* key_blocks;  // of this KV head; the exact keys of one block where `channels` is null and q is by rows
  const ChannelKeys* channels;       // keys by channel, else null
  const uint8_t* const* value_blocks;
  const float* value_scales;         // [keys]
  int blocks, keys;
  const uint8_t* q;                  // packed panel, bfloat16 pairs [dp/2][r][2]; for exact keys [r][dp]
  const float* rows;                 // for keys by channel: the queries, [r][dp], and behind them
  float* space;                      // space for 2 dp floats and bfloat16 [r][dp]
  const int *low, *high;             // per row: visible keys [low, high), relative to the first block
  float* s;                          // [r][keys]
  uint8_t* p;                        // bfloat16 [r][keys]
  float* out;                        // [r][dp + 2]: maximum, sum and weighted sum of the rows over these keys
  bool cold;                         // the blocks are read for the first time: worth a prefetch
};

// acc += a . b over `units` units of codes; a as in microkernel.h.
template <class Codes, int MR>
inline void code_products(Accumulator<MR>& acc, const uint8_t* a, size_t a_unit, size_t a_row, const uint8_t* b, size_t b_unit,
                          int units) {
#if LLMOPT_AVX512
  for (int u = 0; u < units; ++u, a += Codes::kPairs * a_unit, b += b_unit) {
    __m512i pairs[2][Codes::kPairs];
    Codes::load(b, pairs);
#pragma GCC unroll 4
    for (int j = 0; j < Codes::kPairs; ++j)
#pragma GCC unroll 12
      for (int m = 0; m < MR; ++m) {
        const __m512i x = broadcast_unit(a + m * a_row + j * a_unit);
        acc.v[m][0] = multiply_add<BF16Op>(acc.v[m][0], pairs[0][j], x);
        acc.v[m][1] = multiply_add<BF16Op>(acc.v[m][1], pairs[1][j], x);
      }
  }
#else
  uint16_t pairs[Codes::kPairs * kLanes * 2];
  for (int u = 0; u < units; ++u, a += Codes::kPairs * a_unit, b += b_unit) {
    Codes::load(b, pairs);
    acc.template run<BF16Op>(a, a_unit, a_row, reinterpret_cast<const uint8_t*>(pairs), 4 * kLanes, Codes::kPairs);
  }
#endif
}

// Inlined early: a function that does nothing but prefetch is taken for one without effect, and calls of it are dropped.
inline __attribute__((always_inline)) void prefetch_blocks(const Piece& piece, int b, size_t key_bytes, size_t value_bytes) {
  if (!piece.cold) return;
  for (int next = b ? b + 2 : 0; next < std::min(b + 3, piece.blocks); ++next) prefetch(piece.key_blocks[next], key_bytes);
  prefetch(piece.value_blocks[b], value_bytes);
}

// Scores of codes whose scales are of tokens.
template <class Keys>
struct TokenScores {
  template <int MR>
  static void run(const Piece& piece) {
    Accumulator<MR> acc;  // of its own: one that others see would be kept in memory
    const CacheShape& shape = piece.args->shape;
    const int bs = shape.block_size, units = shape.dp() / (2 * Keys::kPairs);
    for (int b = 0; b < piece.blocks; ++b) {
      prefetch_blocks(piece, b, shape.head_bytes(), shape.head_bytes());
      const uint16_t* scales = code_scales(shape, piece.key_blocks[b]);
      for (int j = 0; j < bs; j += kLanes) {
        float* s = piece.s + b * bs + j;
        acc.zero();
        code_products<Keys>(acc, piece.q, 4 * MR, 4, piece.key_blocks[b] + Keys::kLaneBytes * j,
                            static_cast<size_t>(Keys::kLaneBytes) * bs, units);
        acc.store(s, piece.keys);
        alignas(64) float scale[kLanes];
        for (int i = 0; i < kLanes; ++i) scale[i] = bf16_to_f32(scales[j + i]) * Keys::kFactor;
        for (int m = 0; m < MR; ++m)
          for (int i = 0; i < kLanes; ++i) s[static_cast<size_t>(m) * piece.keys + i] *= scale[i];
      }
    }
  }
};

// One query times a block's scales, in bfloat16 to `scaled`; returns its product with `base`, what codes of 7.5 stand for.
inline float scale_query(const float* q, const float* scale, const float* base, int dp, uint16_t* scaled) {
#if LLMOPT_AVX512
  __m512 sum = _mm512_setzero_ps();
  for (int i = 0; i < dp; i += 32) {
    const __m512 x = _mm512_loadu_ps(q + i), y = _mm512_loadu_ps(q + i + 16);
    sum = _mm512_fmadd_ps(x, _mm512_loadu_ps(base + i), sum);
    sum = _mm512_fmadd_ps(y, _mm512_loadu_ps(base + i + 16), sum);
    const __m512 low = _mm512_mul_ps(x, _mm512_loadu_ps(scale + i)), high = _mm512_mul_ps(y, _mm512_loadu_ps(scale + i + 16));
    _mm512_storeu_si512(scaled + i, bf16_pairs(low, high));
  }
  return _mm512_reduce_add_ps(sum);
#else
  float sum = 0;
  for (int i = 0; i < dp; ++i) {
    sum += q[i] * base[i];
    scaled[i] = f32_to_bf16(q[i] * scale[i]);
  }
  return sum;
#endif
}

// Scores of codes by channel: the queries take the scales, and what the zeros come to is one number a row and block.
struct ChannelScores {
  template <int MR>
  static void run(const Piece& piece) {
    Accumulator<MR> acc;  // of its own: one that others see would be kept in memory
    const CacheShape& shape = piece.args->shape;
    const int bs = shape.block_size, dp = shape.dp();
    float *scale = piece.space, *base = scale + dp;
    uint16_t* scaled = reinterpret_cast<uint16_t*>(base + dp);
    for (int b = 0; b < piece.blocks; ++b) {
      prefetch_blocks(piece, b, shape.code_bytes(), shape.head_bytes());
      const ChannelKeys& keys = piece.channels[b];
      for (int i = 0; i < dp; ++i) {
        scale[i] = bf16_to_f32(keys.scales[i]);
        base[i] = scale[i] * (7.5f - static_cast<float>(keys.zeros[i]));
      }
      float own[MR];
      for (int m = 0; m < MR; ++m)
        own[m] = scale_query(piece.rows + static_cast<size_t>(m) * dp, scale, base, dp, scaled + static_cast<size_t>(m) * dp);
      for (int j = 0; j < bs; j += kLanes) {
        float* s = piece.s + b * bs + j;
        acc.zero();
        code_products<Int4Keys>(acc, reinterpret_cast<const uint8_t*>(scaled), 4, 2 * static_cast<size_t>(dp),
                                keys.codes + Int4Keys::kLaneBytes * j, static_cast<size_t>(Int4Keys::kLaneBytes) * bs,
                                dp / (2 * Int4Keys::kPairs));
        acc.store(s, piece.keys);
        for (int m = 0; m < MR; ++m)
          for (int i = 0; i < kLanes; ++i) s[static_cast<size_t>(m) * piece.keys + i] += own[m];
      }
    }
  }
};

// Scores of one block's exact keys, bfloat16 [dp/2][block_size][2].
struct ExactScores {
  template <int MR>
  static void run(const Piece& piece) {
    Accumulator<MR> acc;  // of its own: one that others see would be kept in memory
    const int bs = piece.args->shape.block_size, dp = piece.args->shape.dp();
    for (int j = 0; j < bs; j += kLanes) {
      acc.zero();
      acc.template run<BF16Op>(piece.q, 4, 2 * static_cast<size_t>(dp), piece.key_blocks[0] + 4 * j, static_cast<size_t>(4) * bs,
                               dp / 2);
      acc.store(piece.s + j, piece.keys);
    }
  }
};

}  // namespace
}  // namespace llmopt
