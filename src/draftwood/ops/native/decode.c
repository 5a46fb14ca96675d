/* Blocks of GGUF files to float32. */
#include "blocks.h"
#include "simd.h"

#define AHEAD 2048 /* bytes to fetch ahead of those that are decoded; the next rows lie behind a row */
#define UNROLL _Pragma("GCC unroll 16")

/* Sixteen bytes as whole numbers. Written out, for compilers take vectors of bytes apart one by one. */
INLINE vi codes16(const uint8_t *p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#else
    vi v;
#if defined(__AVX2__)
    const __m256i parts[] = {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)),
                             _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))};
    memcpy(&v, parts, sizeof v);
#else
    int32_t parts[16];
    for (int i = 0; i < 16; i++) parts[i] = p[i];
    memcpy(&v, parts, sizeof v);
#endif
    return v;
#endif
}

INLINE vi signed16(const uint8_t *p) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#else
    return (codes16(p) ^ 128) - 128;
#endif
}

#ifdef __AVX512F__
/* Numbers of a table by the lowest four bits of each index. */
INLINE vf look_up(vf table, vi index) { return (vf)_mm512_permutexvar_ps((__m512i)index, (__m512)table); }
#endif

/* q where bit i of `bits` is set, else q - less. */
INLINE vi unless(uint32_t bits, vi q, int less) {
#if defined(__AVX512F__)
    return (vi)_mm512_mask_sub_epi32((__m512i)q, (__mmask16)~bits, (__m512i)q, _mm512_set1_epi32(less));
#else
    const vu place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return q - less + (vi)(((vu)splati((int32_t)bits) >> place & 1) * (uint32_t)less);
#endif
}

