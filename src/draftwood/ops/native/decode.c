/* Blocks of GGUF files to float32. */
#include "blocks.h"
#include "simd.h"

typedef uint8_t Codes __attribute__((vector_size(16)));
typedef int8_t Signed __attribute__((vector_size(16)));

/* Sixteen bytes as whole numbers. */
INLINE vi codes16(const uint8_t *p) {
    Codes v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, vi);
}

INLINE vi signed16(const uint8_t *p) {
    Signed v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, vi);
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

INLINE void put(float *out, float scale, vi codes) { store(out, splat(scale) * to_float(codes)); }
INLINE void put_above(float *out, float scale, vi codes, float minimum) {
    store(out, fma16(splat(scale), to_float(codes), splat(minimum)));
}

/* --- Blocks of 32 */

static void q4_0(const uint8_t *b, float *out) {
    const float d = half(b);
    const vi q = codes16(b + 2);
    put(out, d, (q & 15) - 8);
    put(out + 16, d, (q >> 4) - 8);
}

static void q4_1(const uint8_t *b, float *out) {
    const float d = half(b), m = half(b + 2);
    const vi q = codes16(b + 4);
    put_above(out, d, q & 15, m);
    put_above(out + 16, d, q >> 4, m);
}

/* Bit i of `bits` as the fifth bit of code i. */
INLINE vi fifth(uint32_t bits) {
    const vu place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (vi)(((vu)splati((int32_t)bits) >> place & 1) << 4);
}

static void q5_0(const uint8_t *b, float *out) {
    const float d = half(b);
    const uint32_t high = word(b + 2);
    const vi q = codes16(b + 6);
    put(out, d, ((q & 15) | fifth(high)) - 16);
    put(out + 16, d, ((q >> 4) | fifth(high >> 16)) - 16);
}

static void q5_1(const uint8_t *b, float *out) {
    const float d = half(b), m = half(b + 2);
    const uint32_t high = word(b + 4);
    const vi q = codes16(b + 8);
    put_above(out, d, (q & 15) | fifth(high), m);
    put_above(out + 16, d, (q >> 4) | fifth(high >> 16), m);
}

static void q8_0(const uint8_t *b, float *out) {
    const float d = half(b);
    put(out, d, signed16(b + 2));
    put(out + 16, d, signed16(b + 18));
}

/* Sixteen codes by a table of sixteen steps, low nibbles first. */
INLINE void put_steps(float *out, float scale, const uint8_t *p, const Codes steps) {
    Codes v;
    memcpy(&v, p, sizeof v);
    const Signed low = (Signed)__builtin_shuffle(steps, v & 15), high = (Signed)__builtin_shuffle(steps, v >> 4);
    put(out, scale, __builtin_convertvector(low, vi));
    put(out + 16, scale, __builtin_convertvector(high, vi));
}

static const Signed UNEVEN = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const Signed E2M1 = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}; /* doubled */

static void iq4_nl(const uint8_t *b, float *out) { put_steps(out, half(b), b + 2, (Codes)UNEVEN); }

static void mxfp4(const uint8_t *b, float *out) {
    /* Half of 2^(e - 127), for the steps are doubled. */
    put_steps(out, number(b[0] < 2 ? 0x200000u << b[0] : (uint32_t)(b[0] - 1) << 23), b + 1, (Codes)E2M1);
}

static void f32(const uint8_t *b, float *out) { memcpy(out, b, 32 * sizeof(float)); }

static void f16(const uint8_t *b, float *out) {
    uint16_t halves[32];
    memcpy(halves, b, sizeof halves);
    store(out, load_half(halves));
    store(out + 16, load_half(halves + 16));
}

static void bf16(const uint8_t *b, float *out) {
    for (int i = 0; i < 32; i++) out[i] = number((uint32_t)half_word(b + 2 * i) << 16);
}

/* --- Blocks of 256 */

static void q2_k(const uint8_t *b, float *out) {
    const uint8_t *q = b + 16;
    const float d = half(b + 80), low = half(b + 82);
    for (int part = 0; part < 16; part++) {
        const vi codes = codes16(q + part / 8 * 32 + part % 2 * 16) >> (part % 8 / 2 * 2) & 3;
        put_above(out + part * 16, d * (b[part] & 15), codes, -(low * (b[part] >> 4)));
    }
}

static void q3_k(const uint8_t *b, float *out) {
    const uint8_t *q = b + 32, *s = b + 96;
    const float d = half(b + 108);
    for (int part = 0; part < 16; part++) {
        const int high = s[8 + part % 4] >> (part / 4 * 2) & 3, scale = (s[part % 8] >> (part / 8 * 4) & 15) | high << 4;
        const vi codes = codes16(q + part / 8 * 32 + part % 2 * 16) >> (part % 8 / 2 * 2) & 3;
        const vi third = (codes16(b + part % 2 * 16) >> (part / 2) & 1) << 2;
        put(out + part * 16, d * (scale - 32), codes + third - 4);
    }
}

