#include <stdint.h>
#include <immintrin.h>
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef float vf_any __attribute__((vector_size(16), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))
INLINE vf splat(float s) { return s - vf{}; }
INLINE vf larger(vf a, vf b) { return (vf)_mm_max_ps((__m128)a, (__m128)b); }
// exp(x) for x <= 0: x = n ln 2 + r, a polynomial of degree 6 in r, and 2^n as two exact factors, so that denormals come out right.
INLINE vf exp_of(vf x) {
  x = larger(splat(-104.0f), x);
  vf t = x * 1.44269504088896341f + splat(12582912.0f);
  vf n = t - splat(12582912.0f);
  vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vf p = (r * 0x1.6a23cep-10f + 0x1.123a2p-7f) * r + 0x1.5558f2p-5f;
  p = p * r + 0x1.555492p-3f;
  p = p * r + 0x1.fffffcp-2f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  vi k = (vi)t - (vi)splat(12582912.0f), half = k >> 1, rest = k - half;
  return p * (vf)((half + 127) << 23) * (vf)((rest + 127) << 23);
}
extern "C" void run(int64_t begin, int64_t end, void* const* pointers) {
  const float* x = (const float*)pointers[0];
  float* y = (float*)pointers[1];
  for (int64_t i = 4 * begin; i < 4 * end; i += 4) {
    vf v = *(const vf_any*)(x + i);
    vf m = larger(__builtin_shufflevector(v, v, 1, 0, 3, 2), v);
    m = larger(__builtin_shufflevector(m, m, 2, 3, 0, 1), m);
    vf e = exp_of(v - m);
    vf s = e + __builtin_shufflevector(e, e, 1, 0, 3, 2);
    s = s + __builtin_shufflevector(s, s, 2, 3, 0, 1);
    *(vf_any*)(y + i) = e / s;
  }
}
