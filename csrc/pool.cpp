#include "pool.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <pthread.h>

#include <chrono>
#include <list>
#include <mutex>

namespace autokern {
namespace {

// glibc maps blocks of this size and more afresh (its default mmap threshold is 128 KiB and moves up to 32 MiB).
constexpr size_t kSmallestBlock = size_t{1} << 18;
constexpr auto kIdleLimit = std::chrono::seconds(10); // idle blocks go back to the system after this
using Clock = std::chrono::steady_clock;

struct Block {
  c10::DataPtr memory;
  size_t size_bytes;
  Clock::time_point idle_since;
};

struct Lent { // what travels with a tensor; gives the block back when the tensor dies
  c10::DataPtr memory;
  size_t size_bytes;
};

struct Pool {
  std::mutex mutex;
  std::list<Block> idle; // most recently returned first
  uint64_t limit_bytes = 0;
  uint64_t kept_bytes = 0;
  uint64_t reused = 0;
  uint64_t fresh = 0;
};

Pool& pool() {
  static Pool* instance = [] {
    static auto* made = new Pool; // outlives every tensor, so it is never destroyed
    // A fork while another thread holds the lock must not leave it taken in the child.
    pthread_atfork([] { made->mutex.lock(); }, [] { made->mutex.unlock(); }, [] { made->mutex.unlock(); });
    return made;
  }();
  return *instance;
}

// Moves blocks that are over the limit or idle for too long to `dropped`, which the caller frees without the lock.
void trim(Pool& p, std::list<Block>& dropped) {
  const auto now = Clock::now();
  while (!p.idle.empty() && (p.kept_bytes > p.limit_bytes || now - p.idle.back().idle_since > kIdleLimit)) {
    p.kept_bytes -= p.idle.back().size_bytes;
    dropped.splice(dropped.begin(), p.idle, std::prev(p.idle.end()));
  }
}

void give_back(void* context) {
  auto* lent = static_cast<Lent*>(context);
  std::list<Block> dropped;
  {
    Pool& p = pool();
    const std::lock_guard<std::mutex> lock(p.mutex);
    p.kept_bytes += lent->size_bytes;
    p.idle.push_front(Block{std::move(lent->memory), lent->size_bytes, Clock::now()});
    trim(p, dropped);
  }
  delete lent;
}

// Asks for huge pages where the system leaves that to programs: one fault then brings 2 MiB instead of 4 KiB, and a
// block that no idle one could serve costs a third as much to touch. Best effort, so the result is not looked at.
void prefer_huge_pages(void* data, size_t size_bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + size_bytes) & ~(kHugePage - 1);
  if (begin < end) {
    (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
#endif
}

c10::DataPtr take(size_t size_bytes) {
  std::list<Block> dropped;
  c10::DataPtr memory;
  {
    Pool& p = pool();
    const std::lock_guard<std::mutex> lock(p.mutex);
    for (auto block = p.idle.begin(); block != p.idle.end(); ++block) {
      if (block->size_bytes == size_bytes) {
        memory = std::move(block->memory);
        p.kept_bytes -= size_bytes;
        p.idle.erase(block);
        break;
      }
    }
    ++(memory ? p.reused : p.fresh);
    trim(p, dropped);
  }
  return memory;
}

class PoolAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size_bytes) override {
    if (size_bytes < kSmallestBlock || pool().limit_bytes < size_bytes) {
      return c10::GetCPUAllocator()->allocate(size_bytes);
    }
    c10::DataPtr memory = take(size_bytes);
    if (!memory) {
      memory = c10::GetCPUAllocator()->allocate(size_bytes);
      prefer_huge_pages(memory.get(), size_bytes);
    }
    void* data = memory.get();
    auto* lent = new Lent{std::move(memory), size_bytes};
    return {data, lent, &give_back, c10::Device(c10::kCPU)};
  }

  void copy_data(void* dest, const void* src, std::size_t count) const override { default_copy_data(dest, src, count); }
};

} // namespace

c10::Allocator* pool_allocator() {
  static PoolAllocator allocator;
  return &allocator;
}

void pool_set_limit(uint64_t limit_bytes) {
  std::list<Block> dropped;
  const std::lock_guard<std::mutex> lock(pool().mutex);
  pool().limit_bytes = limit_bytes;
  trim(pool(), dropped);
}

void pool_empty() {
  std::list<Block> dropped;
  const std::lock_guard<std::mutex> lock(pool().mutex);
  pool().kept_bytes = 0;
  dropped.swap(pool().idle);
}

PoolStats pool_stats() {
  const std::lock_guard<std::mutex> lock(pool().mutex);
  const Pool& p = pool();
  return {p.limit_bytes, p.kept_bytes, p.reused, p.fresh};
}

} // namespace autokern
