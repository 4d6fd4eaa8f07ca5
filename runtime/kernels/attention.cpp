// Online-softmax attention (Milakov & Gimelshein 2018; Dao et al. 2022) over paged keys and values.
//
// A task is a tile of query tokens with the query heads of one KV head: those rows share every key and value they load.
// A long context with few tasks is cut into parts that are merged at the end (Flash-Decoding, Dao et al. 2023).
#include "attention_torch.h"

namespace llmopt {
namespace {

constexpr int kSpan = 256;       // keys between two updates of the running maximum
constexpr int kTileRows = 48;    // query rows of a task
constexpr int kMinPart = 256;    // fewest keys worth a part of their own, if torch's span need not be kept whole

// Softmax numerators of one row of scores against a running maximum; returns the factor for what was summed before.
float softmax_row(const Span& span, int m, float* s, uint8_t* p) {
  const int n = span.keys, low = std::max(0, span.low[m]), high = std::min(n, span.high[m]);
  const bool half = span.args->shape.format == KV_BF16;
  if (!finish_scores(span, low, high, s)) {
    std::memset(p, 0, static_cast<size_t>(n) * (half ? 2 : 4));
    return 1.0f;
  }
  float peak = span.maximum[m], total = 0;
#if LLMOPT_AVX512
  __m512 best = _mm512_set1_ps(peak);
  for (int i = 0; i < n; i += 16) best = _mm512_max_ps(best, _mm512_loadu_ps(s + i));
  peak = _mm512_reduce_max_ps(best);
  const __m512 shift = _mm512_set1_ps(peak);
  __m512 sum = _mm512_setzero_ps();
  if (half) {
    for (int i = 0; i < n; i += 16) {
      const __m512 e = exp_short(_mm512_loadu_ps(s + i), shift);
      sum = _mm512_add_ps(sum, e);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 2 * i), to_bf16(e));
    }
  } else {
    for (int i = 0; i < n; i += 16) {
      const __m512 e = exp16(_mm512_sub_ps(_mm512_loadu_ps(s + i), shift));
      sum = _mm512_add_ps(sum, e);
      _mm512_storeu_ps(p + 4 * i, e);
    }
  }
  total = _mm512_reduce_add_ps(sum);
#else
  for (int i = low; i < high; ++i) peak = std::max(peak, s[i]);
  for (int i = 0; i < n; ++i) {
    const float e = i < low || i >= high ? 0.0f : std::exp(s[i] - peak);
    total += e;
    if (half) {
      const uint16_t b = f32_to_bf16(e);
      std::memcpy(p + 2 * i, &b, 2);
    } else {
      std::memcpy(p + 4 * i, &e, 4);
    }
  }
#endif
  const float factor = span.maximum[m] == kNegInf ? 0.0f : std::exp(span.maximum[m] - peak);
  span.maximum[m] = peak;
  span.sum[m] = span.sum[m] * factor + total;
  return factor;
}

template <class Op>
struct Panel {
  template <int MR>
  struct Body {
    static void run(const Span& span) {
      const CacheShape& shape = span.args->shape;
      const int bs = shape.block_size, dp = shape.dp();
      const size_t p_row = static_cast<size_t>(span.keys) * shape.element();
      Accumulator<MR> acc;
      const size_t block_bytes = shape.head_bytes();
      if (span.cold)
        for (int b = 0; b < std::min(2, span.blocks); ++b) prefetch(span.key_blocks[b], block_bytes);
      for (int b = 0; b < span.blocks; ++b) {
        if (span.cold) {
          if (b + 2 < span.blocks) prefetch(span.key_blocks[b + 2], block_bytes);
          prefetch(span.value_blocks[b], block_bytes);
        }
        for (int j = 0; j < bs; j += kLanes) {
          acc.zero();
          acc.template run<Op>(span.q, 4 * MR, 4, span.key_blocks[b] + 4 * j, static_cast<size_t>(4) * bs, dp / Op::kPerUnit);
          acc.store(span.s + b * bs + j, span.keys);
        }
      }
      for (int m = 0; m < MR; ++m) {
        const float factor = softmax_row(span, m, span.s + static_cast<size_t>(m) * span.keys, span.p + m * p_row);
        if (factor != 1.0f)
          for (int d = 0; d < dp; ++d) span.o[m * dp + d] *= factor;
      }
      for (int d = 0; d < dp; d += kLanes) {
        acc.load(span.o + d, dp);
        for (int b = 0; b < span.blocks; ++b)
          acc.template run<Op>(span.p + b * bs * shape.element(), 4, p_row, span.value_blocks[b] + 4 * d,
                               static_cast<size_t>(4) * dp, bs / Op::kPerUnit);
        acc.store(span.o + d, dp);
      }
    }
  };
};

