#include "thread_state.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <pthread.h>

#include <mutex>

namespace autokern {

std::atomic<bool> any_interval{false};

namespace {

std::atomic<ThreadState*> head{nullptr};
// Taken when a thread meets the router for the first time and when it ends. A fork meanwhile must not leave it taken in
// the child.
std::mutex& reuse_mutex() {
  static auto* mutex = [] {
    static std::mutex held;
    pthread_atfork([] { held.lock(); }, [] { held.unlock(); }, [] { held.unlock(); });
    return &held;
  }();
  return *mutex;
}

// A state of an ended thread is reused only when this many have ended: its intervals serve backward passes that run
// later.
constexpr int kEndedKept = 64;

ThreadState* oldest_ended() {
  ThreadState* found = nullptr;
  int ended = 0;
  for (ThreadState* s = head.load(); s; s = s->next) {
    if (!s->in_use.load()) {
      ++ended;
      if (!found || s->thread_id.load() < found->thread_id.load()) {
        found = s;
      }
    }
  }
  return ended > kEndedKept ? found : nullptr;
}

struct Handle {
  ThreadState* state;

  Handle() {
    const std::lock_guard<std::mutex> lock(reuse_mutex());
    state = oldest_ended();
    const bool fresh = !state;
    if (fresh) {
      state = new ThreadState;
    }
    // Sequence numbers count per thread: the ended thread's intervals would match this one's nodes.
    state->thread_id.store(0);
    state->ring.clear();
    state->entered.clear();
    state->scope = nullptr;
    state->depth = 0;
    state->in_use.store(true);
    state->thread_id.store(at::RecordFunction::currentThreadId());
    if (fresh) {
      state->next = head.load();
      head.store(state);
    }
  }

  ~Handle() {
    const std::lock_guard<std::mutex> lock(reuse_mutex());
    state->in_use.store(false);
  }
};

} // namespace

__thread ThreadState* own_state = nullptr;

ThreadState& make_thread_state() {
  thread_local Handle handle; // gives the state back when the thread ends
  own_state = handle.state;
  return *own_state;
}

ThreadState* first_thread_state() { return head.load(std::memory_order_acquire); }

void IntervalRing::push(uint64_t from, uint64_t to, Scope* scope) {
  if (!slots_.load(std::memory_order_relaxed)) {
    slots_.store(new Interval[kCapacity], std::memory_order_release);
  }
  const uint64_t head = head_.load(std::memory_order_relaxed);
  if (head > 0) {
    Interval& last = at(head - 1);
    if (last.scope.load(std::memory_order_relaxed) == scope && last.to.load(std::memory_order_relaxed) == from) {
      last.to.store(to, std::memory_order_release);
      return;
    }
  }
  Interval& slot = at(head);
  slot.scope.store(nullptr, std::memory_order_release); // a reader that meets a half-written slot finds no scope
  slot.from.store(from, std::memory_order_release);
  slot.to.store(to, std::memory_order_release);
  slot.scope.store(scope, std::memory_order_release);
  head_.store(head + 1, std::memory_order_release);
}

void IntervalRing::clear() {
  head_.store(0, std::memory_order_release);
  for (uint64_t i = 0; slots_.load(std::memory_order_relaxed) && i < kCapacity; ++i) {
    at(i).scope.store(nullptr, std::memory_order_release);
  }
}

Scope* IntervalRing::find(uint64_t sequence) const {
  const uint64_t head = head_.load(std::memory_order_acquire);
  if (head == 0) {
    return nullptr;
  }
  const uint64_t oldest = head > kCapacity ? head - kCapacity + 1 : 0; // the very oldest may be overwritten any moment
  uint64_t low = oldest;
  uint64_t high = head;
  while (low < high) { // first interval that ends after `sequence`
    const uint64_t middle = low + (high - low) / 2;
    if (at(middle).to.load(std::memory_order_acquire) > sequence) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  for (; low < head; ++low) { // an enclosing interval ends later than those nested in it
    const Interval& slot = at(low);
    Scope* scope = slot.scope.load(std::memory_order_acquire);
    if (slot.from.load(std::memory_order_acquire) <= sequence && sequence < slot.to.load(std::memory_order_acquire)) {
      const bool overwritten = head_.load(std::memory_order_acquire) > low + kCapacity - 1;
      return overwritten ? nullptr : scope;
    }
  }
  return nullptr;
}

Scope* scope_of_current_node() {
  const auto node = torch::autograd::get_current_node();
  if (!node) {
    return nullptr;
  }
  const uint64_t thread_id = node->thread_id();
  for (ThreadState* s = first_thread_state(); s; s = s->next) {
    if (s->thread_id.load(std::memory_order_relaxed) == thread_id) {
      Scope* scope = s->ring.find(node->sequence_nr());
      return s->thread_id.load() == thread_id ? scope : nullptr; // reused meanwhile: what was read is another thread's
    }
  }
  return nullptr;
}

void record_interval(ThreadState& state, uint64_t from, uint64_t to, Scope* scope) {
  if (from < to) {
    state.ring.push(from, to, scope);
    any_interval.store(true, std::memory_order_relaxed);
  }
}

} // namespace autokern
