// exp(x) for x <= 0 with a polynomial of degree 4: two multiplications less.
INLINE vf exp_of(vf x) {
  vf t = x * 1.44269504088896341f + splat(12582912.0f);
  vf n = t - splat(12582912.0f);
  vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vf p = (r * 4.1666667e-2f + 1.6666667e-1f) * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  vf e = p * (vf)(((vi)t << 23) + (127 << 23));
  return (vf)((vi)e & ~(vi)(x < splat(-87.33f)));
}