void pack_query(const AttentionArgs& a, const float* q, uint8_t* panel, int r) {
  const int d = a.shape.head_dim, dp = a.shape.dp();
  const float scale = query_scale(a);
  if (a.shape.format == KV_BF16 && !a.as_torch) {
    for (int i = 0; i < dp; i += 2) {
      const uint16_t pair[2] = {f32_to_bf16(i < d ? q[i] * scale : 0.0f), f32_to_bf16(i + 1 < d ? q[i + 1] * scale : 0.0f)};
      std::memcpy(panel + static_cast<size_t>(i / 2) * r * 4, pair, 4);
    }
  } else {
    for (int i = 0; i < dp; ++i) {
      const float v = i < d ? q[i] * scale : 0.0f;
      std::memcpy(panel + static_cast<size_t>(i) * r * 4, &v, 4);
    }
  }
}

void run_task(const Batch& batch, const AttentionArgs& a, const AttentionScratch::Task& task,
              AttentionScratch::Thread& t, float* partial) {
  const CacheShape& shape = a.shape;
  const int group = a.heads / shape.kv_heads, rows = task.tokens * group, dp = shape.dp(), bs = shape.block_size;
  const int units = shape.format == KV_BF16 && !a.as_torch ? dp / 2 : dp;
  const int span_blocks = std::max(1, (a.as_torch ? kTorchSpan : kSpan) / bs), span_keys = span_blocks * bs;
  uint8_t* q = t.q.reserve(static_cast<size_t>(rows) * units * 4);
  float* s = t.s.reserve(static_cast<size_t>(kMaxRows) * span_keys);
  uint8_t* p = t.p.reserve(static_cast<size_t>(kMaxRows) * span_keys * 4);
  float* o = t.o.reserve(static_cast<size_t>(rows) * dp);
  float* maximum = t.stats.reserve(static_cast<size_t>(rows) * 2);
  float* sum = maximum + rows;
  std::fill(o, o + static_cast<size_t>(rows) * dp, 0.0f);
  std::fill(maximum, maximum + rows, kNegInf);
  std::fill(sum, sum + rows, 0.0f);
  const int first_position = batch.lengths[task.sequence] - (batch.starts[task.sequence + 1] - task.token);
  const int tokens = batch.starts[task.sequence + 1] - batch.starts[task.sequence];
  const ScoreOrder order = score_order(task.token - batch.starts[task.sequence], tokens, batch.lengths[task.sequence]);
  const auto position = [&](int row) { return first_position + row / group; };
  for (int row = 0; row < rows; ++row) {
    const int panel = row / kMaxRows, r = std::min(kMaxRows, rows - panel * kMaxRows);
    pack_query(a, a.q + (task.token + row / group) * a.q_stride +
                      static_cast<size_t>(task.head * group + row % group) * shape.head_dim,
               q + (static_cast<size_t>(panel) * kMaxRows * units + row % kMaxRows) * 4, r);
  }
  const int32_t* table = batch.tables + static_cast<size_t>(task.sequence) * batch.table_stride;
  const uint8_t *key_blocks[kTorchSpan / 32 + 1], *value_blocks[kTorchSpan / 32 + 1];
  // Adds the keys [begin, end), of which a row sees those up to its own, and from its window's first one on if `windowed`.
  const auto attend = [&](int begin, int end, bool windowed) {
    for (int start = begin / bs * bs; start < end; start += span_keys) {
      const int blocks = std::min(span_blocks, (end - start + bs - 1) / bs);
      for (int b = 0; b < blocks; ++b) {
        const size_t at = static_cast<size_t>(table[start / bs + b]) * shape.block_bytes() + task.head * shape.head_bytes();
        key_blocks[b] = a.keys + at;
        value_blocks[b] = a.values + at;
      }
      for (int panel = 0; panel * kMaxRows < rows; ++panel) {
        const int row0 = panel * kMaxRows, r = std::min(kMaxRows, rows - row0);
        int low[kMaxRows], high[kMaxRows];
        for (int m = 0; m < r; ++m) {
          const int pos = position(row0 + m);
          high[m] = std::min(pos + 1, end) - start;
          low[m] = std::max(windowed ? a.first_key(pos) : 0, begin) - start;
        }
        const int seen = std::min(blocks, (high[r - 1] + bs - 1) / bs);
        if (seen <= 0 || low[0] >= seen * bs) continue;
        Span span{&a, key_blocks, value_blocks, seen, seen * bs, q + static_cast<size_t>(row0) * units * 4, low, high,
                  s, o + static_cast<size_t>(row0) * dp, maximum + row0, sum + row0, p,
                  std::min(span_keys, batch.lengths[task.sequence] - start), order, panel == 0};
#if LLMOPT_AVX512
        if (a.as_torch) {
          for_rows<TorchPanel::Body>(r, span);
          continue;
        }
#endif
        if (shape.format == KV_BF16) for_rows<Panel<BF16Op>::template Body>(r, span);
        else for_rows<Panel<F32Op>::template Body>(r, span);
      }
    }
  };
  if (task.part == 0) attend(0, a.kept_keys(first_position + task.tokens), false);
  attend(task.begin, task.end, true);
  for (int row = 0; row < rows; ++row) {
    if (!partial) {
      finish_row(a, task.token + row / group, task.head * group + row % group, o + static_cast<size_t>(row) * dp,
                 maximum[row], sum[row]);
    } else {
      float* to = partial + static_cast<size_t>(row) * (dp + 2);
      to[0] = maximum[row];
      to[1] = sum[row];
      std::memcpy(to + 2, o + static_cast<size_t>(row) * dp, sizeof(float) * dp);
    }
  }
}

