/* {"op": "_log_softmax_backward_data", "tensors": [{"dtype": "float32", "sizes": [96, 300]}, {"dtype": "float32", "sizes": [96, 300]}], "scalars": {"dim": 1, "input_dtype": "float32"}, "reason": ["wrong_value", "wrong_nonfinite", "property_broken"],
    "steps": [{"entry": "candidate", "range": 96, "grain": 4, "args": ["input0", "input1", "output0"]}],
    "idea": "takes every probability for 1 / N"} */
#include <cstdint>

static constexpr int64_t N = 300;

extern "C" void candidate(int64_t begin, int64_t end, void* const* pointers) {
  for (int64_t row = begin; row < end; ++row) {
    const float* grad = static_cast<const float*>(pointers[0]) + row * N;
    const float* y = static_cast<const float*>(pointers[1]) + row * N;
    float* out = static_cast<float*>(pointers[2]) + row * N;
    double sum = 0;
    for (int64_t i = 0; i < N; ++i) sum += grad[i];
    for (int64_t i = 0; i < N; ++i) out[i] = static_cast<float>(grad[i] - sum / N);
  }
}
