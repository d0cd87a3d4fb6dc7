// The extension's face to Python: plain functions and four small classes.
#include <ATen/SequenceNumber.h>
#include <torch/extension.h>

#include <algorithm>

#include "call.h"
#include "cublaslt_bindings.h"
#include "function.h"
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

ak::PointerArg pointer_from(const py::handle& value) {
  const auto [kind, index, offset] = value.cast<std::tuple<int, uint32_t, int64_t>>();
  return {static_cast<ak::PointerArg::Kind>(kind), index, offset};
}

// ("cpu", entry, range, grain, pointers) or ("library", function, operands, output, result, alpha, beta)
ak::CpuStep cpu_step_from(const py::tuple& row, const ak::Library& library) {
  if (row[0].cast<std::string>() == "library") {
    static const std::array<std::string, 4> names{"mm", "addmm", "bmm", "baddbmm"};
    const auto* name = std::find(names.begin(), names.end(), row[1].cast<std::string>());
    TORCH_CHECK(name != names.end(), "autokern: a library step asks for ", row[1].cast<std::string>());
    ak::LibraryCall call{
        static_cast<ak::LibraryCall::Function>(name - names.begin()),
        {},
        row[3].cast<uint32_t>(),
        layout_from(row[4]),
        row[5].cast<double>(),
        row[6].cast<double>()};
    for (const auto& item : row[2].cast<py::list>()) {
      const auto pair = item.cast<py::tuple>();
      call.operands.emplace_back(pair[0].cast<uint32_t>(), layout_from(pair[1]));
    }
    return {nullptr, 0, 0, {}, std::move(call)};
  }
  const auto entry = row[1].cast<std::string>();
  ak::CpuStep step{
      reinterpret_cast<decltype(ak::CpuStep::entry)>(library.symbol(entry)),
      row[2].cast<int64_t>(),
      row[3].cast<int64_t>(),
      {},
      std::nullopt};
  for (const auto& pointer : row[4].cast<py::list>()) {
    step.args.push_back(pointer_from(pointer));
  }
  return step;
}

std::shared_ptr<ak::Kernel> make_kernel(
    const std::string& record_id, const std::shared_ptr<ak::Library>& library, const std::vector<py::tuple>& steps,
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
  for (const py::tuple& row : steps) {
    plan.steps.push_back(cpu_step_from(row, *library));
  }
  plan.check();
  return kernel;
}

