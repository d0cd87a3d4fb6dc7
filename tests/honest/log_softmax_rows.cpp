/* {"op": "_log_softmax", "sizes": [96, 333], "scalars": {"dim": 1, "half_to_float": false}, "reason": null,
    "steps": [{"entry": "log_softmax_rows", "range": 96, "grain": 8, "args": ["x", "y"]}],
    "idea": "the sum of exponentials in double, so that its order does not matter"} */
#include <cmath>
#include <cstdint>

static constexpr int64_t N = 333;

extern "C" void log_softmax_rows(int64_t begin, int64_t end, void* const* pointers) {
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
    for (int64_t i = 0; i < N; ++i) sum += std::exp(in[i] - top);
    const float log_sum = static_cast<float>(std::log(sum));
    for (int64_t i = 0; i < N; ++i) out[i] = (in[i] - top) - log_sum;
  }
}
