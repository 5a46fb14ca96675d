#include "products.h"

#include "blocks.h"
#include "simd.h"

#define CHUNK 64 /* inputs summed before they join the total: shorter sums round less */

#define UNROLL _Pragma("GCC unroll 12")
/* Weights are read once a step, from end to end: fetch far ahead into the second-level cache, and from there into the
   first. With one distance only, memory waits while several rows are multiplied. */
#define FETCH(p) \
    do { \
        __builtin_prefetch((const char *)(p) + 8192, 0, 2); \
        __builtin_prefetch((const char *)(p) + 2048, 0, 3); \
    } while (0)

/* One panel of the product with R rows. Each of these is compiled for every R up to MAX_ROWS. */
#define TILE(name) \
    INLINE void name(const Matrix *m, int64_t panel, const Rows *x, int64_t row, const int R, \
                     float out[][PANEL], const int bits)
#define ALL(r) UNROLL for (int r = 0; r < R; r++)

INLINE void clear(vf sums[][2], const int R) { ALL(r) sums[r][0] = sums[r][1] = splat(0); }

INLINE void store_tile(float out[][PANEL], vf totals[][2], const int R) {
    ALL(r) {
        store(out[r], totals[r][0]);
        store(out[r] + LANES, totals[r][1]);
    }
}

TILE(tile_float) {
    const int step = 32 / bits; /* inputs in a word */
    const uint32_t *w = (const uint32_t *)m->words + panel * PANEL * (m->inputs / step);
    const float *xs = x->values + row * x->stride;
    vf total[MAX_ROWS][2];
    clear(total, R);
    for (int64_t start = 0; start < m->inputs; start += CHUNK) {
        const int64_t end = start + CHUNK < m->inputs ? start + CHUNK : m->inputs;
        vf sum[MAX_ROWS][2];
        clear(sum, R);
        for (int64_t k = start; k < end; k += step) {
            vu a = loadu(w), b = loadu(w + LANES);
            FETCH(w);
            FETCH(w + LANES);
            w += PANEL;
            UNROLL for (int j = 0; j < step; j++) {
                /* A bfloat16 is the upper half of a float32. */
                vf a_j = (vf)(bits == 32 ? a : j ? a & 0xffff0000u : a << 16);
                vf b_j = (vf)(bits == 32 ? b : j ? b & 0xffff0000u : b << 16);
                ALL(r) {
                    vf v = splat(xs[r * x->stride + k + j]);
                    sum[r][0] = fma16(v, a_j, sum[r][0]);
                    sum[r][1] = fma16(v, b_j, sum[r][1]);
                }
            }
        }
        ALL(r) {
            total[r][0] += sum[r][0];
            total[r][1] += sum[r][1];
        }
    }
    store_tile(out, total, R);
}

/* Weight j of each word, as a whole number; int8 words have had 128 taken off each byte. */
INLINE vf code_of(vu word, int j, const int bits) {
    if (bits == 8) return to_float((vi)(word << (24 - 8 * j)) >> 24);
    vu nibble = word >> (8 * (j & 3) + (j & 4));
#ifdef __AVX512F__
    const __m512 codes = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (vf)_mm512_permutexvar_ps((__m512i)nibble, codes); /* looks at the lowest four bits only */
#else
    return to_float((vi)nibble & 15);
#endif
}

