#include "router.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <chrono>
#include <memory>
#include <mutex>

#include "call.h"
#include "captured.h"
#include "recorder.h"
#include "table.h"

namespace autokern {
namespace {

constexpr const char* kOwner = "torch_autokern"; // our registrations' "file", by which they are known again
std::atomic<uint32_t> process_policy_bits{0};
std::mutex install_mutex;

// One overload at one backend key: our registration, and the kernel that it covers.
struct Slot {
  const char* name;
  const char* overload;
  c10::DispatchKey backend;
  uint32_t family;
  std::unique_ptr<torch::Library> registration;
  std::atomic<const CapturedKernel*> captured{nullptr}; // replaced ones are kept: a call may be inside

  c10::OperatorHandle handle() const { return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload); }
};

// Never destroyed: calls may come while the process ends.
template <class Op, c10::DispatchKey kBackend>
Slot& slot_of = *new Slot{Op::name, Op::overload_name, kBackend, 0, nullptr, {nullptr}};

const CapturedKernel* recapture(Slot& slot);

// PyTorch's own CPU kernel, for the one case in which what we captured is gone and what lies beneath cannot be seen.
template <class Op>
struct CpuStock;
#define AUTOKERN_CPU_STOCK(family, op, function)             \
  template <>                                                \
  struct CpuStock<at::_ops::op> {                            \
    template <class... Args>                                 \
    static decltype(auto) call(Args&&... args) {             \
      return at::cpu::function(std::forward<Args>(args)...); \
    }                                                        \
  };
AUTOKERN_FOR_EACH_OVERLOAD(AUTOKERN_CPU_STOCK)
#undef AUTOKERN_CPU_STOCK

// Marks this thread as inside a kernel: an op called from there goes straight to its captured kernel.
struct DepthGuard {
  explicit DepthGuard(ThreadState& state) : state(state) { ++state.depth; }
  ~DepthGuard() { --state.depth; }
  ThreadState& state;
};

// What follows is one piece of code for all overloads, so that a program's calls share it in the processor's caches.

using Results = std::vector<at::Tensor>;

Kernel* choose(const Entry& entry, size_t regime, size_t accuracy, size_t deterministic, Miss& reason) {
  Kernel* kernel = entry.slots[regime][accuracy][deterministic].get();
  if (!kernel) {
    reason = entry.why_not(regime, accuracy, deterministic);
  } else if (kernel->quarantined.load(std::memory_order_relaxed)) {
    reason = Miss::kQuarantined;
    kernel = nullptr;
  }
  return kernel;
}

bool prepare(const Kernel& kernel, const Call& call, bool out_form, Results& results, Miss& reason) {
  if (out_form) {
    if (call.out().device() != call.first().device()) {
      reason = Miss::kDevice;
    } else if (!is_plain(call.out()) || !kernel.plan.outputs[0].matches(call.out())) {
      reason = Miss::kOutLayout;
    } else if (call.out_overlaps_input()) {
      reason = Miss::kOutOverlap;
    } else {
      results.push_back(call.out());
    }
  } else {
    try {
      results = kernel.plan.allocate_outputs(/*pooled=*/true);
    } catch (const std::exception&) { // c10::Error or bad_alloc: no memory, nothing touched
      reason = Miss::kOutOfMemory;
    }
  }
  return reason == Miss::kNone;
}

bool run(Kernel& kernel, const Call& call, Results& results, Miss& reason) {
  std::array<void*, kMaxTensors> outputs{};
  for (size_t i = 0; i < results.size(); ++i) {
    outputs.at(i) = results[i].defined() ? results[i].mutable_data_ptr() : nullptr;
  }
  try {
    const auto inputs = call.inputs();
    kernel.plan.run(inputs.data(), outputs.data());
  } catch (const LaunchError& error) { // stock writes every output again, and no input was touched
    kernel.quarantine(error.what());
    reason = Miss::kLaunchFailed;
  } catch (const std::exception&) { // workspace memory: asked for before the first step
    reason = Miss::kOutOfMemory;
  }
  return reason == Miss::kNone;
}

// Runs a kernel for the call and returns kNone, or says why there is none; then nothing was touched.
[[gnu::hot]] Miss serve(const Call& call, bool out_form, Policy policy, ThreadState& state, Results& results) {
  if (call.miss() != Miss::kNone) {
    return call.miss();
  }
  const size_t regime = out_form ? 1 : 0;
  const size_t deterministic = call.context.deterministicAlgorithms() ? 1 : 0;
  const uint64_t stamp = lookup_stamp(regime, policy.accuracy(), deterministic);
  const uint64_t hash = call.key().hash();
  MissMemo& memo = state.memo(hash);
  if (memo.hash == hash && memo.stamp == stamp) {
    memo.slot->count(memo.reason);
    return memo.reason;
  }
  Miss reason = Miss::kNone;
  {
    const TableReader reader(state);
    const Entry* entry = reader.table() ? reader.table()->find(call.key(), hash) : nullptr;
    Kernel* kernel = entry ? choose(*entry, regime, policy.accuracy(), deterministic, reason) : nullptr;
    if (kernel) {
      if (prepare(*kernel, call, out_form, results, reason) && run(*kernel, call, results, reason)) {
        kernel->hits.fetch_add(1, std::memory_order_relaxed);
      }
    } else if (!entry) {
      reason = Miss::kNoRecord;
    }
  }
  if (reason == Miss::kNone) {
    return reason;
  }
  MissedKeySlot* slot = remember_miss(call.key(), hash, reason);
  const bool lasts = reason == Miss::kNoRecord || reason == Miss::kAccuracy || reason == Miss::kDeterminism ||
                     reason == Miss::kRegime; // until the table changes; the others depend on the single call
  if (slot && lasts) {
    memo = {hash, stamp, slot, reason};
  }
  return reason;
}

[[noreturn]] void refuse(const char* op, Miss reason) {
  TORCH_CHECK(
      false, "autokern strict mode: ", op, " was not served (", kReasonNames[static_cast<size_t>(reason)],
      "); see torch_autokern.explain(), or leave strict mode");
}

template <class Op, c10::DispatchKey kBackend, uint32_t kFamily, class Signature = typename Op::schema>
struct Router;

template <class Op, c10::DispatchKey kBackend, uint32_t kFamily, class Result, class... Args>
struct Router<Op, kBackend, kFamily, Result(Args...)> {
  static constexpr bool kOutForm = std::is_reference_v<Result>;

