// Attention over a bfloat16 cache with the very bits of torch's scaled_dot_product_attention on a CPU with AVX-512.
//
// bfloat16 rounds so coarsely that near-ties between tokens are common, and a sum in another order decides them otherwise.
// The orders below were found by experiment, with inputs that reveal a summation tree (Xie et al. 2024, "FPRev"), on torch 2.11
// to 2.13; `matches_torch` in attention.py tests them on the machine at hand before they are used.
//   Keys are taken in spans of 512; a span's scores are scaled, its maximum joins the running one.
//   Queries are taken in tiles of 32, 64 or 256 tokens. Scores of a tile: one float sum over the head dimension in order. Of one
//   token alone: four sums, over d mod 4, added as (0 + 2) + (1 + 3). Of a few tokens with a few keys: the same for keys in
//   whole fours, and eight such sums for the keys beyond.
//   exp: whole vectors of 16 keys by a short polynomial, added by two sums in turn, which are then added; the keys beyond by the
//   exact function and added one by one.
//   Values: numerators rounded to bfloat16. Several tokens: one float sum in the order of keys, cut where a span has more than
//   192. One token alone: by four keys, (0 + 2) + (1 + 3), the last keys short of four from the end, all added to what the span
//   before has left.
#pragma once
#include "attention_rows.h"

namespace llmopt {
namespace {

#if LLMOPT_AVX512
constexpr bool kTorchKernels = true;
#else
constexpr bool kTorchKernels = false;
#endif
constexpr int kTorchSpan = 512;

// The factor of the queries before they are packed, and of the scores after: a power of two is exact in bfloat16, any other
// factor would round the queries once more than the model does.
float query_scale(const AttentionArgs& a) {
  int exponent;
  return a.shape.format != KV_BF16 || std::frexp(a.scale, &exponent) == 0.5f ? a.scale : 1.0f;
}
float score_scale(const AttentionArgs& a) { return query_scale(a) == a.scale ? 1.0f : a.scale; }

// In what order scores are summed.
enum ScoreOrder { SCORES_IN_ORDER = 0, SCORES_BY_FOUR = 1, SCORES_SMALL = 2 };

constexpr int kSmallProduct = 144;  // queries x keys from which on a product of several tokens is summed in order

// Query tokens that torch multiplies at once.
inline int query_tile(int tokens) { return tokens >= 768 ? 256 : tokens >= 192 ? 64 : 32; }

// The order of the tile that holds new token `offset` of `tokens` of a sequence of `length` tokens.
inline ScoreOrder score_order(int offset, int tokens, int length) {
  const int tile = query_tile(tokens), rows = std::min(tile, tokens - offset / tile * tile);
  if (rows == 1) return SCORES_BY_FOUR;
  return rows * std::min(kTorchSpan, length) < kSmallProduct ? SCORES_SMALL : SCORES_IN_ORDER;
}

// One panel of query rows against the keys [first, last) of one span; all blocks of the span are given.
struct Span {
  const AttentionArgs* args;
  const uint8_t* const* key_blocks;    // of this KV head, one per block of the span
  const uint8_t* const* value_blocks;
  int blocks, keys;                    // keys = blocks * block_size, <= the span rounded up to a block
  const uint8_t* q;                    // packed panel
  const int *low, *high;               // per row: visible keys [low, high), relative to the span
  float *s, *o, *maximum, *sum;        // s [r][keys], o [r][dp]
  uint8_t* p;                          // [r][keys] in the cache's format; as_torch: float
  int known;                           // keys of the span that the sequence has by now
  ScoreOrder order;                    // as_torch: of the scores
  bool cold;                           // the blocks are read for the first time: worth a prefetch
};

// Scales, caps and masks one row of scores, of which the keys [low, high) are seen; false where none is.
inline bool finish_scores(const Span& span, int low, int high, float* s) {
  if (low >= high) return false;
  const float scale = score_scale(*span.args);
  if (scale != 1.0f)
    for (int i = low; i < high; ++i) s[i] *= scale;
  if (span.args->cap > 0) soft_cap(s + low, high - low, span.args->cap);
  std::fill(s, s + low, kNegInf);
  std::fill(s + high, s + span.keys, kNegInf);
  return true;
}

#if LLMOPT_AVX512

// The method of Malossi et al. 2015 ("Fast Exponential Computation on SIMD Architectures"): a polynomial corrects the linear
// 2^f; relative error below 2e-4.
inline __m512 exp_torch(__m512 x) {
  __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f));
  asm("" : "+v"(t));  // keeps the product from being contracted into the differences
  const __m512 f = _mm512_sub_ps(t, _mm512_floor_ps(t));
  __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(-0.079204240219773236f), _mm512_set1_ps(-0.22433836478672356f));
  p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(0.30354260500649682f));
  p = _mm512_fmadd_ps(f, p, _mm512_set1_ps(0.00010703434948458272f));
  const __m512 one = _mm512_set1_ps(8388608.0f), bias = _mm512_set1_ps(8388608.0f * 127.0f);
  const __m512i bits = _mm512_cvttps_epi32(_mm512_fmadd_ps(one, _mm512_sub_ps(t, p), bias));
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.33654f), _CMP_GE_OQ), _mm512_castsi512_ps(bits));
}