TILE(tile_quantised) {
    const int step = 32 / bits, words = GROUP / step;
    const int64_t groups = m->inputs / GROUP, xgroups = x->stride / GROUP;
    const float *xs = x->values + row * x->stride, *sums = x->sums + row * xgroups;
    const uint32_t *w = (const uint32_t *)m->words + panel * groups * words * PANEL;
    vf total[MAX_ROWS][2];
    clear(total, R);
    for (int64_t g = 0; g < groups; g++) {
        vf sum[MAX_ROWS][2];
        clear(sum, R);
        for (int i = 0; i < words; i++) {
            vu a = loadu(w), b = loadu(w + LANES);
            FETCH(w);
            FETCH(w + LANES);
            w += PANEL;
            if (bits == 8) {
                a ^= 0x80808080u;
                b ^= 0x80808080u;
            }
            const float *xi = xs + g * GROUP + i * step;
            UNROLL for (int j = 0; j < step; j++) {
                vf a_j = code_of(a, j, bits), b_j = code_of(b, j, bits);
                ALL(r) {
                    vf v = splat(xi[r * x->stride + j]);
                    sum[r][0] = fma16(v, a_j, sum[r][0]);
                    sum[r][1] = fma16(v, b_j, sum[r][1]);
                }
            }
        }
        const int64_t at = (panel * groups + g) * PANEL;
        vf scale_a = load_half(m->scale + at), scale_b = load_half(m->scale + at + LANES);
        ALL(r) {
            total[r][0] = fma16(scale_a, sum[r][0], total[r][0]);
            total[r][1] = fma16(scale_b, sum[r][1], total[r][1]);
            if (bits == 4) {
                vf z = splat(sums[r * xgroups + g]);
                total[r][0] = fma16(load_half(m->minimum + at), z, total[r][0]);
                total[r][1] = fma16(load_half(m->minimum + at + LANES), z, total[r][1]);
            }
        }
    }
    store_tile(out, total, R);
}

/* The same with inputs rounded to bytes: whole-number sums within a group, so their order cannot matter at all. */
TILE(tile_bytes) {
    const int words = GROUP * bits / 32;
    const int64_t groups = m->inputs / GROUP, xgroups = x->stride / GROUP;
    const int8_t *xs = x->bytes + row * x->stride;
    const float *xscale = x->scale + row * xgroups, *sums = x->sums + row * xgroups;
    const int32_t *offsets = x->offsets + row * xgroups;
    const uint32_t *w = (const uint32_t *)m->words + panel * groups * words * PANEL;
    vf total[MAX_ROWS][2];
    clear(total, R);
    for (int64_t g = 0; g < groups; g++) {
        vi sum[MAX_ROWS][2];
        /* An int8 weight is stored 128 too high, which the sum of the inputs takes back. */
        ALL(r) sum[r][0] = sum[r][1] = splati(bits == 8 ? offsets[r * xgroups + g] : 0);
        UNROLL for (int i = 0; i < words; i++) {
            vu a = loadu(w), b = loadu(w + LANES);
            FETCH(w);
            FETCH(w + LANES);
            w += PANEL;
            const int8_t *xi = xs + g * GROUP + i * (32 / bits);
            ALL(r) {
                int32_t v, u;
                memcpy(&v, xi + r * x->stride, 4);
                if (bits == 8) {
                    sum[r][0] = dot4(sum[r][0], a, v);
                    sum[r][1] = dot4(sum[r][1], b, v);
                } else {
                    memcpy(&u, xi + r * x->stride + 4, 4);
                    sum[r][0] = dot4(dot4(sum[r][0], a & 0x0f0f0f0fu, v), a >> 4 & 0x0f0f0f0fu, u);
                    sum[r][1] = dot4(dot4(sum[r][1], b & 0x0f0f0f0fu, v), b >> 4 & 0x0f0f0f0fu, u);
                }
            }
        }
        const int64_t at = (panel * groups + g) * PANEL;
        vf scale_a = load_half(m->scale + at), scale_b = load_half(m->scale + at + LANES);
        ALL(r) {
            vf unit = splat(xscale[r * xgroups + g]);
            total[r][0] = fma16(scale_a * unit, to_float(sum[r][0]), total[r][0]);
            total[r][1] = fma16(scale_b * unit, to_float(sum[r][1]), total[r][1]);
            if (bits == 4) {
                unit *= sums[r * xgroups + g];
                total[r][0] = fma16(load_half(m->minimum + at), unit, total[r][0]);
                total[r][1] = fma16(load_half(m->minimum + at + LANES), unit, total[r][1]);
            }
        }
    }
    store_tile(out, total, R);
}

#define COMPILE(name, body, bits, R) \
    static void name##_##R(const Matrix *m, int64_t p, const Rows *x, int64_t row, float out[][PANEL]) { \
        body(m, p, x, row, R, out, bits); \
    }
