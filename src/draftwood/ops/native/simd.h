/* Sixteen lanes at a time, on whatever the compiler makes of them: one AVX-512 register, two AVX, four NEON.

   Nothing here or in the files beside it depends on how many rows a call has: every number is summed in one fixed
   order, so that a row's result is the same, bit for bit, whatever other rows are computed with it. */
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));

/* Written out, for `(vf){0} + x` would be an addition: it has to make 0 of -0. */
INLINE vf splat(float x) { return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE vi splati(int32_t x) { return (vi){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

INLINE vf load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE vu loadu(const void *p) {
    vu v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }

/* a b + c, rounded once where the processor can. */
INLINE vf fma16(vf a, vf b, vf c) {
#ifdef __AVX512F__
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }
INLINE vf either(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

/* Sixteen float16 numbers. */
INLINE vf load_half(const uint16_t *p) {
#ifdef __AVX512F__
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    vf v;
    for (int i = 0; i < LANES; i++) {
        /* Shift the exponent up to float32's bias; 2^112 makes normal and subnormal numbers alike right. */
        uint32_t bits = ((uint32_t)(p[i] & 0x7fff) << 13);
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude *= 0x1p112f;
        v[i] = p[i] & 0x8000 ? -magnitude : magnitude;
    }
    return v;
#endif
}

/* acc + the four products of unsigned bytes in w and the signed bytes x, in each lane. */
INLINE vi dot4(vi acc, vu w, int32_t x) {
#if defined(__AVX512VNNI__)
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
#else
    vi words = (vi)w;
    acc += (words & 255) * (int8_t)x;
    acc += (words >> 8 & 255) * (int8_t)(x >> 8);
    acc += (words >> 16 & 255) * (int8_t)(x >> 16);
    return acc + (words >> 24 & 255) * (int8_t)(x >> 24);
#endif
}

/* The nearest whole numbers, halves to even, of numbers below 2^22. */
INLINE vf round16(vf x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: there are no fractions up there */
    return (x + magic) - magic;
}

INLINE void store_bytes(int8_t *p, vf whole) {
    typedef int8_t vb __attribute__((vector_size(LANES)));
    vb v = __builtin_convertvector(__builtin_convertvector(whole, vi), vb);
    memcpy(p, &v, sizeof v);
}

/* e^x to about one unit in the last place; exactly 0 where float32 has no normal number for it. */
INLINE vf exp16(vf x) {
    vf clamped = either(x < -87.3f, splat(-87.3f), either(x > 88.0f, splat(88.0f), x));
    vf n = round16(clamped * 1.44269504f);
    vf r = fma16(n, splat(-0.693359375f), clamped);
    r = fma16(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma16(p, r, splat(1.3981999507e-3f));
    p = fma16(p, r, splat(8.3334519073e-3f));
    p = fma16(p, r, splat(4.1665795894e-2f));
    p = fma16(p, r, splat(1.6666665459e-1f));
    p = fma16(p, r, splat(5.0000001201e-1f));
    p = fma16(p, r * r, r) + 1.0f;
    vi power = (__builtin_convertvector(n, vi) + 127) << 23;
    return either(x < -87.3f, splat(0.0f), p * (vf)power);
}

/* cap tanh(x / cap), to about one unit in the last place of cap. */
INLINE vf softcap16(vf x, float cap) {
    vf e = exp16(x * (2.0f / cap)); /* never beyond e^88 */
    return cap - (2.0f * cap) / (e + 1.0f);
}

/* Sum and largest of the lanes, by halves. */
INLINE float sum16(vf v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);
#else
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
#endif
}

INLINE float max16(vf v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)v);
#else
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] = v[i + half] > v[i] ? v[i + half] : v[i];
    return v[0];
#endif
}
