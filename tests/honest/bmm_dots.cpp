/* {"op": "bmm", "tensors": [{"dtype": "float32", "sizes": [3, 16, 64]}, {"dtype": "float32", "sizes": [3, 64, 24]}], "scalars": {}, "reason": null,
    "steps": [{"entry": "product", "range": 48, "grain": 4, "args": ["input0", "input1", "output0"]}],
    "idea": "rows of all batches in one range"} */
#include <cmath>
#include <cstdint>

static constexpr int64_t M = 16, K = 64, N = 24;

extern "C" void product(int64_t begin, int64_t end, void* const* pointers) {
  for (int64_t row = begin; row < end; ++row) {
    const float* a = static_cast<const float*>(pointers[0]) + row * K;
    const float* b = static_cast<const float*>(pointers[1]) + row / M * K * N;
    float* c = static_cast<float*>(pointers[2]) + row * N;
    for (int64_t j = 0; j < N; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < K; ++k) sum += static_cast<double>(a[k]) * b[k * N + j];
      c[j] = static_cast<float>(sum);
    }
  }
}
