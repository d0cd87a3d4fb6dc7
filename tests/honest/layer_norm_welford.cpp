/* {"op": "native_layer_norm", "tensors": [{"dtype": "float32", "sizes": [64, 384]}, {"dtype": "float32", "sizes": [384]}, {"dtype": "float32", "sizes": [384]}], "scalars": {"normalized_shape": [384], "eps": 1e-05}, "reason": null,
    "steps": [{"entry": "candidate", "range": 64, "grain": 4, "args": ["input0", "input1", "input2", "output0", "output1", "output2"]}],
    "idea": "one pass in double, corrected at every element (Welford 1962); the saved mean is a plain sum's, in which an infinity stays one"} */
#include <cmath>
#include <cstdint>

static constexpr int64_t N = 384, PITCH = 384;

extern "C" void candidate(int64_t begin, int64_t end, void* const* pointers) {
  const float* weight = static_cast<const float*>(pointers[1]);
  const float* bias = static_cast<const float*>(pointers[2]);
  for (int64_t row = begin; row < end; ++row) {
    const float* x = static_cast<const float*>(pointers[0]) + row * PITCH;
    float* y = static_cast<float*>(pointers[3]) + row * N;
    double m = 0, squares = 0, sum = 0;
    for (int64_t i = 0; i < N; ++i) {
      const double before = x[i] - m;
      m += before / (i + 1);
      sum += x[i];
      squares += before * (x[i] - m);
    }
    const double r = 1 / std::sqrt(squares / N + 1e-5);
    static_cast<float*>(pointers[4])[row] = static_cast<float>(sum / N);
    static_cast<float*>(pointers[5])[row] = static_cast<float>(r);
    for (int64_t i = 0; i < N; ++i) y[i] = static_cast<float>((static_cast<double>(x[i]) - m) * r * weight[i] + bias[i]);
  }
}
