#include "draws.h"

#include <stddef.h>
#include <stdlib.h>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define BLOCK 256 /* summed in single precision, in LANES parts */
#define LANES 16

float *dw_scratch(int64_t floats) {
    static _Thread_local float *memory;
    static _Thread_local int64_t size;
    if (floats > size) {
        free(memory);
        memory = malloc(floats * sizeof(float));
        size = floats;
    }
    return memory;
}

double dw_row_sum(const float *row, int64_t count) {
    double sum = 0;
    for (int64_t block = 0; block < count; block += BLOCK) {
        int64_t end = block + BLOCK < count ? block + BLOCK : count, x = block;
        float lanes[LANES] = {0};
        for (; x + LANES <= end; x += LANES)
            for (int64_t lane = 0; lane < LANES; lane++) lanes[lane] += row[x + lane];
        for (; x < end; x++) lanes[0] += row[x];
        for (int64_t lane = 0; lane < LANES; lane++) sum += lanes[lane];
    }
    return sum;
}

/* The sum of (weight from - scale q)+, which is also written down where `keep`. */
static inline __attribute__((always_inline)) double sweep(const float *from, float weight, const float *q, float scale,
                                                          float *to, int64_t count, int keep) {
    double sum = 0;
    for (int64_t block = 0; block < count; block += BLOCK) {
        int64_t end = block + BLOCK < count ? block + BLOCK : count, x = block;
        float lanes[LANES] = {0};
        for (; x + LANES <= end; x += LANES)
            for (int64_t lane = 0; lane < LANES; lane++) {
                float rest = weight * from[x + lane] - scale * q[x + lane];
                rest = rest > 0 ? rest : 0;
                if (keep) to[x + lane] = rest;
                lanes[lane] += rest;
            }
        for (; x < end; x++) {
            float rest = weight * from[x] - scale * q[x];
            rest = rest > 0 ? rest : 0;
            if (keep) to[x] = rest;
            lanes[0] += rest;
        }
        for (int64_t lane = 0; lane < LANES; lane++) sum += lanes[lane];
    }
    return sum;
}

double dw_left_mass(const float *p, double weight, const float *law, int64_t count) {
    return sweep(p, (float)weight, law, 1, NULL, count, 0);
}

static const float *law_of(const Offer *offer, const Draws *d, int64_t i) {
    return d->rows[i] < 0 ? NULL : offer->q + d->rows[i] * offer->vocabulary;
}

static int is_without(const Draws *d, int64_t i) { return d->without && d->without[i]; }

Trial dw_begin_trial(const Offer *offer, const Draws *d, int64_t tried, double *values) {
    Trial t = {*offer, d, values, offer->weight, NULL, -1, 0};
    for (int64_t j = 0; j < d->width; j++) {
        values[j] = d->exists[j] ? offer->weight * offer->p[d->tokens[j]] : 0;
        if (j < tried && d->exists[j] && d->rows[j] >= 0) t.last_law = j;
    }
    return t;
}

double dw_normaliser(const Offer *offer, const Draws *d, int64_t i) {
    const float *law = law_of(offer, d, i);
    double removed = 0;
    int some = 0;
    for (int64_t j = 0; law && is_without(d, i) && j < i; j++)
        if (d->exists[j]) removed += law[d->tokens[j]], some = 1;
    if (!some) return 1;
    double rest = dw_row_sum(law, offer->vocabulary) - removed;
    return rest > 0 ? 1 / rest : 0;
}

/* What the law of draw `i` says of the token of draw `j`. */
static double law_at(const Trial *t, int64_t i, int64_t j, double normaliser) {
    const Draws *d = t->draws;
    const float *law = law_of(&t->offer, d, i);
    if (!law) return d->tokens[i] == d->tokens[j];
    for (int64_t k = 0; k < i && is_without(d, i); k++)
        if (d->exists[k] && d->tokens[k] == d->tokens[j]) return 0;
    return normaliser * law[d->tokens[j]];
}

/* A whole row, and then the tokens of earlier draws for which the row's own formula is wrong: points that were taken
   before the row was written down, and what draws without replacement were without. */
