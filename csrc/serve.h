// What the router's overloads and whole functions share: who is served, and one call to its kernel or its reason.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <vector>

#include "call.h"
#include "thread_state.h"

namespace autokern {

using Results = std::vector<at::Tensor>;

// Marks this thread as inside a kernel: an op called from there goes straight to its captured kernel.
struct DepthGuard {
  explicit DepthGuard(ThreadState& state) : state(state) { ++state.depth; }
  ~DepthGuard() { --state.depth; }
  ThreadState& state;
};

// Whether functions are looked up at all: the table holds a kernel of one, or somebody wants to see every call.
extern std::atomic<bool> functions_watched;

// The thread's scope, else that of the autograd node that is running (then also in `from_node`), else the process's.
Policy active_policy(ThreadState& state, Scope*& from_node);

// Runs a kernel for the call and returns kNone, or says why there is none; then nothing was touched.
Miss serve(const Call& call, bool out_form, Policy policy, ThreadState& state, Results& results);

// Strict mode's error.
[[noreturn]] void refuse(const char* op, Miss reason);

} // namespace autokern
