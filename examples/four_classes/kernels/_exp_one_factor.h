// exp(x) for x <= 0, one factor 2^n: below the smallest normal number the result is 0. NaN stays NaN, -inf gives 0.
INLINE vf exp_of(vf x) {
  vf t = x * 1.44269504088896341f + splat(12582912.0f);
  vf n = t - splat(12582912.0f);
  vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vf p = (r * 0x1.6a23cep-10f + 0x1.123a2p-7f) * r + 0x1.5558f2p-5f;
  p = p * r + 0x1.555492p-3f;
  p = p * r + 0x1.fffffcp-2f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  vf e = p * (vf)(((vi)t << 23) + (127 << 23));
  return (vf)((vi)e & ~(vi)(x < splat(-87.33f)));
}
