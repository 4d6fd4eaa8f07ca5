// Keys and values as 8- or 4-bit codes with one bfloat16 scale a token and KV head: int8, fp8 (e4m3) and int4.
//
// What a code means is defined in runtime/kernels/kv_format.py; here is how codes lie in a block, and how they become
// bfloat16 in registers. Every code is exact in bfloat16, so a product over codes times the scale is the product over the
// dequantized values. For one block of `block_size` tokens and one KV head, with head dimension D padded to dp, a multiple of 32:
//   8 bits  keys [dp/2][block_size][2], values [block_size/2][dp][2]
//   4 bits  keys uint32 [dp/8][block_size]: dimensions 8i … 8i + 7 of a token, dimension e at bit 16 (e % 2) + 4 (e / 2)
//           all heads' codes, then all heads' scales bfloat16 [dp], then all heads' zeros int8 [dp]: keys are by channel
//           values [block_size/4][dp/32][16][4]: byte b of lane l is token 4i + {0, 2, 1, 3}[b], dimensions l (low bits) and
//           l + 16 of the 32
// and, but for keys by channel, after the codes the scales, bfloat16 [block_size]. No byte belongs to two tokens: they may be
// written side by side. A quarter of a tail (kv_format.py) lies in a head's codes as bfloat16 [dp/2][block_size/4][2].
#pragma once
#include "attention.h"

namespace llmopt {
namespace {

inline const uint16_t* code_scales(const CacheShape& shape, const uint8_t* head) {
  return reinterpret_cast<const uint16_t*>(head + shape.code_bytes());
}

// One head's keys by channel in block `block` of `keys`.
struct ChannelKeys {
  const uint8_t* codes;
  const uint16_t* scales;  // [dp]
  const int8_t* zeros;     // [dp]
  ChannelKeys() = default;
  ChannelKeys(const CacheShape& shape, const uint8_t* keys, int block, int head) {
    const uint8_t* at = keys + static_cast<size_t>(block) * shape.key_block_bytes();
    const size_t n = shape.code_bytes(), dp = shape.dp();
    codes = at + head * n;
    scales = reinterpret_cast<const uint16_t*>(at + shape.kv_heads * n + head * 2 * dp);
    zeros = reinterpret_cast<const int8_t*>(at + shape.kv_heads * (n + 2 * dp) + head * dp);
  }
};

// Where quarter `quarter` of a tail lies; `tail`: the two blocks after the sequence's last one.
inline size_t tail_at(const CacheShape& shape, const int32_t* tail, int quarter, int head) {
  const size_t block = static_cast<size_t>(tail[quarter / 2]);
  return quarter % 2 ? block * shape.block_bytes() + head * shape.head_bytes()
                     : block * shape.key_block_bytes() + head * shape.code_bytes();
}

#if LLMOPT_AVX512
inline __m512i bf16_pairs(__m512 low, __m512 high) { return to_bf16(high, low); }
#endif

// A codec turns one unit of codes, 32 lanes, into kPairs units of bfloat16 pairs: [2 halves][kPairs] registers, or
// [kPairs][32][2] in memory. kLaneBytes: from lane to lane of a row of keys. kFactor: of the codes' values.
struct Int8Codes {
  static constexpr int kPairs = 1, kLaneBytes = 2;
  static constexpr float kFactor = 1.0f;
#if LLMOPT_AVX512
  static __m512 floats(const uint8_t* b) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b))));
  }
  static void load(const uint8_t* b, __m512i (&out)[2][kPairs]) {
    for (int h = 0; h < 2; ++h) out[h][0] = bf16_pairs(floats(b + 32 * h), floats(b + 32 * h + 16));
  }
#else
  static void load(const uint8_t* b, uint16_t* out) {
    for (int i = 0; i < 64; ++i) out[i] = f32_to_bf16(static_cast<int8_t>(b[i]));
  }
#endif
};