INLINE uint32_t word(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE uint16_t half_word(const uint8_t *p) {
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE float number(uint32_t bits) {
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

/* A float16. */
INLINE float half(const uint8_t *p) {
#ifdef __F16C__
    return _cvtsh_ss(half_word(p));
#else
    const uint32_t bits = half_word(p);
    const float magnitude = number((bits & 0x7fff) << 13) * 0x1p112f;
    return bits & 0x8000 ? -magnitude : magnitude;
#endif
}

/* The same in all lanes. */
INLINE vf halves(const uint8_t *p) {
#ifdef __AVX512F__
    return (vf)_mm512_cvtph_ps(_mm256_set1_epi16((short)half_word(p)));
#else
    return splat(half(p));
#endif
}

INLINE void put(float *out, vf scale, vi codes) { store(out, scale * to_float(codes)); }
INLINE void put_above(float *out, float scale, vi codes, float minimum) {
    store(out, fma16(splat(scale), to_float(codes), splat(minimum)));
}

/* scale nibble + minimum, of the lowest four bits. */
INLINE void put_low(float *out, float scale, float minimum, vi q) {
#ifdef __AVX512F__
    const vf codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    store(out, look_up(fma16(splat(scale), codes, splat(minimum)), q)); /* one table serves many calls */
#else
    put_above(out, scale, q & 15, minimum);
#endif
}

/* Thirty-two weights: low nibbles first. */
INLINE void put_nibbles(float *out, float scale, float minimum, vi q) {
    put_low(out, scale, minimum, q);
    put_low(out + 16, scale, minimum, q >> 4);
}

/* The same by a table of sixteen steps. */
INLINE void put_steps(float *out, float scale, const float *steps, const uint8_t *p) {
#ifdef __AVX512F__
    const vf table = splat(scale) * load(steps);
    store(out, look_up(table, codes16(p)));
    store(out + 16, look_up(table, codes16(p) >> 4));
#else
    for (int i = 0; i < 16; i++) {
        out[i] = scale * steps[p[i] & 15];
        out[i + 16] = scale * steps[p[i] >> 4];
    }
#endif
}

/* --- Blocks of 32 */

INLINE void q4_0(const uint8_t *b, float *out) {
    const float d = half(b);
    put_nibbles(out, d, -8 * d, codes16(b + 2));
}

INLINE void q4_1(const uint8_t *b, float *out) { put_nibbles(out, half(b), half(b + 2), codes16(b + 4)); }

INLINE void q5_0(const uint8_t *b, float *out) {
    const vf d = halves(b);
    const uint32_t high = word(b + 2);
    const vi q = codes16(b + 6);
#ifdef __AVX512F__
    const vf codes = {-16, -15, -14, -13, -12, -11, -10, -9, -8, -7, -6, -5, -4, -3, -2, -1}, table = d * codes;
    const vf low = look_up(table, q), rest = look_up(table, q >> 4), step = d * 16.0f; /* sums of both are exact */
    store(out, (vf)_mm512_mask_add_ps((__m512)low, (__mmask16)high, (__m512)low, (__m512)step));
    store(out + 16, (vf)_mm512_mask_add_ps((__m512)rest, (__mmask16)(high >> 16), (__m512)rest, (__m512)step));
#else
    put(out, d, unless(high, q & 15, 16));
    put(out + 16, d, unless(high >> 16, q >> 4, 16));
#endif
}

INLINE void q5_1(const uint8_t *b, float *out) {
    const float d = half(b), m = half(b + 2);
    const uint32_t high = word(b + 4);
    const vi q = codes16(b + 8);
    put_above(out, d, unless(high, (q & 15) + 16, 16), m);
    put_above(out + 16, d, unless(high >> 16, (q >> 4) + 16, 16), m);
}

INLINE void q8_0(const uint8_t *b, float *out) {
    const vf d = halves(b);
    put(out, d, signed16(b + 2));
    put(out + 16, d, signed16(b + 18));
}

static const float UNEVEN[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const float E2M1[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; /* doubled */

INLINE void iq4_nl(const uint8_t *b, float *out) { put_steps(out, half(b), UNEVEN, b + 2); }

INLINE void mxfp4(const uint8_t *b, float *out) {
    /* Half of 2^(e - 127), for the steps are doubled. */
    const float d = number(b[0] < 2 ? 0x200000u << b[0] : (uint32_t)(b[0] - 1) << 23);
    put_steps(out, d, E2M1, b + 1);
}

/* (code - zero) scale; that is a float32, so the sum below does not round. */
INLINE void int4(const uint8_t *b, float scale, float *out) {
    put_nibbles(out, scale, -scale * b[2], codes16(b + 3));
}

INLINE void int4_f16(const uint8_t *b, float *out) { int4(b, half(b), out); }
INLINE void int4_bf16(const uint8_t *b, float *out) { int4(b, number((uint32_t)half_word(b) << 16), out); }

static const float NF4[] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
    -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
};
static const float FP4[] = {
    0, 0.0625f / 12, 8.0f / 12, 1, 4.0f / 12, 0.5f, 2.0f / 12, 0.25f,
    0, -0.0625f / 12, -8.0f / 12, -1, -4.0f / 12, -0.5f, -2.0f / 12, -0.25f,
};

INLINE void nf4(const uint8_t *b, float *out) { put_steps(out, number(word(b)), NF4, b + 4); }
INLINE void fp4(const uint8_t *b, float *out) { put_steps(out, number(word(b)), FP4, b + 4); }

INLINE void int8(const uint8_t *b, float *out) {
    const vf d = splat(number(word(b)));
    put(out, d, signed16(b + 4));
    put(out + 16, d, signed16(b + 20));
}

/* Exponent and fraction go where float32 has them, 2^120 too low; there are no infinities, and 127 is not a number. */
INLINE void fp8(const uint8_t *b, float *out) {
    const float d = number(word(b));
    for (int i = 0; i < 32; i += 16) {
        const vi v = codes16(b + 4 + i), size = v & 127;
        const vf value = (vf)((size << 20) | (v & 128) << 24) * 0x1p120f;
        store(out + i, splat(d) * either(size == 127, splat(NAN), value));
    }
}

INLINE void f32(const uint8_t *b, float *out) { memcpy(out, b, 32 * sizeof(float)); }

INLINE void f16(const uint8_t *b, float *out) {
#if defined(__AVX512F__)
    for (int i = 0; i < 32; i += LANES) store(out + i, load_half((const uint16_t *)(b + 2 * i)));
#elif defined(__F16C__) && defined(__AVX__)
    for (int i = 0; i < 32; i += 8) {
        const __m256 v = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(b + 2 * i)));
        memcpy(out + i, &v, sizeof v);
    }
#else
    for (int i = 0; i < 32; i++) out[i] = half(b + 2 * i);
#endif
}

INLINE void bf16(const uint8_t *b, float *out) {
    for (int i = 0; i < 32; i++) out[i] = number((uint32_t)half_word(b + 2 * i) << 16);
}

/* --- Blocks of 256 */

INLINE void q2_k(const uint8_t *b, float *out) {
    const uint8_t *q = b + 16;
    const vi parts = codes16(b);
    float scale[16], minimum[16];
    store(scale, splat(half(b + 80)) * to_float(parts & 15));
    store(minimum, splat(-half(b + 82)) * to_float(parts >> 4));
    UNROLL for (int part = 0; part < 16; part++) {
        const vi codes = codes16(q + part / 8 * 32 + part % 2 * 16) >> (part % 8 / 2 * 2) & 3;
        put_above(out + part * 16, scale[part], codes, minimum[part]);
    }
}

INLINE void q3_k(const uint8_t *b, float *out) {
    const uint8_t *q = b + 32, *s = b + 96;
    uint8_t scales[16];
    float scale[16];
    UNROLL for (int i = 0; i < 16; i += 4) { /* four at a time: low bits in the first eight bytes, high ones behind */
        const uint32_t four = (word(s + i % 8) >> (i / 8 * 4) & 0x0f0f0f0fu) | (word(s + 8) >> (i / 4 * 2) & 0x03030303u) << 4;
        memcpy(scales + i, &four, 4);
    }
    store(scale, splat(half(b + 108)) * to_float(codes16(scales) - 32));
    UNROLL for (int part = 0; part < 16; part++) {
        const vi codes = codes16(q + part / 8 * 32 + part % 2 * 16) >> (part % 8 / 2 * 2) & 3;
        const vi third = (codes16(b + part % 2 * 16) >> (part / 2) & 1) << 2;
        put(out + part * 16, splat(scale[part]), codes + third - 4);
    }
}

/* Scales of a block's eight parts, then their minima, negative: six bits each in twelve bytes. */
INLINE void part_scales(const uint8_t *b, float out[16]) {
    const uint32_t first = word(b + 4), second = word(b + 8), third = word(b + 12);
    const uint32_t parts[] = {
        first & 0x3f3f3f3fu, (third & 0x0f0f0f0fu) | (first >> 6 & 0x03030303u) << 4,
        second & 0x3f3f3f3fu, (third >> 4 & 0x0f0f0f0fu) | (second >> 6 & 0x03030303u) << 4,
    };
    const float d = half(b), m = -half(b + 2);
    const vf units = {d, d, d, d, d, d, d, d, m, m, m, m, m, m, m, m};
    store(out, units * to_float(codes16((const uint8_t *)parts)));
}

INLINE void q4_k(const uint8_t *b, float *out) {
    float scale[16];
    part_scales(b, scale);
    UNROLL for (int part = 0; part < 8; part += 2)
        UNROLL for (int i = 0; i < 32; i += 16) {
            const vi q = codes16(b + 16 + part * 16 + i);
            put_low(out + part * 32 + i, scale[part], scale[part + 8], q);
            put_low(out + part * 32 + 32 + i, scale[part + 1], scale[part + 9], q >> 4);
        }
}

INLINE void q5_k(const uint8_t *b, float *out) {
    float scale[16];
    part_scales(b, scale);
    UNROLL for (int part = 0; part < 8; part++)
        UNROLL for (int i = 0; i < 32; i += 16) {
            const vi high = (codes16(b + 16 + i) >> part & 1) << 4;
            const vi codes = (codes16(b + 48 + part / 2 * 32 + i) >> (part % 2 * 4) & 15) | high;
            put_above(out + part * 32 + i, scale[part], codes, scale[part + 8]);
        }
}

INLINE void q6_k(const uint8_t *b, float *out) {
    float scale[16];
    store(scale, splat(half(b + 208)) * to_float(signed16(b + 192)));
    UNROLL for (int part = 0; part < 16; part++) {
        const int side = part / 8, quarter = part % 8 / 2, at = part % 2 * 16;
        const vi low = codes16(b + side * 64 + quarter % 2 * 32 + at) >> (quarter / 2 * 4) & 15;
        const vi high = (codes16(b + 128 + side * 32 + at) >> (quarter * 2) & 3) << 4;
        put(out + part * 16, splat(scale[part]), (low | high) - 32);
    }
}

INLINE void iq4_xs(const uint8_t *b, float *out) {
    const float d = half(b);
    const int high = half_word(b + 2);
    UNROLL for (int part = 0; part < 8; part++) {
        const int scale = (b[4 + part / 2] >> (part % 2 * 4) & 15) | (high >> (part * 2) & 3) << 4;
        put_steps(out + part * 32, d * (scale - 32), UNEVEN, b + 8 + part * 16);
    }
}

/* --- All of them */

#define SPANS(name, values, size) \
    static void name##s(const uint8_t *b, int64_t count, float *out) { \
        for (; count > 0; count -= values, b += size, out += values) name(b, out); \
    } \
    SUMS(name, values, size)
#ifdef __AVX512F__
/* Products of one row with weights that stay in registers. */
#define SUMS(name, values, size) \
    static vf name##_sum(const uint8_t *b, int64_t count, const float *x) { \
        vf sum = {0}; \
        for (; count > 0; count -= values, b += size, x += values) { \
            float w[values]; \
            name(b, w); \
            UNROLL for (int i = 0; i < values; i += LANES) sum = fma16(load(w + i), load(x + i), sum); \
        } \
        return sum; \
    }
