// The mass of (… (w p - s_1 q_1)+ … - s_k q_k)+ for a few rows of a large vocabulary: every row is read once.
#include "draws.h"

#include <stddef.h>

#define BLOCK 256   // summed in single precision, in LANES parts
#define LANES 16
#define CHUNK 16384 // what a thread takes at a time: a multiple of BLOCK
#define MOST_CHUNKS 4096

typedef struct {
    const float *p, *q;
    int64_t vocabulary, laws;
    const int64_t *rows, *tokens;
    const double *scales;
    float weight;
} Row;

static float left_at(const Row *row, int64_t x, int points) {
    float left = row->weight * row->p[x];
    for (int64_t i = 0; i < row->laws; i++) {
        float scale = (float)row->scales[i];
        float taken = 0;
        if (row->rows[i] >= 0) taken = scale * row->q[row->rows[i] * row->vocabulary + x];
        else if (points && row->tokens[i] == x) taken = scale;
        left -= taken;
        left = left > 0 ? left : 0;
    }
    return left;
}

// Sum over [begin, end) as if there were no point masses.
static double sum_of_laws(const Row *row, int64_t begin, int64_t end) {
    double sum = 0;
    for (int64_t block = begin; block < end; block += BLOCK) {
        int64_t count = end - block < BLOCK ? end - block : BLOCK;
        float left[BLOCK];
        for (int64_t x = 0; x < count; x++) left[x] = row->weight * row->p[block + x];
        for (int64_t x = count; x < BLOCK; x++) left[x] = 0;
        for (int64_t i = 0; i < row->laws; i++) {
            if (row->rows[i] < 0 || row->scales[i] == 0) continue;
            const float *q = row->q + row->rows[i] * row->vocabulary + block;
            float scale = (float)row->scales[i];
            for (int64_t x = 0; x < count; x++) {
                float rest = left[x] - scale * q[x];
                left[x] = rest > 0 ? rest : 0;
            }
        }
        float lanes[LANES] = {0};
        for (int64_t x = 0; x < BLOCK; x += LANES)
            for (int64_t lane = 0; lane < LANES; lane++) lanes[lane] += left[x + lane];
        for (int64_t lane = 0; lane < LANES; lane++) sum += lanes[lane];
    }
    return sum;
}

// What point masses take: at their tokens the sum above is mended.
static double change_at_points(const Row *row) {
    double change = 0;
    for (int64_t i = 0; i < row->laws; i++) {
        if (row->rows[i] >= 0) continue;
        int seen = 0;
        for (int64_t j = 0; j < i; j++) seen |= row->rows[j] < 0 && row->tokens[j] == row->tokens[i];
        if (!seen) change += (double)left_at(row, row->tokens[i], 1) - left_at(row, row->tokens[i], 0);
    }
    return change;
}

__attribute__((visibility("default"))) void dw_residual_mass(
    const float *p, const float *q, int64_t vocabulary, int64_t count, int64_t laws, const int64_t *nodes,
    const double *weight, const int64_t *rows, const int64_t *tokens, const double *scales, double *mass) {
    int64_t chunks = (vocabulary + CHUNK - 1) / CHUNK;
    for (int64_t first = 0; first < count; first += MOST_CHUNKS / chunks + 1) {
        int64_t many = count - first < MOST_CHUNKS / chunks + 1 ? count - first : MOST_CHUNKS / chunks + 1;
        double partial[2 * MOST_CHUNKS];
#pragma omp parallel for schedule(static)
        for (int64_t part = 0; part < many * chunks; part++) {
            int64_t n = first + part / chunks, begin = part % chunks * CHUNK;
            Row row = {p + nodes[n] * vocabulary, q, vocabulary, laws, rows + n * laws, tokens + n * laws,
                       scales + n * laws, (float)weight[n]};
            int64_t end = begin + CHUNK < vocabulary ? begin + CHUNK : vocabulary;
            partial[part] = sum_of_laws(&row, begin, end) + (begin == 0 ? change_at_points(&row) : 0);
        }
        // In order, so that the number of threads changes nothing.
        for (int64_t n = 0; n < many; n++) {
            mass[first + n] = 0;
            for (int64_t i = 0; i < chunks; i++) mass[first + n] += partial[n * chunks + i];
        }
    }
}

__attribute__((visibility("default"))) void dw_residual_rows(
    const float *p, const float *q, int64_t vocabulary, int64_t count, int64_t laws, const int64_t *nodes,
    const double *weight, const int64_t *rows, const int64_t *tokens, const double *scales, float *out) {
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < count; n++) {
        Row row = {p + nodes[n] * vocabulary, q, vocabulary, laws, rows + n * laws, tokens + n * laws,
                   scales + n * laws, (float)weight[n]};
        float *left = out + n * vocabulary;
        for (int64_t x = 0; x < vocabulary; x++) left[x] = row.weight * row.p[x];
        for (int64_t i = 0; i < laws; i++) {
            if (row.rows[i] < 0 || row.scales[i] == 0) continue;
            const float *law = q + row.rows[i] * vocabulary;
            float scale = (float)row.scales[i];
            for (int64_t x = 0; x < vocabulary; x++) {
                float rest = left[x] - scale * law[x];
                left[x] = rest > 0 ? rest : 0;
            }
        }
        for (int64_t i = 0; i < laws; i++)
            if (row.rows[i] < 0) left[row.tokens[i]] = left_at(&row, row.tokens[i], 1);
    }
}

__attribute__((visibility("default"))) void dw_reject(
    const float *p, const float *q, int64_t vocabulary, int64_t count, int64_t width, int64_t tried,
    const int64_t *nodes, const double *weight, const int64_t *rows, const int64_t *tokens, const double *own,
    const uint8_t *exists, double *chance, double *scales, double *values, double *mass) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t n = 0; n < count; n++) {
        int64_t at = n * width;
        Offer offer = {p + nodes[n] * vocabulary, q, vocabulary, weight[n]};
        Draws draws = {width, rows + at, tokens + at, own + at, exists + at, NULL};
        mass[n] = dw_reject_one(&offer, &draws, tried, chance + at, scales + at, values + at);
    }
}

__attribute__((visibility("default"))) void dw_kseq_bar(
    const float *p, const float *q, int64_t vocabulary, int64_t count, const int64_t *nodes, const double *weight,
    const int64_t *rows, const int64_t *draws, double *bar) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t n = 0; n < count; n++)
        dw_kseq_bar_one(p + nodes[n] * vocabulary, q + (rows[n] < 0 ? 0 : rows[n]) * vocabulary, vocabulary, weight[n],
                        draws[n], bar + n, bar + count + n);
}
