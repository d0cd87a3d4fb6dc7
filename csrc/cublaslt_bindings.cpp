// cuBLASLt's face to Python: `runtime/cublaslt.py` is its only caller.
#include "cublaslt_bindings.h"

#include "cublaslt.h"

namespace py = pybind11;
namespace lt = autokern::cublaslt;

namespace {

// (rows, columns, leading, batch_stride, transposed, alignment_bytes)
lt::Matrix matrix_from(const py::handle& value) {
  const auto row = value.cast<std::tuple<uint64_t, uint64_t, int64_t, int64_t, bool, uint32_t>>();
  return std::apply([](auto... words) { return lt::Matrix{words...}; }, row);
}

// (dtype, compute, batches, a, b, d, addend or None, bias_alignment_bytes, alpha, beta)
lt::Problem problem_from(const py::tuple& row) {
  return {
      row[0].cast<int>(),
      row[1].cast<int>(),
      row[2].cast<int32_t>(),
      matrix_from(row[3]),
      matrix_from(row[4]),
      matrix_from(row[5]),
      row[6].is_none() ? std::nullopt : std::optional(matrix_from(row[6])),
      row[7].cast<uint32_t>(),
      row[8].cast<float>(),
      row[9].cast<float>()};
}

void run(const lt::Product& product, const std::array<uintptr_t, 6>& addresses, uintptr_t stream) {
  const auto at = [&](size_t i) { return reinterpret_cast<void*>(addresses.at(i)); };
  const auto status = product.run({at(0), at(1), at(2), at(3), at(4), at(5)}, reinterpret_cast<void*>(stream));
  TORCH_CHECK(status == 0, "cublasLtMatmul: ", lt::status_text(status));
}

} // namespace

void autokern::bind_cublaslt(py::module_& m) {
  py::class_<lt::Product, std::shared_ptr<lt::Product>>(m, "CublasLtProduct")
      .def(py::init([](int device, const py::tuple& problem, const lt::Algorithm& algorithm, size_t workspace_bytes) {
        return std::make_shared<lt::Product>(device, problem_from(problem), algorithm, workspace_bytes);
      }))
      .def_property_readonly("workspace_bytes", &lt::Product::workspace_bytes)
      .def("run", &run); // addresses of a, b, d, addend, bias and workspace; on the current device
  m.def("cublaslt_version", &lt::version);
  // (algorithm, workspace_bytes, waves, same) each, best guess first
  m.def("cublaslt_algorithms", [](int device, const py::tuple& problem, size_t workspace_limit_bytes, int most) {
    TORCH_CHECK_VALUE(most >= 1 && most <= 1024, "most is ", most, ", expected 1 to 1024");
    std::vector<std::tuple<lt::Algorithm, size_t, float, bool>> rows;
    for (const auto& p : lt::algorithms(device, problem_from(problem), workspace_limit_bytes, most)) {
      rows.emplace_back(p.algorithm, p.workspace_bytes, p.waves, p.same);
    }
    return rows;
  });
}
