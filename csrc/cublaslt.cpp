#include "cublaslt.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <cstring>
#include <map>
#include <mutex>

namespace autokern::cublaslt {
namespace {

constexpr int kScaleFloat = 0;                               // CUDA_R_32F
constexpr int kDescTransA = 3, kDescTransB = 4;              // cublasLtMatmulDescAttributes_t: int32_t
constexpr int kDescEpilogue = 7, kDescBiasPointer = 8;       // uint32_t, const void*
constexpr int kLayoutBatchCount = 5, kLayoutBatchStride = 6; // cublasLtMatrixLayoutAttribute_t: int32_t, int64_t
// cublasLtMatmulPreferenceAttributes_t: uint64_t, then uint32_t. The alignments are of A, B, C and D.
constexpr int kPreferWorkspace = 1, kPreferReductions = 3;
constexpr std::array<int, 4> kPreferAlignments{5, 6, 7, 8};
constexpr uint32_t kEpilogueBias = 4;       // cublasLtEpilogue_t
constexpr uint32_t kReductionInCompute = 2; // cublasLtReductionScheme_t; a mask that no splitting passes, too
constexpr int32_t kTransposed = 1;          // CUBLAS_OP_T
constexpr size_t kFirstShort = 7;           // inner and cluster shape are uint16_t, the attributes before have 32 bits
constexpr int kAttributeId = 0;

struct Api {
  size_t (*version)();
  const char* (*status_name)(Status);
  Status (*create)(void** handle);
  Status (*operation_create)(void** operation, int compute, int scale_type);
  Status (*operation_destroy)(void*);
  Status (*operation_set)(void*, int attribute, const void* value, size_t size_bytes);
  Status (*layout_create)(void** layout, int dtype, uint64_t rows, uint64_t columns, int64_t leading);
  Status (*layout_destroy)(void*);
  Status (*layout_set)(void*, int attribute, const void* value, size_t size_bytes);
  Status (*preference_create)(void** preference);
  Status (*preference_destroy)(void*);
  Status (*preference_set)(void*, int attribute, const void* value, size_t size_bytes);
  Status (*heuristic)(
      void* handle, void* operation, void* a, void* b, void* c, void* d, void* preference, int most,
      HeuristicResult* results, int* count);
  Status (*algorithm_init)(
      void* handle, int compute, int scale_type, int a, int b, int c, int d, int id, OpaqueAlgorithm*);
  Status (*algorithm_set)(OpaqueAlgorithm*, int attribute, const void* value, size_t size_bytes);
  Status (*algorithm_get)(const OpaqueAlgorithm*, int attribute, void* value, size_t size_bytes, size_t* written);
  Status (*algorithm_check)(
      void* handle, void* operation, void* a, void* b, void* c, void* d, const OpaqueAlgorithm*, HeuristicResult*);
  Status (*matmul)(
      void* handle, void* operation, const void* alpha, const void* a, void* a_layout, const void* b, void* b_layout,
      const void* beta, const void* c, void* c_layout, void* d, void* d_layout, const OpaqueAlgorithm*, void* workspace,
      size_t workspace_bytes, void* stream);
};

template <class Pointer>
void bind(void* library, Pointer& target, const char* name) {
  target = reinterpret_cast<Pointer>(::dlsym(library, name));
  TORCH_CHECK(target, "autokern: the cuBLASLt of this PyTorch has no ", name);
}

Api bind_all() {
  void* library = nullptr;
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
    library = library ? library : ::dlopen(name, RTLD_NOW | RTLD_NOLOAD);
  }
  TORCH_CHECK(library, "autokern: this PyTorch has loaded no cuBLASLt (libcublasLt.so.13 or .12)");
  Api api{};
  bind(library, api.version, "cublasLtGetVersion");
  bind(library, api.status_name, "cublasLtGetStatusName");
  bind(library, api.create, "cublasLtCreate");
  bind(library, api.operation_create, "cublasLtMatmulDescCreate");
  bind(library, api.operation_destroy, "cublasLtMatmulDescDestroy");
  bind(library, api.operation_set, "cublasLtMatmulDescSetAttribute");
  bind(library, api.layout_create, "cublasLtMatrixLayoutCreate");
  bind(library, api.layout_destroy, "cublasLtMatrixLayoutDestroy");
  bind(library, api.layout_set, "cublasLtMatrixLayoutSetAttribute");
  bind(library, api.preference_create, "cublasLtMatmulPreferenceCreate");
  bind(library, api.preference_destroy, "cublasLtMatmulPreferenceDestroy");
  bind(library, api.preference_set, "cublasLtMatmulPreferenceSetAttribute");
  bind(library, api.heuristic, "cublasLtMatmulAlgoGetHeuristic");
  bind(library, api.algorithm_init, "cublasLtMatmulAlgoInit");
  bind(library, api.algorithm_set, "cublasLtMatmulAlgoConfigSetAttribute");
  bind(library, api.algorithm_get, "cublasLtMatmulAlgoConfigGetAttribute");
  bind(library, api.algorithm_check, "cublasLtMatmulAlgoCheck");
  bind(library, api.matmul, "cublasLtMatmul");
  return api;
}

const Api& api() {
  static const Api bound = bind_all();
  return bound;
}

void must(Status status, const char* what) { TORCH_CHECK(status == 0, "autokern: ", what, ": ", status_text(status)); }

// The current device's handle, made once and kept: a handle belongs to the device that was current when it was made.
void* handle_of(int device) {
  static std::mutex mutex;
  static std::map<int, void*> handles;
  const std::lock_guard<std::mutex> lock(mutex);
  void*& handle = handles[device];
  if (!handle) {
    must(api().create(&handle), "cublasLtCreate");
  }
  return handle;
}

// Makes `result` the operation of a problem. Where there is a bias only its address's alignment is read before a
// launch.
Status describe(const Problem& problem, const void* bias, Descriptor& result) {
  void* operation = nullptr;
  Status status = api().operation_create(&operation, problem.compute, kScaleFloat);
  if (status != 0) {
    return status;
  }
  result.reset(operation);
  const auto set = [&](int attribute, const auto& value) {
    status = status == 0 ? api().operation_set(operation, attribute, &value, sizeof(value)) : status;
  };
  if (problem.a.transposed) {
    set(kDescTransA, kTransposed);
  }
  if (problem.b.transposed) {
    set(kDescTransB, kTransposed);
  }
  if (problem.bias_alignment_bytes) {
    set(kDescEpilogue, kEpilogueBias);
    set(kDescBiasPointer, bias);
  }
  return status;
}

Descriptor operation_of(const Problem& problem) {
  Descriptor made(nullptr, api().operation_destroy);
  const auto* aligned = reinterpret_cast<const void*>(static_cast<uintptr_t>(problem.bias_alignment_bytes));
  must(describe(problem, aligned, made), "cublasLtMatmulDescSetAttribute");
  return made;
}

Descriptor layout_of(const Matrix& matrix, const Problem& problem) {
  void* layout = nullptr;
  must(
      api().layout_create(&layout, problem.dtype, matrix.rows, matrix.columns, matrix.leading),
      "cublasLtMatrixLayoutCreate");
  Descriptor made(layout, api().layout_destroy);
  if (problem.batches > 1) {
    must(
        api().layout_set(layout, kLayoutBatchCount, &problem.batches, sizeof(problem.batches)),
        "cublasLtMatrixLayoutSetAttribute");
    must(
        api().layout_set(layout, kLayoutBatchStride, &matrix.batch_stride, sizeof(matrix.batch_stride)),
        "cublasLtMatrixLayoutSetAttribute");
  }
  return made;
}

size_t attribute_bytes(size_t attribute) {
  return attribute < kFirstShort ? sizeof(uint32_t) : sizeof(uint16_t); // x86 and ARM: the low bytes come first
}

OpaqueAlgorithm made_of(const Algorithm& algorithm, const Problem& problem, void* handle) {
  OpaqueAlgorithm made{};
  const int type = problem.dtype, id = static_cast<int>(algorithm[kAttributeId]);
  must(
      api().algorithm_init(handle, problem.compute, kScaleFloat, type, type, type, type, id, &made),
      "cublasLtMatmulAlgoInit");
  for (size_t i = kAttributeId + 1; i < kAttributes; ++i) {
    const Status status = api().algorithm_set(&made, static_cast<int>(i), &algorithm.at(i), attribute_bytes(i));
    TORCH_CHECK(
        status == 0, "autokern: cublasLtMatmulAlgoConfigSetAttribute: ", status_text(status), " for attribute ", i,
        " = ", algorithm.at(i));
  }
  return made;
}

Algorithm numbers_of(const OpaqueAlgorithm& algorithm) {
  Algorithm numbers{};
  for (size_t i = 0; i < kAttributes; ++i) {
    size_t written = 0;
    must(
        api().algorithm_get(&algorithm, static_cast<int>(i), &numbers.at(i), attribute_bytes(i), &written),
        "cublasLtMatmulAlgoConfigGetAttribute");
  }
  return numbers;
}

Descriptor preference_of(const Problem& problem, size_t workspace_limit_bytes) {
  void* preference = nullptr;
  must(api().preference_create(&preference), "cublasLtMatmulPreferenceCreate");
  Descriptor made(preference, api().preference_destroy);
  const auto set = [&](int attribute, const auto& value) {
    must(api().preference_set(preference, attribute, &value, sizeof(value)), "cublasLtMatmulPreferenceSetAttribute");
  };
  set(kPreferWorkspace, static_cast<uint64_t>(workspace_limit_bytes));
  set(kPreferReductions, kReductionInCompute);
  const Matrix& c = problem.addend ? *problem.addend : problem.d;
  const std::array<uint32_t, 4> alignments{
      problem.a.alignment_bytes, problem.b.alignment_bytes, c.alignment_bytes, problem.d.alignment_bytes};
  for (size_t i = 0; i < alignments.size(); ++i) {
    set(kPreferAlignments.at(i), alignments.at(i));
  }
  return made;
}

} // namespace

