#include "recorder.h"

#include <array>
#include <map>
#include <mutex>

namespace autokern {

std::atomic<bool> recording{false};

namespace {

std::mutex recorder_mutex;
std::map<std::vector<uint64_t>, RecordedKey>& recorder() {
  static auto* keys = new std::map<std::vector<uint64_t>, RecordedKey>;
  return *keys;
}

constexpr size_t kMissSlots = 4096;
constexpr size_t kMissProbes = 16;

std::array<MissedKeySlot, kMissSlots>& miss_slots() {
  static auto* slots = new std::array<MissedKeySlot, kMissSlots>;
  return *slots;
}

} // namespace

void record_call(const Key& key, const std::vector<at::Tensor>& results, bool out_form, double seconds) {
  std::vector<uint64_t> words(key.words(), key.words() + key.size());
  const std::lock_guard<std::mutex> lock(recorder_mutex);
  RecordedKey& entry = recorder()[words];
  // Results' layouts are those that stock chooses; what a caller gave as `out` stands in until stock was asked.
  if (entry.calls == 0 || (!out_form && entry.calls == entry.out_calls)) {
    Key layouts;
    for (const at::Tensor& result : results) {
      if (result.defined()) {
        layouts.tensor(result);
      } else {
        layouts.word(0);
      }
    }
    entry.words = std::move(words);
    entry.output_words.assign(layouts.words() + 1, layouts.words() + layouts.size()); // without the header
  }
  ++entry.calls;
  entry.out_calls += out_form ? 1 : 0;
  entry.stock_seconds += seconds;
}

void recorder_clear() {
  const std::lock_guard<std::mutex> lock(recorder_mutex);
  recorder().clear();
}

std::vector<RecordedKey> recorded_keys() {
  const std::lock_guard<std::mutex> lock(recorder_mutex);
  std::vector<RecordedKey> keys;
  for (const auto& [words, entry] : recorder()) {
    keys.push_back(entry);
  }
  return keys;
}

MissedKeySlot* remember_miss(const Key& key, uint64_t hash, Miss reason) {
  auto& slots = miss_slots();
  for (size_t probe = 0; probe < kMissProbes; ++probe) {
    MissedKeySlot& slot = slots[(hash + probe) % kMissSlots];
    uint64_t seen = slot.hash.load(std::memory_order_acquire);
    if (seen == 0 && slot.hash.compare_exchange_strong(seen, hash)) {
      slot.words.store(new std::vector<uint64_t>(key.words(), key.words() + key.size()), std::memory_order_release);
      seen = hash;
    }
    if (seen == hash) {
      slot.count(reason);
      return &slot;
    }
  }
  return nullptr;
}

std::vector<MissedKey> missed_keys() {
  std::vector<MissedKey> keys;
  for (const MissedKeySlot& slot : miss_slots()) {
    const auto* words = slot.words.load(std::memory_order_acquire);
    const uint64_t calls = slot.calls.load(std::memory_order_relaxed);
    if (words && calls) {
      keys.push_back({*words, static_cast<Miss>(slot.reason.load(std::memory_order_relaxed)), calls});
    }
  }
  return keys;
}

void forget_misses() {
  for (MissedKeySlot& slot : miss_slots()) {
    slot.calls.store(0, std::memory_order_relaxed); // the key stays: a reader may be inside it
  }
}

} // namespace autokern
