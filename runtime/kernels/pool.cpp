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
constexpr int kBeforeTheft = 48;    // about a microsecond: what it costs both sides when a line with a share changes cores
constexpr int kPatience = 256;      // spins before the owner of a phase takes even a worker's last item

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

Pool::Pool(int threads) : shares_(new Share[threads]), counts_(new Count[threads]) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
  stop_.store(true);
  { std::lock_guard<std::mutex> lock(mutex_); }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

// Runs a piece of the share `from`: a quarter of what its owner has left, or half of it for a thief, who leaves a single
// last item to its owner unless `last`.
bool Pool::take(int from, int thread, bool steal, bool last) {
  Share& share = shares_[from];
  uint64_t ticket = share.ticket.load(std::memory_order_acquire);
  for (;;) {
    const int next = static_cast<int>(ticket & kField), end = static_cast<int>((ticket >> 20) & kField);
    const int left = end - next;
    if (left <= 0 || (steal && left == 1 && !last)) return false;
    const int piece = steal ? (left + 1) / 2 : (left + 3) / 4;
    if (share.ticket.compare_exchange_weak(ticket, ticket + static_cast<uint64_t>(piece), std::memory_order_acq_rel,
                                           std::memory_order_acquire)) {
      // The phase cannot end before this piece is counted, so function and context are stable here.
      share.function(share.context, next, next + piece, thread);
      Count& count = counts_[thread];
      count.done.store(count.done.load(std::memory_order_relaxed) + piece, std::memory_order_release);
      return true;
    }
  }
}

bool Pool::take_any(int thread, bool last) {
  for (int i = 1, n = threads(); i < n; ++i)
    if (take((thread + i) % n, thread, true, last)) return true;
  return false;
}

void Pool::run_job(int n, Function function, const void* context) {
  const int count = threads();
  ++epoch_;
  total_ += static_cast<uint64_t>(n);
  for (int i = count - 1; i >= 0; --i) {
    const uint64_t begin = static_cast<uint64_t>(n) * i / count, end = static_cast<uint64_t>(n) * (i + 1) / count;
    shares_[i].function = function;
    shares_[i].context = context;
    shares_[i].ticket.store((epoch_ << 40) | (end << 20) | begin, std::memory_order_release);
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
  // One notification per sleep is enough; the phases that pass while a worker wakes up need no further system call.
  if (sleepers_.load() > 0 && !waking_.exchange(true)) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
  while (take(0, 0, false, false)) {}
  for (int spins = 0;; ++spins) {
    uint64_t done = 0;
    for (int i = 0; i < count; ++i) done += counts_[i].done.load(std::memory_order_acquire);
    if (done == total_) return;
    if (spins % kBeforeTheft == kBeforeTheft - 1) {
      while (take_any(0, spins >= kPatience)) {}
    }
    if (spins < kOwnerSpins) relax(); else std::this_thread::yield();
  }
}

void Pool::work(int thread) {
  while (!stop_.load(std::memory_order_relaxed)) {
    bool worked = false;
    for (int spins = 0; spins < kWorkerSpins && !worked; ++spins) {
      while (take(thread, thread, false, false)) worked = true;
      if (spins % kBeforeTheft == kBeforeTheft - 1)
        while (take_any(thread, false)) worked = true;
      relax();
    }
    if (worked) continue;
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    waking_.store(false);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const uint64_t ticket = shares_[thread].ticket.load();
    // One wait, not a loop on the condition: whoever is woken, even too late for that phase, spins for the next one.
    if (!stop_.load() && (ticket & kField) >= ((ticket >> 20) & kField)) wake_.wait(lock);
    sleepers_.fetch_sub(1);
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