  static Result stock(c10::DispatchKeySet keys, Args... args) {
    Slot& slot = slot_of<Op, kBackend>;
    const CapturedKernel* kernel = slot.captured.load(std::memory_order_acquire);
    if (!kernel->is_valid()) {
      kernel = recapture(slot);
      if (!kernel) {
        return last_resort(std::forward<Args>(args)...);
      }
    }
    return kernel->template call<Result, Args...>(keys, std::forward<Args>(args)...);
  }

  [[gnu::cold, gnu::noinline]] static Result last_resort(Args... args) {
    if constexpr (kBackend == c10::DispatchKey::CPU) {
      return CpuStock<Op>::call(std::forward<Args>(args)...);
    } else {
      TORCH_CHECK(
          false, "autokern: the override of ", Op::name,
          " beneath torch_autokern was removed while another one sits above "
          "it, so PyTorch's own kernel cannot be reached; remove overrides in the reverse order of their installation");
    }
  }

  [[gnu::hot]] static Result call(c10::DispatchKeySet keys, Args... args) {
    ThreadState& state = thread_state();
    const bool record = recording.load(std::memory_order_relaxed);
    Scope* from_node = nullptr;
    const Policy policy = active_policy(state, from_node);
    if (!policy.active() && !record) {
      return stock(keys, std::forward<Args>(args)...);
    }
    if (state.depth > 0) {
      if (policy.active()) {
        state.count(kFamily, Miss::kReentrant);
      }
      return stock(keys, std::forward<Args>(args)...);
    }
    const DepthGuard guard(state);
    Call call(kFamily);
    (call.add(args), ...);
    call.finish();
    if (from_node && call.needs_grad() && c10::GradMode::is_enabled()) {
      // Recomputation and double backward: autograd made this op's node just before it came here.
      const uint64_t next = at::sequence_number::peek();
      record_interval(state, next - 1, next, from_node);
    }
    if (record) {
      return recorded(call, policy, state, keys, std::forward<Args>(args)...);
    }
    return served(call, policy, state, keys, std::forward<Args>(args)...);
  }

  static Policy active_policy(ThreadState& state, Scope*& from_node) {
    if (state.scope) {
      const Policy policy = state.scope->load();
      if (policy.active()) {
        return policy;
      }
    }
    if (any_interval.load(std::memory_order_relaxed)) {
      Scope* scope = scope_of_current_node();
      if (scope && scope->load().active()) {
        from_node = scope;
        return scope->load();
      }
    }
    return process_policy();
  }

  static Result served(Call& call, Policy policy, ThreadState& state, c10::DispatchKeySet keys, Args... args) {
    if (policy.active()) {
      Results results;
      const Miss reason = serve(call, kOutForm, policy, state, results);
      state.count(kFamily, reason);
      if (reason == Miss::kNone) {
        return take_result(results, std::forward<Args>(args)...);
      }
      if (policy.strict() && reason != Miss::kEmpty) {
        refuse(Op::name, reason);
      }
    }
    return stock(keys, std::forward<Args>(args)...);
  }

  static Result take_result(Results& results, Args... args) {
    if constexpr (kOutForm) {
      return std::get<sizeof...(Args) - 1>(std::forward_as_tuple(args...));
    } else if constexpr (std::is_same_v<Result, at::Tensor>) {
      return std::move(results[0]);
    } else {
      return {std::move(results[0]), std::move(results[1]), std::move(results[2])};
    }
  }

