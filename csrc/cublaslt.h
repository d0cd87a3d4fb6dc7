// The few cuBLASLt calls that one product with a chosen algorithm needs, bound on first use from the library that
// PyTorch itself has loaded: no header at build time, no link dependency, and never another version than stock's own.
// Types and numbers are those of cublasLt.h and cublas_api.h (cuBLAS 12.0 to 13.1; read against 13.1.1), repeated here
// because those headers need not be installed. Names are theirs without the prefix.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace autokern::cublaslt {

using Status = int; // cublasStatus_t; 0 is success

// cublasLtMatmulAlgo_t
struct OpaqueAlgorithm {
  uint64_t data[8];
};

// cublasLtMatmulHeuristicResult_t
struct HeuristicResult {
  OpaqueAlgorithm algorithm;
  size_t workspace_bytes;
  Status state;
  float waves;
  int reserved[4];
};
static_assert(sizeof(HeuristicResult) == 96);

// Value i is attribute i of cublasLtMatmulAlgoConfigAttributes_t: id, tile, splits of K, reduction scheme, CTA
// swizzling, custom option, stages, inner shape, cluster shape.
constexpr size_t kAttributes = 9;
using Algorithm = std::array<uint32_t, kAttributes>;

// Column after column, in elements. `alignment_bytes` is what the address promises.
struct Matrix {
  uint64_t rows, columns;
  int64_t leading, batch_stride;
  bool transposed;
  uint32_t alignment_bytes;
};

// d = alpha * op(a) * op(b) + beta * addend + bias: one dtype, fp32 scalars, the bias a column for every column of d.
struct Problem {
  int dtype;   // cudaDataType
  int compute; // cublasComputeType_t
  int32_t batches;
  Matrix a, b, d;
  std::optional<Matrix> addend;
  uint32_t bias_alignment_bytes; // 0: no bias
  float alpha, beta;
};

struct Addresses {
  const void *a, *b;
  void* d;
  const void *addend, *bias;
  void* workspace; // workspace_bytes and kWorkspaceAlignment - 1 more
};
constexpr uintptr_t kWorkspaceAlignment = 256; // WORKSPACE_ALIGNMENT in runtime/plan.py

// A descriptor of the library's; gone with its owner.
using Descriptor = std::unique_ptr<void, Status (*)(void*)>;

// One product with its descriptors and its checked algorithm. Immutable after construction: threads may share it.
class Product {
 public:
  // On the current device, whose index is `device`. Throws c10::Error in cuBLASLt's words where this version does not
  // run the algorithm on this problem, or it needs more workspace.
  Product(int device, const Problem& problem, const Algorithm& algorithm, size_t workspace_bytes);
  // Launches on `stream` of the device; allocates no memory there and does not wait.
  Status run(const Addresses& at, void* stream) const;
  // What the algorithm really takes, at most the workspace_bytes of the constructor.
  size_t workspace_bytes() const { return needed_bytes_; }
  const OpaqueAlgorithm& algorithm() const { return algorithm_; }

 private:
  Problem problem_;
  void* handle_;
  Descriptor operation_, a_, b_, d_, addend_;
  OpaqueAlgorithm algorithm_{};
  size_t workspace_bytes_, needed_bytes_ = 0;
};

// An algorithm that cuBLASLt's heuristic names, best guess first, as the numbers that make it again. `same`: they make
// it bit for bit; otherwise the numbers make a valid neighbour of it.
struct Proposal {
  Algorithm algorithm;
  size_t workspace_bytes;
  float waves;
  bool same;
};

// At most `most` algorithms for a problem on the current device, of those that keep partial sums in fp32. Throws
// c10::Error where the heuristic cannot be asked; an empty answer is no error.
std::vector<Proposal> algorithms(int device, const Problem& problem, size_t workspace_limit_bytes, int most);

size_t version();                     // "13.1.1" is 130101; throws c10::Error where no cuBLASLt is loaded
std::string status_text(Status code); // "CUBLAS_STATUS_NOT_SUPPORTED (15)"

} // namespace autokern::cublaslt
