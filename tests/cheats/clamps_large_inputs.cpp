/* {"op": "_softmax", "sizes": [96, 1000], "scalars": {"dim": 1, "half_to_float": false}, "reason": ["wrong_value", "wrong_nonfinite"],
    "steps": [{"entry": "candidate", "range": 96, "grain": 4, "args": ["x", "y"]}],
    "idea": "inputs cut to [-80, 80], so that nothing overflows"} */
#include <cmath>
#include <cstdint>

static constexpr int64_t N = 1000;

extern "C" void candidate(int64_t begin, int64_t end, void* const* pointers) {
  for (int64_t row = begin; row < end; ++row) {
    const float* in = static_cast<const float*>(pointers[0]) + row * N;
    float* out = static_cast<float*>(pointers[1]) + row * N;
    float sum = 0;
    for (int64_t i = 0; i < N; ++i) {
      const float v = in[i] > 80 ? 80 : in[i] < -80 ? -80 : in[i];
      sum += out[i] = std::exp(v);
    }
    for (int64_t i = 0; i < N; ++i) out[i] = static_cast<float>(out[i] / sum);
  }
}