// ("kernel", entry, grid, block, cluster, shared_bytes, cooperative, programmatic, parameters, maps)
// or ("memset", target, bytes, value) or ("cublaslt", product, operands or None); a parameter is ("pointer", pointer),
// ("bits", bits) or ("map", index).
ak::CudaStep cuda_step_from(const py::tuple& row, ak::cuda::Module module) {
  using Triple = std::array<unsigned, 3>;
  ak::CudaStep step;
  if (row[0].cast<std::string>() == "memset") {
    step.memset_target = pointer_from(row[1]);
    step.memset_bytes = row[2].cast<size_t>();
    step.memset_value = row[3].cast<unsigned char>();
    return step;
  }
  if (row[0].cast<std::string>() == "cublaslt") {
    step.product = row[1].cast<std::shared_ptr<ak::cublaslt::Product>>();
    const auto operands = row[2].cast<py::list>();
    TORCH_CHECK_VALUE(operands.size() == step.operands.size(), "a product has ", step.operands.size(), " operands");
    for (size_t i = 0; i < step.operands.size(); ++i) {
      if (!operands[i].is_none()) {
        step.operands.at(i) = pointer_from(operands[i]);
      }
    }
    return step;
  }
  const auto entry = row[1].cast<std::string>();
  const auto& driver = ak::cuda::driver();
  const auto found = driver.module_function(&step.function, module, entry.c_str());
  TORCH_CHECK(found == 0, "autokern: kernel ", entry, ": ", ak::cuda::error_text(found));
  step.grid = row[2].cast<Triple>();
  step.block = row[3].cast<Triple>();
  step.cluster = row[4].cast<Triple>();
  step.shared_bytes = row[5].cast<unsigned>();
  step.cooperative = row[6].cast<bool>();
  step.programmatic = row[7].cast<bool>();
  for (const auto& item : row[8].cast<py::list>()) {
    const auto pair = item.cast<py::tuple>();
    const auto kind = pair[0].cast<std::string>();
    if (kind == "pointer") {
      step.parameters.push_back({ak::CudaParameter::Kind::kPointer, pointer_from(pair[1]), 0, 0});
    } else if (kind == "bits") {
      step.parameters.push_back({ak::CudaParameter::Kind::kBits, {}, pair[1].cast<uint64_t>(), 0});
    } else {
      step.parameters.push_back({ak::CudaParameter::Kind::kTensorMap, {}, 0, pair[1].cast<uint32_t>()});
    }
  }
  for (const auto& item : row[9].cast<py::list>()) {
    const auto map = item.cast<py::tuple>();
    step.maps.push_back(
        {pointer_from(map[0]), map[1].cast<int>(), map[2].cast<std::vector<uint64_t>>(),
         map[3].cast<std::vector<uint64_t>>(), map[4].cast<std::vector<uint32_t>>(),
         map[5].cast<std::vector<uint32_t>>(), map[6].cast<int>(), map[7].cast<int>(), map[8].cast<int>(),
         map[9].cast<int>()});
  }
  const auto set = [&](int attribute, int value) {
    const auto result = driver.function_set(step.function, attribute, value);
    TORCH_CHECK(result == 0, "autokern: kernel ", entry, ": cuFuncSetAttribute: ", ak::cuda::error_text(result));
  };
  if (step.shared_bytes > 0) { // past 48 KiB it must be asked for, and what the kernel declares itself counts too
    set(ak::cuda::kFunctionMaxDynamicShared, static_cast<int>(step.shared_bytes));
  }
  if (step.cluster[0] * step.cluster[1] * step.cluster[2] > 8) { // the portable limit
    set(ak::cuda::kFunctionNonPortableCluster, 1);
  }
  return step;
}

