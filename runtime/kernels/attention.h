// Paged attention over a flat batch of query rows of many sequences.
//
// The cache is laid out for the microkernels, so that neither scores nor weighted sums need a transpose. For one block of
// `block_size` tokens (a multiple of 32) and one KV head, with head dimension D padded with zeros to dp, a multiple of 32:
//   keys    bfloat16 [dp/2][block_size][2], float [dp][block_size]
//   values  bfloat16 [block_size/2][dp][2], float [block_size][dp]
// Quantized keys and values lie as attention_codes.h says.
// Blocks are outermost: keys [num_blocks][kv_heads]…, values alike, so a block is copied or shared as one piece.
#pragma once
#include <deque>
#include <vector>

#include "microkernel.h"
#include "pool.h"

namespace llmopt {

enum CacheFormat { KV_F32 = 0, KV_BF16 = 1, KV_INT8 = 2, KV_FP8 = 3, KV_INT4 = 4 };

struct CacheShape {
  int format, num_blocks, block_size, kv_heads, head_dim;
  int dp() const { return round_up(head_dim, 32); }
  size_t element() const { return format == KV_BF16 ? 2 : 4; }
  bool quantized() const { return format >= KV_INT8; }
  bool rotates() const { return format == KV_INT4; }     // values: see rotate_blocks
  bool by_channel() const { return format == KV_INT4; }  // keys: see attention_codes.h
  int tail_blocks() const { return by_channel() ? 2 : 0; }
  int code_bits() const { return format == KV_INT4 ? 4 : 8; }
  size_t code_bytes() const { return static_cast<size_t>(dp()) * block_size * code_bits() / 8; }
  size_t head_bytes() const {
    return quantized() ? code_bytes() + static_cast<size_t>(block_size) * 2 : static_cast<size_t>(dp()) * block_size * element();
  }
  size_t block_bytes() const { return head_bytes() * kv_heads; }  // of values, and of keys where they are alike
  size_t key_block_bytes() const {
    return by_channel() ? kv_heads * (code_bytes() + 3 * static_cast<size_t>(dp())) : block_bytes();
  }
};

// Writes k and v, float [kv_heads][head_dim], of one token into slot = block * block_size + offset.
void write_token(const CacheShape& shape, uint8_t* keys, uint8_t* values, int slot, const float* k, const float* v);

// The same for codes: quantizes as it writes. Keys by channel are not written: write_keys does it.
void write_quantized(const CacheShape& shape, uint8_t* keys, uint8_t* values, int slot, const float* k, const float* v);

// Multiplies each block of x[n] by a Hadamard matrix of 1 and -1, block being the largest power of two that divides n; returns
// the block. Products of two rotated vectors are block times those of the vectors.
int rotate_blocks(float* x, int n);

// The rows of the flat batch: sequence r owns tokens [starts[r], starts[r + 1]), which are the last of its lengths[r]
// tokens in the cache; its blocks are tables[r * table_stride …].
struct Batch {
  int sequences;
  const int32_t* starts;
  const int32_t* lengths;
  const int32_t* tables;
  int table_stride;
};

// The new keys of a batch, by channel: token t, head h at k + t * k_stride + h * head_dim. Those of each sequence's last block go
// into its tail, blocks that are full become codes.
void write_keys(Pool& pool, const CacheShape& shape, uint8_t* keys, uint8_t* values, const Batch& batch, const float* k,
                size_t k_stride);

struct AttentionArgs {
  CacheShape shape;
  const uint8_t *keys, *values;
  int heads;
  const float* q;      // token t, head h at q + t * q_stride + h * head_dim
  size_t q_stride;
  float* out;          // token t, head h at out + t * out_stride + h * head_dim
  size_t out_stride;
  float scale, cap;    // scores are scale * q.k, then cap * tanh(./cap) where cap > 0
  int window;          // a token sees the last `window` positions, itself included; 0: all
  int kept;            // and, with a window, the first `kept` positions (StreamingLLM, Xiao et al. 2023)
  const float* sinks;  // [heads] or null: a logit that takes part in the softmax and has no value
  // With a bfloat16 cache and AVX-512: the arithmetic of torch's scaled_dot_product_attention, see attention_torch.h.
  bool as_torch = false;
  const float* k = nullptr;  // the batch's own keys, as in write_keys; only where keys are by channel
  size_t k_stride = 0;

  // The kept keys are attended by themselves, before the others; of those a token at `position` sees none before this one.
  int first_key(int position) const { return window > 0 ? std::max(kept, position + 1 - window) : 0; }
  int kept_keys(int end) const { return window > 0 ? std::min(kept, end) : 0; }  // of the first `end` ones
};

// Per-thread space and the pieces of sequences whose context was split.
struct AttentionScratch {
  struct Thread { Buffer<uint8_t> q, p, exact; Buffer<float> s, o, stats, rows; };
  std::deque<Thread> threads;
  struct Task { int sequence, token, tokens, head, begin, end, part, parts; };
  std::vector<Task> tasks;
  Buffer<float> partial;
};

void attention(Pool& pool, const Batch& batch, const AttentionArgs& args, AttentionScratch& scratch);
// The same over codes; a row's result depends on its sequence alone.
void quantized_attention(Pool& pool, const Batch& batch, const AttentionArgs& args, AttentionScratch& scratch);

}  // namespace llmopt
