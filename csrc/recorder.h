// What a program asks for, while record() is on; and, always, which keys missed. Neither is on the way of a hit.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "key.h"

namespace autokern {

extern std::atomic<bool> recording;

struct RecordedKey {
  std::vector<uint64_t> words;
  std::vector<uint64_t> output_words; // layouts of the results, as tensors in `words`
  uint64_t calls = 0;
  uint64_t out_calls = 0;
  double stock_seconds = 0; // host clock around the captured kernel or the hit
};

void record_call(const Key& key, const std::vector<at::Tensor>& results, bool out_form, double seconds);
void recorder_clear();
std::vector<RecordedKey> recorded_keys();

struct MissedKey {
  std::vector<uint64_t> words;
  Miss reason;
  uint64_t calls;
};

// One key that was asked for in vain. Slots are never freed.
struct MissedKeySlot {
  std::atomic<uint64_t> hash{0};
  std::atomic<uint64_t> calls{0};
  std::atomic<uint8_t> reason{0};
  std::atomic<const std::vector<uint64_t>*> words{nullptr}; // written once by the thread that claimed the slot

  void count(Miss why) {
    calls.fetch_add(1, std::memory_order_relaxed);
    reason.store(static_cast<uint8_t>(why), std::memory_order_relaxed);
  }
};

// Counts a miss of this key and returns its slot. Lock-free and bounded: past 4,096 distinct keys further ones are only
// counted by reason, and null is returned.
MissedKeySlot* remember_miss(const Key& key, uint64_t hash, Miss reason);
std::vector<MissedKey> missed_keys();
void forget_misses();

} // namespace autokern
