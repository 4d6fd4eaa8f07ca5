#include "pool.h"

#include <cstdint>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace llmopt {
namespace {

constexpr uint64_t kField = (1u << 20) - 1;
constexpr int kWorkerSpins = 4000;  // about 50-150 microseconds of pause instructions
constexpr int kOwnerSpins = 2000;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Never destroyed at exit: a process that ends, or a forked child that has no such threads, must not wait for them.
Pool* g_pool = nullptr;
std::mutex g_pool_mutex;
int g_threads = 1;

}  // namespace

Pool::Pool(int threads) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
  stop_.store(true);
  { std::lock_guard<std::mutex> lock(mutex_); }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

bool Pool::take_piece(int thread) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  for (;;) {
    const int next = static_cast<int>(ticket & kField), n = static_cast<int>((ticket >> 20) & kField);
    if (next >= n) return false;
    const int remaining = n - next;
    int piece = remaining / (2 * threads());
    if (piece < 1) piece = 1;
    if (ticket_.compare_exchange_weak(ticket, ticket + static_cast<uint64_t>(piece), std::memory_order_acq_rel,
                                      std::memory_order_acquire)) {
      // The phase cannot end before this piece is counted as done, so function_ and context_ are stable here.
      function_(context_, next, next + piece, thread);
      done_.fetch_add(piece, std::memory_order_release);
      return true;
    }
  }
}

void Pool::run_job(int n, Function function, const void* context) {
  function_ = function;
  context_ = context;
  done_.store(0, std::memory_order_relaxed);
  const uint64_t epoch = (ticket_.load(std::memory_order_relaxed) >> 40) + 1;
  ticket_.store((epoch << 40) | (static_cast<uint64_t>(n) << 20), std::memory_order_seq_cst);
  // One notification per sleep is enough; the phases that pass while a worker wakes up need no further system call.
  if (sleepers_.load(std::memory_order_seq_cst) > 0 && !waking_.exchange(true)) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
  while (take_piece(0)) {}
  for (int spins = 0; done_.load(std::memory_order_acquire) < n; ++spins) {
    if (spins < kOwnerSpins) relax(); else std::this_thread::yield();
  }
}

void Pool::work(int thread) {
  while (!stop_.load(std::memory_order_relaxed)) {
    bool worked = false;
    for (int spins = 0; spins < kWorkerSpins; ++spins) {
      if (take_piece(thread)) { worked = true; break; }
      relax();
    }
    if (worked) continue;
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    waking_.store(false, std::memory_order_seq_cst);
    wake_.wait(lock, [this] {
      const uint64_t ticket = ticket_.load(std::memory_order_seq_cst);
      return stop_.load() || (ticket & kField) < ((ticket >> 20) & kField);
    });
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }
}

Pool& pool() {
#if defined(__unix__) || defined(__APPLE__)
  static const int registered = pthread_atfork(nullptr, nullptr, [] { g_pool = nullptr; });
  (void)registered;
#endif
  if (!g_pool || g_pool->threads() != g_threads) {
    delete g_pool;
    g_pool = nullptr;
    g_pool = new Pool(g_threads);
  }
  return *g_pool;
}

std::mutex& pool_mutex() { return g_pool_mutex; }

}  // namespace llmopt

extern "C" {

// Threads used by the next native call, caller included; at least 1.
void llmopt_set_threads(int threads) {
  std::lock_guard<std::mutex> lock(llmopt::g_pool_mutex);
  llmopt::g_threads = threads < 1 ? 1 : threads;
}

int llmopt_get_threads() { return llmopt::g_threads; }

// Ends the worker threads; the next native call starts them again.
void llmopt_stop_threads() {
  std::lock_guard<std::mutex> lock(llmopt::g_pool_mutex);
  delete llmopt::g_pool;
  llmopt::g_pool = nullptr;
}
}
