// A fused decoder step: all layers of a Llama-like transformer over a flat batch of tokens in one call.
#pragma once
#include <deque>
#include <vector>

#include "attention.h"
#include "linear.h"

namespace llmopt {

// Plain structures, mirrored field by field in decoder.py. Null pointers are parts that a model does not have.
extern "C" struct LayerSpec {
  Linear *q, *k, *v, *o, *gate, *up, *down;
  const float *input_norm, *post_attention_norm, *pre_mlp_norm, *post_mlp_norm;  // [hidden]
  const float *q_norm, *k_norm;  // [head_dim], or [heads * head_dim] with qk_norm_full
  const float* sinks;            // [heads]
  const uint16_t* activation_table;  // with rounding: the activation of every bfloat16, by its bits [65536]
  int32_t qk_norm_full;
  int32_t window;      // 0: all positions
  int32_t kept;        // first positions that stay visible outside the window
  int32_t rope;        // index of a rope table, -1: none
  int32_t activation;  // of the gate
  float attention_scale, attention_cap, residual_scale;
};

extern "C" struct DecoderSpec {
  int32_t layers, hidden, heads, kv_heads, head_dim, vocab;
  int32_t embedding_bf16;  // else float
  // Where values are rounded to bfloat16. NORM_EXACT: nowhere but where activations enter bfloat16 products. Otherwise at
  // every point at which transformers' modules hand on a bfloat16 tensor; the norms do it once or twice.
  int32_t rounding;
  int32_t torch_attention;  // attention to the bits of torch's, see attention_torch.h
  int32_t reserved;
  const void* embedding;   // [vocab][hidden]
  const float* final_norm; // [hidden]
  Linear* head;
  float embedding_scale, norm_eps, logit_scale, logit_cap;
};

extern "C" struct StepArgs {
  int32_t tokens, sequences, table_stride, logit_count;
  const int32_t *token_ids, *positions, *slots;    // [tokens]
  const int32_t *starts, *lengths, *tables;        // [sequences + 1], [sequences], [sequences][table_stride]
  const int32_t* logit_rows;                       // [logit_count], indices of tokens
  float* logits;                                   // [logit_count][vocab]
  const int32_t* layers;                           // [layer_count], ascending: only these layers run
  int32_t layer_count, reserved;                   // 0: all
};

enum StepError {
  STEP_OK = 0, STEP_MEMORY = -1, STEP_TOKEN = -2, STEP_POSITION = -3, STEP_SLOT = -4, STEP_BLOCK = -5, STEP_LOGIT_ROW = -6,
  STEP_SEQUENCE = -7, STEP_NO_CACHE = -8, STEP_LAYER = -9
};

enum Part { PART_ROWS, PART_QKV, PART_ROPE, PART_ATTENTION, PART_OUT, PART_MLP_IN, PART_MLP_OUT, PART_HEAD, PART_COUNT };

struct RopeTable { const float *cos, *sin; int positions, half; };  // [positions][half]

class Decoder {
 public:
  Decoder(const DecoderSpec& spec, const LayerSpec* layers)
      : spec_(spec), layers_(layers, layers + spec.layers), round_(spec.rounding != NORM_EXACT) {}
  void set_rope(int index, const RopeTable& table) {
    if (index >= static_cast<int>(ropes_.size())) ropes_.resize(index + 1);
    ropes_[index] = table;
  }
  void set_cache(const CacheShape& shape, uint8_t* keys, uint8_t* values) {
    cache_ = shape;
    keys_ = keys;
    values_ = values;
  }
  void set_window(int layer, int window, int kept) {
    layers_[layer].window = window;
    layers_[layer].kept = kept;
  }
  int step(Pool& pool, const StepArgs& args);
  int64_t part_ns[PART_COUNT] = {0};
  bool profile = false;

 private:
  struct Thread { TileScratch tile; Buffer<float> row; };
  int check(const StepArgs& args) const;
  void norm(const float* x, const float* weight, int n, float* y) const;
  void begin_part(int part);
  void embed(const StepArgs& args);
  // Packs the rows for the linears: each distinct activation format once.
  template <class Row>
  void pack(int rows, std::initializer_list<const Linear*> linears, const Row& row);
  void mark_alone(const StepArgs& args);
  const Activations& packed(const Linear& linear) const;
  int panel_parts(int panels, int panel_bytes) const;
  template <class Store>
  void product(std::initializer_list<const Linear*> linears, int rows, const Store& store);
  void queries_keys_values(const LayerSpec& layer, int index, const StepArgs& args);
  void residual(const Linear& linear, int rows, float scale, const float* post_norm);
  void gated_mlp(const LayerSpec& layer, int rows);
  void head(const StepArgs& args);
  template <class F>
  void rows(int count, const F& f);

  DecoderSpec spec_;
  std::vector<LayerSpec> layers_;
  bool round_;
  std::vector<RopeTable> ropes_;
  CacheShape cache_{};
  uint8_t *keys_ = nullptr, *values_ = nullptr;
  Pool* pool_ = nullptr;
  std::deque<Thread> threads_;
  Activations acts_[4];
  std::vector<uint8_t> alone_;  // per row: whether it is all that its sequence computes in this step
  int acts_used_ = 0;
  AttentionScratch attention_;
  Buffer<float> x_, kept_, qkv_, attended_, update_, mlp_;
  float* hidden_ = nullptr;  // the residual stream, [rows][hidden rounded up to 32]
  int part_ = -1;
  int64_t part_start_ = 0;
};

}  // namespace llmopt