inline __m512 even_values(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 odd_values(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

// As softmax_row; p is float, rounded to bfloat16.
inline float torch_softmax_row(const Span& span, int m, float* s, float* p) {
  const int n = span.keys, low = std::max(0, span.low[m]), high = std::min(n, span.high[m]);
  if (!finish_scores(span, low, high, s)) {
    std::memset(p, 0, sizeof(float) * n);
    return 1.0f;
  }
  __m512 best = _mm512_set1_ps(span.maximum[m]);
  for (int i = 0; i < n; i += 16) best = _mm512_max_ps(best, _mm512_loadu_ps(s + i));
  const float peak = _mm512_reduce_max_ps(best);
  const __m512 shift = _mm512_set1_ps(peak);
  __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  const int whole = std::min(n, span.known / 16 * 16);
  for (int i = 0; i < whole; i += 16) {
    const __m512 e = exp_torch(_mm512_sub_ps(_mm512_loadu_ps(s + i), shift));
    sums[i / 16 % 2] = _mm512_add_ps(sums[i / 16 % 2], e);
    _mm512_storeu_ps(p + i, e);
  }
  float total = _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1]));
  for (int i = whole; i < n; ++i) {
    p[i] = i < high ? std::exp(s[i] - peak) : 0.0f;
    total += p[i];
  }
  round_to_bf16(p, n);
  const float factor = span.maximum[m] == kNegInf ? 0.0f : std::exp(span.maximum[m] - peak);
  span.maximum[m] = peak;
  span.sum[m] = total + factor * span.sum[m];
  return factor;
}

struct TorchPanel {
  // Scores of MR rows against the 32 keys at `keys`, units [dp / 2][bs][2].
  template <int MR>
  static void scores(const Span& span, const uint8_t* keys, size_t step, float* s) {
    const float* q = reinterpret_cast<const float*>(span.q);
    const int units = span.args->shape.dp() / 2;
    __m512 acc[MR][2];
#pragma GCC unroll 12
    for (int m = 0; m < MR; ++m) acc[m][0] = acc[m][1] = _mm512_setzero_ps();
    for (int u = 0; u < units; ++u, keys += step, q += 2 * MR) {
      const __m512i k0 = _mm512_loadu_si512(keys), k1 = _mm512_loadu_si512(keys + 64);
      const __m512 e0 = even_values(k0), e1 = even_values(k1), o0 = odd_values(k0), o1 = odd_values(k1);
#pragma GCC unroll 12
      for (int m = 0; m < MR; ++m) {
        const __m512 even = _mm512_set1_ps(q[m]), odd = _mm512_set1_ps(q[MR + m]);
        acc[m][0] = _mm512_fmadd_ps(odd, o0, _mm512_fmadd_ps(even, e0, acc[m][0]));
        acc[m][1] = _mm512_fmadd_ps(odd, o1, _mm512_fmadd_ps(even, e1, acc[m][1]));
      }
    }
#pragma GCC unroll 12
    for (int m = 0; m < MR; ++m) {
      _mm512_storeu_ps(s + static_cast<size_t>(m) * span.keys, acc[m][0]);
      _mm512_storeu_ps(s + static_cast<size_t>(m) * span.keys + 16, acc[m][1]);
    }
  }

  // The same by kSums sums, over d mod kSums, for the keys that `lanes` has.
  template <int MR, int kSums>
  static void scores_by(const Span& span, const uint8_t* keys, size_t step, float* s, uint32_t lanes) {
    const float* q = reinterpret_cast<const float*>(span.q);
    const int units = span.args->shape.dp() / 2;
    for (int m = 0; m < MR; ++m)
      for (int h = 0; h < 2; ++h) {
        const __mmask16 mask = static_cast<__mmask16>(lanes >> (16 * h));
        if (!mask) continue;
        __m512 acc[kSums];
        for (auto& a : acc) a = _mm512_setzero_ps();
        for (int u = 0; u < units; ++u) {
          const __m512i k = _mm512_loadu_si512(keys + u * step + 64 * h);
          const float* x = q + static_cast<size_t>(2 * u) * MR + m;
          __m512* pair = acc + u % (kSums / 2) * 2;
          pair[0] = _mm512_fmadd_ps(_mm512_set1_ps(x[0]), even_values(k), pair[0]);
          pair[1] = _mm512_fmadd_ps(_mm512_set1_ps(x[MR]), odd_values(k), pair[1]);
        }
        for (int n = kSums / 2; n > 0; n /= 2)
          for (int i = 0; i < n; ++i) acc[i] = _mm512_add_ps(acc[i], acc[i + n]);
        _mm512_mask_storeu_ps(s + static_cast<size_t>(m) * span.keys + 16 * h, mask, acc[0]);
      }
  }

