/* {"op": "native_layer_norm", "tensors": [{"dtype": "float16", "sizes": [64, 384]}, {"dtype": "float16", "sizes": [384]}, {"dtype": "float16", "sizes": [384]}], "scalars": {"normalized_shape": [384], "eps": 1e-05}, "reason": null,
    "steps": [{"entry": "candidate", "range": 64, "grain": 4, "args": ["input0", "input1", "input2", "output0", "output1", "output2"]}],
    "idea": "half precision in and out, double in between"} */
#include <cmath>
#include <cstdint>
#include <cstring>

static constexpr int64_t N = 384, PITCH = 384;

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
  const uint16_t* weight = static_cast<const uint16_t*>(pointers[1]);
  const uint16_t* bias = static_cast<const uint16_t*>(pointers[2]);
  for (int64_t row = begin; row < end; ++row) {
    const uint16_t* x = static_cast<const uint16_t*>(pointers[0]) + row * PITCH;
    uint16_t* y = static_cast<uint16_t*>(pointers[3]) + row * N;
    double m = 0, squares = 0;
    for (int64_t i = 0; i < N; ++i) m += wide(x[i]);
    m /= N;
    for (int64_t i = 0; i < N; ++i) squares += (wide(x[i]) - m) * (wide(x[i]) - m);
    const double r = 1 / std::sqrt(squares / N + 1e-5);
    static_cast<uint16_t*>(pointers[4])[row] = narrow(static_cast<float>(m));
    static_cast<uint16_t*>(pointers[5])[row] = narrow(static_cast<float>(r));
    for (int64_t i = 0; i < N; ++i) y[i] = narrow(static_cast<float>((static_cast<double>(wide(x[i])) - m) * r * wide(weight[i]) + wide(bias[i])));
  }
}
