/* {"op": "_softmax", "sizes": [96, 1000], "scalars": {"dim": 1, "half_to_float": false}, "reason": ["wrong_value", "wrong_nonfinite", "not_deterministic", "stale_result", "not_written"],
    "steps": [{"entry": "candidate", "range": 96, "grain": 4, "args": ["x", "y"]}],
    "idea": "adds to what was in the output before"} */
#include <cmath>
#include <cstdint>

static constexpr int64_t N = 1000;

extern "C" void candidate(int64_t begin, int64_t end, void* const* pointers) {
  for (int64_t row = begin; row < end; ++row) {
    const float* in = static_cast<const float*>(pointers[0]) + row * N;
    float* out = static_cast<float*>(pointers[1]) + row * N;
    float top = in[0];
    for (int64_t i = 0; i < N; ++i) top = (in[i] > top || in[i] != in[i]) ? in[i] : top;
    float sum = 0;
    for (int64_t i = 0; i < N; ++i) sum += std::exp(in[i] - top);
    for (int64_t i = 0; i < N; ++i) out[i] += std::exp(in[i] - top) / sum;
  }
}
