/* {"op": "addmm", "tensors": [{"dtype": "float32", "sizes": [32, 40]}, {"dtype": "float32", "sizes": [32, 96]}, {"dtype": "float32", "sizes": [96, 40]}], "scalars": {"beta": 0.5, "alpha": 2.0}, "reason": null,
    "steps": [{"entry": "product", "range": 32, "grain": 4, "args": ["input1", "input2", "output0", "input0"]}],
    "idea": "alpha and beta"} */
#include <cmath>
#include <cstdint>

static constexpr int64_t M = 32, K = 96, N = 40;

extern "C" void product(int64_t begin, int64_t end, void* const* pointers) {
  const float* b = static_cast<const float*>(pointers[1]);
  for (int64_t row = begin; row < end; ++row) {
    const float* a = static_cast<const float*>(pointers[0]) + row * K;
    float* c = static_cast<float*>(pointers[2]) + row * N;
    for (int64_t j = 0; j < N; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < K; ++k) sum += static_cast<double>(a[k]) * b[k * N + j];
      c[j] = static_cast<float>(2 * sum + 0.5 * static_cast<const float*>(pointers[3])[row * N + j]);
    }
  }
}
