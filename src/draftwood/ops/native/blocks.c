#include "blocks.h"

#include "simd.h"

#ifdef __AVX512F__
#define MAX_QUADS 6 /* rows for which four outputs at a time leave enough registers */
#else
#define MAX_QUADS 1
#endif
#define UNROLL _Pragma("GCC unroll 12")
#define AHEAD 4096 /* bytes to fetch ahead of a row's own */

/* The weights of one output from input k on, zeros where there is no such output. */
static void decode_output(const Matrix *m, int64_t output, int64_t k, int64_t count, float *out) {
    if (m->rows[output]) decode_blocks(m->kinds[output], m->rows[output], k, count, out);
    else memset(out, 0, count * sizeof *out);
}

/* Products of R rows with O outputs. Each of sixteen lanes sums its own inputs of a span; spans join a total, and the
   lanes join at the end: the same for every R and O. */
INLINE void outputs(const Matrix *m, int64_t first, const Rows *x, int64_t row, const int R, const int O,
                    float out[][PANEL], int64_t lane) {
    __attribute__((aligned(64))) float weights[4][SPAN];
    const float *xs = x->values + row * x->stride;
    vf total[4][MAX_ROWS];
    UNROLL for (int o = 0; o < O; o++) UNROLL for (int r = 0; r < R; r++) total[o][r] = splat(0);
    for (int64_t k = 0; k < m->inputs; k += SPAN) {
        const int64_t count = m->inputs - k < SPAN ? m->inputs - k : SPAN;
        for (int o = 0; o < O; o++) decode_output(m, first + lane + o, k, count, weights[o]);
        vf sum[4][MAX_ROWS];
        UNROLL for (int o = 0; o < O; o++) UNROLL for (int r = 0; r < R; r++) sum[o][r] = splat(0);
        for (int64_t i = 0; i < count; i += LANES) {
            vf w[4];
            UNROLL for (int o = 0; o < O; o++) w[o] = load(weights[o] + i);
            UNROLL for (int r = 0; r < R; r++) {
                const vf v = load(xs + r * x->stride + k + i);
                UNROLL for (int o = 0; o < O; o++) sum[o][r] = fma16(w[o], v, sum[o][r]);
            }
        }
        UNROLL for (int o = 0; o < O; o++) UNROLL for (int r = 0; r < R; r++) total[o][r] += sum[o][r];
    }
    UNROLL for (int o = 0; o < O; o++) UNROLL for (int r = 0; r < R; r++) out[r][lane + o] = sum16(total[o][r]);
}

#define COMPILE(R) \
    static void rows_##R(const Matrix *m, int64_t panel, const Rows *x, int64_t row, float out[][PANEL]) { \
        const int O = R <= MAX_QUADS ? 4 : 2; \
        for (int64_t lane = 0; lane < PANEL; lane += O) outputs(m, panel * PANEL, x, row, R, O, out, lane); \
    }
COMPILE(1) COMPILE(2) COMPILE(3) COMPILE(4) COMPILE(5) COMPILE(6)
COMPILE(7) COMPILE(8) COMPILE(9) COMPILE(10) COMPILE(11) COMPILE(12)
Tile *const block_tiles[] = {rows_1, rows_2, rows_3, rows_4,  rows_5,  rows_6,
                             rows_7, rows_8, rows_9, rows_10, rows_11, rows_12};

void read_block_row(const Matrix *m, int64_t index, float *out) { decode_output(m, index, 0, m->inputs, out); }
