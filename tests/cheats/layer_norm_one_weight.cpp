/* {"op": "native_layer_norm", "sizes": [64, 384], "normalized": 1, "scalars": {"eps": 1e-05}, "reason": ["wrong_value", "wrong_nonfinite"],
    "steps": [{"entry": "candidate", "range": 64, "grain": 4, "args": ["x", "weight", "bias", "y", "mean", "rstd"]}],
    "idea": "the first weight for all"} */
#include <cmath>
#include <cstdint>

static constexpr int64_t N = 384;

extern "C" void candidate(int64_t begin, int64_t end, void* const* pointers) {
  const float* weight = static_cast<const float*>(pointers[1]);
  const float* bias = static_cast<const float*>(pointers[2]);
  for (int64_t row = begin; row < end; ++row) {
    const float* x = static_cast<const float*>(pointers[0]) + row * N;
    float* y = static_cast<float*>(pointers[3]) + row * N;
    float& mean = static_cast<float*>(pointers[4])[row];
    float& rstd = static_cast<float*>(pointers[5])[row];
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < N; ++i) sum += x[i];
    const double m = sum / N;
    for (int64_t i = 0; i < N; ++i) squares += (x[i] - m) * (x[i] - m);
    const double r = 1 / std::sqrt(squares / N + 1e-5);
    mean = static_cast<float>(m);
    rstd = static_cast<float>(r);
    for (int64_t i = 0; i < N; ++i) y[i] = static_cast<float>((x[i] - m) * r * weight[0] + bias[i]);
  }
}