// Merges the parts of one task into its rows.
void merge(const AttentionArgs& a, const AttentionScratch::Task& task, float* parts, size_t part_stride) {
  const int group = a.heads / a.shape.kv_heads, dp = a.shape.dp();
  for (int row = 0; row < task.tokens * group; ++row) {
    float* total = parts + static_cast<size_t>(row) * (dp + 2);
    for (int part = 1; part < task.parts; ++part) fold(total, total + part * part_stride, dp);
    finish_row(a, task.token + row / group, task.head * group + row % group, total + 2, total[0], total[1]);
  }
}

}  // namespace

void attention(Pool& pool, const Batch& batch, const AttentionArgs& given, AttentionScratch& scratch) {
  if (given.shape.quantized()) return quantized_attention(pool, batch, given, scratch);
  AttentionArgs a = given;
  a.as_torch = given.as_torch && kTorchKernels && given.shape.format == KV_BF16;
  const int group = a.heads / a.shape.kv_heads, bs = a.shape.block_size;
  int tile = std::max(1, kTileRows / group);
  if (a.as_torch)  // no tile may reach into two of torch's
    while (32 % tile) --tile;
  while (scratch.threads.size() < static_cast<size_t>(pool.threads())) scratch.threads.emplace_back();
  int tiles = 0;
  for (int r = 0; r < batch.sequences; ++r) tiles += (batch.starts[r + 1] - batch.starts[r] + tile - 1) / tile;
  tiles *= a.shape.kv_heads;
  scratch.tasks.clear();
  size_t partial_rows = 0, work = 0;
  // Longest first, so that the last pieces to be taken are short ones: later tiles of a sequence see more keys.
  for (int r = 0; r < batch.sequences; ++r) {
    const int rows = batch.starts[r + 1] - batch.starts[r];
    for (int i = (rows + tile - 1) / tile - 1; i >= 0; --i) {
      const int token = batch.starts[r] + i * tile, tokens = std::min(tile, batch.starts[r + 1] - token);
      const int first = batch.lengths[r] - rows + i * tile, end = first + tokens;
      const int begin = std::min(a.first_key(first), end);
      int parts = 1;
      if (pool.threads() > 1 && tiles < 4 * pool.threads())
        parts = std::max(1, std::min((end - begin) / (a.as_torch ? kTorchSpan : kMinPart), 4 * pool.threads() / tiles + 1));
      for (int h = 0; h < a.shape.kv_heads; ++h)
        for (int part = 0; part < parts; ++part) {
          const int step = round_up((end - begin + parts - 1) / parts, bs);
          const int from = std::min(end, begin / bs * bs + part * step), to = std::min(end, begin / bs * bs + (part + 1) * step);
          scratch.tasks.push_back({r, token, tokens, h, std::max(begin, from), part + 1 == parts ? end : to, part, parts});
          if (parts > 1) partial_rows += tokens * group;
          work += static_cast<size_t>(to - from) * tokens * group;
        }
    }
  }
  const size_t stride = static_cast<size_t>(a.shape.dp()) + 2;
  float* partial = partial_rows ? scratch.partial.reserve(partial_rows * stride) : nullptr;
  std::vector<size_t> offsets(scratch.tasks.size(), 0);
  size_t at = 0;
  for (size_t i = 0; i < scratch.tasks.size(); ++i)
    if (scratch.tasks[i].parts > 1) {
      offsets[i] = at;
      at += scratch.tasks[i].tokens * group * stride;
    }
  const auto body = [&](int begin, int end, int thread) {
    for (int i = begin; i < end; ++i)
      run_task(batch, a, scratch.tasks[i], scratch.threads[thread], scratch.tasks[i].parts > 1 ? partial + offsets[i] : nullptr);
  };
  const int count = static_cast<int>(scratch.tasks.size());
  if (work * a.shape.head_dim < 40000) body(0, count, 0);  // shorter than the hand-over to another thread
  else pool.run(count, body);
  for (int i = 0; i < count; ++i)
    if (scratch.tasks[i].parts > 1 && scratch.tasks[i].part == 0)
      merge(a, scratch.tasks[i], partial + offsets[i], scratch.tasks[i].tokens * group * stride);
}

