/* rng.py in C: keys, uniform numbers, and the two ways to draw with them. */
#include "random.h"

#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))
#define BLOCK 512
#define LANES 8
#define MANY 100000     /* weights that are worth a second thread */
#define SLACK (1 - 1e-9) /* for what a bound in floating point may be off */

/* `parts` may be NULL: then it is `value` for all. */
EXPORT void dw_derive(const uint64_t *keys, const uint64_t *parts, int64_t value, int64_t count, uint64_t *out) {
    for (int64_t i = 0; i < count; i++) out[i] = fold(keys[i], parts ? parts[i] : (uint64_t)value);
}

EXPORT void dw_uniforms(const uint64_t *keys, int64_t count, double *out) {
    for (int64_t i = 0; i < count; i++) out[i] = uniform(keys[i]);
}

/* One uniform number on the cumulated weights: blocks first, then one of them weight by weight. A block is summed in
   lanes, so its weights one after the other may come to a little less: then the last one with any weight is meant. */
#define DEFINE_PICK(REAL)                                                                             \
    static double sum_##REAL(const REAL *w, int64_t count) {                                          \
        double lanes[LANES] = {0}, sum = 0;                                                           \
        int64_t x = 0;                                                                                \
        for (; x + LANES <= count; x += LANES)                                                        \
            for (int64_t lane = 0; lane < LANES; lane++) lanes[lane] += w[x + lane];                  \
        for (; x < count; x++) lanes[x % LANES] += w[x];                                              \
        for (int64_t lane = 0; lane < LANES; lane++) sum += lanes[lane];                              \
        return sum;                                                                                   \
    }                                                                                                 \
    static int64_t pick_##REAL(const REAL *w, int64_t count, double u) {                              \
        int64_t blocks = (count + BLOCK - 1) / BLOCK, block = 0, last = count - 1;                    \
        double sums[blocks], total = 0, before = 0;                                                   \
        for (int64_t i = 0; i < blocks; i++) {                                                        \
            int64_t left = count - i * BLOCK;                                                         \
            total += sums[i] = sum_##REAL(w + i * BLOCK, left < BLOCK ? left : BLOCK);                \
        }                                                                                             \
        double aim = aim_at(u, total);                                                                \
        while (block < blocks && before + sums[block] <= aim) before += sums[block++];                \
        if (block == blocks) return last; /* no weight anywhere */                                    \
        int64_t end = (block + 1) * BLOCK < count ? (block + 1) * BLOCK : count;                      \
        for (int64_t x = block * BLOCK; x < end; x++) {                                               \
            if (w[x] > 0) last = x;                                                                   \
            before += w[x];                                                                           \
            if (before > aim && w[x] > 0) break;                                                      \
        }                                                                                             \
        return last;                                                                                  \
    }

/* The first of an exponential race. -log u is at least 1 - u: most weights lose without a logarithm. */
#define DEFINE_RACE(REAL)                                                                             \
    static int64_t race_##REAL(const REAL *w, int64_t count, uint64_t key) {                          \
        double best = 0, gap[BLOCK];                                                                  \
        int64_t winner = 0;                                                                           \
        for (int64_t block = 0; block < count; block += BLOCK) {                                      \
            int64_t size = count - block < BLOCK ? count - block : BLOCK;                             \
            int some = 0;                                                                             \
            for (int64_t x = 0; x < size; x++) some |= w[block + x] > 0;                              \
            if (!some) continue;                                                                      \
            some = 0;                                                                                 \
            for (int64_t x = 0; x < size; x++) {                                                      \
                gap[x] = unit_interval(~mix(key + (uint64_t)(block + x + 1) * GOLDEN));               \
                some |= w[block + x] >= best * gap[x] * SLACK;                                        \
            }                                                                                         \
            for (int64_t x = 0; some && x < size; x++) {                                              \
                if (!(w[block + x] > 0 && w[block + x] >= best * gap[x] * SLACK)) continue;           \
                double speed = w[block + x] / -log(1 - gap[x]);                                       \
                if (speed > best) best = speed, winner = block + x;                                   \
            }                                                                                         \
        }                                                                                             \
        return winner;                                                                                \
    }

DEFINE_PICK(float)
DEFINE_PICK(double)
DEFINE_RACE(float)
DEFINE_RACE(double)

int64_t dw_pick_row(const float *weights, int64_t count, double u) { return pick_float(weights, count, u); }
int64_t dw_race_row(const float *weights, int64_t count, uint64_t key) { return race_float(weights, count, key); }

/* Rows are `stride` weights apart; `wide`: in double precision. */
EXPORT void dw_pick(const void *weights, int64_t wide, int64_t rows, int64_t count, int64_t stride,
                    const uint64_t *keys, int64_t *out) {
#pragma omp parallel for schedule(static) if (rows * count > MANY)
    for (int64_t i = 0; i < rows; i++) {
        double u = uniform(keys[i]);
        out[i] = wide ? pick_double((const double *)weights + i * stride, count, u)
                      : pick_float((const float *)weights + i * stride, count, u);
    }
}

EXPORT void dw_race(const void *weights, int64_t wide, int64_t rows, int64_t count, int64_t stride,
                    const uint64_t *keys, int64_t *out) {
#pragma omp parallel for schedule(dynamic, 1) if (rows * count > MANY)
    for (int64_t i = 0; i < rows; i++)
        out[i] = wide ? race_double((const double *)weights + i * stride, count, keys[i])
                      : race_float((const float *)weights + i * stride, count, keys[i]);
}