// e4m3 moved into the bits of a float16 is its value times 2^-8, subnormal numbers included.
struct Fp8Codes {
  static constexpr int kPairs = 1, kLaneBytes = 2;
  static constexpr float kFactor = 256.0f;
#if LLMOPT_AVX512
  static void load(const uint8_t* b, __m512i (&out)[2][kPairs]) {
    for (int h = 0; h < 2; ++h) {
      __m512i w = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + 32 * h)));
      w = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(w, 8), 1), _mm512_set1_epi16(static_cast<short>(0xbf80)));
      out[h][0] = bf16_pairs(_mm512_cvtph_ps(_mm512_castsi512_si256(w)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(w, 1)));
    }
  }
#else
  static void load(const uint8_t* b, uint16_t* out) {
    for (int i = 0; i < 64; ++i) {
      const int exponent = b[i] >> 3 & 15, mantissa = b[i] & 7;
      const float magnitude = exponent ? std::ldexp(static_cast<float>(mantissa + 8), exponent - 18)
                                       : std::ldexp(static_cast<float>(mantissa), -17);
      out[i] = f32_to_bf16(b[i] & 0x80 ? -magnitude : magnitude);
    }
  }
#endif
};

// Four bits n stand for n - 7.5.
constexpr uint16_t kInt4Values[32] = {
    0xc0f0, 0xc0d0, 0xc0b0, 0xc090, 0xc060, 0xc020, 0xbfc0, 0xbf00, 0x3f00, 0x3fc0, 0x4020, 0x4060, 0x4090, 0x40b0, 0x40d0, 0x40f0,
    0xc0f0, 0xc0d0, 0xc0b0, 0xc090, 0xc060, 0xc020, 0xbfc0, 0xbf00, 0x3f00, 0x3fc0, 0x4020, 0x4060, 0x4090, 0x40b0, 0x40d0, 0x40f0};

struct Int4Codes {
  static constexpr float kFactor = 1.0f;
#if LLMOPT_AVX512
  // The values of bits shift … shift + 3 of every 16-bit element; the table has 32 entries, so the bit above does not matter.
  template <int shift>
  static __m512i values(__m512i codes) {
    return _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, shift), _mm512_loadu_si512(kInt4Values));
  }
#endif
};

struct Int4Keys : Int4Codes {  // lane: eight dimensions of a token
  static constexpr int kPairs = 4, kLaneBytes = 4;
#if LLMOPT_AVX512
  static void load(const uint8_t* b, __m512i (&out)[2][kPairs]) {
    for (int h = 0; h < 2; ++h) {
      const __m512i x = _mm512_loadu_si512(b + 64 * h);
      out[h][0] = values<0>(x);
      out[h][1] = values<4>(x);
      out[h][2] = values<8>(x);
      out[h][3] = values<12>(x);
    }
  }
#else
  static void load(const uint8_t* b, uint16_t* out) {
    for (int lane = 0; lane < 32; ++lane) {
      uint32_t codes;
      std::memcpy(&codes, b + 4 * lane, 4);
      for (int e = 0; e < 8; ++e) out[(e / 2 * 32 + lane) * 2 + e % 2] = kInt4Values[codes >> (16 * (e % 2) + 4 * (e / 2)) & 15];
    }
  }
#endif
};

struct Int4Values : Int4Codes {  // 16 lanes of four bytes: four tokens by 32 dimensions
  static constexpr int kPairs = 2;
#if LLMOPT_AVX512
  static void load(const uint8_t* b, __m512i (&out)[2][kPairs]) {
    const __m512i x = _mm512_loadu_si512(b);
    out[0][0] = values<0>(x);
    out[1][0] = values<4>(x);
    out[0][1] = values<8>(x);
    out[1][1] = values<12>(x);
  }
#else
  static void load(const uint8_t* b, uint16_t* out) {
    for (int lane = 0; lane < 16; ++lane)
      for (int byte = 0; byte < 4; ++byte)
        for (int half = 0; half < 2; ++half)
          out[(byte % 2 * 32 + lane + 16 * half) * 2 + byte / 2] = kInt4Values[b[4 * lane + byte] >> (4 * half) & 15];
  }
#endif
};

}  // namespace
}  // namespace llmopt
