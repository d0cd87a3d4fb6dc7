#include "table.h"

#include <algorithm>
#include <cstring>
#include <mutex>

namespace autokern {
namespace {

std::atomic<const Table*> current{nullptr};
std::atomic<uint64_t> generation{0};
std::mutex publish_mutex;
std::vector<std::unique_ptr<const Table>>& retired() {
  static auto* tables = new std::vector<std::unique_ptr<const Table>>; // never destroyed: threads may outlive main
  return *tables;
}

bool is_read(const Table* table) {
  for (ThreadState* s = first_thread_state(); s; s = s->next) {
    if (s->reading.load() == table) {
      return true;
    }
  }
  return false;
}

} // namespace

Miss Entry::why_not(size_t regime, size_t accuracy, size_t deterministic) const {
  if (deterministic && slots[regime][accuracy][0]) {
    return Miss::kDeterminism;
  }
  if (slots[1 - regime][accuracy][deterministic]) {
    return Miss::kRegime;
  }
  return Miss::kAccuracy;
}

Table::Table(std::vector<Entry> entries) : entries_(std::move(entries)) {
  size_t capacity = 16;
  while (capacity < entries_.size() * 2) {
    capacity *= 2;
  }
  slots_.resize(capacity);
  for (uint32_t i = 0; i < entries_.size(); ++i) {
    const auto& words = entries_[i].words;
    const uint64_t hash = Key::hash_words(words.data(), words.size());
    size_t at = hash & (capacity - 1);
    while (slots_[at].hash) {
      at = (at + 1) & (capacity - 1);
    }
    slots_[at] = {hash, i};
  }
}

const Entry* Table::find(const Key& key, uint64_t hash) const {
  const size_t mask = slots_.size() - 1;
  for (size_t at = hash & mask; slots_[at].hash; at = (at + 1) & mask) {
    if (slots_[at].hash != hash) {
      continue;
    }
    const Entry& entry = entries_[slots_[at].entry];
    if (entry.words.size() == key.size() &&
        std::memcmp(entry.words.data(), key.words(), key.size() * sizeof(uint64_t)) == 0) {
      return &entry;
    }
  }
  return nullptr;
}

TableReader::TableReader(ThreadState& state) : state_(state) {
  // Announce, then look again: a table that is still current after the announcement cannot be freed before we leave.
  const Table* seen = current.load();
  for (;;) {
    state_.reading.store(seen);
    const Table* now = current.load();
    if (now == seen) {
      break;
    }
    seen = now;
  }
  table_ = seen;
}

uint64_t publish_table(std::unique_ptr<Table> table) {
  const std::lock_guard<std::mutex> lock(publish_mutex);
  const Table* old = current.exchange(table.release());
  if (old) {
    retired().emplace_back(old);
  }
  auto& tables = retired();
  tables.erase(
      std::remove_if(tables.begin(), tables.end(), [](const auto& t) { return !is_read(t.get()); }), tables.end());
  return ++generation;
}

uint64_t lookup_stamp(size_t regime, size_t accuracy, size_t deterministic) {
  return generation.load(std::memory_order_acquire) << 8 | 128 | accuracy << 2 | regime << 1 | deterministic;
}

uint64_t table_generation() { return generation.load(); }

size_t tables_alive() {
  const std::lock_guard<std::mutex> lock(publish_mutex);
  return retired().size() + (current.load() ? 1 : 0);
}

} // namespace autokern
