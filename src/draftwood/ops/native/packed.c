#include "packed.h"

#include "simd.h"

int64_t vector_bytes(const Model *m, const Batch *b) {
    return b->packing == PLAIN ? m->head_dim * (int64_t)sizeof(float) : m->head_dim + (int64_t)sizeof(float);
}

char *vectors_of(const Model *m, const Batch *b, int64_t layer, int64_t which, int64_t head) {
    const int64_t heads = (layer * 2 + which) * m->num_kv_heads + head;
    return (char *)b->store + heads * b->num_slots * vector_bytes(m, b);
}

static uint32_t bits_of_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* e4m3, to the nearest, ties to even, at most 448. */
static uint8_t code_of(float x) {
    const uint8_t sign = bits_of_float(x) >> 31 << 7;
    float size = fabsf(x);
    if (!(size < 448.0f)) return sign | 0x7e;
    if (size < 0.015625f) return sign | (uint8_t)rintf(size * 512.0f); /* as many 1/512: subnormal, or the first that is not */
    uint32_t bits = bits_of_float(size);
    bits += 0x7ffff + (bits >> 20 & 1);
    const uint32_t code = (bits >> 20) - (120 << 3);
    return sign | (uint8_t)(code > 0x7e ? 0x7e : code);
}

static float number_of(uint8_t code) {
    const uint32_t size = code & 0x7f, sign = (uint32_t)(code & 0x80) << 24;
    const float small = (float)size * 0.001953125f; /* of a subnormal: 1/512 */
    const float usual = float_of((size << 20) + (120u << 23));
    return float_of(bits_of_float(size < 8 ? small : usual) | sign);
}

void write_vector(const Batch *b, const float *x, int64_t size, char *out) {
    if (b->packing == PLAIN) {
        memcpy(out, x, size * sizeof(float));
        return;
    }
    const float top = b->packing == PACKED_INT8 ? 127.0f : 448.0f;
    float largest = 0;
    for (int64_t i = 0; i < size; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    const float inverse = largest > 0 ? top / largest : 0.0f, scale = largest / top;
    for (int64_t i = 0; i < size; i++)
        out[i] = b->packing == PACKED_INT8 ? (char)(int8_t)rintf(x[i] * inverse) : (char)code_of(x[i] * inverse);
    memcpy(out + size, &scale, sizeof scale);
}

void read_vector(const Batch *b, const char *packed, int64_t size, float *out) {
    float scale;
    memcpy(&scale, packed + size, sizeof scale);
    if (b->packing == PACKED_INT8)
        for (int64_t i = 0; i < size; i++) out[i] = (float)(int8_t)packed[i] * scale;
    else
        for (int64_t i = 0; i < size; i++) out[i] = number_of((uint8_t)packed[i]) * scale;
}
