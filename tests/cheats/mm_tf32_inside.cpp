/* {"op": "mm", "tensors": [{"dtype": "float32", "sizes": [32, 96]}, {"dtype": "float32", "sizes": [96, 40]}], "scalars": {}, "reason": ["wrong_value", "wrong_nonfinite"],
    "steps": [{"entry": "product", "range": 32, "grain": 4, "args": ["input0", "input1", "output0"]}],
    "idea": "operands cut to ten bits of fraction, as tensor cores would"} */
#include <cmath>
#include <cstdint>

static constexpr int64_t K = 96, N = 40;

static float cut(float v) {
  uint32_t bits;
  __builtin_memcpy(&bits, &v, 4);
  bits &= ~0x1fffu;
  __builtin_memcpy(&v, &bits, 4);
  return v;
}

extern "C" void product(int64_t begin, int64_t end, void* const* pointers) {
  const float* b = static_cast<const float*>(pointers[1]);
  for (int64_t row = begin; row < end; ++row) {
    const float* a = static_cast<const float*>(pointers[0]) + row * K;
    float* c = static_cast<float*>(pointers[2]) + row * N;
    for (int64_t j = 0; j < N; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < K; ++k) sum += static_cast<double>(cut(a[k])) * cut(b[k * N + j]);
      c[j] = static_cast<float>(sum);
    }
  }
}