static void try_law(Trial *t, int64_t i, const float *law, float scale) {
    const Draws *d = t->draws;
    const int keep = i < t->last_law, first = !t->written;
    const float *from = first ? t->offer.p : t->left;
    const float weight = first ? (float)t->offer.weight : 1;
    float by_formula[i + 1];
    for (int64_t j = 0; j < i; j++) {
        float rest = weight * from[d->tokens[j]] - scale * law[d->tokens[j]];
        by_formula[j] = rest > 0 ? rest : 0;
    }
    if (keep && first) t->left = dw_scratch(t->offer.vocabulary);
    t->mass = keep ? sweep(from, weight, law, scale, t->left, t->offer.vocabulary, 1)
                   : sweep(from, weight, law, scale, NULL, t->offer.vocabulary, 0);
    t->written |= keep;
    for (int64_t j = 0; j < i; j++) {
        int again = 0;
        for (int64_t k = 0; k < j; k++) again |= d->exists[k] && d->tokens[k] == d->tokens[j];
        if (!d->exists[j] || again || !((first && d->rows[j] < 0) || is_without(d, i))) continue;
        t->mass += t->values[j] - by_formula[j];
        if (keep) t->left[d->tokens[j]] = (float)t->values[j];
    }
}

void dw_try(Trial *t, int64_t i, double survives, double normaliser) {
    const Draws *d = t->draws;
    const float *law = law_of(&t->offer, d, i);
    const double before = t->values[i];
    for (int64_t j = 0; j < d->width; j++) {
        double rest = t->values[j] - survives * law_at(t, i, j, normaliser);
        t->values[j] = d->exists[j] && rest > 0 ? rest : 0;
    }
    if (law) try_law(t, i, law, (float)(survives * normaliser));
    else { /* a point mass changes one token */
        t->mass -= before - t->values[i];
        if (t->written) t->left[d->tokens[i]] = (float)t->values[i];
    }
    if (t->mass < 0) t->mass = 0;
}

double dw_reject_one(const Offer *offer, const Draws *d, int64_t tried, double *chance, double *scales,
                     double *values) {
    const double missing = 1 - offer->weight;
    Trial t = dw_begin_trial(offer, d, tried, values);
    for (int64_t i = 0; i < d->width; i++) {
        chance[i] = scales[i] = 0;
        if (!d->exists[i] || i >= tried) continue;
        const double survives = t.mass + missing, normaliser = dw_normaliser(offer, d, i);
        const double offered = survives * d->own[i] * normaliser;
        const double fair = offered > 0 ? values[i] / offered : 1;
        chance[i] = fair < 1 ? fair : 1;
        scales[i] = survives;
        dw_try(&t, i, survives, normaliser);
    }
    return t.mass;
}

void dw_residual_row(const Offer *offer, const Draws *d, const double *scales, float *out) {
    const int64_t count = offer->vocabulary;
    const float weight = (float)offer->weight;
    for (int64_t x = 0; x < count; x++) out[x] = weight * offer->p[x];
    for (int64_t i = 0; i < d->width; i++) {
        if (!d->exists[i] || scales[i] == 0) continue;
        const float *law = law_of(offer, d, i);
        if (!law) {
            float rest = out[d->tokens[i]] - (float)scales[i];
            out[d->tokens[i]] = rest > 0 ? rest : 0;
            continue;
        }
        float kept[i + 1], scale = (float)(scales[i] * dw_normaliser(offer, d, i));
        for (int64_t j = 0; j < i; j++) kept[j] = out[d->tokens[j]];
        for (int64_t x = 0; x < count; x++) {
            float rest = out[x] - scale * law[x];
            out[x] = rest > 0 ? rest : 0;
        }
        for (int64_t j = 0; j < i && is_without(d, i); j++)
            if (d->exists[j]) out[d->tokens[j]] = kept[j];
    }
}

/* K-SEQ's bar, as ops/kseq.py says it. Few tokens lie between the two laws where the bar can move them: those below
   are scaled, those above are cut off, and only the others are looked at again. */
#define ROUNDS 8
#define HALVINGS 50

