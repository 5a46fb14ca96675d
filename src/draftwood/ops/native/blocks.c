#include "blocks.h"

#include "simd.h"

/* What one register holds: vectors of several go through memory where sums of them are kept. */
#if defined(__AVX512F__)
#define WIDTH 16
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
typedef float Part __attribute__((vector_size(4 * WIDTH)));

/* Outputs that R rows are multiplied by at a time: as many sums as there are registers for. */
#define OUTPUTS(R) (WIDTH == 16 ? (R) <= 3 ? 8 : (R) <= 6 ? 4 : 2 : (R) == 1 ? 8 : 4)
#define MOST 8
#define UNROLL _Pragma("GCC unroll 12")

/* Loaded once and kept: compilers would rather read it again for every output, and loads are what there is least of. */
#if defined(__AVX__)
#define KEEP(v) __asm__("" : "+v"(v))
#else
#define KEEP(v) (void)(v)
#endif

INLINE Part part_at(const float *p) {
    Part v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE float total_of(Part v) {
#if defined(__AVX512F__)
    return sum16((vf)v);
#endif
    for (int half = WIDTH / 2; half; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}

INLINE Part plus_product(Part a, Part b, Part c) {
#if defined(__AVX512F__)
    return (Part)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

/* The weights of one output from input k on, zeros where there is no such output. */
static void decode_output(const Matrix *m, int64_t output, int64_t k, int64_t count, float *out) {
    if (m->rows[output]) decode_blocks(m->kinds[output], m->rows[output], k, count, out);
    else memset(out, 0, count * sizeof *out);
}

/* Products of R rows with O outputs. Each lane of a register sums its own inputs of a span; spans join a total, and
   lanes join at the end: the same for every R and O. */
INLINE void multiply_outputs(const Matrix *m, int64_t first, const Rows *x, int64_t row, const int R, const int O,
                             float out[][PANEL], int64_t lane) {
    __attribute__((aligned(64))) float weights[MOST][SPAN];
    const float *xs = x->values + row * x->stride;
    Part total[MOST][MAX_ROWS];
    UNROLL for (int o = 0; o < O; o++) UNROLL for (int r = 0; r < R; r++) total[o][r] = (Part){0};
    for (int64_t k = 0; k < m->inputs; k += SPAN) {
        const int64_t count = m->inputs - k < SPAN ? m->inputs - k : SPAN;
        for (int o = 0; o < O; o++) decode_output(m, first + lane + o, k, count, weights[o]);
        Part sum[MOST][MAX_ROWS];
        UNROLL for (int o = 0; o < O; o++) UNROLL for (int r = 0; r < R; r++) sum[o][r] = (Part){0};
        for (int64_t i = 0; i < count; i += WIDTH) {
            Part w[MOST];
            UNROLL for (int o = 0; o < O; o++) w[o] = part_at(weights[o] + i);
            UNROLL for (int r = 0; r < R; r++) {
                Part v = part_at(xs + r * x->stride + k + i);
                KEEP(v);
                UNROLL for (int o = 0; o < O; o++) sum[o][r] = plus_product(w[o], v, sum[o][r]);
            }
        }
        UNROLL for (int o = 0; o < O; o++) UNROLL for (int r = 0; r < R; r++) total[o][r] += sum[o][r];
    }
    UNROLL for (int o = 0; o < O; o++) UNROLL for (int r = 0; r < R; r++) out[r][lane + o] = total_of(total[o][r]);
}

#define COMPILE(R) \
    static void rows_##R(const Matrix *m, int64_t panel, const Rows *x, int64_t row, float out[][PANEL]) { \
        for (int64_t lane = 0; lane < PANEL; lane += OUTPUTS(R)) \
            multiply_outputs(m, panel * PANEL, x, row, R, OUTPUTS(R), out, lane); \
    }
#ifdef __AVX512F__
/* One row: the same sums in the same order, without weights in memory in between. */
static void rows_1(const Matrix *m, int64_t panel, const Rows *x, int64_t row, float out[][PANEL]) {
    const float *xs = x->values + row * x->stride;
    for (int64_t lane = 0; lane < PANEL; lane++) {
        const int64_t output = panel * PANEL + lane;
        vf total = {0};
        for (int64_t k = 0; m->rows[output] && k < m->inputs; k += SPAN) {
            const int64_t count = m->inputs - k < SPAN ? m->inputs - k : SPAN;
            total += sum_blocks(m->kinds[output], m->rows[output], k, count, xs + k);
        }
        out[0][lane] = total_of((Part)total);
    }
}
#else
COMPILE(1)
#endif
COMPILE(2) COMPILE(3) COMPILE(4) COMPILE(5) COMPILE(6)
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
