// A persistent pool of threads for phases of microseconds.
//
// A phase is a range of n items. Each thread owns a contiguous share of it, the same in every phase of the same n, so that a
// core finds its part of the weights in its own caches; who is done takes half of what another has left (work stealing,
// Blumofe & Leiserson 1999). A phase ends when its items are done, not when every thread has arrived: a worker that the
// system has taken off its core delays nobody by more than the piece it holds. Idle workers spin briefly, then sleep.
//
// A phase costs two transfers of a cache line per worker: its share there, its count of finished items back.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace llmopt {

class Pool {
 public:
  static constexpr int kMaxItems = (1 << 20) - 1;
  explicit Pool(int threads);
  ~Pool();
  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls f(begin, end, thread) over disjoint pieces of [0, n), 0 <= n <= kMaxItems, on all threads; returns when all
  // are done. Calls must not nest, and only one caller at a time may use the pool.
  template <class F>
  void run(int n, const F& f) {
    if (n <= 0) return;
    if (n == 1 || workers_.empty()) { f(0, n, 0); return; }
    run_job(n, [](const void* context, int begin, int end, int thread) {
      (*static_cast<const F*>(context))(begin, end, thread);
    }, &f);
  }

 private:
  using Function = void (*)(const void*, int, int, int);
  // epoch (24 bits) | end (20 bits) | next (20 bits): one word, so that a piece is only ever taken from the phase whose
  // end was read with it. What runs the piece lies in the same line.
  struct alignas(64) Share {
    std::atomic<uint64_t> ticket{0};
    Function function = nullptr;
    const void* context = nullptr;
  };
  struct alignas(64) Count { std::atomic<uint64_t> done{0}; };

  void run_job(int n, Function function, const void* context);
  bool take(int from, int thread, bool steal, bool last);
  bool take_any(int thread, bool last);
  void work(int thread);

  std::unique_ptr<Share[]> shares_;
  std::unique_ptr<Count[]> counts_;
  uint64_t epoch_ = 0, total_ = 0;
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> waking_{false}, stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

// The pool shared by every kernel of this process, created at first use; see llmopt_set_threads. One caller at a time,
// under the mutex.
Pool& pool();
std::mutex& pool_mutex();

}  // namespace llmopt
