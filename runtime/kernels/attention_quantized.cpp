// Attention over quantized keys and values: the codes become bfloat16 in registers, scales multiply scores and numerators.
//
// The spans of keys that are computed as one stand at fixed positions of a sequence, each has a softmax of its own, and they are
// folded in order, whoever computes them. So a row's sums depend on its sequence alone: not on its neighbours in the batch, nor
// on how many tokens of its prompt are computed at once, nor on the number of threads. Where keys are by channel, those of a row's
// own block are a span of their own, of exact keys, and come last.
#include "attention_rows.h"
#include "attention_scores.h"

namespace llmopt {
namespace {

constexpr int kSpan = 256;      // keys of a span, or one block where that is longer
constexpr int kTileRows = 48;   // query rows of a task

int span_blocks(const CacheShape& shape) { return std::max(1, kSpan / shape.block_size); }
int spans_of(int keys, int span_keys) { return (keys + span_keys - 1) / span_keys; }

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
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 2 * i), to_bf16(scaled));
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

template <class Scores, class Values>
struct QuantizedPanel {
  template <int MR>
  struct Body {
    static void run(const Piece& piece) {
      const int bs = piece.args->shape.block_size, dp = piece.args->shape.dp();
      const size_t p_row = static_cast<size_t>(piece.keys) * 2;
      Scores::template run<MR>(piece);
      Accumulator<MR> acc;
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
  if (format == KV_INT8) for_rows<QuantizedPanel<TokenScores<Int8Codes>, Int8Codes>::Body>(rows, piece);
  else if (format == KV_FP8) for_rows<QuantizedPanel<TokenScores<Fp8Codes>, Fp8Codes>::Body>(rows, piece);
  else if (piece.channels) for_rows<QuantizedPanel<ChannelScores, Int4Values>::Body>(rows, piece);
  else for_rows<QuantizedPanel<ExactScores, Int4Values>::Body>(rows, piece);
}

// One query row, scaled, in bfloat16 pairs that are `step` bytes apart. x: dp floats, the row as float.
void pack_query(const AttentionArgs& a, const float* q, float* x, uint8_t* to, size_t step) {
  const int d = a.shape.head_dim, dp = a.shape.dp();
  for (int i = 0; i < d; ++i) x[i] = q[i] * a.scale;
  std::fill(x + d, x + dp, 0.0f);
  for (int i = 0; i < dp; i += 2) {
    const uint16_t pair[2] = {f32_to_bf16(x[i]), f32_to_bf16(x[i + 1])};
    std::memcpy(to + i / 2 * step, pair, 4);
  }
}

// The spans of a tile of tokens at positions first … end - 1, in the order in which they are folded: of the kept keys, of the
// others, and where keys are by channel the tile's own blocks, twice where kept keys are among them.
struct Spans {
  int span_keys, bs, begin, coded, kept, end, kept_spans, window_first, window_spans, own_first, own_blocks, count;
  Spans(const AttentionArgs& a, int first, int end_)
      : span_keys(span_blocks(a.shape) * a.shape.block_size), bs(a.shape.block_size), end(end_) {
    const bool exact = a.shape.by_channel();
    coded = exact ? (end - 1) / bs * bs : end;  // no row sees codes of keys beyond
    kept = a.kept_keys(end);
    begin = std::min(a.first_key(first), coded);
    kept_spans = spans_of(std::min(kept, coded), span_keys);
    window_first = begin / span_keys;
    window_spans = std::max(0, spans_of(coded, span_keys) - window_first);
    own_first = first / bs;
    own_blocks = exact ? (end - 1) / bs - own_first + 1 : 0;
    count = kept_spans + window_spans + own_blocks * (kept > own_first * bs ? 2 : 1);
  }
  struct Span { bool windowed; int own, start, stop; };  // own: the block whose exact keys they are, or -1
  Span at(int span) const {
    if (span < kept_spans) return {false, -1, span * span_keys, std::min((span + 1) * span_keys, std::min(kept, coded))};
    span -= kept_spans;
    if (span < window_spans) {
      const int place = window_first + span;
      return {true, -1, std::max(place * span_keys, begin / bs * bs), std::min((place + 1) * span_keys, coded)};
    }
    span -= window_spans;
    const bool windowed = span < own_blocks;
    const int own = own_first + span % own_blocks;
    return {windowed, own, own * bs, std::min((own + 1) * bs, windowed ? end : kept)};
  }
  // The keys that a row at `position` sees of a span, relative to its start.
  void range(const AttentionArgs& a, const Span& span, int position, int* low, int* high) const {
    int limit = std::min(position + 1, span.windowed ? end : kept);
    if (own_blocks && span.own < 0) limit = std::min(limit, position / bs * bs);
    if (span.own >= 0) limit = position / bs == span.own ? std::min(limit, span.stop) : span.start;
    *low = (span.windowed ? a.first_key(position) : 0) - span.start;
    *high = limit - span.start;
  }
};

// The exact keys of one head in block `own`, up to position `stop`, as bfloat16 [dp/2][block_size][2]: the batch's own where they
// are new, the others from the tail.
void exact_block(const Batch& batch, const AttentionArgs& a, const AttentionScratch::Task& task, int own, int stop, uint16_t* to) {
  const CacheShape& shape = a.shape;
  const int bs = shape.block_size, d = shape.head_dim, quarter = bs / 4, r = task.sequence;
  const int start = batch.lengths[r] - (batch.starts[r + 1] - batch.starts[r]), base = own * bs;
  const int32_t* tail = batch.tables + static_cast<size_t>(r) * batch.table_stride + own + 1;
  std::memset(to, 0, static_cast<size_t>(shape.dp()) * bs * 2);
  for (int part = 0; base + part * quarter < std::min(start, stop); ++part) {
    const uint8_t* from = (part % 2 ? a.values : a.keys) + tail_at(shape, tail, part, task.head);
    const size_t bytes = 4 * static_cast<size_t>(std::min(quarter, start - base - part * quarter));
    for (int i = 0; i < (d + 1) / 2; ++i)
      std::memcpy(to + (static_cast<size_t>(i) * bs + part * quarter) * 2, from + static_cast<size_t>(i) * quarter * 4, bytes);
  }
  for (int p = std::max(base, start); p < stop; ++p) {
    const float* k = a.k + (batch.starts[r] + p - start) * a.k_stride + static_cast<size_t>(task.head) * d;
    for (int i = 0; i < d; ++i) to[(static_cast<size_t>(i / 2) * bs + p - base) * 2 + i % 2] = f32_to_bf16(k[i]);
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
              float* states) {
  const CacheShape& shape = a.shape;
  const bool channels = shape.by_channel();
  const int group = a.heads / shape.kv_heads, rows = task.tokens * group, dp = shape.dp(), bs = shape.block_size, stride = dp + 2;
  const int first_position = batch.lengths[task.sequence] - (batch.starts[task.sequence + 1] - task.token);
  const Spans spans(a, first_position, first_position + task.tokens);
  uint8_t* q = t.q.reserve(static_cast<size_t>(rows) * dp * 2);
  float* s = t.s.reserve(static_cast<size_t>(kMaxRows) * spans.span_keys);
  uint8_t* p = t.p.reserve(static_cast<size_t>(kMaxRows) * spans.span_keys * 4);
  float* value_scales = t.stats.reserve(static_cast<size_t>(spans.span_keys) + kMaxRows * stride);
  float* own = value_scales + spans.span_keys;
  float* floats = t.rows.reserve(static_cast<size_t>(channels ? rows : 1) * dp + (channels ? (kMaxRows / 2 + 2) * dp : 0));
  uint8_t* exact = channels ? t.exact.reserve(static_cast<size_t>(dp) * bs * 2) : nullptr;
  float* totals = states ? nullptr : t.o.reserve(static_cast<size_t>(rows) * stride);
  if (totals) std::fill(totals, totals + static_cast<size_t>(rows) * stride, 0.0f);
  for (int row = 0; row < rows; ++row) {
    const int panel = row / kMaxRows, r = std::min(kMaxRows, rows - panel * kMaxRows);
    const size_t at = channels ? static_cast<size_t>(row) * dp * 2
                               : (static_cast<size_t>(panel) * kMaxRows * (dp / 2) + row % kMaxRows) * 4;
    const float* query = a.q + (task.token + row / group) * a.q_stride;
    pack_query(a, query + static_cast<size_t>(task.head * group + row % group) * shape.head_dim,
               floats + (channels ? static_cast<size_t>(row) * dp : 0), q + at, channels ? 4 : static_cast<size_t>(4) * r);
    if (totals) totals[static_cast<size_t>(row) * stride] = kNegInf;
  }
  const int32_t* table = batch.tables + static_cast<size_t>(task.sequence) * batch.table_stride;
  const uint8_t *keys[kSpan / 32], *values[kSpan / 32];
  ChannelKeys by_channel[kSpan / 32];
  for (int number = task.begin; number < task.end; ++number) {
    const Spans::Span span = spans.at(number);
    const int blocks = (span.stop - span.start + bs - 1) / bs;
    for (int b = 0; b < blocks; ++b) {
      const int block = table[span.start / bs + b];
      values[b] = a.values + static_cast<size_t>(block) * shape.block_bytes() + task.head * shape.head_bytes();
      if (channels) by_channel[b] = ChannelKeys(shape, a.keys, block, task.head);
      keys[b] = channels ? by_channel[b].codes : a.keys + (values[b] - a.values);
      const uint16_t* scales = code_scales(shape, values[b]);
      const float factor = shape.format == KV_FP8 ? Fp8Codes::kFactor : 1.0f;
      for (int i = 0; i < bs; ++i) value_scales[b * bs + i] = bf16_to_f32(scales[i]) * factor;
    }
    if (span.own >= 0) {
      exact_block(batch, a, task, span.own, span.stop, reinterpret_cast<uint16_t*>(exact));
      keys[0] = exact;
    }
    for (int row0 = 0; row0 < rows; row0 += kMaxRows) {
      const int r = std::min(kMaxRows, rows - row0);
      int low[kMaxRows], high[kMaxRows], furthest = 0, nearest = spans.span_keys;
      for (int m = 0; m < r; ++m) {
        spans.range(a, span, first_position + (row0 + m) / group, low + m, high + m);
        if (low[m] >= high[m]) continue;
        furthest = std::max(furthest, high[m]);
        nearest = std::min(nearest, low[m]);
      }
      float* out = states ? states + (static_cast<size_t>(number) * rows + row0) * stride : own;
      const int seen = std::min(blocks, (furthest + bs - 1) / bs);
      if (seen <= 0 || nearest >= seen * bs) {
        for (int m = 0; m < r; ++m) std::fill(std::fill_n(out + m * stride, 1, kNegInf), out + (m + 1) * stride, 0.0f);
      } else {
        run_panel(shape.format, r, {&a, keys, channels && span.own < 0 ? by_channel : nullptr, values, value_scales, seen,
                                    seen * bs, q + static_cast<size_t>(row0) * dp * 2, floats + static_cast<size_t>(channels ? row0 : 0) * dp,
                                    floats + static_cast<size_t>(channels ? rows : 0) * dp, low, high, s, p, out,
                                    row0 == 0 && span.own < 0});
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
  const int stride = a.shape.dp() + 2;
  while (scratch.threads.size() < static_cast<size_t>(pool.threads())) scratch.threads.emplace_back();
  int tiles = 0;
  for (int r = 0; r < batch.sequences; ++r) tiles += (batch.starts[r + 1] - batch.starts[r] + tile - 1) / tile;
  tiles *= a.shape.kv_heads;
  scratch.tasks.clear();
  std::vector<size_t> offsets;   // of a tile's states, for each task of it
  size_t states = 0, work = 0;
  // Longest first, as in attention.cpp.
  for (int r = 0; r < batch.sequences; ++r) {
    const int rows = batch.starts[r + 1] - batch.starts[r];
    for (int i = (rows + tile - 1) / tile - 1; i >= 0; --i) {
      const int token = batch.starts[r] + i * tile, tokens = std::min(tile, batch.starts[r + 1] - token);
      const int position = batch.lengths[r] - rows + i * tile, end = position + tokens;
      const Spans plan(a, position, end);
      const int spans = plan.count;
      int parts = 1;
      if (pool.threads() > 1 && tiles < 4 * pool.threads()) parts = std::min(spans, 4 * pool.threads() / tiles + 1);
      for (int h = 0; h < a.shape.kv_heads; ++h) {
        for (int part = 0; part < parts; ++part) {
          scratch.tasks.push_back({r, token, tokens, h, spans * part / parts, spans * (part + 1) / parts, part, parts});
          offsets.push_back(states);
        }
        if (parts > 1) states += static_cast<size_t>(spans) * tokens * group * stride;
        work += static_cast<size_t>(end - plan.begin) * tokens * group;
      }
    }
  }
  float* partial = states ? scratch.partial.reserve(states) : nullptr;
  const int count = static_cast<int>(scratch.tasks.size());
  const auto body = [&](int begin, int end, int thread) {
    for (int i = begin; i < end; ++i) {
      const AttentionScratch::Task& task = scratch.tasks[i];
      run_task(batch, a, task, scratch.threads[thread], task.parts > 1 ? partial + offsets[i] : nullptr);
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