  // Adds the span's values to lanes [d, d + 32) of the rows' sums.
  template <int MR>
  static void values(const Span& span, int d) {
    const int bs = span.args->shape.block_size, dp = span.args->shape.dp(), n = std::min(span.keys, span.known);
    const int chunk = span.known <= 192 ? span.known : span.known <= 384 ? (span.known + 1) / 2 : 192;
    const float* p = reinterpret_cast<const float*>(span.p);
    Accumulator<MR> acc;
    acc.zero();
    int next = chunk;
    const auto add = [&](int key, __m512 v0, __m512 v1) {
      if (key == next) {
        for (int m = 0; m < MR; ++m) acc.flush(m, span.o + static_cast<size_t>(m) * dp + d);
        next += chunk;
      }
#pragma GCC unroll 12
      for (int m = 0; m < MR; ++m) {
        const __m512 x = _mm512_set1_ps(p[static_cast<size_t>(m) * span.keys + key]);
        acc.v[m][0] = _mm512_fmadd_ps(x, v0, acc.v[m][0]);
        acc.v[m][1] = _mm512_fmadd_ps(x, v1, acc.v[m][1]);
      }
    };
    for (int key = 0; key < n; key += 2) {
      const uint8_t* v = span.value_blocks[key / bs] + (static_cast<size_t>(key % bs / 2) * dp + d) * 4;
      const __m512i v0 = _mm512_loadu_si512(v), v1 = _mm512_loadu_si512(v + 64);
      add(key, even_values(v0), even_values(v1));
      if (key + 1 < n) add(key + 1, odd_values(v0), odd_values(v1));
    }
    for (int m = 0; m < MR; ++m) acc.flush(m, span.o + static_cast<size_t>(m) * dp + d);
  }

  template <int MR>
  static void values_alone(const Span& span, int d) {
    const int bs = span.args->shape.block_size, dp = span.args->shape.dp(), n = std::min(span.keys, span.known);
    for (int m = 0; m < MR; ++m)
      for (int h = 0; h < 2; ++h) {
        const float* p = reinterpret_cast<const float*>(span.p) + static_cast<size_t>(m) * span.keys;
        const auto pair = [&](int key) {
          return _mm512_loadu_si512(span.value_blocks[key / bs] + (static_cast<size_t>(key % bs / 2) * dp + d + 16 * h) * 4);
        };
        float* o = span.o + static_cast<size_t>(m) * dp + d + 16 * h;
        __m512 acc = _mm512_loadu_ps(o);
        int key = 0;
        for (; key + 4 <= n; key += 4) {
          const __m512i a = pair(key), b = pair(key + 2);
          const __m512 even = _mm512_fmadd_ps(_mm512_set1_ps(p[key + 2]), even_values(b),
                                              _mm512_mul_ps(_mm512_set1_ps(p[key]), even_values(a)));
          const __m512 odd = _mm512_fmadd_ps(_mm512_set1_ps(p[key + 3]), odd_values(b),
                                             _mm512_mul_ps(_mm512_set1_ps(p[key + 1]), odd_values(a)));
          acc = _mm512_add_ps(acc, _mm512_add_ps(even, odd));
        }
        for (int i = n - 1; i >= key; --i) {
          const __m512i v = pair(i & ~1);
          acc = _mm512_fmadd_ps(_mm512_set1_ps(p[i]), i & 1 ? odd_values(v) : even_values(v), acc);
        }
        _mm512_storeu_ps(o, acc);
      }
  }

  template <int MR>
  struct Body {
    static void run(const Span& span) {
      const CacheShape& shape = span.args->shape;
      const int bs = shape.block_size, dp = shape.dp();
      const size_t step = static_cast<size_t>(4) * bs;
      for (int b = 0; b < span.blocks; ++b)
        for (int j = 0; j < bs; j += kLanes) {
          const uint8_t* keys = span.key_blocks[b] + 4 * j;
          float* s = span.s + b * bs + j;
          const int fours = span.known / 4 * 4 - b * bs - j;
          const uint32_t whole = fours >= 32 ? ~0u : fours > 0 ? (1u << fours) - 1 : 0;
          if (span.order == SCORES_IN_ORDER) scores<MR>(span, keys, step, s);
          else scores_by<MR, 4>(span, keys, step, s, ~0u);
          if (span.order == SCORES_SMALL && ~whole) scores_by<MR, 8>(span, keys, step, s, ~whole);
        }
      float* p = reinterpret_cast<float*>(span.p);
      for (int m = 0; m < MR; ++m) {
        const size_t row = static_cast<size_t>(m) * span.keys;
        const float factor = torch_softmax_row(span, m, span.s + row, p + row);
        if (factor != 1.0f)
          for (int d = 0; d < dp; ++d) span.o[m * dp + d] *= factor;
      }
      for (int d = 0; d < dp; d += kLanes) {
        if (span.order == SCORES_BY_FOUR) values_alone<MR>(span, d);
        else values<MR>(span, d);
      }
    }
  };
};

#endif

}  // namespace
}  // namespace llmopt
