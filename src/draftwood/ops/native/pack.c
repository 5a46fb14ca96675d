/* Weights from rows as checkpoints have them to panels. Outputs and inputs beyond the last are zero weights. */
#include "model.h"
#include "simd.h"

#define EXPORT __attribute__((visibility("default")))

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* The nearest bfloat16, halves to even. */
static uint32_t to_bfloat16(float x) {
    uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0; /* not a number */
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* Panels [first, last) from the rows [outputs][inputs] that `source` points to; row 0 is output 16 first. */
EXPORT void dw_pack_floats(int64_t storage, const float *source, int64_t outputs, int64_t inputs, int64_t padded_inputs,
                           uint32_t *words, int64_t panels) {
    const int64_t per_word = storage == BFLOAT16 ? 2 : 1;
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t lane = 0; lane < PANEL; lane++) {
            const int64_t output = panel * PANEL + lane;
            for (int64_t k = 0; k < padded_inputs; k += per_word) {
                uint32_t word = 0;
                for (int64_t j = 0; j < per_word; j++) {
                    float x = output < outputs && k + j < inputs ? source[output * inputs + k + j] : 0.0f;
                    word |= per_word == 1 ? bits_of(x) : to_bfloat16(x) << (16 * j);
                }
                words[(panel * padded_inputs + k) / per_word * PANEL + lane] = word;
            }
        }
}

/* The same from quantised rows: codes [outputs][inputs], scale and minimum (or null) [outputs][inputs / 32]. */
EXPORT void dw_pack_codes(int64_t storage, const uint8_t *codes, const uint16_t *scale, const uint16_t *minimum,
                          int64_t outputs, int64_t inputs, uint32_t *words, uint16_t *packed_scale,
                          uint16_t *packed_minimum, int64_t panels) {
    const int64_t per_word = storage == INT8 ? 4 : 8, groups = inputs / GROUP;
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t lane = 0; lane < PANEL; lane++) {
            const int64_t output = panel * PANEL + lane;
            const int present = output < outputs;
            for (int64_t k = 0; k < inputs; k += per_word) {
                uint32_t word = 0;
                for (int64_t j = 0; j < per_word; j++) {
                    uint32_t code = present ? codes[output * inputs + k + j] : 0;
                    word |= code << (storage == INT8 ? 8 * j : 8 * (j & 3) + (j & 4));
                }
                words[(panel * inputs + k) / per_word * PANEL + lane] = word;
            }
            for (int64_t g = 0; g < groups; g++) {
                const int64_t at = (panel * groups + g) * PANEL + lane;
                packed_scale[at] = present ? scale[output * groups + g] : 0;
                if (minimum) packed_minimum[at] = present ? minimum[output * groups + g] : 0;
            }
        }
}
