// A persistent pool of threads for phases of microseconds.
//
// A phase is a range of n items that threads take in shrinking pieces (guided self-scheduling, Polychronopoulos & Kuck
// 1987). A phase ends when its items are done, not when every thread has arrived: a worker that the system has taken off
// its core between two pieces delays nobody, the others simply take its share. Idle workers spin briefly, then sleep.
#pragma once
#include <atomic>
#include <condition_variable>
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
    run_job(n, [](const void* context, int begin, int end, int thread) { (*static_cast<const F*>(context))(begin, end, thread); },
            &f);
  }

 private:
  using Function = void (*)(const void*, int, int, int);
  void run_job(int n, Function function, const void* context);
  bool take_piece(int thread);
  void work(int thread);

  // epoch (24 bits) | n (20 bits) | next item (20 bits): one word, so that a piece is only ever taken from the phase
  // whose n was read with it.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) Function function_ = nullptr;
  const void* context_ = nullptr;
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> waking_{false};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

// The pool shared by every kernel of this process, created at first use; see set_threads. Locked by one caller at a time.
Pool& pool();
std::mutex& pool_mutex();

}  // namespace llmopt