/* Scale and minimum of part j of a block with eight parts, six bits each. */
INLINE int part_scale(const uint8_t *s, int j) { return j < 4 ? s[j] & 63 : (s[j + 4] & 15) | s[j - 4] >> 6 << 4; }
INLINE int part_minimum(const uint8_t *s, int j) { return j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4; }

static void q4_k(const uint8_t *b, float *out) {
    const float d = half(b), low = half(b + 2);
    for (int part = 0; part < 8; part++) {
        const float scale = d * part_scale(b + 4, part), minimum = -(low * part_minimum(b + 4, part));
        const uint8_t *q = b + 16 + part / 2 * 32;
        for (int i = 0; i < 32; i += 16)
            put_above(out + part * 32 + i, scale, codes16(q + i) >> (part % 2 * 4) & 15, minimum);
    }
}

static void q5_k(const uint8_t *b, float *out) {
    const float d = half(b), low = half(b + 2);
    for (int part = 0; part < 8; part++) {
        const float scale = d * part_scale(b + 4, part), minimum = -(low * part_minimum(b + 4, part));
        const uint8_t *q = b + 48 + part / 2 * 32;
        for (int i = 0; i < 32; i += 16) {
            const vi high = (codes16(b + 16 + i) >> part & 1) << 4;
            put_above(out + part * 32 + i, scale, (codes16(q + i) >> (part % 2 * 4) & 15) | high, minimum);
        }
    }
}

static void q6_k(const uint8_t *b, float *out) {
    const float d = half(b + 208);
    for (int part = 0; part < 16; part++) {
        const int side = part / 8, quarter = part % 8 / 2, at = part % 2 * 16;
        const vi low = codes16(b + side * 64 + quarter % 2 * 32 + at) >> (quarter / 2 * 4) & 15;
        const vi high = (codes16(b + 128 + side * 32 + at) >> (quarter * 2) & 3) << 4;
        put(out + part * 16, d * (int8_t)b[192 + part], (low | high) - 32);
    }
}

static void iq4_xs(const uint8_t *b, float *out) {
    const float d = half(b);
    const int high = half_word(b + 2);
    for (int part = 0; part < 8; part++) {
        const int scale = (b[4 + part / 2] >> (part % 2 * 4) & 15) | (high >> (part * 2) & 3) << 4;
        put_steps(out + part * 32, d * (scale - 32), b + 8 + part * 16, (Codes)UNEVEN);
    }
}

/* --- All of them */

typedef struct {
    void (*decode)(const uint8_t *, float *);
    int32_t values, bytes; /* of a block */
} Format;

static const Format FORMATS[NUM_KINDS] = {
    [KIND_F32] = {f32, 32, 128},      [KIND_F16] = {f16, 32, 64},       [KIND_BF16] = {bf16, 32, 64},
    [KIND_Q4_0] = {q4_0, 32, 18},     [KIND_Q4_1] = {q4_1, 32, 20},     [KIND_Q5_0] = {q5_0, 32, 22},
    [KIND_Q5_1] = {q5_1, 32, 24},     [KIND_Q8_0] = {q8_0, 32, 34},     [KIND_IQ4_NL] = {iq4_nl, 32, 18},
    [KIND_MXFP4] = {mxfp4, 32, 17},   [KIND_Q2_K] = {q2_k, 256, 84},    [KIND_Q3_K] = {q3_k, 256, 110},
    [KIND_Q4_K] = {q4_k, 256, 144},   [KIND_Q5_K] = {q5_k, 256, 176},   [KIND_Q6_K] = {q6_k, 256, 210},
    [KIND_IQ4_XS] = {iq4_xs, 256, 136},
};

void decode_blocks(int64_t kind, const uint8_t *row, int64_t start, int64_t count, float *out) {
    const Format *f = &FORMATS[kind];
    const uint8_t *block = row + start / f->values * f->bytes;
    for (int64_t i = 0; i < count; i += f->values, block += f->bytes) f->decode(block, out + i);
}

/* Rows one behind the other, `bytes` apart, to numbers [count, inputs]. */
__attribute__((visibility("default"))) void dw_decode_rows(int64_t kind, const uint8_t *rows, int64_t bytes,
                                                           int64_t count, int64_t inputs, float *out) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < count; row++) decode_blocks(kind, rows + row * bytes, 0, inputs, out + row * inputs);
}
