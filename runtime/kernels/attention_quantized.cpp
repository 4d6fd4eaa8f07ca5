// Attention over quantized keys and values: the codes become bfloat16 in registers, scales multiply scores and numerators.
//
// The spans of keys that are computed as one stand at fixed positions of a sequence, each has a softmax of its own, and they are
// folded in order, whoever computes them. So a row's sums depend on its sequence alone: not on its neighbours in the batch, nor
// on how many tokens of its prompt are computed at once, nor on the number of threads.
#include "attention_codes.h"
#include "attention_rows.h"

namespace llmopt {
namespace {

constexpr int kSpan = 256;      // keys of a span, or one block where that is longer
constexpr int kTileRows = 48;   // query rows of a task

int span_blocks(const CacheShape& shape) { return std::max(1, kSpan / shape.block_size); }
int spans_of(int keys, int span_keys) { return (keys + span_keys - 1) / span_keys; }

// One panel of query rows against the blocks of one span.
struct Piece {
  const AttentionArgs* args;
  const uint8_t* const* key_blocks;  // of this KV head
  const uint8_t* const* value_blocks;
  const float* value_scales;         // [keys]
  int blocks, keys;
  const uint8_t* q;                  // packed panel, bfloat16 pairs [dp/2][r][2]
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

// Caps and masks one row of scores; false where no key is seen.
bool mask_scores(const Piece& piece, int low, int high, float* s) {
  if (low >= high) return false;
  if (piece.args->cap > 0) soft_cap(s + low, high - low, piece.args->cap);
  std::fill(s, s + low, kNegInf);
  std::fill(s + high, s + piece.keys, kNegInf);
  return true;
}

// Softmax numerators of one row times the scales of their values, rounded to bfloat16; exactly 0 where a key is not seen.
void numerators(const Piece& piece, int m, float* s, uint8_t* p, float* state) {
  const int n = piece.keys, low = std::max(0, piece.low[m]), high = std::min(n, piece.high[m]);
  state[0] = kNegInf;
  state[1] = 0.0f;
  if (!mask_scores(piece, low, high, s)) {
    std::memset(p, 0, static_cast<size_t>(n) * 2);
    return;
  }
  float peak = kNegInf, total = 0;
#if LLMOPT_AVX512
  const __m512 none = _mm512_set1_ps(kNegInf);
  __m512 best = none, sum = _mm512_setzero_ps();
  for (int i = 0; i < n; i += 16) best = _mm512_max_ps(best, _mm512_loadu_ps(s + i));
  peak = _mm512_reduce_max_ps(best);
  const __m512 shift = _mm512_set1_ps(peak);
  for (int i = 0; i < n; i += 16) {
    const __m512 x = _mm512_loadu_ps(s + i);
    const __mmask16 seen = _mm512_cmp_ps_mask(x, none, _CMP_NEQ_UQ);
    const __m512 e = _mm512_maskz_mov_ps(seen, exp_short(x, shift));
    sum = _mm512_add_ps(sum, e);
    const __m512 scaled = _mm512_maskz_mul_ps(seen, e, _mm512_loadu_ps(piece.value_scales + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 2 * i), (__m256i)_mm512_cvtneps_pbh(scaled));
  }
  total = _mm512_reduce_add_ps(sum);
#else
  for (int i = low; i < high; ++i) peak = std::max(peak, s[i]);
  for (int i = 0; i < n; ++i) {
    const float e = i < low || i >= high ? 0.0f : std::exp(s[i] - peak);
    const uint16_t b = f32_to_bf16(i < low || i >= high ? 0.0f : e * piece.value_scales[i]);
    total += e;
    std::memcpy(p + 2 * i, &b, 2);
  }
#endif
  state[0] = peak;
  state[1] = total;
}

template <class Keys, class Values>
struct QuantizedPanel {
  template <int MR>
  struct Body {
    static void run(const Piece& piece) {
      const CacheShape& shape = piece.args->shape;
      const int bs = shape.block_size, dp = shape.dp(), units = dp / (2 * Keys::kPairs);
      const size_t bytes = shape.head_bytes(), p_row = static_cast<size_t>(piece.keys) * 2;
      Accumulator<MR> acc;
      if (piece.cold)
        for (int b = 0; b < std::min(2, piece.blocks); ++b) prefetch(piece.key_blocks[b], bytes);
      for (int b = 0; b < piece.blocks; ++b) {
        if (piece.cold) {
          if (b + 2 < piece.blocks) prefetch(piece.key_blocks[b + 2], bytes);
          prefetch(piece.value_blocks[b], bytes);
        }
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
      for (int m = 0; m < MR; ++m)
        numerators(piece, m, piece.s + static_cast<size_t>(m) * piece.keys, piece.p + m * p_row, piece.out + m * (dp + 2));
      for (int d = 0; d < dp; d += kLanes) {
        acc.zero();
        for (int b = 0; b < piece.blocks; ++b)
          code_products<Values>(acc, piece.p + static_cast<size_t>(b) * bs * 2, 4, p_row, piece.value_blocks[b] + 2 * d,
                                static_cast<size_t>(2) * dp, bs / (2 * Values::kPairs));
        acc.store(piece.out + 2 + d, dp + 2);
      }
    }
  };
};

void run_panel(int format, int rows, const Piece& piece) {
  if (format == KV_INT8) for_rows<QuantizedPanel<Int8Codes, Int8Codes>::Body>(rows, piece);
  else if (format == KV_FP8) for_rows<QuantizedPanel<Fp8Codes, Fp8Codes>::Body>(rows, piece);
  else for_rows<QuantizedPanel<Int4Keys, Int4Values>::Body>(rows, piece);
}

// One query row, scaled and rotated as the keys are, into lane `m` of a panel of `r`. `x` is space for dp floats.
void pack_query(const AttentionArgs& a, const float* q, float* x, uint8_t* panel, int r) {
  const int d = a.shape.head_dim, dp = a.shape.dp();
  float scale = a.scale;
  std::fill(std::copy(q, q + d, x), x + dp, 0.0f);
  if (a.shape.rotates()) scale /= static_cast<float>(rotate_blocks(x, d));
  for (int i = 0; i < dp; i += 2) {
    const uint16_t pair[2] = {f32_to_bf16(x[i] * scale), f32_to_bf16(x[i + 1] * scale)};
    std::memcpy(panel + static_cast<size_t>(i / 2) * r * 4, pair, 4);
  }
}

void finish(const AttentionArgs& a, int token, int head, float* state) {
  float* o = state + 2;
  if (a.shape.rotates()) {
    const float r = 1.0f / static_cast<float>(rotate_blocks(o, a.shape.head_dim));
    for (int i = 0; i < a.shape.head_dim; ++i) o[i] *= r;
  }
  finish_row(a, token, head, o, state[0], state[1]);
}

// A tile of tokens and one KV head against some of its spans. states: where it is one of several tasks of the tile, a place for
// the rows of each span of the tile; else null, and the rows are finished here.
void run_task(const Batch& batch, const AttentionArgs& a, const AttentionScratch::Task& task, AttentionScratch::Thread& t,
              float* states, int first_span) {
  const CacheShape& shape = a.shape;
  const int group = a.heads / shape.kv_heads, rows = task.tokens * group, dp = shape.dp(), bs = shape.block_size;
  const int blocks_of_span = span_blocks(shape), span_keys = blocks_of_span * bs, stride = dp + 2;
  const int first_position = batch.lengths[task.sequence] - (batch.starts[task.sequence + 1] - task.token);
  const int end = first_position + task.tokens, begin = std::min(a.first_key(first_position), end);
  const int kept = a.kept_keys(end), kept_spans = spans_of(kept, span_keys);
  uint8_t* q = t.q.reserve(static_cast<size_t>(rows) * dp * 2);
  float* s = t.s.reserve(static_cast<size_t>(kMaxRows) * span_keys);
  uint8_t* p = t.p.reserve(static_cast<size_t>(kMaxRows) * span_keys * 4);
  float* value_scales = t.stats.reserve(static_cast<size_t>(span_keys) + kMaxRows * stride + dp);
  float *own = value_scales + span_keys, *space = own + kMaxRows * stride;
  float* totals = states ? nullptr : t.o.reserve(static_cast<size_t>(rows) * stride);
  if (totals) std::fill(totals, totals + static_cast<size_t>(rows) * stride, 0.0f);
  for (int row = 0; row < rows; ++row) {
    const int panel = row / kMaxRows, r = std::min(kMaxRows, rows - panel * kMaxRows);
    pack_query(a, a.q + (task.token + row / group) * a.q_stride + static_cast<size_t>(task.head * group + row % group) * shape.head_dim,
               space, q + (static_cast<size_t>(panel) * kMaxRows * (dp / 2) + row % kMaxRows) * 4, r);
    if (totals) totals[static_cast<size_t>(row) * stride] = kNegInf;
  }
  const int32_t* table = batch.tables + static_cast<size_t>(task.sequence) * batch.table_stride;
  const uint8_t *keys[kSpan / 32], *values[kSpan / 32];
  for (int span = task.begin; span < task.end; ++span) {
    const bool windowed = span >= first_span + kept_spans;  // else a span of the kept keys
    const int place = windowed ? span : span - first_span;
    const int start = windowed ? std::max(place * span_keys, begin / bs * bs) : place * span_keys;
    const int stop = std::min((place + 1) * span_keys, windowed ? end : kept);
    const int blocks = (stop - start + bs - 1) / bs;
    for (int b = 0; b < blocks; ++b) {
      const size_t at = static_cast<size_t>(table[start / bs + b]) * shape.block_bytes() + task.head * shape.head_bytes();
      keys[b] = a.keys + at;
      values[b] = a.values + at;
      const uint16_t* scales = code_scales(shape, values[b]);
      const float factor = shape.format == KV_FP8 ? Fp8Codes::kFactor : 1.0f;
      for (int i = 0; i < bs; ++i) value_scales[b * bs + i] = bf16_to_f32(scales[i]) * factor;
    }
    for (int row0 = 0; row0 < rows; row0 += kMaxRows) {
      const int r = std::min(kMaxRows, rows - row0);
      int low[kMaxRows], high[kMaxRows];
      for (int m = 0; m < r; ++m) {
        const int position = first_position + (row0 + m) / group;
        high[m] = std::min(position + 1, windowed ? end : kept) - start;
        low[m] = (windowed ? a.first_key(position) : 0) - start;
      }
      float* out = states ? states + (static_cast<size_t>(span - first_span) * rows + row0) * stride : own;
      const int seen = std::min(blocks, (high[r - 1] + bs - 1) / bs);
      if (seen <= 0 || low[0] >= seen * bs) {
        for (int m = 0; m < r; ++m) std::fill(std::fill_n(out + m * stride, 1, kNegInf), out + (m + 1) * stride, 0.0f);
      } else {
        run_panel(shape.format, r, {&a, keys, values, value_scales, seen, seen * bs, q + static_cast<size_t>(row0) * dp * 2, low, high,
                                    s, p, out, row0 == 0});
      }
      if (totals)
        for (int m = 0; m < r; ++m) fold(totals + static_cast<size_t>(row0 + m) * stride, out + m * stride, dp);
    }
  }
  if (totals)
    for (int row = 0; row < rows; ++row)
      finish(a, task.token + row / group, task.head * group + row % group, totals + static_cast<size_t>(row) * stride);
}

}  // namespace

void quantized_attention(Pool& pool, const Batch& batch, const AttentionArgs& a, AttentionScratch& scratch) {
  const int group = a.heads / a.shape.kv_heads, tile = std::max(1, kTileRows / group);
  const int span_keys = span_blocks(a.shape) * a.shape.block_size, stride = a.shape.dp() + 2;
  while (scratch.threads.size() < static_cast<size_t>(pool.threads())) scratch.threads.emplace_back();
  int tiles = 0;
  for (int r = 0; r < batch.sequences; ++r) tiles += (batch.starts[r + 1] - batch.starts[r] + tile - 1) / tile;
  tiles *= a.shape.kv_heads;
  scratch.tasks.clear();
  std::vector<size_t> offsets;   // of a tile's states, for each task of it
  std::vector<int> first_spans;
  size_t states = 0, work = 0;
  // Longest first, as in attention.cpp.
  for (int r = 0; r < batch.sequences; ++r) {
    const int rows = batch.starts[r + 1] - batch.starts[r];
    for (int i = (rows + tile - 1) / tile - 1; i >= 0; --i) {
      const int token = batch.starts[r] + i * tile, tokens = std::min(tile, batch.starts[r + 1] - token);
      const int position = batch.lengths[r] - rows + i * tile, end = position + tokens;
      const int begin = std::min(a.first_key(position), end), kept_spans = spans_of(a.kept_keys(end), span_keys);
      const int first = begin / span_keys - kept_spans, spans = spans_of(end, span_keys) - first;
      int parts = 1;
      if (pool.threads() > 1 && tiles < 4 * pool.threads()) parts = std::min(spans, 4 * pool.threads() / tiles + 1);
      for (int h = 0; h < a.shape.kv_heads; ++h) {
        for (int part = 0; part < parts; ++part) {
          scratch.tasks.push_back({r, token, tokens, h, first + spans * part / parts, first + spans * (part + 1) / parts, part, parts});
          offsets.push_back(states);
          first_spans.push_back(first);
        }
        if (parts > 1) states += static_cast<size_t>(spans) * tokens * group * stride;
        work += static_cast<size_t>(end - begin) * tokens * group;
      }
    }
  }
  float* partial = states ? scratch.partial.reserve(states) : nullptr;
  const int count = static_cast<int>(scratch.tasks.size());
  const auto body = [&](int begin, int end, int thread) {
    for (int i = begin; i < end; ++i) {
      const AttentionScratch::Task& task = scratch.tasks[i];
      run_task(batch, a, task, scratch.threads[thread], task.parts > 1 ? partial + offsets[i] : nullptr, first_spans[i]);
    }
  };
  if (work * a.shape.head_dim < 40000) body(0, count, 0);  // shorter than the hand-over to another thread
  else pool.run(count, body);
  for (int i = 0; i < count; ++i) {
    const AttentionScratch::Task& task = scratch.tasks[i];
    if (task.parts == 1 || task.part > 0) continue;
    const int rows = task.tokens * group, spans = scratch.tasks[i + task.parts - 1].end - task.begin;
    float* own = partial + offsets[i];
    for (int row = 0; row < rows; ++row) {
      float* total = own + static_cast<size_t>(row) * stride;
      for (int span = 1; span < spans; ++span) fold(total, total + static_cast<size_t>(span) * rows * stride, stride - 2);
      finish(a, task.token + row / group, task.head * group + row % group, total);
    }
  }
}

}  // namespace llmopt
