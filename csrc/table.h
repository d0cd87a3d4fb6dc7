// Key -> kernel. A table is built aside, published whole by one pointer store, and read without a lock; a reader
// announces the table that it uses (ThreadState::reading), so a replaced one is freed only when nobody is inside it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plan.h"
#include "thread_state.h"

namespace autokern {

// One verified kernel, shared by all generations of the table that hold it.
struct Kernel {
  Plan plan;
  std::string record_id;
  std::atomic<uint64_t> hits{0};
  std::atomic<bool> quarantined{false};
  std::string fault; // why; written once, before `quarantined` is set
  std::atomic<bool> fault_claimed{false};

  void quarantine(const std::string& reason) {
    if (!fault_claimed.exchange(true)) {
      fault = reason;
      quarantined.store(true, std::memory_order_release);
    }
  }
};

constexpr size_t kRegimes = 2;     // 0 eager (functional form), 1 compiled (out form)
constexpr size_t kClasses = 3;     // policy: 0 exact, 1 stock, 2 tolerance
constexpr size_t kDeterminism = 2; // 0 any, 1 run-to-run required

// The winners of one key, by what the call and the policy ask for. Null: nothing is admitted there.
struct Entry {
  std::vector<uint64_t> words;
  std::shared_ptr<Kernel> slots[kRegimes][kClasses][kDeterminism];

  // Why a slot is empty: the first condition whose relaxation would fill one.
  Miss why_not(size_t regime, size_t accuracy, size_t deterministic) const;
};

class Table {
 public:
  explicit Table(std::vector<Entry> entries);
  const Entry* find(const Key& key, uint64_t hash) const;
  size_t size() const { return entries_.size(); }
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  struct Slot {
    uint64_t hash = 0;
    uint32_t entry = 0;
  };
  std::vector<Entry> entries_;
  std::vector<Slot> slots_; // open addressing, a power of two at most half full
};

// Holds the current table for the length of one call.
class TableReader {
 public:
  explicit TableReader(ThreadState& state);
  ~TableReader() { state_.reading.store(nullptr, std::memory_order_release); }
  TableReader(const TableReader&) = delete;
  TableReader& operator=(const TableReader&) = delete;
  const Table* table() const { return table_; }

 private:
  ThreadState& state_;
  const Table* table_;
};

// What an answer "no kernel" depends on besides the key, as one number that is never 0: the table's generation and what
// the call asks for. Read before the table: a table that is swapped meanwhile makes the stamp old, never the answer.
uint64_t lookup_stamp(size_t regime, size_t accuracy, size_t deterministic);

// Replaces the table and returns the new generation; frees earlier ones that no thread reads any more.
uint64_t publish_table(std::unique_ptr<Table> table);
uint64_t table_generation();
size_t tables_alive(); // the current one and those that a thread still reads

} // namespace autokern
