// The key of a call as a short run of 64-bit words. `torch_autokern/ops/spec.py` writes the same layout in Python
// (`encode`), and tests/runtime/test_key_words.py holds the two together.
//
//   header   op | device << 8 | flags << 16 | place << 32      place: threads on a CPU, device index on a GPU
//   tensor   tag | dtype | rank << 8 | log2(alignment) << 16, then sizes, then strides; one 0 word when absent
//   scalar   int and bool as they are, float and Scalar as the bits of a double, lists as length then values
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include <array>
#include <cstdint>
#include <cstring>

namespace autokern {

// Why a call was not served. Each is counted; the Python side reads the names from `kReasonNames`.
enum class Miss : uint8_t {
  kNone,           // a hit
  kSubclass,       // fake, meta, nested, quantised, wrapped or lazily conjugated tensor
  kLayout,         // not strided
  kDtype,          // a dtype or scalar that keys do not express
  kRank,           // more dimensions, or more words, than a key holds
  kEmpty,          // no elements: ATen handles it
  kDevice,         // tensors on several devices
  kOutLayout,      // `out` would need a resize, or has other strides than the record proved
  kOutOverlap,     // `out` shares memory with an input
  kFlagUnreadable, // a precision getter raised
  kNoRecord,       // no verified kernel for this key
  kAccuracy,       // there is one, of a weaker accuracy class than the policy admits
  kDeterminism,    // there is one, less deterministic than use_deterministic_algorithms asks
  kRegime,         // there is one, for the other calling regime
  kQuarantined,    // there is one, set aside after a fault
  kOutOfMemory,    // no memory for outputs or workspace
  kReentrant,      // called from inside a captured kernel
  kLaunchFailed,   // the driver refused a launch: set aside, and stock ran
  kBody,           // a function whose body cannot be written down as one op at this key
  kGradient,       // a function of which a gradient is wanted: its body runs, and autograd sees it
  kCount
};
constexpr std::array<const char*, static_cast<size_t>(Miss::kCount)> kReasonNames = {
    "hit",         "subclass",      "layout",          "dtype",         "rank",     "empty",       "device",
    "out_layout",  "out_overlap",   "flag_unreadable", "no_record",     "accuracy", "determinism", "regime",
    "quarantined", "out_of_memory", "reentrant",       "launch_failed", "body",     "gradient"};

constexpr uint64_t kTensorTag = uint64_t{1} << 63;
constexpr int64_t kMaxRank = 8;
constexpr uint64_t kFlagFlushDenormal = 1;
constexpr uint64_t kFlagNoMkldnn = 2;
constexpr int kPrecisionShift = 2;

// Dtypes that keys express: bit per c10::ScalarType number, as DTYPE_CODES in ops/spec.py.
constexpr uint64_t kKeyDtypes = 0b1000'1000'1111'1111;

class Key {
 public:
  // 6 tensors of rank 8 and all scalars of the widest op (native_layer_norm_backward) fit.
  static constexpr size_t kMaxWords = 128;

  const uint64_t* words() const { return words_.data(); }
  size_t size() const { return size_; }
  uint64_t hash() const { return hash_words(words(), size_); }
  void set_header(uint64_t header) { words_[0] = header; }

  void word(uint64_t value) {
    if (size_ < kMaxWords) {
      words_[size_++] = value;
    } else {
      overflow_ = true;
    }
  }

  bool overflowed() const { return overflow_; }

  // `t` is plain (is_plain), of at most kMaxRank dimensions.
  void tensor(const at::Tensor& t) {
    const auto sizes = t.sizes();
    const auto strides = t.strides();
    const size_t rank = sizes.size();
    if (size_ + 1 + 2 * rank > kMaxWords) {
      overflow_ = true;
      return;
    }
    const auto address = reinterpret_cast<uintptr_t>(t.unsafeGetTensorImpl()->data());
    const uintptr_t cap = t.is_cuda() ? 16 : t.element_size();
    const auto log2_alignment = static_cast<uint64_t>(__builtin_ctzll(address | cap));
    uint64_t* next = words_.data() + size_;
    *next++ = kTensorTag | static_cast<uint64_t>(t.scalar_type()) | rank << 8 | log2_alignment << 16;
    std::memcpy(next, sizes.data(), rank * sizeof *next);
    std::memcpy(next + rank, strides.data(), rank * sizeof *next);
    size_ += 1 + 2 * rank;
  }

  void number(double value) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    word(bits);
  }

  static uint64_t hash_words(const uint64_t* words, size_t count) {
    // Two independent multiply chains halve the latency; the tail is folded into the first.
    uint64_t a = 0x9E3779B97F4A7C15ull ^ count;
    uint64_t b = 0xC2B2AE3D27D4EB4Full;
    size_t i = 0;
    for (; i + 1 < count; i += 2) {
      a = (a ^ words[i]) * 0xFF51AFD7ED558CCDull;
      b = (b ^ words[i + 1]) * 0xC4CEB9FE1A85EC53ull;
      a ^= a >> 32;
      b ^= b >> 29;
    }
    if (i < count) {
      a = (a ^ words[i]) * 0xFF51AFD7ED558CCDull;
    }
    uint64_t hash = (a ^ (b << 31 | b >> 33)) * 0x9FB21C651E98DF25ull;
    hash ^= hash >> 28;
    return hash ? hash : 1; // 0 marks an empty slot
  }

 private:
  std::array<uint64_t, kMaxWords> words_; // left unset: only the first size_ words are read
  size_t size_ = 1;                       // word 0 is the header, written last
  bool overflow_ = false;
};

} // namespace autokern
