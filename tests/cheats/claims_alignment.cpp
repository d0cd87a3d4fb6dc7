/* {"op": "_softmax", "sizes": [96, 1024], "scalars": {"dim": 1, "half_to_float": false}, "reason": ["crashed", "sanitizer"],
    "steps": [{"entry": "candidate", "range": 96, "grain": 4, "args": ["x", "y"]}],
    "idea": "takes the output for aligned to 64 bytes, and stores accordingly"} */
#include <cmath>
#include <cstdint>

static constexpr int64_t N = 1024;

typedef float Wide __attribute__((vector_size(64)));

extern "C" void candidate(int64_t begin, int64_t end, void* const* pointers) {
  for (int64_t row = begin; row < end; ++row) {
    const float* in = static_cast<const float*>(pointers[0]) + row * N;
    float* out = static_cast<float*>(pointers[1]) + row * N;
    float top = in[0];
    for (int64_t i = 0; i < N; ++i) top = (in[i] > top || in[i] != in[i]) ? in[i] : top;
    double sum = 0;
    for (int64_t i = 0; i < N; ++i) sum += out[i] = std::exp(in[i] - top);
    Wide* wide = reinterpret_cast<Wide*>(out);
    for (int64_t i = 0; i < N / 16; ++i) wide[i] = wide[i] / static_cast<float>(sum);
  }
}