#define SUM_OF(name) name##_sum
#else
#define SUMS(name, values, size)
#define SUM_OF(name) NULL
#endif
#define EACH_FORMAT(DO) \
    DO(KIND_F32, f32, 32, 128) DO(KIND_F16, f16, 32, 64) DO(KIND_BF16, bf16, 32, 64) DO(KIND_Q4_0, q4_0, 32, 18) \
    DO(KIND_Q4_1, q4_1, 32, 20) DO(KIND_Q5_0, q5_0, 32, 22) DO(KIND_Q5_1, q5_1, 32, 24) DO(KIND_Q8_0, q8_0, 32, 34) \
    DO(KIND_IQ4_NL, iq4_nl, 32, 18) DO(KIND_MXFP4, mxfp4, 32, 17) DO(KIND_Q2_K, q2_k, 256, 84) \
    DO(KIND_Q3_K, q3_k, 256, 110) DO(KIND_Q4_K, q4_k, 256, 144) DO(KIND_Q5_K, q5_k, 256, 176) \
    DO(KIND_Q6_K, q6_k, 256, 210) DO(KIND_IQ4_XS, iq4_xs, 256, 136) DO(KIND_INT4_F16, int4_f16, 32, 19) \
    DO(KIND_INT4_BF16, int4_bf16, 32, 19) DO(KIND_INT8, int8, 32, 36) DO(KIND_FP8, fp8, 32, 36) \
    DO(KIND_NF4, nf4, 32, 20) DO(KIND_FP4, fp4, 32, 20)
