/* {"op": "native_layer_norm", "sizes": [64, 384], "normalized": 1, "scalars": {"eps": 1e-5}, "reason": null,
    "steps": [{"entry": "layer_norm_rows", "range": 64, "grain": 4, "args": ["x", "weight", "bias", "y", "mean", "rstd"]}],
    "idea": "two passes over a row that stays in cache; sums in double, so large offsets and constant rows are harmless"} */
#include <cmath>
#include <cstdint>

static constexpr int64_t N = 384;

extern "C" void layer_norm_rows(int64_t begin, int64_t end, void* const* pointers) {
  const float* weight = static_cast<const float*>(pointers[1]);
  const float* bias = static_cast<const float*>(pointers[2]);
  for (int64_t row = begin; row < end; ++row) {
    const float* x = static_cast<const float*>(pointers[0]) + row * N;
    float* y = static_cast<float*>(pointers[3]) + row * N;
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < N; ++i) sum += x[i];
    const double mean = sum / N;
    for (int64_t i = 0; i < N; ++i) squares += (x[i] - mean) * (x[i] - mean);
    const double rstd = 1 / std::sqrt(squares / N + 1e-5);
    for (int64_t i = 0; i < N; ++i) {
      y[i] = static_cast<float>((x[i] - mean) * rstd * weight[i] + bias[i]);
    }
    static_cast<float*>(pointers[4])[row] = static_cast<float>(mean);
    static_cast<float*>(pointers[5])[row] = static_cast<float>(rstd);
  }
}
