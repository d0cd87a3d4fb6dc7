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
