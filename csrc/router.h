// The way of a call: backend key -> router -> enabled here? -> key -> table -> run the plan, or the captured kernel.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "thread_state.h"

namespace autokern {

struct InstalledOverload {
  std::string name; // "aten::mm.out"
  std::string device;
  uint32_t family;
  bool installed;
  bool on_top;          // false: another override sits above ours
  bool above_another;   // true: what we captured is not PyTorch's own kernel
  std::string captured; // where the captured kernel was registered
};

// Registers the router at the CPU and CUDA keys of every overload that has a kernel there. Repeating is harmless.
void install();
// Takes every registration back that nothing sits on; the others stay and pass calls through. Repeating is harmless.
void uninstall();
std::vector<InstalledOverload> installed_overloads();

// Seconds that reading a key and looking it up take here, averaged over many look-ups of one call.
double measure_lookup_seconds(const at::Tensor& sample);

void set_process_policy(Policy policy);
Policy process_policy();

} // namespace autokern