void write_token(const CacheShape& shape, uint8_t* keys, uint8_t* values, int slot, const float* k, const float* v) {
  if (shape.quantized()) return write_quantized(shape, keys, values, slot, k, v);
  const int bs = shape.block_size, d = shape.head_dim, dp = shape.dp(), offset = slot % bs;
  const size_t base = static_cast<size_t>(slot / bs) * shape.block_bytes();
  for (int h = 0; h < shape.kv_heads; ++h, k += d, v += d) {
    uint8_t* kh = keys + base + h * shape.head_bytes();
    uint8_t* vh = values + base + h * shape.head_bytes();
    if (shape.format == KV_BF16) {
      uint16_t* ko = reinterpret_cast<uint16_t*>(kh) + 2 * offset;
      uint16_t* vo = reinterpret_cast<uint16_t*>(vh) + static_cast<size_t>(offset / 2) * dp * 2 + offset % 2;
      for (int i = 0; i < d; ++i) {
        ko[static_cast<size_t>(i / 2) * bs * 2 + i % 2] = f32_to_bf16(k[i]);
        vo[2 * i] = f32_to_bf16(v[i]);
      }
    } else {
      float* ko = reinterpret_cast<float*>(kh) + offset;
      for (int i = 0; i < d; ++i) ko[static_cast<size_t>(i) * bs] = k[i];
      std::memcpy(reinterpret_cast<float*>(vh) + static_cast<size_t>(offset) * dp, v, sizeof(float) * d);
    }
  }
}

}  // namespace llmopt
