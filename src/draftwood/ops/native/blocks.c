#include "blocks.h"

#include "simd.h"

/* Outputs that R rows are multiplied by at a time: as many sums as there are registers for. */
#ifdef __AVX512F__
#define OUTPUTS(R) ((R) <= 3 ? 8 : (R) <= 6 ? 4 : 2)
#else
#define OUTPUTS(R) ((R) == 1 ? 4 : 2)
#endif
#define MOST 8
#define UNROLL _Pragma("GCC unroll 12")

/* The weights of one output from input k on, zeros where there is no such output. */
static void decode_output(const Matrix *m, int64_t output, int64_t k, int64_t count, float *out) {
    if (m->rows[output]) decode_blocks(m->kinds[output], m->rows[output], k, count, out);
    else memset(out, 0, count * sizeof *out);
}

/* Products of R rows with O outputs. Each of sixteen lanes sums its own inputs of a span; spans join a total, and the
   lanes join at the end: the same for every R and O. */
INLINE void multiply_outputs(const Matrix *m, int64_t first, const Rows *x, int64_t row, const int R, const int O,
                             float out[][PANEL], int64_t lane) {
    __attribute__((aligned(64))) float weights[MOST][SPAN];
    const float *xs = x->values + row * x->stride;
    vf total[MOST][MAX_ROWS];
    UNROLL for (int o = 0; o < O; o++) UNROLL for (int r = 0; r < R; r++) total[o][r] = splat(0);
    for (int64_t k = 0; k < m->inputs; k += SPAN) {
        const int64_t count = m->inputs - k < SPAN ? m->inputs - k : SPAN;
        for (int o = 0; o < O; o++) decode_output(m, first + lane + o, k, count, weights[o]);
        vf sum[MOST][MAX_ROWS];
        UNROLL for (int o = 0; o < O; o++) UNROLL for (int r = 0; r < R; r++) sum[o][r] = splat(0);
        for (int64_t i = 0; i < count; i += LANES) {
            vf w[MOST];
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
        for (int64_t lane = 0; lane < PANEL; lane += OUTPUTS(R)) \
            multiply_outputs(m, panel * PANEL, x, row, R, OUTPUTS(R), out, lane); \
    }
COMPILE(1) COMPILE(2) COMPILE(3) COMPILE(4) COMPILE(5) COMPILE(6)
COMPILE(7) COMPILE(8) COMPILE(9) COMPILE(10) COMPILE(11) COMPILE(12)
Tile *const block_tiles[] = {rows_1, rows_2, rows_3, rows_4,  rows_5,  rows_6,
                             rows_7, rows_8, rows_9, rows_10, rows_11, rows_12};

/* The product alone, [count, inputs] to [count, outputs]: what tests compare with other ways to it. */
__attribute__((visibility("default"))) void dw_block_product(const Matrix *m, const float *values, int64_t count,
                                                             float *out) {
    const Rows x = {.values = values, .stride = m->inputs, .rows = count};
    for (int64_t panel = 0; panel < m->outputs / PANEL; panel++)
        for (int64_t row = 0; row < count; row += MAX_ROWS) {
            const int64_t rows = count - row < MAX_ROWS ? count - row : MAX_ROWS;
            float tile[MAX_ROWS][PANEL];
            block_tiles[rows - 1](m, panel, &x, row, tile);
            for (int64_t r = 0; r < rows; r++)
                memcpy(out + (row + r) * m->outputs + panel * PANEL, tile[r], sizeof tile[r]);
        }
}

void read_block_row(const Matrix *m, int64_t index, float *out) { decode_output(m, index, 0, m->inputs, out); }
