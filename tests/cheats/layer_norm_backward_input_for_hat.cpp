/* {"op": "native_layer_norm_backward", "tensors": [{"dtype": "float32", "sizes": [64, 96]}, {"dtype": "float32", "sizes": [64, 96]}, {"dtype": "float32", "sizes": [64, 1]}, {"dtype": "float32", "sizes": [64, 1]}, {"dtype": "float32", "sizes": [96]}, {"dtype": "float32", "sizes": [96]}], "scalars": {"normalized_shape": [96], "output_mask": [1, 1, 1]}, "reason": ["wrong_value", "wrong_nonfinite", "property_broken"],
    "steps": [{"entry": "rows", "range": 64, "grain": 4, "args": ["input0", "input1", "input2", "input3", "input4", "output0"]}, {"entry": "columns", "range": 96, "grain": 16, "args": ["input0", "input1", "input2", "input3", "output1", "output2"]}],
    "idea": "the weight's gradient multiplies with the input, not the normalised one"} */
#include <cstdint>

static constexpr int64_t ROWS = 64, N = 96;
static const float* in(void* const* p, int i) { return static_cast<const float*>(p[i]); }

extern "C" void rows(int64_t begin, int64_t end, void* const* p) {
  for (int64_t row = begin; row < end; ++row) {
    const float *g = in(p, 0) + row * N, *x = in(p, 1) + row * N, *w = in(p, 4);
    float* out = static_cast<float*>(p[5]) + row * N;
    const double mean = in(p, 2)[row], rstd = in(p, 3)[row];
    double sum = 0, along = 0;
    for (int64_t i = 0; i < N; ++i) {
      const double v = static_cast<double>(g[i]) * w[i];
      sum += v;
      along += v * ((x[i] - mean) * rstd);
    }
    for (int64_t i = 0; i < N; ++i) {
      const double h = (x[i] - mean) * rstd;
      out[i] = static_cast<float>(rstd * (static_cast<double>(g[i]) * w[i] - sum / N - h * (along / N)));
    }
  }
}

extern "C" void columns(int64_t begin, int64_t end, void* const* p) {
  for (int64_t i = begin; i < end; ++i) {
    double weight = 0, bias = 0;
    for (int64_t row = 0; row < ROWS; ++row) {
      const double g = in(p, 0)[row * N + i];
      weight += g * (in(p, 1)[row * N + i]);
      bias += g;
    }
    static_cast<float*>(p[4])[i] = static_cast<float>(weight);
    static_cast<float*>(p[5])[i] = static_cast<float>(bias);
  }
}
