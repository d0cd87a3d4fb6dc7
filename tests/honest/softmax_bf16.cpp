/* {"op": "_softmax", "sizes": [64, 200], "dtype": "bfloat16", "scalars": {"dim": 1, "half_to_float": false}, "reason": null,
    "steps": [{"entry": "softmax_bf16", "range": 64, "grain": 8, "args": ["x", "y"]}],
    "idea": "bfloat16 in and out, float32 between, rounded to nearest even at the very end"} */
#include <cmath>
#include <cstdint>
#include <cstring>

static constexpr int64_t N = 200;

static float widen(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

static uint16_t narrow(float value) {
  if (value != value) return 0x7FC0;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

extern "C" void softmax_bf16(int64_t begin, int64_t end, void* const* pointers) {
  for (int64_t row = begin; row < end; ++row) {
    const uint16_t* in = static_cast<const uint16_t*>(pointers[0]) + row * N;
    uint16_t* out = static_cast<uint16_t*>(pointers[1]) + row * N;
    float value[N];
    float top = widen(in[0]), sum = 0;
    for (int64_t i = 0; i < N; ++i) {
      value[i] = widen(in[i]);
      top = (value[i] > top || value[i] != value[i]) ? value[i] : top;
    }
    for (int64_t i = 0; i < N; ++i) {
      value[i] = std::exp(value[i] - top);
      sum += value[i];
    }
    for (int64_t i = 0; i < N; ++i) out[i] = narrow(value[i] / sum);
  }
}