typedef struct {
    double scaled, cut; /* sums over tokens that are always scaled, or always cut off */
    float *target, *law;
    int64_t between;
    int64_t draws;
} Overlap;

static double beta_at(const Overlap *o, double bar) {
    double sum = bar * o->scaled + o->cut;
    const float t = (float)bar;
    for (int64_t block = 0; block < o->between; block += BLOCK) {
        int64_t end = block + BLOCK < o->between ? block + BLOCK : o->between, x = block;
        float lanes[LANES] = {0};
        for (; x + LANES <= end; x += LANES)
            for (int64_t lane = 0; lane < LANES; lane++) {
                float mine = t * o->target[x + lane], its = o->law[x + lane];
                lanes[lane] += mine < its ? mine : its;
            }
        for (; x < end; x++) {
            float mine = t * o->target[x];
            lanes[0] += mine < o->law[x] ? mine : o->law[x];
        }
        for (int64_t lane = 0; lane < LANES; lane++) sum += lanes[lane];
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

/* LANES tokens sorted into the three. What lies between is appended without a branch: what is not meant to stay is
   overwritten by what comes next. */
static inline void sort_lanes(Overlap *o, const float *mine, const float *law, float most, float *scaled, float *cut) {
#ifdef __AVX512F__
    const __m512 m = _mm512_loadu_ps(mine), l = _mm512_loadu_ps(law);
    const __mmask16 below = _mm512_cmp_ps_mask(m, l, _CMP_LE_OQ);
    const __mmask16 above = _mm512_cmp_ps_mask(m, _mm512_mul_ps(_mm512_set1_ps(most), l), _CMP_GE_OQ) & ~below;
    const __mmask16 between = ~(below | above);
    _mm512_storeu_ps(scaled, _mm512_mask_add_ps(_mm512_loadu_ps(scaled), below, _mm512_loadu_ps(scaled), m));
    _mm512_storeu_ps(cut, _mm512_mask_add_ps(_mm512_loadu_ps(cut), above, _mm512_loadu_ps(cut), l));
    _mm512_storeu_ps(o->target + o->between, _mm512_maskz_compress_ps(between, m));
    _mm512_storeu_ps(o->law + o->between, _mm512_maskz_compress_ps(between, l));
    o->between += __builtin_popcount(between);
#else
    for (int64_t lane = 0; lane < LANES; lane++) {
        const int below = mine[lane] <= law[lane], above = !below && mine[lane] >= most * law[lane];
        scaled[lane] += below ? mine[lane] : 0;
        cut[lane] += above ? law[lane] : 0;
        o->target[o->between] = mine[lane], o->law[o->between] = law[lane];
        o->between += !below && !above;
    }
#endif
}

void dw_kseq_bar_one(const float *target, const float *law, int64_t vocabulary, double weight, int64_t count,
                     double *bar, double *beta) {
    float *memory = dw_scratch(2 * (vocabulary + LANES));
    Overlap o = {0, 0, memory, memory + vocabulary + LANES, 0, count};
    const float w = (float)weight, most = (float)count;
    for (int64_t block = 0; block < vocabulary && count > 0; block += BLOCK) {
        int64_t end = block + BLOCK < vocabulary ? block + BLOCK : vocabulary, x = block;
        float scaled[LANES] = {0}, cut[LANES] = {0}, mine[LANES], its[LANES] = {0};
        for (; x + LANES <= end; x += LANES) {
            for (int64_t lane = 0; lane < LANES; lane++) mine[lane] = w * target[x + lane];
            sort_lanes(&o, mine, law + x, most, scaled, cut);
        }
        if (x < end) { /* behind the end there is nothing, which is always scaled */
            for (int64_t lane = 0; lane < LANES; lane++) mine[lane] = x + lane < end ? w * target[x + lane] : 0;
            for (int64_t lane = 0; x + lane < end; lane++) its[lane] = law[x + lane];
            sort_lanes(&o, mine, its, most, scaled, cut);
        }
        for (int64_t lane = 0; lane < LANES; lane++) o.scaled += scaled[lane], o.cut += cut[lane];
    }
    best_bar(&o, bar, beta);
}
