#include <stdint.h>
#include <math.h>
extern "C" void run(int64_t begin, int64_t end, void* const* pointers) {
  const float* x = (const float*)pointers[0];
  float* y = (float*)pointers[1];
  for (int64_t row = begin; row < end; row++) {
    const float* p = x + 4 * row;
    float m = p[0];
    for (int j = 1; j < 4; j++) m = p[j] > m ? p[j] : m;
    float e[4], s = 0;
    for (int j = 0; j < 4; j++) s += e[j] = expf(p[j] - m);
    for (int j = 0; j < 4; j++) y[4 * row + j] = e[j] / s;
  }
}