  [[gnu::cold, gnu::noinline]] static Result recorded(
      Call& call, Policy policy, ThreadState& state, c10::DispatchKeySet keys, Args... args) {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    Result result = served(call, policy, state, keys, std::forward<Args>(args)...);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    const bool in_place = kOutForm && call.miss() == Miss::kNone && call.out_overlaps_input(); // never served
    if (call.miss() == Miss::kNone && !in_place) {
      std::vector<at::Tensor> results;
      if constexpr (std::is_same_v<std::decay_t<Result>, at::Tensor>) {
        results.push_back(result);
      } else {
        results = {std::get<0>(result), std::get<1>(result), std::get<2>(result)};
      }
      record_call(call.key(), results, kOutForm, seconds);
    }
    return result;
  }
};

bool is_ours(const c10::SafeKernelFunction& kernel) { return kernel.debug().find(kOwner) != std::string::npos; }

void capture(Slot& slot) {
  slot.captured.store(new CapturedKernel(slot.handle(), slot.backend), std::memory_order_release);
}

// Registering over a kernel prints a warning meant for people who do so by mistake.
struct SilentWarnings final : c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

template <class Op, c10::DispatchKey kBackend, uint32_t kFamily>
void register_router(Slot& slot) {
  SilentWarnings silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  slot.registration = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", kBackend, kOwner, kFamily);
  const std::string full = Op::overload_name[0] ? std::string(Op::name) + "." + Op::overload_name : Op::name;
  slot.registration->impl(
      full.c_str(), torch::CppFunction::makeFromUnboxedFunction(&Router<Op, kBackend, kFamily>::call));
}

struct Overload {
  Slot* slot;
  void (*put)(Slot&);
};

template <class Op, c10::DispatchKey kBackend, uint32_t kFamily>
Overload overload() {
  Slot& slot = slot_of<Op, kBackend>;
  slot.family = kFamily;
  return {&slot, &register_router<Op, kBackend, kFamily>};
}

const std::vector<Overload>& overloads() {
  static const auto* all = new std::vector<Overload>{
#define AUTOKERN_ENTRY(family, op, function) \
  overload<at::_ops::op, c10::DispatchKey::CPU, family>(), overload<at::_ops::op, c10::DispatchKey::CUDA, family>(),
      AUTOKERN_FOR_EACH_OVERLOAD(AUTOKERN_ENTRY)
#undef AUTOKERN_ENTRY
  };
  return *all;
}

bool on_top(const Slot& slot) { return is_ours(slot.handle().getComputedKernelForDispatchKey(slot.backend)); }

// What we captured was taken away by its owner. Step aside, look what is beneath, and step back. Null where another
// override sits above ours: stepping aside would show that one, and break the hold that it has on us.
const CapturedKernel* recapture(Slot& slot) {
  const std::lock_guard<std::mutex> lock(install_mutex);
  if (slot.captured.load()->is_valid()) { // another thread was first
    return slot.captured.load();
  }
  if (!on_top(slot)) {
    return nullptr;
  }
  slot.registration.reset();
  capture(slot);
  for (const Overload& entry : overloads()) {
    if (entry.slot == &slot) {
      entry.put(slot);
    }
  }
  return slot.captured.load();
}

} // namespace

void watch(uint32_t families) {
  const std::lock_guard<std::mutex> lock(install_mutex);
  for (const Overload& entry : overloads()) {
    Slot& slot = *entry.slot;
    const bool wanted = families >> family_bit(slot.family, slot.backend == c10::DispatchKey::CUDA) & 1;
    if (wanted && !slot.registration && slot.handle().hasKernelForDispatchKey(slot.backend)) {
      capture(slot);
      entry.put(slot);
    } else if (!wanted && slot.registration && on_top(slot)) {
      slot.registration.reset();
    }
  }
}

std::vector<InstalledOverload> installed_overloads() {
  const std::lock_guard<std::mutex> lock(install_mutex);
  std::vector<InstalledOverload> result;
  for (const Overload& entry : overloads()) {
    const Slot& slot = *entry.slot;
    const bool installed = slot.registration != nullptr;
    if (!installed && !slot.handle().hasKernelForDispatchKey(slot.backend)) {
      continue;
    }
    const auto top = slot.handle().getComputedKernelForDispatchKey(slot.backend);
    const std::string captured = installed ? slot.captured.load()->registered_at() : top.debug();
    const bool foreign = captured.find("aten/src/ATen") == std::string::npos;
    const std::string full = slot.overload[0] ? std::string(slot.name) + "." + slot.overload : slot.name;
    result.push_back({full, c10::toString(slot.backend), slot.family, installed, is_ours(top), foreign, captured});
  }
  return result;
}

double measure_lookup_seconds(const at::Tensor& sample) {
  constexpr int kRounds = 20000;
  ThreadState& state = thread_state();
  size_t found = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kRounds; ++i) {
    Call call(4); // _softmax
    call.add(sample);
    call.add(int64_t{-1});
    call.add(false);
    call.finish();
    const TableReader reader(state);
    const uint64_t hash = call.key().hash();
    found += reader.table() && reader.table()->find(call.key(), hash) ? 1 : 0;
  }
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  return elapsed.count() / kRounds + (found > kRounds ? 1 : 0); // `found` is used so that the loop stays
}

void set_process_policy(Policy policy) { process_policy_bits.store(policy.bits, std::memory_order_relaxed); }
Policy process_policy() { return {process_policy_bits.load(std::memory_order_relaxed)}; }

} // namespace autokern
