// The mass of (… (w p - s_1 q_1)+ … - s_k q_k)+ for a few rows of a large vocabulary: every row is read once.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

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

// left = (left - scale q)+ in place; returns its sum.
static double take(float *left, const float *q, float scale, int64_t vocabulary) {
    double sum = 0;
    for (int64_t block = 0; block < vocabulary; block += BLOCK) {
        int64_t count = vocabulary - block < BLOCK ? vocabulary - block : BLOCK;
        float lanes[LANES] = {0};
        if (count == BLOCK) {
            for (int64_t x = 0; x < BLOCK; x += LANES)
                for (int64_t lane = 0; lane < LANES; lane++) {
                    int64_t at = block + x + lane;
                    float rest = left[at] - scale * q[at];
                    left[at] = rest > 0 ? rest : 0;
                    lanes[lane] += left[at];
                }
        } else {
            for (int64_t at = block; at < vocabulary; at++) {
                float rest = left[at] - scale * q[at];
                left[at] = rest > 0 ? rest : 0;
                lanes[0] += left[at];
            }
        }
        for (int64_t lane = 0; lane < LANES; lane++) sum += lanes[lane];
    }
    return sum;
}

typedef struct {
    const int64_t *rows, *tokens;
    const double *own;
    const uint8_t *exists;
    double *chance, *scales, *values;
} Tries;

// One node: draw after draw against what the draws before it left. `left` is working memory.
static double reject_one(const float *p, const float *q, int64_t vocabulary, int64_t width, int64_t tried,
                         double weight, const Tries *t, float *left) {
    double mass = weight, missing = 1 - weight;
    int written = 0;
    for (int64_t j = 0; j < width; j++) t->values[j] = weight * p[t->tokens[j]];
    for (int64_t i = 0; i < tried; i++) {
        if (!t->exists[i]) continue;
        double survives = mass + missing, offered = survives * t->own[i];
        double fair = offered > 0 ? t->values[i] / offered : 1;
        t->chance[i] = fair < 1 ? fair : 1;
        t->scales[i] = survives;
        const float *law = t->rows[i] >= 0 ? q + t->rows[i] * vocabulary : NULL;
        double before = t->values[i];
        for (int64_t j = 0; j < width; j++) {
            double rest = t->values[j] - survives * (law ? law[t->tokens[j]] : t->tokens[j] == t->tokens[i]);
            t->values[j] = rest > 0 ? rest : 0;
        }
        if (!law) { // a point mass changes one token
            mass -= before - t->values[i];
            if (written) left[t->tokens[i]] = (float)t->values[i];
            if (mass < 0) mass = 0;
            continue;
        }
        if (!written) {
            for (int64_t x = 0; x < vocabulary; x++) left[x] = (float)weight * p[x];
            for (int64_t j = 0; j < i; j++)
                if (t->rows[j] < 0 && t->exists[j]) left[t->tokens[j]] = 0;
            written = 1;
        }
        mass = take(left, law, (float)survives, vocabulary);
    }
    return mass;
}

__attribute__((visibility("default"))) void dw_reject(
    const float *p, const float *q, int64_t vocabulary, int64_t count, int64_t width, int64_t tried,
    const int64_t *nodes, const double *weight, const int64_t *rows, const int64_t *tokens, const double *own,
    const uint8_t *exists, double *chance, double *scales, double *values, double *mass) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t n = 0; n < count; n++) {
        float *left = q ? malloc(vocabulary * sizeof(float)) : NULL;
        int64_t at = n * width;
        Tries tries = {rows + at, tokens + at, own + at, exists + at, chance + at, scales + at, values + at};
        mass[n] = reject_one(p + nodes[n] * vocabulary, q, vocabulary, width, tried, weight[n], &tries, left);
        free(left);
    }
}

// K-SEQ's bar, as ops/kseq.py says it. Few tokens lie between the two laws where the bar can move them:
// those below are scaled, those above are cut off, and only the others are looked at again.
#define ROUNDS 8
#define HALVINGS 50

typedef struct {
    double scaled, cut; // sums over tokens that are always scaled, or always cut off
    float *target, *law;
    int64_t between;
    int64_t draws;
} Overlap;

static double beta_at(const Overlap *o, double bar) {
    double sum = bar * o->scaled + o->cut;
    for (int64_t block = 0; block < o->between; block += BLOCK) {
        int64_t end = block + BLOCK < o->between ? block + BLOCK : o->between;
        float part = 0, t = (float)bar;
        for (int64_t x = block; x < end; x++) {
            float mine = t * o->target[x];
            part += mine < o->law[x] ? mine : o->law[x];
        }
        sum += part;
    }
    return sum;
}

static int lossless(double bar, double beta, int64_t draws) {
    double missed = 1;
    for (int64_t i = 0; i < draws; i++) missed *= 1 - beta;
    return bar * (1 - missed) <= beta + 1e-15;
}

static void best_bar(const Overlap *o, double *bar, double *beta) {
    double end_beta = beta_at(o, 1);
    *bar = 1, *beta = end_beta;
    if (o->draws < 1 || lossless(1, end_beta, o->draws)) return;
    double low = 1.0 / o->draws, high = 1, low_beta = beta_at(o, low), high_beta = end_beta;
    for (int round = 0; round < ROUNDS && high - low > 1e-13; round++) {
        double middle = (low + high) / 2, found = beta_at(o, middle);
        if (lossless(middle, found, o->draws)) low = middle, low_beta = found;
        else high = middle, high_beta = found;
        double start = low, top = high, slope = high > low ? (high_beta - low_beta) / (high - low) : 0;
        for (int i = 0; i < HALVINGS; i++) {
            middle = (low + top) / 2;
            if (lossless(middle, low_beta + (middle - start) * slope, o->draws)) low = middle;
            else top = middle;
        }
        low_beta = beta_at(o, low);
    }
    *bar = low, *beta = low_beta;
}

__attribute__((visibility("default"))) void dw_kseq_bar(
    const float *p, const float *q, int64_t vocabulary, int64_t count, const int64_t *nodes, const double *weight,
    const int64_t *rows, const int64_t *draws, double *bar) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t n = 0; n < count; n++) {
        float *memory = malloc(2 * vocabulary * sizeof(float));
        Overlap o = {0, 0, memory, memory + vocabulary, 0, draws[n]};
        const float *target = p + nodes[n] * vocabulary, *law = q + (rows[n] < 0 ? 0 : rows[n]) * vocabulary;
        float w = (float)weight[n];
        for (int64_t x = 0; x < vocabulary && draws[n] > 0; x++) {
            float mine = w * target[x];
            if (mine <= law[x]) o.scaled += mine;
            else if (mine >= draws[n] * law[x]) o.cut += law[x];
            else o.target[o.between] = mine, o.law[o.between++] = law[x];
        }
        best_bar(&o, bar + n, bar + count + n);
        free(memory);
    }
}
