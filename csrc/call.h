// One call's arguments, read in schema order into a key, with the gates that need no table. Never touches data.
#pragma once

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <optional>

#include "key.h"
#include "ops.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace autokern {

constexpr size_t kMaxTensors = 6;

// What a plain tensor may have in its key set; anything more is a subclass, a wrapper, a lazy view, or another layout.
inline const uint64_t kPlainKeys =
    (c10::DispatchKeySet(c10::DispatchKey::CPU) | c10::DispatchKeySet(c10::DispatchKey::CUDA) |
     c10::DispatchKeySet(c10::DispatchKey::AutogradCPU) | c10::DispatchKeySet(c10::DispatchKey::AutogradCUDA) |
     c10::DispatchKeySet(c10::DispatchKey::AutocastCPU) | c10::DispatchKeySet(c10::DispatchKey::AutocastCUDA) |
     c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView))
        .raw_repr();

inline bool is_plain(const at::Tensor& t) { return (t.key_set().raw_repr() & ~kPlainKeys) == 0; }

inline bool flushes_denormals() {
#if defined(__x86_64__)
  constexpr unsigned kFlushToZero = 1u << 15, kDenormalsAreZero = 1u << 6;
  return (_mm_getcsr() & (kFlushToZero | kDenormalsAreZero)) != 0;
#elif defined(__aarch64__)
  uint64_t fpcr = 0;
  asm("mrs %0, fpcr" : "=r"(fpcr));
  return fpcr >> 24 & 1;
#else
  return false;
#endif
}

class Call {
 public:
  explicit Call(size_t family) : family_(family) {}

  inline static at::Context& context = at::globalContext();

  const Key& key() const { return key_; }
  Miss miss() const { return miss_; }
  bool has_out() const { return out_; }
  const at::Tensor& out() const { return *out_; }
  bool needs_grad() const { return needs_grad_; }
  // Addresses for a plan, null where a tensor is absent.
  std::array<void*, kMaxTensors> inputs() const {
    std::array<void*, kMaxTensors> addresses{};
    for (size_t i = 0; i < std::min(tensor_count_, kMaxTensors); ++i) {
      addresses[i] = tensors_[i] ? const_cast<void*>(tensors_[i]->const_data_ptr()) : nullptr;
    }
    return addresses;
  }
  size_t input_count() const { return tensor_count_; }
  const at::Tensor& first() const { return *first_; }

  // Schema order. Overloads by type: what a new op's schema adds, this list must know.
  void add(const at::Tensor& t) {
    if (!t.defined()) {
      add_absent();
      return;
    }
    needs_grad_ = needs_grad_ || t.requires_grad();
    if (!admit(t)) {
      return;
    }
    push(&t);
    key_.tensor(t);
  }
  void add(const std::optional<at::Tensor>& t) {
    if (t.has_value()) {
      add(*t);
    } else {
      add_absent();
    }
  }
  void add(at::Tensor& out) { out_ = &out; } // `out`: not part of the words, checked by check_out
  void add(int64_t value) {
    if (int_is_dimension(family_) && first_ && value < 0) {
      value += std::max<int64_t>(first_->dim(), 1);
    }
    key_.word(static_cast<uint64_t>(value));
  }
  void add(bool value) { key_.word(value ? 1 : 0); }
  void add(double value) { key_.number(value); }
  void add(const at::Scalar& value) {
    constexpr int64_t kExact = int64_t{1} << 53; // beyond it, integers share a double
    if (value.isComplex() || value.isSymbolic() ||
        (value.isIntegral(/*includeBool=*/false) && (value.toLong() > kExact || value.toLong() < -kExact))) {
      set(Miss::kDtype);
    } else {
      key_.number(value.toDouble());
    }
  }
  void add(at::ScalarType value) { key_.word(static_cast<uint64_t>(value)); }
  void add(std::optional<at::ScalarType> value) {
    key_.word(static_cast<uint64_t>(value.value_or(at::ScalarType::Undefined)));
  }
  void add(c10::SymIntArrayRef values) {
    key_.word(values.size());
    for (const auto& value : values) {
      const auto plain = value.maybe_as_int();
      if (!plain) {
        set(Miss::kSubclass);
        return;
      }
      key_.word(static_cast<uint64_t>(*plain));
    }
  }
  void add(std::array<bool, 3> values) {
    key_.word(values.size());
    for (const bool value : values) {
      key_.word(value ? 1 : 0);
    }
  }

