// C interface of the paged cache and its attention, for callers outside the fused decoder.
#include <memory>

#include "arena.h"
#include "attention.h"

using namespace llmopt;

namespace {
thread_local AttentionScratch g_scratch;
}

extern "C" {

// k, v: float [tokens][kv_heads][head_dim], contiguous; slots [tokens]. Slots must lie inside the cache. Keys by channel are not
// written: llmopt_write_keys does it.
int llmopt_write_kv(int format, int num_blocks, int block_size, int kv_heads, int head_dim, void* keys, void* values,
                    int tokens, const int32_t* slots, const float* k, const float* v) try {
  const CacheShape shape{format, num_blocks, block_size, kv_heads, head_dim};
  const size_t step = static_cast<size_t>(kv_heads) * head_dim;
  const auto body = [&](int begin, int end, int) {
    for (int t = begin; t < end; ++t)
      write_token(shape, static_cast<uint8_t*>(keys), static_cast<uint8_t*>(values), slots[t], k + t * step, v + t * step);
  };
  if (tokens < 8) {
    body(0, tokens, 0);
    return 0;
  }
  std::lock_guard<std::mutex> lock(pool_mutex());
  pool().run(tokens, body);
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}

// k: float [tokens][kv_heads][head_dim], contiguous, of sequences as in llmopt_attention: keys by channel, with two blocks more in
// each table than its tokens need. Returns 0, or -1 when memory is short.
int llmopt_write_keys(int format, int num_blocks, int block_size, int kv_heads, int head_dim, void* keys, void* values,
                      int sequences, const int32_t* starts, const int32_t* lengths, const int32_t* tables, int table_stride,
                      const float* k) try {
  std::lock_guard<std::mutex> lock(pool_mutex());
  const CacheShape shape{format, num_blocks, block_size, kv_heads, head_dim};
  write_keys(pool(), shape, static_cast<uint8_t*>(keys), static_cast<uint8_t*>(values),
             Batch{sequences, starts, lengths, tables, table_stride}, k, static_cast<size_t>(kv_heads) * head_dim);
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}

// q, out: float [tokens][heads][head_dim], contiguous. starts [sequences + 1], lengths [sequences], tables
// [sequences][table_stride] as in attention.h; sinks [heads] or null; as_torch as in attention.h; k as
// in llmopt_write_keys, or null where keys are not by channel. Returns 0, or -1 when memory is short.
int llmopt_attention(int format, int num_blocks, int block_size, int kv_heads, int head_dim, const void* keys,
                     const void* values, int heads, const float* q, float* out, int sequences, const int32_t* starts,
                     const int32_t* lengths, const int32_t* tables, int table_stride, float scale, float cap, int window,
                     int kept, const float* sinks, int as_torch, const float* k) try {
  std::lock_guard<std::mutex> lock(pool_mutex());
  const size_t stride = static_cast<size_t>(heads) * head_dim;
  const AttentionArgs args{{format, num_blocks, block_size, kv_heads, head_dim}, static_cast<const uint8_t*>(keys),
                           static_cast<const uint8_t*>(values), heads, q, stride, out, stride, scale, cap, window, kept, sinks,
                           as_torch != 0, k, static_cast<size_t>(kv_heads) * head_dim};
  attention(pool(), Batch{sequences, starts, lengths, tables, table_stride}, args, g_scratch);
  return 0;
} catch (const std::bad_alloc&) {
  return -1;
}
}

extern "C" {

// Asks for huge pages under [data, data + bytes); advice only, the memory works without.
void llmopt_advise_huge(void* data, int64_t bytes) {
#if defined(__linux__)
  madvise(data, static_cast<size_t>(bytes), MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}
}
