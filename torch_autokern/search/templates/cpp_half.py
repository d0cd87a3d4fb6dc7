"""The C++ of 16-bit elements: `bf16` and `fp16` beside `float`, with the same loads and stores of vectors of float.

Everything is computed in float and rounded once, to nearest with ties to even, when it is stored; NaN stays a quiet NaN. A
half's denormals are normal floats, so they survive whatever the processor does with a float's own. F16C and AVX-512 have
instructions; elsewhere the bits are moved: a half is ``2^-112`` times the float whose exponent and mantissa it holds, and a
denormal one is what an addition of 2^-14 (or 1/2, to round to multiples of 2^-24) leaves behind.
"""

from __future__ import annotations

CPP_TYPES = {"float32": "float", "bfloat16": "bf16", "float16": "fp16"}
DTYPES = tuple(CPP_TYPES)
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}

_HALVES = """
typedef uint32_t vu __attribute__((vector_size(WIDTH)));
typedef uint16_t vh __attribute__((vector_size(WIDTH / 2)));
typedef uint16_t vh_any __attribute__((vector_size(WIDTH / 2), aligned(2), may_alias));
// GCC 12 converts such vectors element by element for AVX2.
#if defined(__AVX2__) && @WIDTH@ == 32
AK_INLINE vu ak_bits(vh h) { return (vu)_mm256_cvtepu16_epi32((__m128i)h); }
AK_INLINE vh ak_low_halves(vu v) {  // all below 2^16
  return (vh)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
}
#else
AK_INLINE vu ak_bits(vh h) { return __builtin_convertvector(h, vu); }
AK_INLINE vh ak_low_halves(vu v) { return __builtin_convertvector(v, vh); }
#endif
struct bf16;
struct fp16;
AK_INLINE vf ak_widen(vh h, const bf16*) { return (vf)(ak_bits(h) << 16); }
AK_INLINE vh ak_narrow(vf v, const bf16*) {
  const vu b = (vu)v, rounded = b + 0x7fff + (b >> 16 & 1);
  return ak_low_halves((v != v ? (vu){} + 0x7fc00000 : rounded) >> 16);
}
#if defined(__AVX512F__) && @WIDTH@ == 64
AK_INLINE vf ak_widen(vh h, const fp16*) { return (vf)_mm512_cvtph_ps((__m256i)h); }
AK_INLINE vh ak_narrow(vf v, const fp16*) { return (vh)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT); }
#elif defined(__F16C__) && @WIDTH@ == 32
AK_INLINE vf ak_widen(vh h, const fp16*) { return (vf)_mm256_cvtph_ps((__m128i)h); }
AK_INLINE vh ak_narrow(vf v, const fp16*) { return (vh)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT); }
#else
AK_INLINE vf ak_widen(vh h, const fp16*) {
  const vu b = ak_bits(h), sign = (b & 0x8000) << 16, size = (b & 0x7fff) << 13;
  const vu normal = size + (112u << 23), endless = size + (224u << 23);  // infinity, NaN: the exponent is 255
  const vf denormal = (vf)(size + (113u << 23)) - 0x1p-14f;
  const vu large = size >= 31u << 23 ? endless : normal;
  return (vf)((size < 1u << 23 ? (vu)denormal : large) | sign);
}
AK_INLINE vh ak_narrow(vf v, const fp16*) {
  const vu b = (vu)v, sign = b >> 16 & 0x8000, size = b & 0x7fffffff;
  const vu normal = (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13;
  const vu denormal = (vu)((vf)size + 0.5f) - 0x3f000000;
  vu found = size < 0x38800000u ? denormal : normal;
  found = size >= 0x477ff000u ? (vu){} + 0x7c00 : found;
  found = size > 0x7f800000u ? (vu){} + 0x7e00 : found;
  return ak_low_halves(found | sign);
}
#endif
struct bf16 {
  uint16_t bits;
  bf16() = default;
  AK_INLINE_MEMBER bf16(float f) : bits(ak_narrow(ak_splat(f), this)[0]) {}
  AK_INLINE_MEMBER operator float() const { return ak_widen(vh{} + bits, this)[0]; }
};
struct fp16 {
  uint16_t bits;
  fp16() = default;
  AK_INLINE_MEMBER fp16(float f) : bits(ak_narrow(ak_splat(f), this)[0]) {}
  AK_INLINE_MEMBER operator float() const { return ak_widen(vh{} + bits, this)[0]; }
};
#if defined(__AVX512BW__) && defined(__AVX512VL__) && @WIDTH@ == 64
template <int N> AK_INLINE vh ak_half_part(const void* p) {
  return (vh)_mm256_maskz_loadu_epi16((__mmask16)((1u << N) - 1), p);
}
template <int N> AK_INLINE void ak_put_part(void* p, vh h) {
  _mm256_mask_storeu_epi16(p, (__mmask16)((1u << N) - 1), (__m256i)h);
}
template <int N> AK_INLINE vf ak_fill(vf v, vf fill) {
  return (vf)_mm512_mask_mov_ps((__m512)fill, (__mmask16)((1u << N) - 1), (__m512)v);
}
#elif defined(__AVX2__) && @WIDTH@ == 32
// A copy into a part of a vector would wait for its own stores: 8, 4 and 2 bytes go their own ways.
template <int N> AK_INLINE vh ak_half_part(const void* p) {
  const char* at = (const char*)p + (N >= 4 ? 8 : 0);
  __m128i h = N >= 4 ? _mm_loadl_epi64((const __m128i*)p) : _mm_setzero_si128();
  int32_t two = 0;
  int16_t one = 0;
  if (N & 2) memcpy(&two, at, 4);
  if (N & 1) memcpy(&one, at + (N & 2) * 2, 2);
  if (N & 2) h = _mm_insert_epi32(h, two, N >= 4 ? 2 : 0);
  if (N & 1) h = _mm_insert_epi16(h, one, N - 1);
  return (vh)h;
}
template <int N> AK_INLINE void ak_put_part(void* p, vh h) {
  char* at = (char*)p + (N >= 4 ? 8 : 0);
  if (N >= 4) _mm_storel_epi64((__m128i*)p, (__m128i)h);
  const int32_t two = _mm_extract_epi32((__m128i)h, N >= 4 ? 2 : 0);
  const int16_t one = (int16_t)_mm_extract_epi16((__m128i)h, N - 1);
  if (N & 2) memcpy(at, &two, 4);
  if (N & 1) memcpy(at + (N & 2) * 2, &one, 2);
}
template <int N> AK_INLINE vf ak_fill(vf v, vf fill) { return (vf)_mm256_blend_ps((__m256)fill, (__m256)v, (1 << N) - 1); }
#else
template <int N> AK_INLINE vh ak_half_part(const void* p) {
  vh h = {};
  memcpy(&h, p, N * 2);
  return h;
}
template <int N> AK_INLINE void ak_put_part(void* p, vh h) { memcpy(p, &h, N * 2); }
template <int N> AK_INLINE vf ak_fill(vf v, vf fill) {
  AK_UNROLL for (int i = N; i < L; i++) v[i] = fill[i];
  return v;
}
#endif
"""

_OF_TYPE = """
AK_INLINE vf ak_load(const @T@* p) { return ak_widen(*(const vh_any*)p, p); }
AK_INLINE void ak_store(@T@* p, vf v) { *(vh_any*)p = ak_narrow(v, p); }
template <int N> AK_INLINE vf ak_load_part(const @T@* p, vf fill) { return ak_fill<N>(ak_widen(ak_half_part<N>(p), p), fill); }
template <int N> AK_INLINE void ak_store_part(@T@* p, vf v) { ak_put_part<N>(p, ak_narrow(v, p)); }
AK_INLINE void ak_stream(@T@* p, vf v) { ak_store(p, v); }
"""


def half_types(width: int) -> str:
    """C++ text, inside the anonymous namespace, after the float part of `cpp_common.prelude`."""
    both = "".join(_OF_TYPE.replace("@T@", name) for name in ("bf16", "fp16"))
    text = (_HALVES + both).replace("@WIDTH@", str(width))
    return text.replace("AK_INLINE_MEMBER", "inline __attribute__((always_inline))")