#define FOR_ALL_ROWS(name, body, bits) \
    COMPILE(name, body, bits, 1) COMPILE(name, body, bits, 2) COMPILE(name, body, bits, 3) \
    COMPILE(name, body, bits, 4) COMPILE(name, body, bits, 5) COMPILE(name, body, bits, 6) \
    COMPILE(name, body, bits, 7) COMPILE(name, body, bits, 8) COMPILE(name, body, bits, 9) \
    COMPILE(name, body, bits, 10) COMPILE(name, body, bits, 11) COMPILE(name, body, bits, 12) \
    static Tile *const name[] = {name##_1, name##_2, name##_3, name##_4, name##_5, name##_6, \
                                 name##_7, name##_8, name##_9, name##_10, name##_11, name##_12};

FOR_ALL_ROWS(float32_tiles, tile_float, 32)
FOR_ALL_ROWS(bfloat16_tiles, tile_float, 16)
FOR_ALL_ROWS(int8_tiles, tile_quantised, 8)
FOR_ALL_ROWS(int4_tiles, tile_quantised, 4)
FOR_ALL_ROWS(byte8_tiles, tile_bytes, 8)
FOR_ALL_ROWS(byte4_tiles, tile_bytes, 4)

static const int64_t bits_of[] = {[FLOAT32] = 32, [BFLOAT16] = 16, [INT8] = 8, [INT4] = 4};

static Tile *const *tiles_for(const Matrix *m, const Rows *x) {
    if (m->storage == BLOCKS) return block_tiles;
    if (m->storage == FLOAT32) return float32_tiles;
    if (m->storage == BFLOAT16) return bfloat16_tiles;
    if (m->storage == INT8) return x->bytes ? byte8_tiles : int8_tiles;
    return x->bytes ? byte4_tiles : int4_tiles;
}

INLINE vf activate(vf x, int64_t kind) {
    if (kind == SILU) return x / (1.0f + exp16(-x));
    if (kind == RELU || kind == RELU_SQUARED) {
        x = either(x > 0.0f, x, splat(0));
        return kind == RELU ? x : x * x;
    }
    vf out;
    for (int i = 0; i < LANES; i++) {
        float v = x[i];
        out[i] = kind == GELU ? 0.5f * v * (1.0f + erff(v * 0.70710678f))
                              : 0.5f * v * (1.0f + tanhf(0.79788456f * (v + 0.044715f * v * v * v)));
    }
    return out;
}

/* What a gated MLP makes of gate and up. */
INLINE vf pass(vf gate, vf up, int64_t kind) {
    if (kind != CLAMPED) return activate(gate, kind) * up;
    const vf limit = splat(7.0f);
    gate = either(gate > limit, limit, gate);
    up = either(up > limit, limit, either(up < -limit, -limit, up));
    return gate / (1.0f + exp16(gate * -1.702f)) * (up + 1.0f);
}

static void finish(const Matrix *m, int64_t panel, float tile[][PANEL], int64_t row, int64_t count, const Target *t) {
    const int64_t column = panel * PANEL;
    for (int64_t r = 0; r < count; r++) {
        vf a = load(tile[r]), b = load(tile[r] + LANES);
        if (m->bias) {
            a += load(m->bias + column);
            b += load(m->bias + column + LANES);
        }
        float *out = t->out + (row + r) * t->stride;
        if (t->kind == GATED) {
            store(out + panel * LANES, pass(a, b, t->activation));
            continue;
        }
        out += column;
        if (t->kind == ACTIVATED) {
            a = activate(a, t->activation);
            b = activate(b, t->activation);
        }
        if (t->kind == ADD) {
            a = a * t->scale + load(out);
            b = b * t->scale + load(out + LANES);
        }
        if (column + PANEL <= t->limit) {
            store(out, a);
            store(out + LANES, b);
        } else {
            store(tile[r], a);
            store(tile[r] + LANES, b);
            memcpy(out, tile[r], (t->limit - column) * sizeof *out);
        }
    }
}

/* Into how many parts the rows are cut. */
static int64_t parts_of(const Matrix *m, const Rows *x) {
    const int64_t most = x->bytes && in_groups(m) ? MAX_BYTE_ROWS : MAX_ROWS;
    return (x->rows + most - 1) / most;
}

static int64_t pieces_of(const Product *p) { return p->matrix->outputs / PANEL * parts_of(p->matrix, &p->rows); }

/* One panel of outputs with one part of the rows. */
static void multiply_piece(const Product *p, int64_t piece) {
    const Matrix *m = p->matrix;
    const int64_t parts = parts_of(m, &p->rows), panel = piece / parts, part = piece % parts;
    const int64_t row = p->rows.rows * part / parts, count = p->rows.rows * (part + 1) / parts - row;
    float tile[MAX_ROWS][PANEL];
    tiles_for(m, &p->rows)[count - 1](m, panel, &p->rows, row, tile);
    finish(m, panel, tile, row, count, &p->target);
}

void line_up(Product *products, int64_t count) {
    int64_t first = 0;
    for (int64_t i = 0; i < count; i++) {
        products[i].first = first;
        first += pieces_of(products + i);
    }
}

void multiply_all(const Product *products, int64_t count, const Team *team) {
    const int64_t pieces = products[count - 1].first + pieces_of(products + count - 1);
    int64_t helped = 0;
    for (int64_t piece; (piece = take(team, pieces, &helped)) >= 0;) {
        int64_t low = 0, high = count - 1; /* the last product that begins at or before the piece */
        while (low < high) {
            const int64_t middle = (low + high + 1) / 2;
            if (products[middle].first <= piece) low = middle;
            else high = middle - 1;
        }
        multiply_piece(products + low, piece - products[low].first);
    }
    meet(team);
}

void multiply(const Matrix *m, const Rows *x, const Target *t, const Team *team) {
    const Product alone = {.matrix = m, .rows = *x, .target = *t};
    multiply_all(&alone, 1, team);
}

void summarise_row(const float *values, int64_t stride, int8_t *bytes, float *scale, float *sums, int32_t *offsets) {
    for (int64_t g = 0; g < stride / GROUP; g++) {
        vf a = load(values + g * GROUP), b = load(values + g * GROUP + LANES);
        if (!bytes) {
            sums[g] = sum16(a + b);
            continue;
        }
        vf size_a = (vf)((vi)a & 0x7fffffff), size_b = (vf)((vi)b & 0x7fffffff);
        float largest = max16(either(size_a > size_b, size_a, size_b));
        float inverse = largest > 0 ? 127.0f / largest : 0.0f;
        scale[g] = largest / 127.0f;
        a = round16(a * inverse);
        b = round16(b * inverse);
        store_bytes(bytes + g * GROUP, a);
        store_bytes(bytes + g * GROUP + LANES, b);
        sums[g] = sum16(a + b);
        offsets[g] = -128 * (int32_t)sums[g];
    }
}

/* Output `lane` of a panel, input k; `scale` and `minimum` are those of its group. */
static float weight_at(const Matrix *m, int64_t panel, int64_t lane, int64_t k, float scale, float minimum) {
    const int64_t per_word = 32 / bits_of[m->storage], j = k % per_word;
    uint32_t word = ((const uint32_t *)m->words)[(panel * (m->inputs / per_word) + k / per_word) * PANEL + lane];
    if (m->storage == INT8) return scale * ((float)(word >> (8 * j) & 255) - 128.0f);
    if (m->storage == INT4) return fmaf((float)(word >> (8 * (j & 3) + (j & 4)) & 15), scale, minimum);
    if (m->storage == BFLOAT16) word = j ? word & 0xffff0000u : word << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

void read_output(const Matrix *m, int64_t index, float *out) {
    if (m->storage == BLOCKS) {
        read_block_row(m, index, out);
        return;
    }
    const int64_t panel = index / PANEL, lane = index % PANEL;
    for (int64_t g = 0; g < m->inputs / GROUP; g++) {
        const int64_t at = (panel * (m->inputs / GROUP) + g) * PANEL + lane / LANES * LANES;
        const float scale = m->storage >= INT8 ? load_half(m->scale + at)[lane % LANES] : 0;
        const float minimum = m->storage == INT4 ? load_half(m->minimum + at)[lane % LANES] : 0;
        for (int64_t k = g * GROUP; k < (g + 1) * GROUP; k++) out[k] = weight_at(m, panel, lane, k, scale, minimum);
    }
}
