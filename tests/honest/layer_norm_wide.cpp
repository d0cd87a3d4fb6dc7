/* {"op": "native_layer_norm", "sizes": [256, 4096], "normalized": 1, "scalars": {"eps": 1e-5}, "reason": null,
    "steps": [{"entry": "layer_norm_wide", "range": 256, "grain": 2, "args": ["x", "weight", "bias", "y", "mean", "rstd"]}],
    "idea": "32 partial sums in double, which the compiler keeps in vectors; the row stays in cache between the passes"} */
#include <cmath>
#include <cstdint>

static constexpr int64_t N = 4096, LANES = 32;

static double total(const double* partial) {
  double sum = 0;
  for (int64_t k = 0; k < LANES; ++k) sum += partial[k];
  return sum;
}

extern "C" void layer_norm_wide(int64_t begin, int64_t end, void* const* pointers) {
  const float* weight = static_cast<const float*>(pointers[1]);
  const float* bias = static_cast<const float*>(pointers[2]);
  for (int64_t row = begin; row < end; ++row) {
    const float* x = static_cast<const float*>(pointers[0]) + row * N;
    float* y = static_cast<float*>(pointers[3]) + row * N;
    double sums[LANES] = {}, squares[LANES] = {};
    for (int64_t i = 0; i < N; i += LANES) {
      for (int64_t k = 0; k < LANES; ++k) sums[k] += x[i + k];
    }
    const double mean = total(sums) / N;
    for (int64_t i = 0; i < N; i += LANES) {
      for (int64_t k = 0; k < LANES; ++k) squares[k] += (x[i + k] - mean) * (x[i + k] - mean);
    }
    const double rstd = 1 / std::sqrt(total(squares) / N + 1e-5);
    for (int64_t i = 0; i < N; ++i) {
      y[i] = static_cast<float>((x[i] - mean) * rstd) * weight[i] + bias[i];
    }
    static_cast<float*>(pointers[4])[row] = static_cast<float>(mean);
    static_cast<float*>(pointers[5])[row] = static_cast<float>(rstd);
  }
}