  // Writes the header and closes the key.
  void finish() {
    if (key_.overflowed()) {
      set(Miss::kRank);
    }
    if (miss_ != Miss::kNone || !first_) {
      set(Miss::kSubclass); // keeps an earlier reason
      return;
    }
    const bool cuda = first_->is_cuda();
    const uint64_t place = cuda ? first_->get_device() : at::get_num_threads();
    uint64_t flags = 0;
    if (!cuda && flushes_denormals()) {
      flags |= kFlagFlushDenormal;
    }
    if (!context.userEnabledMkldnn()) {
      flags |= kFlagNoMkldnn;
    }
    if (uses_matmul_precision(family_) && first_->scalar_type() == at::kFloat) {
      flags |= matmul_precision(cuda) << kPrecisionShift;
    }
    key_.set_header(family_ | (cuda ? uint64_t{1} : 0) << 8 | flags << 16 | place << 32);
  }

  // Whether the first to the last byte of `out` meet those of an input. Slices of one buffer that lie behind one
  // another do not (attention's q, k and v); columns side by side do, although they share no element.
  bool out_overlaps_input() const {
    const Range out = storage_range(*out_);
    for (size_t i = 0; i < std::min(tensor_count_, kMaxTensors); ++i) {
      const Range input = tensors_[i] ? storage_range(*tensors_[i]) : Range{};
      if (input.meets(out) && extent(*tensors_[i]).meets(extent(*out_))) {
        return true;
      }
    }
    return false;
  }

 private:
  struct Range {
    uintptr_t begin = 0, end = 0;
    bool meets(const Range& other) const { return begin < other.end && other.begin < end; }
  };

  static Range storage_range(const at::Tensor& t) {
    const auto begin = reinterpret_cast<uintptr_t>(t.storage().data());
    return {begin, begin + t.storage().nbytes()};
  }

  // Not empty: every tensor of a call that comes this far has elements.
  static Range extent(const at::Tensor& t) {
    uintptr_t last = 0;
    for (int64_t dim = 0; dim < t.dim(); ++dim) {
      last += static_cast<uintptr_t>((t.size(dim) - 1) * t.stride(dim));
    }
    const auto begin = reinterpret_cast<uintptr_t>(t.const_data_ptr());
    return {begin, begin + (last + 1) * t.element_size()};
  }

  void push(const at::Tensor* tensor) {
    if (tensor_count_ < kMaxTensors) {
      tensors_[tensor_count_] = tensor;
    }
    ++tensor_count_;
  }

  void set(Miss reason) {
    if (miss_ == Miss::kNone) {
      miss_ = reason;
    }
  }

  void add_absent() {
    push(nullptr);
    key_.word(0);
  }

  bool admit(const at::Tensor& t) {
    if (!is_plain(t)) {
      set(t.layout() == at::kStrided ? Miss::kSubclass : Miss::kLayout);
    } else if (t.scalar_type() > at::kBFloat16 || !(kKeyDtypes >> static_cast<int>(t.scalar_type()) & 1)) {
      set(Miss::kDtype);
    } else if (t.dim() > kMaxRank) {
      set(Miss::kRank);
    } else if (t.numel() == 0) {
      set(Miss::kEmpty);
    } else if (first_ && t.device() != first_->device()) {
      set(Miss::kDevice);
    } else {
      first_ = first_ ? first_ : &t;
      return true;
    }
    return false;
  }

  // After torch.backends...fp32_precision was assigned, the older getters raise; this one may too on some builds.
  uint64_t matmul_precision(bool cuda) {
    try {
      const auto backend = cuda ? at::Float32Backend::CUDA : at::Float32Backend::MKLDNN;
      switch (context.float32Precision(backend, at::Float32Op::MATMUL)) {
        case at::Float32Precision::TF32:
          return 1;
        case at::Float32Precision::BF16:
          return 2;
        default: // unset means IEEE for matmul
          return 0;
      }
    } catch (const std::exception&) {
      set(Miss::kFlagUnreadable);
      return 0;
    }
  }

  size_t family_;
  Key key_;
  Miss miss_ = Miss::kNone;
  const at::Tensor* first_ = nullptr;
  const at::Tensor* out_ = nullptr;
  size_t tensor_count_ = 0;
  bool needs_grad_ = false;
  std::array<const at::Tensor*, kMaxTensors> tensors_; // the first tensor_count_ are set
};

} // namespace autokern
