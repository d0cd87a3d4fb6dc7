// A launch plan made ready to run: entry points resolved, layouts fixed. Immutable after construction.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cublaslt.h"
#include "cuda_driver.h"
#include "library.h"

namespace autokern {

// A launch that the driver or cuBLASLt refused, in its words. Results so far are worthless, inputs are untouched.
struct LaunchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct TensorLayout {
  bool present = false;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;

  bool matches(const at::Tensor& t) const;
};

struct PointerArg {
  enum class Kind : uint8_t { kInput, kOutput, kWorkspace } kind;
  uint32_t index;
  int64_t offset_bytes;
};

// Stock's own product in its `out` form, on inputs and an output as they lie.
struct LibraryCall {
  enum class Function : uint8_t { kMm, kAddmm, kBmm, kBaddbmm } function;
  std::vector<std::pair<uint32_t, TensorLayout>> operands; // index among the inputs
  uint32_t output;
  TensorLayout result;
  double alpha, beta;

  void run(void* const* inputs, void* const* outputs) const;
};

struct CpuStep {
  void (*entry)(int64_t begin, int64_t end, void* const* pointers); // null: `product`
  int64_t range;
  int64_t grain;
  std::vector<PointerArg> args;
  std::optional<LibraryCall> product;
};

// A tensor map (TMA descriptor) is encoded at every launch, because it holds the address. Fields as in
// cuTensorMapEncodeTiled.
struct TensorMapSpec {
  PointerArg base;
  int type;
  std::vector<uint64_t> sizes;         // elements, innermost first
  std::vector<uint64_t> strides_bytes; // of all but the innermost dimension
  std::vector<uint32_t> box;
  std::vector<uint32_t> element_strides;
  int interleave, swizzle, l2_promotion, fill;
};

struct CudaParameter {
  enum class Kind : uint8_t { kPointer, kBits, kTensorMap } kind;
  PointerArg pointer;
  uint64_t bits;      // a number as its bytes, lowest first; the kernel's own parameter size says how many are read
  uint32_t map_index; // into CudaStep::maps
};

struct CudaStep {
  cuda::Function function = nullptr; // null: a product or a memset
  std::shared_ptr<const cublaslt::Product> product;
  std::array<std::optional<PointerArg>, 6> operands; // of the product: a, b, d, addend, bias, workspace
  std::array<unsigned, 3> grid{1, 1, 1}, block{1, 1, 1}, cluster{1, 1, 1};
  unsigned shared_bytes = 0;
  bool cooperative = false;
  bool programmatic = false; // may start before the step ahead of it has finished
  std::vector<CudaParameter> parameters;
  std::vector<TensorMapSpec> maps;
  PointerArg memset_target{};
  size_t memset_bytes = 0;
  unsigned char memset_value = 0;
};

struct Workspace {
  size_t size_bytes;
  bool zeroed;
};

constexpr size_t kMaxPointers = 24;
constexpr size_t kMaxWorkspaces = 8; // MAX_WORKSPACES in runtime/plan.py

class Plan {
 public:
  c10::Device device{c10::kCPU};
  std::shared_ptr<Library> library;
  std::vector<CpuStep> steps;
  std::vector<CudaStep> cuda_steps; // instead of `steps` on a GPU
  std::vector<Workspace> workspaces;
  std::vector<TensorLayout> outputs;
  size_t input_count = 0;

  // Throws c10::Error when an index points outside inputs, outputs or workspaces.
  void check() const;

  // Fresh outputs in the proved layouts; undefined tensors where a result is absent. Throws when memory is short.
  std::vector<at::Tensor> allocate_outputs(bool pooled) const;

  // Runs all steps. `inputs` has input_count addresses (null for an absent tensor), `outputs` one per output.
  // Throws c10::Error before any output is touched when workspace memory is short, LaunchError when the driver refuses.
  void run(void* const* inputs, void* const* outputs) const;

 private:
  using Memory = std::array<c10::DataPtr, kMaxWorkspaces>;
  c10::Allocator* allocator() const;
  void run_cpu(void* const* inputs, void* const* outputs, const Memory& memory) const;
  void run_cuda(void* const* inputs, void* const* outputs, const Memory& memory) const;
  static char* address(const PointerArg& arg, void* const* inputs, void* const* outputs, const Memory& memory);
  void check_pointer(const PointerArg& arg) const;
};

} // namespace autokern
