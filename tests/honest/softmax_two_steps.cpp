/* {"op": "_softmax", "sizes": [96, 1000], "scalars": {"dim": 1, "half_to_float": false}, "workspaces": [{"name": "kept", "size_bytes": 768}], "reason": null,
    "steps": [{"entry": "candidate", "range": 96, "grain": 4, "args": ["x", "y", "kept"]},
              {"entry": "divide", "range": 96, "grain": 4, "args": ["x", "y", "kept"]}],
    "idea": "maximum and sum of every row in one step, the results in another"} */
#include <cmath>
#include <cstdint>

static constexpr int64_t N = 1000;

extern "C" void candidate(int64_t begin, int64_t end, void* const* pointers) {
  for (int64_t row = begin; row < end; ++row) {
    const float* in = static_cast<const float*>(pointers[0]) + row * N;
    float* out = static_cast<float*>(pointers[1]) + row * N;
    float top = in[0];
    for (int64_t i = 0; i < N; ++i) top = (in[i] > top || in[i] != in[i]) ? in[i] : top;
    float* kept = static_cast<float*>(pointers[2]) + 2 * row;
    double sum = 0;
    for (int64_t i = 0; i < N; ++i) sum += out[i] = std::exp(in[i] - top);
    kept[0] = top;
    kept[1] = static_cast<float>(sum);
  }
}

extern "C" void divide(int64_t begin, int64_t end, void* const* pointers) {
  for (int64_t row = begin; row < end; ++row) {
    float* out = static_cast<float*>(pointers[1]) + row * N;
    const float sum = static_cast<const float*>(pointers[2])[2 * row + 1];
    for (int64_t i = 0; i < N; ++i) out[i] /= sum;
  }
}
