/* {"op": "mm", "tensors": [{"dtype": "float32", "sizes": [32, 96]}, {"dtype": "float32", "sizes": [96, 40]}], "scalars": {}, "reason": null,
    "steps": [{"entry": "product", "range": 32, "grain": 4, "args": ["input0", "input1", "output0"]}],
    "idea": "a whole row of the result at once, float sums in registers"} */
#include <cmath>
#include <cstdint>

static constexpr int64_t M = 32, K = 96, N = 40;

extern "C" void product(int64_t begin, int64_t end, void* const* pointers) {
  const float* b = static_cast<const float*>(pointers[1]);
  for (int64_t row = begin; row < end; ++row) {
    const float* a = static_cast<const float*>(pointers[0]) + row * K;
    float* c = static_cast<float*>(pointers[2]) + row * N;
    float sums[N] = {};
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t j = 0; j < N; ++j) sums[j] += a[k] * b[k * N + j];
    }
    for (int64_t j = 0; j < N; ++j) c[j] = sums[j];
  }
}