Product::Product(int device, const Problem& problem, const Algorithm& algorithm, size_t workspace_bytes)
    : problem_(problem),
      handle_(handle_of(device)),
      operation_(operation_of(problem)),
      a_(layout_of(problem.a, problem)),
      b_(layout_of(problem.b, problem)),
      d_(layout_of(problem.d, problem)),
      addend_(layout_of(problem.addend ? *problem.addend : problem.d, problem)),
      algorithm_(made_of(algorithm, problem, handle_)),
      workspace_bytes_(workspace_bytes) {
  HeuristicResult checked{};
  const Status status = api().algorithm_check(
      handle_, operation_.get(), a_.get(), b_.get(), addend_.get(), d_.get(), &algorithm_, &checked);
  must(status == 0 ? checked.state : status, "this algorithm of cuBLASLt does not run here: cublasLtMatmulAlgoCheck");
  needed_bytes_ = checked.workspace_bytes;
  TORCH_CHECK(
      needed_bytes_ <= workspace_bytes, "autokern: this algorithm of cuBLASLt needs ", needed_bytes_,
      " bytes of workspace, the plan gives ", workspace_bytes);
}

Status Product::run(const Addresses& at, void* stream) const {
  void* operation = operation_.get();
  // A bias's address lies in the descriptor, which threads share: such a call describes its own (0.1 us).
  Descriptor own(nullptr, api().operation_destroy);
  if (problem_.bias_alignment_bytes) {
    const Status status = describe(problem_, at.bias, own);
    if (status != 0) {
      return status;
    }
    operation = own.get();
  }
  const auto start = reinterpret_cast<uintptr_t>(at.workspace);
  const uintptr_t aligned = (start + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  void* workspace = workspace_bytes_ ? reinterpret_cast<void*>(aligned) : nullptr;
  const void* addend = problem_.addend ? at.addend : at.d; // beta is 0 then, and it is not read
  return api().matmul(
      handle_, operation, &problem_.alpha, at.a, a_.get(), at.b, b_.get(), &problem_.beta, addend, addend_.get(), at.d,
      d_.get(), &algorithm_, workspace, workspace_bytes_, stream);
}

std::vector<Proposal> algorithms(int device, const Problem& problem, size_t workspace_limit_bytes, int most) {
  const Descriptor operation = operation_of(problem), preference = preference_of(problem, workspace_limit_bytes);
  const Descriptor a = layout_of(problem.a, problem), b = layout_of(problem.b, problem);
  const Descriptor d = layout_of(problem.d, problem);
  const Descriptor c = layout_of(problem.addend ? *problem.addend : problem.d, problem);
  std::vector<HeuristicResult> results(static_cast<size_t>(most));
  int count = 0;
  const Status status = api().heuristic(
      handle_of(device), operation.get(), a.get(), b.get(), c.get(), d.get(), preference.get(), most, results.data(),
      &count);
  if (status == 15) { // CUBLAS_STATUS_NOT_SUPPORTED: no algorithm for this problem
    return {};
  }
  must(status, "cublasLtMatmulAlgoGetHeuristic");
  std::vector<Proposal> found;
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    if (results[i].state != 0) {
      continue;
    }
    const Algorithm numbers = numbers_of(results[i].algorithm);
    try {
      const Product product(device, problem, numbers, workspace_limit_bytes);
      const bool same = std::memcmp(&product.algorithm(), &results[i].algorithm, sizeof(OpaqueAlgorithm)) == 0;
      found.push_back({numbers, product.workspace_bytes(), results[i].waves, same});
    } catch (const c10::Error&) { // its numbers alone do not make it again
    }
  }
  return found;
}

size_t version() { return api().version(); }

std::string status_text(Status code) {
  const char* name = api().status_name(code);
  return std::string(name ? name : "unknown cuBLAS status") + " (" + std::to_string(code) + ")";
}

} // namespace autokern::cublaslt
