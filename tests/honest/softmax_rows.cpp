/* {"op": "_softmax", "sizes": [96, 1000], "scalars": {"dim": 1, "half_to_float": false}, "reason": null,
    "steps": [{"entry": "softmax_rows", "range": 96, "grain": 4, "args": ["x", "y"]}],
    "idea": "a row at a time, its sum in double: eight partial sums in float are less accurate than stock, and refused"} */
#include <cmath>
#include <cstdint>

static constexpr int64_t N = 1000;

extern "C" void softmax_rows(int64_t begin, int64_t end, void* const* pointers) {
  const float* x = static_cast<const float*>(pointers[0]);
  float* y = static_cast<float*>(pointers[1]);
  for (int64_t row = begin; row < end; ++row) {
    const float* in = x + row * N;
    float* out = y + row * N;
    float top = in[0];
    for (int64_t i = 0; i < N; ++i) {
      top = (in[i] > top || in[i] != in[i]) ? in[i] : top;  // a NaN stays: nothing is larger than it
    }
    double partial[32] = {};
    for (int64_t i = 0; i < N; ++i) {
      out[i] = std::exp(in[i] - top);
      partial[i % 32] += out[i];
    }
    double sum = 0;
    for (double p : partial) sum += p;
    for (int64_t i = 0; i < N; ++i) out[i] = static_cast<float>(out[i] / sum);
  }
}