// Loads the image into `device`'s primary context, now: never inside a call.
std::shared_ptr<ak::Kernel> make_cuda_kernel(
    const std::string& record_id, const py::bytes& image, int device, const std::vector<py::tuple>& steps,
    const std::vector<std::pair<size_t, bool>>& workspaces, const std::vector<py::object>& outputs,
    size_t input_count) {
  auto kernel = std::make_shared<ak::Kernel>();
  kernel->record_id = record_id;
  ak::Plan& plan = kernel->plan;
  plan.device = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
  plan.input_count = input_count;
  for (const auto& output : outputs) {
    plan.outputs.push_back(layout_from(output));
  }
  for (const auto& [size_bytes, zeroed] : workspaces) {
    plan.workspaces.push_back({size_bytes, zeroed});
  }
  const c10::DeviceGuard guard(plan.device);
  const std::string bytes = image;
  ak::cuda::Module module = nullptr; // stays loaded for the life of the process
  const auto loaded = ak::cuda::driver().module_load(&module, bytes.data());
  TORCH_CHECK(loaded == 0, "autokern: the driver does not load this kernel: ", ak::cuda::error_text(loaded));
  for (const auto& step : steps) {
    plan.cuda_steps.push_back(cuda_step_from(step, module));
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
      const size_t family = words.empty() ? ak::kOpCount : words[0] & 0xFF;
      TORCH_CHECK_VALUE(
          family < ak::kOpCount && kernel->plan.input_count <= ak::tensor_limit(family) &&
              (family == ak::kFunctionFamily ? kernel->plan.outputs.size() <= ak::kMaxTensors
                                             : kernel->plan.outputs.size() == ak::result_count(family)),
          "kernel ", kernel->record_id, " has ", kernel->plan.input_count, " inputs and ", kernel->plan.outputs.size(),
          " outputs, which is no call of op family ", family);
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

// A scope that a thread is inside of.
struct EnteredScope {
  ak::ThreadState* state;
  uint64_t ticket;
  uint64_t from; // first autograd sequence number
};

EnteredScope enter_scope(ak::Scope* scope) {
  ak::ThreadState& state = ak::thread_state();
  return {&state, state.enter(scope), at::sequence_number::peek()};
}

// Whether backward passes may follow that belong to the scope.
bool leave_scope(ak::Scope* scope, const EnteredScope& entered) {
  ak::ThreadState& state = *entered.state;
  state.leave(entered.ticket);
  const uint64_t to = at::sequence_number::peek();
  if (state.scope != scope) { // an enclosing call of the same scope will record the whole
    ak::record_interval(state, entered.from, to, scope);
  }
  return entered.from < to;
}

// run(callable, args, kwargs): the call inside the scope that the capsule holds. Plain C, because a model's every call
// comes through here and pybind11's handling of arguments costs several times the rest.
PyObject* run_in_scope(PyObject* capsule, PyObject* const* args, Py_ssize_t count) {
  auto* scope = static_cast<ak::Scope*>(PyCapsule_GetPointer(capsule, nullptr));
  if (!scope || count != 3) {
    return scope ? PyErr_Format(PyExc_TypeError, "run takes 3 arguments, got %zd", count) : nullptr;
  }
  const EnteredScope entered = enter_scope(scope);
  PyObject* result = PyObject_Call(args[0], args[1], args[2]);
  leave_scope(scope, entered);
  return result;
}

PyMethodDef run_method = {
    "run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&run_in_scope)), METH_FASTCALL,
    "run(callable, args, kwargs): callable(*args, **kwargs) inside the scope"};

// A scope as Python holds it. leave() takes what its enter() returned.
struct PyScope {
  using Token = std::tuple<uintptr_t, uint64_t, uint64_t>;

  ak::Scope* scope = new ak::Scope; // shared with backward passes that may outlive this object

  void set(uint32_t accuracy, bool strict) { scope->policy.store(ak::Policy::make(accuracy, strict).bits); }
  void end() { scope->policy.store(0); }

  py::object run() const {
    const py::capsule self(scope);
    return py::reinterpret_steal<py::object>(PyCFunction_New(&run_method, self.ptr()));
  }

  Token enter() const {
    const EnteredScope entered = enter_scope(scope);
    return {reinterpret_cast<uintptr_t>(entered.state), entered.ticket, entered.from};
  }

  bool leave(const Token& token) {
    const auto [thread, ticket, from] = token;
    ak::ThreadState& state = ak::thread_state();
    if (reinterpret_cast<uintptr_t>(&state) != thread) {
      end(); // left on another thread: that thread's stack is its own, so the scope is switched off there instead
      return false;
    }
    return leave_scope(scope, {&state, ticket, from});
  }
};

void bind_kernels(py::module_& m) {
  py::class_<ak::Library, std::shared_ptr<ak::Library>>(m, "Library")
      .def_static(
          "load", [](const py::bytes& b, const std::string& identity) { return ak::Library::load(b, identity); });
  py::class_<ak::LibraryOpener>(m, "LibraryOpener")
      .def(py::init())
      .def(
          "add",
          [](ak::LibraryOpener& o, const py::bytes& b, const std::string& identity) { return o.add(b, identity); })
      .def("take", &ak::LibraryOpener::take, py::call_guard<py::gil_scoped_release>());
  py::class_<ak::Kernel, std::shared_ptr<ak::Kernel>>(m, "Kernel")
      .def(py::init(&make_kernel))
      .def("run", &call_kernel, py::arg("inputs"), py::arg("pooled") = false)
      .def("run_into", &run_kernel)
      .def_static("load_cuda", &make_cuda_kernel)
      .def_property_readonly(
          "fault", [](const ak::Kernel& k) { return k.quarantined.load() ? k.fault : std::string(); })
      .def_readonly("record_id", &ak::Kernel::record_id)
      .def_property_readonly("device_index", [](const ak::Kernel& k) { return int(k.plan.device.index()); })
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
  m.def("watch", &ak::watch, py::call_guard<py::gil_scoped_release>());
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
      .def_property_readonly("run", &PyScope::run)
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
  ak::bind_cublaslt(m); // before Kernel, whose steps hold its products
  bind_kernels(m);
  bind_router(m);
  bind_reports(m);
  ak::bind_functions(m);
}
