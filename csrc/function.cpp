#include "function.h"

#include <ATen/core/stack.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>

#include "recorder.h"
#include "router.h"
#include "serve.h"

namespace py = pybind11;

namespace autokern {
namespace {

constexpr size_t kMaxLayouts = 64; // of one function; further ones run the body

using GraphWords = std::array<uint64_t, 2>;

// What a function is at one layout of its tensors; nothing where it cannot be one op there.
struct Layout {
  uint64_t hash;
  std::vector<uint64_t> words; // header and tensors
  std::optional<GraphWords> graph;
};
using Layouts = std::vector<Layout>;

// One function with one structure of arguments. Never freed: a registered kernel may be inside.
struct Function {
  std::string name;
  size_t inputs, results;
  PyObject* body;    // (*tensors) -> tuple of `results` tensors
  PyObject* resolve; // (list of tensors) -> (low, high) or None

  Function(std::string name, size_t inputs, size_t results, PyObject* body, PyObject* resolve)
      : name(std::move(name)), inputs(inputs), results(results), body(body), resolve(resolve) {}

  std::vector<std::unique_ptr<torch::Library>> registrations;
  std::mutex layouts_mutex;
  std::atomic<const Layouts*> layouts{new Layouts}; // replaced whole; earlier ones are kept, a reader may be inside

  const Layout* find(const Key& key, uint64_t hash) const {
    for (const Layout& layout : *layouts.load(std::memory_order_acquire)) {
      if (layout.hash == hash && layout.words.size() == key.size() &&
          std::memcmp(layout.words.data(), key.words(), key.size() * sizeof(uint64_t)) == 0) {
        return &layout;
      }
    }
    return nullptr;
  }

  // Asks Python; the GIL is taken here. Null when no more layouts are kept.
  [[gnu::cold, gnu::noinline]] const Layout* learn(const Key& key, uint64_t hash, const Results& tensors) {
    if (layouts.load(std::memory_order_acquire)->size() >= kMaxLayouts) {
      return nullptr;
    }
    std::optional<GraphWords> graph;
    {
      const py::gil_scoped_acquire gil;
      const py::object answer = py::reinterpret_borrow<py::object>(resolve)(py::cast(tensors));
      if (!answer.is_none()) {
        graph = answer.cast<GraphWords>();
      }
    }
    const std::lock_guard<std::mutex> lock(layouts_mutex);
    auto grown = std::make_unique<Layouts>(*layouts.load());
    grown->push_back({hash, std::vector<uint64_t>(key.words(), key.words() + key.size()), graph});
    layouts.store(grown.release(), std::memory_order_release);
    return find(key, hash);
  }
};

// Closes the key of a call whose tensors were added, with the graph's words; the reason why it has none otherwise.
Miss identify(Function& function, Call& call, const at::Tensor* const* tensors) {
  call.finish();
  if (call.miss() != Miss::kNone) {
    return call.miss();
  }
  const uint64_t hash = call.key().hash();
  const Layout* layout = function.find(call.key(), hash);
  if (!layout) {
    Results given;
    for (size_t i = 0; i < function.inputs; ++i) {
      given.push_back(*tensors[i]);
    }
    layout = function.learn(call.key(), hash, given);
  }
  if (!layout || !layout->graph) {
    return Miss::kBody;
  }
  for (const uint64_t word : *layout->graph) {
    call.add(static_cast<int64_t>(word));
  }
  return call.key().overflowed() ? Miss::kRank : Miss::kNone;
}

// Serves the call, or says why not and counts it. Not to be called with the GIL.
Miss attempt(Function& function, const at::Tensor* const* tensors, bool differentiable, Results& results) {
  ThreadState& state = thread_state();
  Scope* from_node = nullptr;
  const Policy policy = active_policy(state, from_node);
  if (!policy.active() || !functions_watched.load(std::memory_order_relaxed)) {
    return Miss::kNoRecord; // nobody asked: not counted, as with every op that is not watched
  }
  Call call(kFunctionFamily);
  for (size_t i = 0; i < function.inputs; ++i) {
    call.add(*tensors[i]);
  }
  Miss reason = Miss::kNone;
  if (state.depth > 0) {
    reason = Miss::kReentrant;
  } else if (c10::impl::dispatch_mode_enabled()) {
    reason = Miss::kSubclass; // somebody watches every op: they see those of the body
  } else if (differentiable && call.needs_grad() && c10::GradMode::is_enabled()) {
    reason = Miss::kGradient;
  } else {
    reason = identify(function, call, tensors);
  }
  if (reason == Miss::kNone) {
    const DepthGuard guard(state);
    reason = serve(call, /*out_form=*/false, policy, state, results);
  }
  state.count(kFunctionFamily, reason);
  if (reason != Miss::kNone && policy.strict() && reason != Miss::kEmpty) {
    refuse(function.name.c_str(), reason);
  }
  return reason;
}

void record(Function& function, const Results& tensors, const Results& results, double seconds) {
  Call call(kFunctionFamily);
  std::array<const at::Tensor*, kMaxTensors> addresses{};
  for (size_t i = 0; i < tensors.size(); ++i) {
    call.add(tensors[i]);
    addresses[i] = &tensors[i];
  }
  if (identify(function, call, addresses.data()) == Miss::kNone) {
    record_call(call.key(), results, /*out_form=*/false, seconds);
  }
}

Results run_body(const Function& function, const Results& tensors) {
  const py::gil_scoped_acquire gil;
  py::tuple arguments(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    arguments[i] = py::cast(tensors[i]);
  }
  const py::object made = py::reinterpret_steal<py::object>(PyObject_Call(function.body, arguments.ptr(), nullptr));
  if (!made) {
    throw py::error_already_set();
  }
  return made.cast<Results>();
}

// The function at a backend key, where a compiled program calls it.
struct BackendKernel : c10::OperatorKernel {
  explicit BackendKernel(Function* function) : function(function) {}

