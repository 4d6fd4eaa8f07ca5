// Memory for packed weights: large chunks on huge pages, handed out in order.
//
// Weights are read once a step from end to end. On 4 KiB pages the page walks halve the bandwidth of such a stream (28 GB/s
// against 16 on one core of a Zen 4), and the many small matrices of a model never fill a huge page of their own.
#pragma once
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace llmopt {

class Chunk {
 public:
  static constexpr size_t kHugePage = size_t{2} << 20, kSize = size_t{32} << 20;

  explicit Chunk(size_t bytes) : size_((bytes + kHugePage - 1) / kHugePage * kHugePage) {
    data_ = static_cast<unsigned char*>(std::aligned_alloc(kHugePage, size_));
    if (!data_) throw std::bad_alloc();
#if defined(__linux__)
    madvise(data_, size_, MADV_HUGEPAGE);  // advice: the memory works without
#endif
  }
  ~Chunk() { std::free(data_); }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

 private:
  friend class Block;
  unsigned char* data_;
  size_t size_, used_ = 0;
};

// A zeroed, 64-byte aligned piece of a chunk; the chunk lives as long as any of its blocks.
class Block {
 public:
  Block() = default;
  explicit Block(size_t bytes) {
    static std::mutex mutex;
    static std::weak_ptr<Chunk> current;
    bytes = (bytes + 63) / 64 * 64;
    std::lock_guard<std::mutex> lock(mutex);
    chunk_ = current.lock();
    if (!chunk_ || chunk_->size_ - chunk_->used_ < bytes) {
      chunk_ = std::make_shared<Chunk>(bytes > Chunk::kSize ? bytes : Chunk::kSize);
      current = chunk_;
    }
    data_ = chunk_->data_ + chunk_->used_;
    chunk_->used_ += bytes;
    std::memset(data_, 0, bytes);
  }
  unsigned char* data() const { return data_; }

 private:
  std::shared_ptr<Chunk> chunk_;
  unsigned char* data_ = nullptr;
};

}  // namespace llmopt
