/* {"op": "_softmax", "sizes": [96, 1000], "scalars": {"dim": 1, "half_to_float": false}, "reason": null,
    "steps": [{"entry": "candidate", "range": 96, "grain": 4, "args": ["x", "y"]}],
    "idea": "one pass for maximum and sum together, rescaled when the maximum grows (Milakov and Gimelshein 2018)"} */
#include <cmath>
#include <cstdint>

static constexpr int64_t N = 1000;

extern "C" void candidate(int64_t begin, int64_t end, void* const* pointers) {
  for (int64_t row = begin; row < end; ++row) {
    const float* in = static_cast<const float*>(pointers[0]) + row * N;
    float* out = static_cast<float*>(pointers[1]) + row * N;
    float top = in[0];
    double sum = in[0] == INFINITY ? NAN : 1;
    for (int64_t i = 1; i < N; ++i) {
      const float v = in[i];
      if (v > top || v != v) {
        sum = sum * std::exp(top - v) + (v - v == 0 ? 1 : NAN);
        top = v;
      } else {
        sum += v == top ? 1 : std::exp(v - top);
      }
    }
    for (int64_t i = 0; i < N; ++i) out[i] = static_cast<float>(std::exp(in[i] - top) / sum);
  }
}
