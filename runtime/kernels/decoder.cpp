#include "decoder.h"

#include <chrono>

namespace llmopt {
namespace {

constexpr int kPanelBytes = 256 * 1024;  // activations that a thread keeps in its L2 cache while it walks over tiles
constexpr int64_t kSerialWork = 2000;     // tiles x bytes of a row x rows: less is done before another thread could start
constexpr int kSerialRows = 3;           // up to here, rows are not worth handing to another thread

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Rotates pairs (i, i + half), as in Su et al. 2021 with the halves layout of Llama.
void rotate(float* x, const float* cos, const float* sin, int half, bool round) {
  if (!round) {
    for (int i = 0; i < half; ++i) {
      const float a = x[i], b = x[i + half];
      x[i] = a * cos[i] - b * sin[i];
      x[i + half] = b * cos[i] + a * sin[i];
    }
    return;
  }
  for (int i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = bf16_round(bf16_round(a * cos[i]) - bf16_round(b * sin[i]));
    x[i + half] = bf16_round(bf16_round(b * cos[i]) + bf16_round(a * sin[i]));
  }
}

// x += scale * update over n values; `update` is overwritten.
void add_scaled(float* x, float* update, float scale, int n, bool round) {
  if (!round) {
    for (int i = 0; i < n; ++i) x[i] += scale * update[i];
    return;
  }
  round_to_bf16(update, n);
  if (scale != 1.0f) {
    for (int i = 0; i < n; ++i) update[i] *= scale;
    round_to_bf16(update, n);
  }
  for (int i = 0; i < n; ++i) x[i] += update[i];
  round_to_bf16(x, n);
}

}  // namespace

void Decoder::begin_part(int part) {
  if (!profile) return;
  const int64_t now = now_ns();
  if (part_ >= 0) part_ns[part_] += now - part_start_;
  part_ = part;
  part_start_ = now;
}

template <class F>
void Decoder::rows(int count, const F& f) {
  const auto body = [&](int begin, int end, int thread) {
    for (int i = begin; i < end; ++i) f(i, threads_[thread]);
  };
  if (count <= kSerialRows) body(0, count, 0);
  else pool_->run(count, body);
}

int Decoder::check(const StepArgs& a) const {
  if (!keys_) return STEP_NO_CACHE;
  int limit = INT32_MAX;
  for (const LayerSpec& l : layers_)
    if (l.rope >= 0) limit = std::min(limit, ropes_[l.rope].positions);
  for (int t = 0; t < a.tokens; ++t) {
    if (a.token_ids[t] < 0 || a.token_ids[t] >= spec_.vocab) return STEP_TOKEN;
    if (a.positions[t] < 0 || a.positions[t] >= limit) return STEP_POSITION;
    if (a.slots[t] < 0 || a.slots[t] / cache_.block_size >= cache_.num_blocks) return STEP_SLOT;
  }
  if (a.starts[0] != 0 || a.starts[a.sequences] != a.tokens) return STEP_SEQUENCE;
  for (int r = 0; r < a.sequences; ++r) {
    const int count = a.starts[r + 1] - a.starts[r], used = (a.lengths[r] + cache_.block_size - 1) / cache_.block_size;
    const int blocks = used + cache_.tail_blocks();
    if (count < 1 || a.lengths[r] < count) return STEP_SEQUENCE;
    if (blocks > a.table_stride) return STEP_BLOCK;
    for (int b = 0; b < blocks; ++b) {
      const int block = a.tables[static_cast<size_t>(r) * a.table_stride + b];
      if (block < 0 || block >= cache_.num_blocks) return STEP_BLOCK;
    }
  }
  for (int i = 0; i < a.logit_count; ++i)
    if (a.logit_rows[i] < 0 || a.logit_rows[i] >= a.tokens) return STEP_LOGIT_ROW;
  for (int i = 0; i < a.layer_count; ++i)
    if (a.layers[i] < (i ? a.layers[i - 1] + 1 : 0) || a.layers[i] >= spec_.layers) return STEP_LAYER;
  return STEP_OK;
}

void Decoder::embed(const StepArgs& a) {
  const int hidden = spec_.hidden, ld = round_up(hidden, kLanes);
  hidden_ = x_.reserve(static_cast<size_t>(a.tokens) * ld);
  rows(a.tokens, [&](int t, Thread&) {
    const size_t at = static_cast<size_t>(a.token_ids[t]) * hidden;
    float* x = hidden_ + static_cast<size_t>(t) * ld;
    if (spec_.embedding_bf16) {
      const uint16_t* e = static_cast<const uint16_t*>(spec_.embedding) + at;
      for (int i = 0; i < hidden; ++i) x[i] = bf16_to_f32(e[i]) * spec_.embedding_scale;
    } else {
      const float* e = static_cast<const float*>(spec_.embedding) + at;
      for (int i = 0; i < hidden; ++i) x[i] = e[i] * spec_.embedding_scale;
    }
    if (round_ && spec_.embedding_scale != 1.0f) round_to_bf16(x, hidden);
  });
}

void Decoder::mark_alone(const StepArgs& a) {
  alone_.assign(std::max(a.tokens, a.logit_count), 0);
  for (int r = 0; r < a.sequences; ++r)
    if (a.starts[r + 1] - a.starts[r] == 1) alone_[a.starts[r]] = 1;
}

template <class Row>
void Decoder::pack(int count, std::initializer_list<const Linear*> linears, const Row& row) {
  acts_used_ = 0;
  int k = 0;
  for (const Linear* l : linears) {
    bool known = false;
    for (int i = 0; i < acts_used_; ++i) known = known || acts_[i].matches(*l);
    if (!known) acts_[acts_used_++].resize(count, *l);
    k = l->k;
  }
  for (int i = 0; i < acts_used_; ++i) acts_[i].alone = alone_.data();
  const int kp = round_up(k, kLanes);
  // By panels: the rows of a panel are interleaved, and two threads in one would fight for its cache lines.
  const int panels = (count + kMaxRows - 1) / kMaxRows;
  pool_->run(panels, [&](int begin, int end, int thread) {
    float* space = threads_[thread].row.reserve(static_cast<size_t>(2) * kp);
    for (int i = begin * kMaxRows; i < std::min(count, end * kMaxRows); ++i) {
      const float* x = row(i, space);
      for (int j = 0; j < acts_used_; ++j) acts_[j].pack_row(i, x, k, space + kp);
    }
  });
}

const Activations& Decoder::packed(const Linear& linear) const {
  for (int i = 0; i < acts_used_; ++i)
    if (acts_[i].matches(linear)) return acts_[i];
  std::abort();  // pack() was called without this linear
}

// Into how many parts the panels of a product are cut: each fits the cache, and with many rows every thread keeps the rows that
// it also normalizes and packs.
int Decoder::panel_parts(int panels, int panel_bytes) const {
  const int limit = std::max(1, kPanelBytes / panel_bytes), parts = (panels + limit - 1) / limit, n = pool_->threads();
  return panels >= 6 * n ? round_up(parts, n) : parts;
}

// Calls store(linear, tile, first row, rows, c[rows][32]) for every tile of every linear and every panel of rows.
template <class Store>
void Decoder::product(std::initializer_list<const Linear*> linears, int count, const Store& store) {
  int tiles = 0, kp = 0;
  for (const Linear* l : linears) {
    tiles += l->tiles;
    kp = std::max(kp, l->kp * (l->activation == X_F32 ? 4 : l->activation == X_BF16 ? 2 : 1));
  }
  const int panels = (count + kMaxRows - 1) / kMaxRows, parts = panel_parts(panels, kMaxRows * kp);
  const int step = (panels + parts - 1) / parts;
  const auto body = [&](int begin, int end, int thread) {
    alignas(64) float c[kMaxRows * kLanes];
    for (int i = begin; i < end; ++i) {
      const int first = i / tiles * step, last = std::min(panels, first + step);
      int tile = i % tiles, index = 0;
      const Linear* l = nullptr;
      for (const Linear* each : linears) {
        l = each;
        if (tile < each->tiles) break;
        tile -= each->tiles;
        ++index;
      }
      if (first >= last) continue;
      const Activations& x = packed(*l);
      TileView view = prepare_tile(*l, tile, std::min(count, last * kMaxRows) - first * kMaxRows, threads_[thread].tile);
      for (int panel = first; panel < last; ++panel) {
        panel_product(*l, view, tile, x, panel, c);
        store(index, tile, panel * kMaxRows, x.panel_rows(panel), c);
      }
    }
  };
  if (static_cast<int64_t>(tiles) * kp * count < kSerialWork) body(0, tiles * parts, 0);
  else pool_->run(tiles * parts, body);
}

void Decoder::queries_keys_values(const LayerSpec& l, int index, const StepArgs& a) {
  const int d = spec_.head_dim, hidden = spec_.hidden, ld = round_up(hidden, kLanes);
  begin_part(PART_ROWS);
  pack(a.tokens, {l.q, l.k, l.v}, [&](int t, float* space) -> const float* {
    const float* x = hidden_ + static_cast<size_t>(t) * ld;
    if (!l.input_norm) return x;
    norm(x, l.input_norm, hidden, space);
    return space;
  });
  const int offset[3] = {0, l.q->tiles * kLanes, (l.q->tiles + l.k->tiles) * kLanes};
  const size_t stride = static_cast<size_t>(offset[2]) + l.v->tiles * kLanes;
  float* qkv = qkv_.reserve(stride * a.tokens);
  begin_part(PART_QKV);
  product({l.q, l.k, l.v}, a.tokens, [&](int which, int tile, int row, int count, float* c) {
    if (round_) round_to_bf16(c, count * kLanes);
    for (int m = 0; m < count; ++m)
      std::memcpy(qkv + (row + m) * stride + offset[which] + tile * kLanes, c + m * kLanes, sizeof(float) * kLanes);
  });
  begin_part(PART_ROPE);
  const size_t count = static_cast<size_t>(cache_.num_blocks) * index;
  uint8_t *keys = keys_ + count * cache_.key_block_bytes(), *values = values_ + count * cache_.block_bytes();
  rows(a.tokens, [&](int t, Thread&) {
    float *q = qkv + t * stride, *k = q + offset[1], *v = q + offset[2];
    if (l.q_norm && l.qk_norm_full) {
      norm(q, l.q_norm, spec_.heads * d, q);
      norm(k, l.k_norm, spec_.kv_heads * d, k);
    } else if (l.q_norm) {
      for (int h = 0; h < spec_.heads; ++h) norm(q + h * d, l.q_norm, d, q + h * d);
      for (int h = 0; h < spec_.kv_heads; ++h) norm(k + h * d, l.k_norm, d, k + h * d);
    }
    if (l.rope >= 0) {
      const RopeTable& table = ropes_[l.rope];
      const float* cos = table.cos + static_cast<size_t>(a.positions[t]) * table.half;
      const float* sin = table.sin + static_cast<size_t>(a.positions[t]) * table.half;
      for (int h = 0; h < spec_.heads; ++h) rotate(q + h * d, cos, sin, table.half, round_);
      for (int h = 0; h < spec_.kv_heads; ++h) rotate(k + h * d, cos, sin, table.half, round_);
    }
    write_token(cache_, keys, values, a.slots[t], k, v);
  });
  if (cache_.by_channel())
    write_keys(*pool_, cache_, keys, values, {a.sequences, a.starts, a.lengths, a.tables, a.table_stride}, qkv + offset[1], stride);
}

void Decoder::norm(const float* x, const float* weight, int n, float* y) const {
  rms_norm(x, weight, spec_.norm_eps, n, y, spec_.rounding);
}

// hidden += scale * post_norm(W x), x as packed.
void Decoder::residual(const Linear& linear, int count, float scale, const float* post_norm) {
  const int hidden = spec_.hidden, ld = round_up(hidden, kLanes);
  if (!post_norm) {
    product({&linear}, count, [&](int, int tile, int row, int n, float* c) {
      for (int m = 0; m < n; ++m)
        add_scaled(hidden_ + static_cast<size_t>(row + m) * ld + tile * kLanes, c + m * kLanes, scale, kLanes, round_);
    });
    return;
  }
  float* update = update_.reserve(static_cast<size_t>(count) * ld);
  product({&linear}, count, [&](int, int tile, int row, int n, float* c) {
    if (round_) round_to_bf16(c, n * kLanes);
    for (int m = 0; m < n; ++m)
      std::memcpy(update + static_cast<size_t>(row + m) * ld + tile * kLanes, c + m * kLanes, sizeof(float) * kLanes);
  });
  rows(count, [&](int i, Thread&) {
    float *x = hidden_ + static_cast<size_t>(i) * ld, *u = update + static_cast<size_t>(i) * ld;
    norm(u, post_norm, hidden, u);
    add_scaled(x, u, scale, hidden, round_);
  });
}

void Decoder::gated_mlp(const LayerSpec& l, int count) {
  const int hidden = spec_.hidden, ld = round_up(hidden, kLanes), width = l.gate->tiles * kLanes;
  begin_part(PART_ROWS);
  pack(count, {l.gate, l.up}, [&](int i, float* space) -> const float* {
    const float* x = hidden_ + static_cast<size_t>(i) * ld;
    if (!l.pre_mlp_norm) return x;
    norm(x, l.pre_mlp_norm, hidden, space);
    return space;
  });
  begin_part(PART_MLP_IN);
  float* mlp = mlp_.reserve(static_cast<size_t>(count) * width);
  const Activations &gate_x = packed(*l.gate), &up_x = packed(*l.up);
  const int panels = gate_x.panels(), parts = panel_parts(panels, kMaxRows * gate_x.units() * 4);
  const int step = (panels + parts - 1) / parts;
  pool_->run(l.gate->tiles * parts, [&](int begin, int end, int thread) {
    alignas(64) float c[kMaxRows * kLanes];
    // All gates of the piece, then all ups: each runs through its own weights in order.
    for (const bool up : {false, true}) {
      const Linear& linear = up ? *l.up : *l.gate;
      const Activations& x = up ? up_x : gate_x;
      for (int i = begin; i < end; ++i) {
        const int tile = i % l.gate->tiles, first = i / l.gate->tiles * step, last = std::min(panels, first + step);
        if (first >= last) continue;
        const int covered = std::min(count, last * kMaxRows) - first * kMaxRows;
        TileView view = prepare_tile(linear, tile, covered, threads_[thread].tile);
        for (int panel = first; panel < last; ++panel) {
          panel_product(linear, view, tile, x, panel, c);
          if (round_) round_to_bf16(c, x.panel_rows(panel) * kLanes);
          for (int m = 0; m < x.panel_rows(panel); ++m) {
            float* out = mlp + (static_cast<size_t>(panel) * kMaxRows + m) * width + tile * kLanes;
            if (up) gated(l.activation, l.activation_table, out, c + m * kLanes, kLanes, out);
            else std::memcpy(out, c + m * kLanes, sizeof(float) * kLanes);
          }
        }
      }
    }
  });
  begin_part(PART_ROWS);
  pack(count, {l.down}, [&](int i, float*) -> const float* { return mlp + static_cast<size_t>(i) * width; });
  begin_part(PART_MLP_OUT);
  residual(*l.down, count, l.residual_scale, l.post_mlp_norm);
}

void Decoder::head(const StepArgs& a) {
  const int hidden = spec_.hidden, ld = round_up(hidden, kLanes), vocab = spec_.vocab;
  std::fill(alone_.begin(), alone_.end(), 1);  // transformers asks for the logits of one position at a time
  pack(a.logit_count, {spec_.head}, [&](int i, float* space) -> const float* {
    const float* x = hidden_ + static_cast<size_t>(i) * ld;
    norm(x, spec_.final_norm, hidden, space);
    return space;
  });
  product({spec_.head}, a.logit_count, [&](int, int tile, int row, int n, float* c) {
    const int width = std::min(kLanes, vocab - tile * kLanes);
    if (round_) round_to_bf16(c, n * kLanes);
    if (spec_.logit_scale != 1.0f) {
      for (int i = 0; i < n * kLanes; ++i) c[i] *= spec_.logit_scale;
      if (round_) round_to_bf16(c, n * kLanes);
    }
    if (spec_.logit_cap > 0) {
      soft_cap(c, n * kLanes, spec_.logit_cap);
      if (round_) round_to_bf16(c, n * kLanes);
    }
    for (int m = 0; m < n; ++m)
      std::memcpy(a.logits + static_cast<size_t>(row + m) * vocab + tile * kLanes, c + m * kLanes, sizeof(float) * width);
  });
}

int Decoder::step(Pool& pool, const StepArgs& a) {
  const int error = check(a);
  if (error != STEP_OK || a.tokens == 0) return error;
  pool_ = &pool;
  while (threads_.size() < static_cast<size_t>(pool.threads())) threads_.emplace_back();
  const int ld = round_up(spec_.hidden, kLanes), width = spec_.heads * spec_.head_dim;
  part_ = -1;
  begin_part(PART_ROWS);
  embed(a);
  mark_alone(a);
  const Batch batch{a.sequences, a.starts, a.lengths, a.tables, a.table_stride};
  const int layers = a.layer_count ? a.layer_count : spec_.layers;
  for (int n = 0; n < layers; ++n) {
    const int i = a.layer_count ? a.layers[n] : n;
    const LayerSpec& l = layers_[i];
    const bool last = n + 1 == layers;
    queries_keys_values(l, i, a);
    if (last && a.logit_count == 0) break;
    begin_part(PART_ATTENTION);
    const size_t before = static_cast<size_t>(cache_.num_blocks) * i;
    float* attended = attended_.reserve(static_cast<size_t>(a.tokens) * width);
    const size_t stride = static_cast<size_t>(l.q->tiles + l.k->tiles + l.v->tiles) * kLanes;
    attention(pool, batch, {cache_, keys_ + before * cache_.key_block_bytes(), values_ + before * cache_.block_bytes(),
                            spec_.heads, qkv_.data, stride, attended, static_cast<size_t>(width), l.attention_scale, l.attention_cap, l.window, l.kept, l.sinks,
                            spec_.torch_attention != 0, qkv_.data + l.q->tiles * kLanes, stride}, attention_);
    begin_part(PART_ROWS);
    int count = a.tokens;
    if (last) {  // only the rows whose logits are asked for go on
      count = a.logit_count;
      float* kept = kept_.reserve(static_cast<size_t>(count) * ld);
      std::vector<uint8_t> alone(alone_.size(), 0);
      for (int r = 0; r < count; ++r) alone[r] = alone_[a.logit_rows[r]];
      alone_.swap(alone);
      for (int r = 0; r < count; ++r)
        std::memcpy(kept + static_cast<size_t>(r) * ld, hidden_ + static_cast<size_t>(a.logit_rows[r]) * ld, sizeof(float) * ld);
      hidden_ = kept;
    }
    pack(count, {l.o}, [&](int r, float*) -> const float* {
      return attended + static_cast<size_t>(last ? a.logit_rows[r] : r) * width;
    });
    begin_part(PART_OUT);
    residual(*l.o, count, l.residual_scale, l.post_attention_norm);
    gated_mlp(l, count);
  }
  begin_part(PART_HEAD);
  if (a.logit_count > 0) head(a);
  begin_part(-1);
  return STEP_OK;
}

}  // namespace llmopt
