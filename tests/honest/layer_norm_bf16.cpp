/* {"op": "native_layer_norm", "tensors": [{"dtype": "bfloat16", "sizes": [64, 384]}, {"dtype": "bfloat16", "sizes": [384]}, {"dtype": "bfloat16", "sizes": [384]}], "scalars": {"normalized_shape": [384], "eps": 1e-05}, "reason": null,
    "steps": [{"entry": "candidate", "range": 64, "grain": 4, "args": ["input0", "input1", "input2", "output0", "output1", "output2"]}],
    "idea": "bfloat16 in and out, double in between"} */
#include <cmath>
#include <cstdint>
#include <cstring>

static constexpr int64_t N = 384, PITCH = 384;

static float wide(uint16_t v) {
  const uint32_t bits = static_cast<uint32_t>(v) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

static uint16_t narrow(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (f != f) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
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
