// C interface of the fused decoder.
#include "decoder.h"

using namespace llmopt;

extern "C" {

// The specifications are copied; what they point to must outlive the decoder. Null when the memory is not there.
Decoder* llmopt_decoder_create(const DecoderSpec* spec, const LayerSpec* layers) try {
  return new Decoder(*spec, layers);
} catch (const std::bad_alloc&) {
  return nullptr;
}

void llmopt_decoder_free(Decoder* decoder) { delete decoder; }

// cos and sin: float [positions][half], kept by the caller.
void llmopt_decoder_set_rope(Decoder* decoder, int index, const float* cos, const float* sin, int positions, int half) {
  std::lock_guard<std::mutex> lock(pool_mutex());
  decoder->set_rope(index, {cos, sin, positions, half});
}

// What a layer sees from the next step on; see AttentionArgs.
void llmopt_decoder_set_window(Decoder* decoder, int layer, int window, int kept) {
  std::lock_guard<std::mutex> lock(pool_mutex());
  decoder->set_window(layer, window, kept);
}

// keys and values: all layers, [layers] times the layout in attention.h, kept by the caller.
void llmopt_decoder_set_cache(Decoder* decoder, int format, int num_blocks, int block_size, int kv_heads, int head_dim,
                              void* keys, void* values) {
  std::lock_guard<std::mutex> lock(pool_mutex());
  decoder->set_cache({format, num_blocks, block_size, kv_heads, head_dim}, static_cast<uint8_t*>(keys),
                     static_cast<uint8_t*>(values));
}

// Runs one step; a StepError.
int llmopt_decoder_step(Decoder* decoder, const StepArgs* args) try {
  std::lock_guard<std::mutex> lock(pool_mutex());
  return decoder->step(pool(), *args);
} catch (const std::bad_alloc&) {
  return STEP_MEMORY;
}

// Turns the profile on or off; `out`, if given, receives the nanoseconds per Part so far, and the counts are reset.
void llmopt_decoder_profile(Decoder* decoder, int enabled, int64_t* out) {
  std::lock_guard<std::mutex> lock(pool_mutex());
  decoder->profile = enabled != 0;
  for (int i = 0; i < PART_COUNT; ++i) {
    if (out) out[i] = decoder->part_ns[i];
    decoder->part_ns[i] = 0;
  }
}

// 3 with AVX-512 VNNI, 2 with BF16 beside it, 1 with portable code.
int llmopt_isa() {
#if LLMOPT_BF16
  return 2;
#elif LLMOPT_AVX512
  return 3;
#else
  return 1;
#endif
}
}