#define SPANS_OF(kind, name, values, size) SPANS(name, values, size)
#define ENTRY(kind, name, values, size) [kind] = {name##s, SUM_OF(name), values, size},

EACH_FORMAT(SPANS_OF)

static const struct {
    void (*decode)(const uint8_t *, int64_t, float *);
    vf (*sum)(const uint8_t *, int64_t, const float *);
    int64_t values, bytes; /* of a block */
} FORMATS[NUM_KINDS] = {EACH_FORMAT(ENTRY)};

/* Where weights begin that are needed now; what comes after them is fetched. */
INLINE const uint8_t *blocks_at(int64_t kind, const uint8_t *row, int64_t start, int64_t count) {
    const uint8_t *first = row + start / FORMATS[kind].values * FORMATS[kind].bytes;
    for (int64_t i = 0; i < count / FORMATS[kind].values * FORMATS[kind].bytes; i += 64)
        __builtin_prefetch(first + i + AHEAD, 0, 3);
    return first;
}

void decode_blocks(int64_t kind, const uint8_t *row, int64_t start, int64_t count, float *out) {
    FORMATS[kind].decode(blocks_at(kind, row, start, count), count, out);
}

vf sum_blocks(int64_t kind, const uint8_t *row, int64_t start, int64_t count, const float *x) {
    return FORMATS[kind].sum(blocks_at(kind, row, start, count), count, x);
}

/* Rows one behind the other, `bytes` apart, to numbers [count, inputs]. */
__attribute__((visibility("default"))) void dw_decode_rows(int64_t kind, const uint8_t *rows, int64_t bytes,
                                                           int64_t count, int64_t inputs, float *out) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < count; row++) decode_blocks(kind, rows + row * bytes, 0, inputs, out + row * inputs);
}