  void operator()(const c10::OperatorHandle& /*op*/, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
    Results tensors;
    std::array<const at::Tensor*, kMaxTensors> addresses{};
    for (const c10::IValue& value : torch::jit::last(*stack, function->inputs)) {
      tensors.push_back(value.toTensor());
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
      addresses[i] = &tensors[i];
    }
    const auto start = std::chrono::steady_clock::now();
    Results results;
    if (attempt(*function, addresses.data(), /*differentiable=*/false, results) != Miss::kNone) {
      results = run_body(*function, tensors);
    }
    if (recording.load(std::memory_order_relaxed)) {
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
      record(*function, tensors, results, spent.count());
    }
    torch::jit::drop(*stack, function->inputs);
    for (at::Tensor& result : results) {
      stack->emplace_back(std::move(result));
    }
  }

  Function* function;
};

// attempt(*tensors): the results of a hit as a tuple, None where the body has to run. Plain C, as `run_in_scope` is.
PyObject* attempt_from_python(PyObject* capsule, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  auto* function = static_cast<Function*>(PyCapsule_GetPointer(capsule, nullptr));
  if (!function) {
    return nullptr;
  }
  if (static_cast<size_t>(count) != function->inputs) {
    return PyErr_Format(PyExc_TypeError, "attempt takes %zu tensors, got %zd", function->inputs, count);
  }
  std::array<const at::Tensor*, kMaxTensors> tensors{};
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!THPVariable_CheckExact(args[i])) {
      thread_state().count(kFunctionFamily, Miss::kSubclass);
      Py_RETURN_NONE;
    }
    tensors[static_cast<size_t>(i)] = &THPVariable_Unpack(args[i]);
  }
  Results results;
  Miss reason = Miss::kNone;
  {
    const py::gil_scoped_release release;
    reason = attempt(*function, tensors.data(), /*differentiable=*/true, results);
  }
  if (reason != Miss::kNone) {
    Py_RETURN_NONE;
  }
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(results.size()));
  for (size_t i = 0; tuple && i < results.size(); ++i) {
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), THPVariable_Wrap(std::move(results[i])));
  }
  return tuple;
  END_HANDLE_TH_ERRORS
}

// functions_asked(): 0 where every function runs its body, else bit 0: this thread is served, bit 1: calls are
// recorded.
PyObject* functions_asked(PyObject* /*self*/, PyObject* /*none*/) {
  long bits = recording.load(std::memory_order_relaxed) ? 2 : 0;
  if (functions_watched.load(std::memory_order_relaxed)) {
    Scope* from_node = nullptr;
    bits |= active_policy(thread_state(), from_node).active() ? 1 : 0;
  }
  return PyLong_FromLong(bits);
}

PyMethodDef attempt_method = {
    "attempt", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&attempt_from_python)), METH_FASTCALL,
    "attempt(*tensors): a hit's results, or None"};
PyMethodDef asked_method = {"functions_asked", &functions_asked, METH_NOARGS, "functions_asked(): who wants functions"};

struct PyFunction {
  Function* function;

  PyFunction(std::string name, size_t inputs, size_t results, const py::object& body, const py::object& resolve) {
    TORCH_CHECK_VALUE(
        inputs > 0 && inputs <= kMaxTensors && results > 0 && results <= kMaxTensors, name, " takes ", inputs,
        " tensors and returns ", results, "; an op takes and returns 1 to ", kMaxTensors);
    function = new Function(std::move(name), inputs, results, body.inc_ref().ptr(), resolve.inc_ref().ptr());
  }

  py::object attempt() const {
    const py::capsule self(function);
    return py::reinterpret_steal<py::object>(PyCFunction_New(&attempt_method, self.ptr()));
  }

  // Puts the kernel under an operator `autokern::<op>` that torch.library defined, at both backend keys.
  void implement(const std::string& op) const {
    for (const auto key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
      auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "autokern", key, "torch_autokern", 0);
      library->impl(op.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<BackendKernel>(function)));
      function->registrations.push_back(std::move(library));
    }
  }
};

} // namespace

void bind_functions(py::module_& m) {
  py::class_<PyFunction>(m, "Function")
      .def(py::init<std::string, size_t, size_t, const py::object&, const py::object&>())
      .def_property_readonly("attempt", &PyFunction::attempt)
      .def("implement", &PyFunction::implement)
      .def(
          "record",
          [](const PyFunction& f, const Results& tensors, const Results& results, double seconds) {
            record(*f.function, tensors, results, seconds);
          },
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("layouts", [](const PyFunction& f) { return f.function->layouts.load()->size(); });
  m.attr("functions_asked") = py::reinterpret_steal<py::object>(PyCFunction_New(&asked_method, nullptr));
  m.attr("function_max_tensors") = kMaxTensors;
}

} // namespace autokern
