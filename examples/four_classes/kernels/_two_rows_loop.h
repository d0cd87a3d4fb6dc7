extern "C" void run(int64_t begin, int64_t end, void* const* pointers) {
  const float* x = (const float*)pointers[0];
  float* y = (float*)pointers[1];
  int64_t i = begin * 4;
  const int64_t stop = end * 4;
  for (; i + 8 * UNROLL <= stop; i += 8 * UNROLL) {
    vf v[UNROLL];
    for (int u = 0; u < UNROLL; u++) v[u] = two_rows(load(x + i + 8 * u));
    for (int u = 0; u < UNROLL; u++) store(y + i + 8 * u, v[u]);
  }
  for (; i + 8 <= stop; i += 8) store(y + i, two_rows(load(x + i)));
  if (i < stop) {
    float last[8];
    memcpy(last, x + i, 16);
    memcpy(last + 4, x + i, 16);
    store(last, two_rows(load(last)));
    memcpy(y + i, last, 16);
  }
}
