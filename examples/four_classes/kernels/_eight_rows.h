// Four vectors of two rows each to four vectors of one column each (rows 0 2 4 6 | 1 3 5 7), and back: the same shuffles.
INLINE void transpose(vf* a) {
  __m256 t0 = _mm256_unpacklo_ps((__m256)a[0], (__m256)a[1]), t1 = _mm256_unpackhi_ps((__m256)a[0], (__m256)a[1]);
  __m256 t2 = _mm256_unpacklo_ps((__m256)a[2], (__m256)a[3]), t3 = _mm256_unpackhi_ps((__m256)a[2], (__m256)a[3]);
  a[0] = (vf)_mm256_shuffle_ps(t0, t2, 0x44);
  a[1] = (vf)_mm256_shuffle_ps(t0, t2, 0xee);
  a[2] = (vf)_mm256_shuffle_ps(t1, t3, 0x44);
  a[3] = (vf)_mm256_shuffle_ps(t1, t3, 0xee);
}
INLINE void eight_rows(const float* x, float* y) {
  vf a[4];
  for (int c = 0; c < 4; c++) a[c] = load(x + 8 * c);
  transpose(a);
  vf m = larger(larger(a[0], a[1]), larger(a[2], a[3]));
  for (int c = 0; c < 4; c++) a[c] = exp_of(a[c] - m);
  vf s = (a[0] + a[1]) + (a[2] + a[3]);
  vf q = RECIPROCAL(s);
  for (int c = 0; c < 4; c++) a[c] = a[c] * q;
  transpose(a);
  for (int c = 0; c < 4; c++) store(y + 8 * c, a[c]);
}
extern "C" void run(int64_t begin, int64_t end, void* const* pointers) {
  const float* x = (const float*)pointers[0] + begin * 4;
  float* y = (float*)pointers[1] + begin * 4;
  int64_t left = end - begin;
  for (; left >= 8; left -= 8, x += 32, y += 32) eight_rows(x, y);
  if (left > 0) {
    float in[32] = {}, out[32];
    memcpy(in, x, left * 16);
    eight_rows(in, out);
    memcpy(y, out, left * 16);
  }
}
