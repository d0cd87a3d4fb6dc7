/* {"op": "_softmax", "dtype": "float16", "sizes": [96, 1000], "scalars": {"dim": 1, "half_to_float": false}, "reason": null,
    "steps": [{"entry": "candidate", "range": 96, "grain": 4, "args": ["x", "y"]}],
    "idea": "half precision in and out, double in between"} */
#include <cmath>
#include <cstdint>
#include <cstring>

static constexpr int64_t N = 1000;

static float wide(uint16_t v) {
  _Float16 h;
  std::memcpy(&h, &v, 2);
  return static_cast<float>(h);
}

static uint16_t narrow(float f) {
  const _Float16 h = static_cast<_Float16>(f);
  uint16_t bits;
  std::memcpy(&bits, &h, 2);
  return bits;
}

extern "C" void candidate(int64_t begin, int64_t end, void* const* pointers) {
  for (int64_t row = begin; row < end; ++row) {
    const uint16_t* in = static_cast<const uint16_t*>(pointers[0]) + row * N;
    uint16_t* out = static_cast<uint16_t*>(pointers[1]) + row * N;
    float top = wide(in[0]);
    for (int64_t i = 0; i < N; ++i) {
      const float v = wide(in[i]);
      top = (v > top || v != v) ? v : top;
    }
    double sum = 0;
    for (int64_t i = 0; i < N; ++i) sum += std::exp(static_cast<double>(wide(in[i])) - top);
    for (int64_t i = 0; i < N; ++i) out[i] = narrow(static_cast<float>(std::exp(static_cast<double>(wide(in[i])) - top) / sum));
  }
}
