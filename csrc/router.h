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

// An op family at a device's backend key, as a bit of `watch`.
constexpr uint32_t family_bit(uint32_t family, bool cuda) { return family + (cuda ? 16 : 0); }

// Registers the router at every overload of these families that has a kernel there, and takes each other registration
// back that nothing sits on; those that are covered stay and pass calls through. Repeating is harmless.
void watch(uint32_t families);
inline void install() { watch(~0u); }
inline void uninstall() { watch(0); }
std::vector<InstalledOverload> installed_overloads();

// Seconds that reading a key and looking it up take here, averaged over many look-ups of one call.
double measure_lookup_seconds(const at::Tensor& sample);

void set_process_policy(Policy policy);
Policy process_policy();

} // namespace autokern
