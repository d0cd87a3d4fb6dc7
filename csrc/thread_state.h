// What one thread carries through the router: its scope, its counters, the table it is reading, and which autograd
// nodes its optimised forwards created. States are linked once, reused by later threads, and never freed, so readers
// need no lock.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "key.h"

namespace autokern {

class Table;

constexpr size_t kOpCount = 11;

// What a scope admits, packed so that it is read in one load. 0: not active.
struct Policy {
  uint32_t bits = 0;
  static constexpr uint32_t kActive = 1;
  static constexpr uint32_t kStrict = 8;

  static Policy make(uint32_t accuracy, bool strict) { return {kActive | accuracy << 1 | (strict ? kStrict : 0)}; }
  bool active() const { return bits & kActive; }
  bool strict() const { return bits & kStrict; }
  uint32_t accuracy() const { return bits >> 1 & 3; } // 0 exact, 1 stock, 2 tolerance
};

// One optimised model or one enabled() block. Shared with backward passes that may outlive it; never freed (16 bytes).
struct Scope {
  std::atomic<uint32_t> policy{0};
  Policy load() const { return {policy.load(std::memory_order_relaxed)}; }
};

// Bounded log of the autograd sequence numbers [from, to) that scopes covered on one thread, in the order of `to`.
class IntervalRing {
 public:
  void push(uint64_t from, uint64_t to, Scope* scope);
  Scope* find(uint64_t sequence) const; // any thread; null when unknown or overwritten
  void clear();                         // forgets all; the owner must have ended

 private:
  static constexpr uint64_t kCapacity = 4096;
  struct Interval {
    std::atomic<uint64_t> from{0}, to{0};
    std::atomic<Scope*> scope{nullptr};
  };
  Interval& at(uint64_t index) const { return slots_.load(std::memory_order_acquire)[index % kCapacity]; }
  std::atomic<Interval*> slots_{nullptr}; // made at the first push
  std::atomic<uint64_t> head_{0};
};

struct MissedKeySlot;

// Keys that this thread lately asked for in vain, each with what was current then (`stamp`, see table.h): while nothing
// has changed the answer is the same, and neither the table nor the log of missed keys is searched.
struct MissMemo {
  uint64_t hash = 0;
  uint64_t stamp = 0; // 0: empty
  MissedKeySlot* slot = nullptr;
  Miss reason = Miss::kNone;
};

struct ThreadState {
  static constexpr size_t kMemos = 512;
  std::atomic<const Table*> reading{nullptr};
  std::atomic<uint64_t> thread_id{0}; // at::RecordFunction::currentThreadId, as autograd nodes keep it
  std::atomic<bool> in_use{false};
  Scope* scope = nullptr; // the innermost of `entered`
  uint32_t depth = 0;     // > 0 inside a captured kernel or a plan
  struct Entered {
    Scope* scope;
    uint64_t ticket;
  };
  std::vector<Entered> entered;
  uint64_t next_ticket = 0;
  std::array<std::array<std::atomic<uint64_t>, static_cast<size_t>(Miss::kCount)>, kOpCount> counts{};
  IntervalRing ring;
  std::array<MissMemo, kMemos> memos{};
  ThreadState* next = nullptr;

  MissMemo& memo(uint64_t hash) { return memos[hash % kMemos]; }

  uint64_t enter(Scope* inner) {
    entered.push_back({inner, next_ticket});
    scope = inner;
    return next_ticket++;
  }

  // A suspended generator may leave after what it was entered in has left, so an entry is found, not popped.
  void leave(uint64_t ticket) {
    for (auto entry = entered.rbegin(); entry != entered.rend(); ++entry) {
      if (entry->ticket == ticket) {
        entered.erase(std::next(entry).base());
        break;
      }
    }
    scope = entered.empty() ? nullptr : entered.back().scope;
  }

  void count(size_t op, Miss reason) {
    auto& cell = counts[op][static_cast<size_t>(reason)];
    cell.store(cell.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); // only the owner writes
  }
};

extern __thread ThreadState* own_state; // null until this thread meets the router; __thread: no wrapper call
ThreadState& make_thread_state();
inline ThreadState& thread_state() {
  ThreadState* state = own_state;
  return state ? *state : make_thread_state();
}
ThreadState* first_thread_state(); // head of the list of all states ever made

// The scope whose forward created the autograd node that is running on this thread, if any.
Scope* scope_of_current_node();
extern std::atomic<bool> any_interval; // false until the first interval is recorded: spares the node look-up
void record_interval(ThreadState& state, uint64_t from, uint64_t to, Scope* scope);

} // namespace autokern
