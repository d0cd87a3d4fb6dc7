// The kernel that was installed before ours, callable without boxing.
//
// c10::SafeKernelFunction is the only handle that PyTorch gives out for a registered kernel, and it offers a boxed call
// only. Boxing every argument costs a good part of what a whole decided miss may (benchmarks/overhead.py). The
// KernelFunction inside has the unboxed call, and its token says whether the owner took the kernel away; both are read
// here through the one door that C++ leaves open to private members, an explicit instantiation. Names checked in
// torch 2.11 and 2.13; another layout fails to compile, never at run time.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace autokern {

template <class Tag, typename Tag::type kMember>
struct Door {
  friend typename Tag::type open(Tag) { return kMember; }
};

struct KernelMember {
  using type = c10::KernelFunction c10::SafeKernelFunction::*;
  friend type open(KernelMember);
};
struct TokenMember {
  using type = std::shared_ptr<c10::KernelToken> c10::SafeKernelFunction::*;
  friend type open(TokenMember);
};
template struct Door<KernelMember, &c10::SafeKernelFunction::kernel_>;
template struct Door<TokenMember, &c10::SafeKernelFunction::token_>;

class CapturedKernel {
 public:
  CapturedKernel(c10::OperatorHandle op, c10::DispatchKey backend)
      : op_(std::move(op)), safe_(op_.getComputedKernelForDispatchKey(backend)) {}

  bool is_valid() const { return (safe_.*open(TokenMember{}))->isValid(); }
  const std::string& registered_at() const { return safe_.debug(); }

  template <class Result, class... Args>
  Result call(c10::DispatchKeySet keys, Args... args) const {
    return (safe_.*open(KernelMember{})).template call<Result, Args...>(op_, keys, std::forward<Args>(args)...);
  }

 private:
  c10::OperatorHandle op_;
  c10::SafeKernelFunction safe_;
};

} // namespace autokern
