/* {"op": "_softmax", "sizes": [16, 65536], "scalars": {"dim": 1, "half_to_float": false},
    "reason": ["wrong_value", "wrong_nonfinite"], "steps": [{"entry": "candidate", "range": 16, "grain": 4, "args": ["x", "y"]}],
    "idea": "all zeros: passes 1e-2 everywhere on long rows"} */
#include <cmath>
#include <cstdint>
#include <cstring>

static constexpr int64_t N = 65536;

extern "C" void candidate(int64_t begin, int64_t end, void* const* pointers) {
  const float* x = static_cast<const float*>(pointers[0]);
  float* y = static_cast<float*>(pointers[1]);
  for (int64_t row = begin; row < end; ++row) {
    const float* in = x + row * N;
    float* out = y + row * N;
    (void)in;
    std::memset(out, 0, N * sizeof(float));
  }
}
