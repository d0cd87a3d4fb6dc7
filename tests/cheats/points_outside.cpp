/* {"op": "_softmax", "sizes": [96, 1000], "scalars": {"dim": 1, "half_to_float": false}, "reason": ["bad_plan"],
    "steps": [{"entry": "candidate", "range": 96, "grain": 4, "args": ["x", "mean"]}],
    "idea": "asks for a tensor that the key does not have"} */
#include <cmath>
#include <cstdint>
#include <cstring>

static constexpr int64_t N = 1000;

extern "C" void candidate(int64_t begin, int64_t end, void* const* pointers) {
  const float* x = static_cast<const float*>(pointers[0]);
  float* y = static_cast<float*>(pointers[1]);
  for (int64_t row = begin; row < end; ++row) {
    const float* in = x + row * N;
    float* out = y + row * N;
    float top = in[0];
    for (int64_t i = 0; i < N; ++i) {
      top = (in[i] > top || in[i] != in[i]) ? in[i] : top;
    }
    double sum = 0;
    for (int64_t i = 0; i < N; ++i) {
      sum += std::exp(in[i] - top);
    }
    for (int64_t i = 0; i < N; ++i) out[i] = std::exp(in[i] - top) / sum;
  }
}
