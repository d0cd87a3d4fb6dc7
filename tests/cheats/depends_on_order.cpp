/* {"op": "_softmax", "sizes": [96, 1000], "scalars": {"dim": 1, "half_to_float": false}, "workspaces": [{"name": "tops", "size_bytes": 384}], "reason": ["wrong_value", "wrong_nonfinite", "not_deterministic", "stale_result", "sanitizer"],
    "steps": [{"entry": "candidate", "range": 96, "grain": 4, "args": ["x", "y", "tops"]}],
    "idea": "each row starts from the maximum that the row before it left: right while rows come one after the other"} */
#include <cmath>
#include <cstdint>

static constexpr int64_t N = 1000;

extern "C" void candidate(int64_t begin, int64_t end, void* const* pointers) {
  for (int64_t row = begin; row < end; ++row) {
    const float* in = static_cast<const float*>(pointers[0]) + row * N;
    float* out = static_cast<float*>(pointers[1]) + row * N;
    float* tops = static_cast<float*>(pointers[2]);
    float top = in[0];
    for (int64_t i = 0; i < N; ++i) top = (in[i] > top || in[i] != in[i]) ? in[i] : top;
    tops[row] = top;
    const float shift = row == 0 ? top : tops[row - 1];
    double sum = 0;
    for (int64_t i = 0; i < N; ++i) sum += out[i] = std::exp(in[i] - shift);
    for (int64_t i = 0; i < N; ++i) out[i] = static_cast<float>(out[i] / sum);
  }
}
