// The extension's face to Python: plain functions and four small classes.
#include <ATen/SequenceNumber.h>
#include <torch/extension.h>

#include "plan.h"
#include "pool.h"
#include "recorder.h"
#include "router.h"
#include "table.h"

namespace py = pybind11;
namespace ak = autokern;

namespace {

ak::TensorLayout layout_from(const py::object& value) {
  if (value.is_none()) {
    return {};
  }
  const auto tuple = value.cast<std::tuple<int, std::vector<int64_t>, std::vector<int64_t>>>();
  return {true, static_cast<at::ScalarType>(std::get<0>(tuple)), std::get<1>(tuple), std::get<2>(tuple)};
}

using StepTuple = std::tuple<std::string, int64_t, int64_t, std::vector<std::tuple<int, uint32_t, int64_t>>>;

std::shared_ptr<ak::Kernel> make_kernel(
    const std::string& record_id, const std::shared_ptr<ak::Library>& library, const std::vector<StepTuple>& steps,
    const std::vector<std::pair<size_t, bool>>& workspaces, const std::vector<py::object>& outputs,
    size_t input_count) {
  auto kernel = std::make_shared<ak::Kernel>();
  kernel->record_id = record_id;
  ak::Plan& plan = kernel->plan;
  plan.library = library;
  plan.input_count = input_count;
  for (const auto& output : outputs) {
    plan.outputs.push_back(layout_from(output));
  }
  for (const auto& [size_bytes, zeroed] : workspaces) {
    plan.workspaces.push_back({size_bytes, zeroed});
  }
  for (const auto& [entry, range, grain, args] : steps) {
    ak::CpuStep step{reinterpret_cast<decltype(ak::CpuStep::entry)>(library->symbol(entry)), range, grain, {}};
    for (const auto& [kind, index, offset] : args) {
      step.args.push_back({static_cast<ak::PointerArg::Kind>(kind), index, offset});
    }
    plan.steps.push_back(std::move(step));
  }
  plan.check();
  return kernel;
}

void run_kernel(
    const ak::Kernel& kernel, const std::vector<std::optional<at::Tensor>>& inputs,
    const std::vector<std::optional<at::Tensor>>& outputs) {
  TORCH_CHECK_VALUE(
      inputs.size() == kernel.plan.input_count && outputs.size() == kernel.plan.outputs.size(), "this kernel takes ",
      kernel.plan.input_count, " inputs and ", kernel.plan.outputs.size(), " outputs, got ", inputs.size(), " and ",
      outputs.size());
  std::vector<void*> in, out;
  for (const auto& t : inputs) {
    in.push_back(t ? const_cast<void*>(t->const_data_ptr()) : nullptr);
  }
  for (const auto& t : outputs) {
    out.push_back(t ? t->mutable_data_ptr() : nullptr);
  }
  const py::gil_scoped_release release;
  kernel.plan.run(in.data(), out.data());
}

std::vector<std::optional<at::Tensor>> call_kernel(
    const ak::Kernel& kernel, const std::vector<std::optional<at::Tensor>>& inputs, bool pooled) {
  std::vector<std::optional<at::Tensor>> outputs;
  for (auto& t : kernel.plan.allocate_outputs(pooled)) {
    outputs.push_back(t.defined() ? std::optional<at::Tensor>(std::move(t)) : std::nullopt);
  }
  run_kernel(kernel, inputs, outputs);
  return outputs;
}

// entries: (words, [(regime, accuracy, deterministic, kernel)])
using SlotTuple = std::tuple<size_t, size_t, size_t, std::shared_ptr<ak::Kernel>>;
uint64_t set_table(const std::vector<std::pair<std::vector<uint64_t>, std::vector<SlotTuple>>>& rows) {
  std::vector<ak::Entry> entries;
  entries.reserve(rows.size());
  for (const auto& [words, slots] : rows) {
    ak::Entry entry;
    entry.words = words;
    for (const auto& [regime, accuracy, deterministic, kernel] : slots) {
      TORCH_CHECK_VALUE(
          regime < ak::kRegimes && accuracy < ak::kClasses && deterministic < ak::kDeterminism, "no such table slot");
      entry.slots[regime][accuracy][deterministic] = kernel;
    }
    entries.push_back(std::move(entry));
  }
  return ak::publish_table(std::make_unique<ak::Table>(std::move(entries)));
}

// family -> counts by reason, summed over all threads that ever called.
std::vector<std::vector<uint64_t>> counts() {
  std::vector<std::vector<uint64_t>> sums(ak::kOpCount, std::vector<uint64_t>(ak::kReasonNames.size()));
  for (ak::ThreadState* s = ak::first_thread_state(); s; s = s->next) {
    for (size_t op = 0; op < ak::kOpCount; ++op) {
      for (size_t reason = 0; reason < ak::kReasonNames.size(); ++reason) {
        sums[op][reason] += s->counts[op][reason].load(std::memory_order_relaxed);
      }
    }
  }
  return sums;
}

// A scope as Python holds it. enter() and leave() must alternate on one thread; nesting is by token.
struct PyScope {
  ak::Scope* scope = new ak::Scope; // shared with backward passes that may outlive this object

