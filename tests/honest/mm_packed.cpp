/* {"op": "mm", "tensors": [{"dtype": "float32", "sizes": [32, 96]}, {"dtype": "float32", "sizes": [96, 40]}], "scalars": {}, "workspaces": [{"name": "turned", "size_bytes": 15360}], "reason": null,
    "steps": [{"entry": "turn", "range": 40, "grain": 8, "args": ["input1", "turned"]},
              {"entry": "product", "range": 32, "grain": 4, "args": ["input0", "turned", "output0"]}],
    "idea": "the right operand turned into a workspace first"} */
#include <cmath>
#include <cstdint>

static constexpr int64_t M = 32, K = 96, N = 40;

extern "C" void turn(int64_t begin, int64_t end, void* const* pointers) {
  const float* b = static_cast<const float*>(pointers[0]);
  float* turned = static_cast<float*>(pointers[1]);
  for (int64_t j = begin; j < end; ++j) {
    for (int64_t k = 0; k < K; ++k) turned[j * K + k] = b[k * N + j];
  }
}

extern "C" void product(int64_t begin, int64_t end, void* const* pointers) {
  const float* turned = static_cast<const float*>(pointers[1]);
  for (int64_t row = begin; row < end; ++row) {
    const float* a = static_cast<const float*>(pointers[0]) + row * K;
    for (int64_t j = 0; j < N; ++j) {
      float part[8] = {};
      for (int64_t k = 0; k < K; k += 8) {
        for (int64_t i = 0; i < 8; ++i) part[i] += a[k + i] * turned[j * K + k + i];
      }
      const float sum = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
      static_cast<float*>(pointers[2])[row * N + j] = sum;
    }
  }
}
