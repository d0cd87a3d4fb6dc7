// A launch plan made ready to run: entry points resolved, layouts fixed. Immutable after construction.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace autokern {

// A CPU library, loaded from bytes that were verified before; stays loaded for the life of the process.
class Library {
 public:
  // Throws c10::Error where the bytes do not load, or export another identity than `identity`.
  static std::shared_ptr<Library> load(const std::string& bytes, const std::string& identity);
  void* symbol(const std::string& name) const;

 private:
  explicit Library(void* handle) : handle_(handle) {}
  void* handle_;
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

struct CpuStep {
  void (*entry)(int64_t begin, int64_t end, void* const* pointers);
  int64_t range;
  int64_t grain;
  std::vector<PointerArg> args;
};

struct Workspace {
  size_t size_bytes;
  bool zeroed;
};

constexpr size_t kMaxPointers = 24;

class Plan {
 public:
  std::shared_ptr<Library> library;
  std::vector<CpuStep> steps;
  std::vector<Workspace> workspaces;
  std::vector<TensorLayout> outputs;
  size_t input_count = 0;

  // Throws c10::Error when an index points outside inputs, outputs or workspaces.
  void check() const;

  // Fresh outputs in the proved layouts; undefined tensors where a result is absent. Throws when memory is short.
  std::vector<at::Tensor> allocate_outputs(bool pooled) const;

  // Runs all steps. `inputs` has input_count addresses (null for an absent tensor), `outputs` one per output.
  // Throws c10::Error before any output is touched when workspace memory is short.
  void run(void* const* inputs, void* const* outputs) const;
};

} // namespace autokern