  void set(uint32_t accuracy, bool strict) { scope->policy.store(ak::Policy::make(accuracy, strict).bits); }
  void end() { scope->policy.store(0); }

  std::pair<uintptr_t, uint64_t> enter() const {
    ak::ThreadState& state = ak::thread_state();
    const auto outer = reinterpret_cast<uintptr_t>(state.scope);
    state.scope = scope;
    return {outer, at::sequence_number::peek()};
  }

  void leave(std::pair<uintptr_t, uint64_t> token) const {
    ak::ThreadState& state = ak::thread_state();
    state.scope = reinterpret_cast<ak::Scope*>(token.first);
    if (state.scope != scope) { // an enclosing call of the same scope will record the whole
      ak::record_interval(state, token.second, at::sequence_number::peek(), scope);
    }
  }
};

void bind_kernels(py::module_& m) {
  py::class_<ak::Library, std::shared_ptr<ak::Library>>(m, "Library")
      .def_static(
          "load", [](const py::bytes& b, const std::string& identity) { return ak::Library::load(b, identity); });
  py::class_<ak::Kernel, std::shared_ptr<ak::Kernel>>(m, "Kernel")
      .def(py::init(&make_kernel))
      .def("run", &call_kernel, py::arg("inputs"), py::arg("pooled") = false)
      .def("run_into", &run_kernel)
      .def_readonly("record_id", &ak::Kernel::record_id)
      .def_property_readonly("hits", [](const ak::Kernel& k) { return k.hits.load(); })
      .def_property(
          "quarantined", [](const ak::Kernel& k) { return k.quarantined.load(); },
          [](ak::Kernel& k, bool value) { k.quarantined.store(value); });
  m.def("set_table", &set_table);
  m.def("table_generation", &ak::table_generation);
  m.def("tables_alive", &ak::tables_alive);
}

void bind_router(py::module_& m) {
  py::class_<ak::InstalledOverload>(m, "InstalledOverload")
      .def_readonly("name", &ak::InstalledOverload::name)
      .def_readonly("device", &ak::InstalledOverload::device)
      .def_readonly("family", &ak::InstalledOverload::family)
      .def_readonly("installed", &ak::InstalledOverload::installed)
      .def_readonly("on_top", &ak::InstalledOverload::on_top)
      .def_readonly("above_another", &ak::InstalledOverload::above_another)
      .def_readonly("captured", &ak::InstalledOverload::captured);
  m.def("install", &ak::install, py::call_guard<py::gil_scoped_release>());
  m.def("uninstall", &ak::uninstall, py::call_guard<py::gil_scoped_release>());
  m.def("installed_overloads", &ak::installed_overloads);
  m.def("measure_lookup_seconds", &ak::measure_lookup_seconds);
  m.def("set_process_policy", [](bool active, uint32_t accuracy, bool strict) {
    ak::set_process_policy(active ? ak::Policy::make(accuracy, strict) : ak::Policy{});
  });
  m.def("process_policy_active", [] { return ak::process_policy().active(); });
  py::class_<PyScope>(m, "Scope")
      .def(py::init<>())
      .def("set", &PyScope::set)
      .def("end", &PyScope::end)
      .def("enter", &PyScope::enter)
      .def("leave", &PyScope::leave)
      .def_property_readonly("active", [](const PyScope& s) { return s.scope->load().active(); });
}

void bind_reports(py::module_& m) {
  m.attr("reason_names") = std::vector<std::string>(ak::kReasonNames.begin(), ak::kReasonNames.end());
  m.def("counts", &counts);
  m.def("set_recording", [](bool on) { ak::recording.store(on); });
  m.def("recorder_clear", &ak::recorder_clear);
  m.def("recorded_keys", [] {
    std::vector<std::tuple<std::vector<uint64_t>, std::vector<uint64_t>, uint64_t, uint64_t, double>> rows;
    for (auto& k : ak::recorded_keys()) {
      rows.emplace_back(k.words, k.output_words, k.calls, k.out_calls, k.stock_seconds);
    }
    return rows;
  });
  m.def("missed_keys", [] {
    std::vector<std::tuple<std::vector<uint64_t>, std::string, uint64_t>> rows;
    for (auto& k : ak::missed_keys()) {
      rows.emplace_back(k.words, ak::kReasonNames[static_cast<size_t>(k.reason)], k.calls);
    }
    return rows;
  });
  m.def("forget_misses", &ak::forget_misses);
  m.def("pool_set_limit", &ak::pool_set_limit);
  m.def("pool_empty", &ak::pool_empty);
  m.def("pool_stats", [] {
    const ak::PoolStats s = ak::pool_stats();
    return std::make_tuple(s.limit_bytes, s.kept_bytes, s.reused, s.fresh);
  });
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("built_for_torch") = AUTOKERN_TORCH_VERSION;
  bind_kernels(m);
  bind_router(m);
  bind_reports(m);
}
