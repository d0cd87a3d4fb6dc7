/* {"op": "_softmax", "sizes": [6, 50, 40], "scalars": {"dim": 1, "half_to_float": false}, "reason": null,
    "steps": [{"entry": "softmax_columns", "range": 6, "grain": 1, "args": ["x", "y"]}],
    "idea": "a dimension that is not the last: all columns of one slab side by side, memory read in order"} */
#include <cmath>
#include <cstdint>

static constexpr int64_t N = 50, M = 40;

extern "C" void softmax_columns(int64_t begin, int64_t end, void* const* pointers) {
  for (int64_t slab = begin; slab < end; ++slab) {
    const float* in = static_cast<const float*>(pointers[0]) + slab * N * M;
    float* out = static_cast<float*>(pointers[1]) + slab * N * M;
    float top[M], sum[M];
    for (int64_t j = 0; j < M; ++j) top[j] = in[j], sum[j] = 0;
    for (int64_t i = 1; i < N; ++i) {
      for (int64_t j = 0; j < M; ++j) {
        const float v = in[i * M + j];
        top[j] = (v > top[j] || v != v) ? v : top[j];
      }
    }
    for (int64_t i = 0; i < N; ++i) {
      for (int64_t j = 0; j < M; ++j) {
        const float e = std::exp(in[i * M + j] - top[j]);
        out[i * M + j] = e;
        sum[j] += e;
      }
    }
    for (int64_t i = 0; i < N; ++i) {
      for (int64_t j = 0; j < M; ++j) out[i * M + j] /= sum[j];
    }
  }
}
