/* Greedy multi-path block verification in one call: see verifiers/gbv.py, which this follows step by step. */
#include "draws.h"
#include "verdict.h"

#include <string.h>

#define RANKED 256
#define NUM_BINS 256 /* as in verifiers/gbv.py */
#define BIN_SHIFT 20
#define LOWEST_BIN ((127 - 24) << 3)
#define BLOCK 256
#define LANES 8

/* Where the kept path stands at every node. [M] each. */
typedef struct {
    double *below, *joint, *hits, *taken, *missed, *enters;
    int64_t *paths, *kept;
    void *memory;
} Standing;

typedef struct {
    float ratio;
    int64_t token;
} Ranked;

static int by_ratio(const void *a, const void *b) {
    const Ranked *x = a, *y = b;
    if (x->ratio != y->ratio) return x->ratio < y->ratio ? -1 : 1;
    return x->token < y->token ? -1 : 1;
}

static int64_t bin_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const int64_t bin = (int64_t)(bits >> BIN_SHIFT) - LOWEST_BIN;
    return bin < 0 ? 0 : bin < NUM_BINS ? bin : NUM_BINS - 1;
}

/* The tokens in the highest bins of q that hold at most RANKED, in rising order of p / q, ties by number. */
static int64_t rank_likely(const float *p, const float *q, int64_t vocabulary, Ranked *order) {
    int64_t counts[NUM_BINS] = {0}, bar = NUM_BINS, within = 0, count = 0;
    for (int64_t x = 0; x < vocabulary; x++) counts[bin_of(q[x])] += q[x] > 0;
    while (bar > 0 && within + counts[bar - 1] <= RANKED) within += counts[--bar];
    for (int64_t x = 0; x < vocabulary; x++)
        if (q[x] > 0 && bin_of(q[x]) >= bar) order[count++] = (Ranked){p[x] / q[x], x};
    qsort(order, count, sizeof *order, by_ratio);
    return count;
}

static int64_t rank_of(const Ranked *order, int64_t count, int64_t token, int64_t vocabulary) {
    for (int64_t i = 0; i < count; i++)
        if (order[i].token == token) return i;
    return token - vocabulary;
}

/* The sum over i < k of high^i low^(k-1-i). */
static inline double power_sum(double high, double low, int64_t k) {
    double sum = 1, power = 1;
    for (int64_t i = 1; i < k; i++) power *= high, sum = sum * low + power;
    return sum;
}

/* The draft's mass below each token. */
static void masses_below(const float *q, int64_t vocabulary, const Ranked *order, int64_t count, double *lower) {
    double sum = 0;
    for (int64_t x = 0; x < vocabulary; x++) lower[x] = q[x];
    for (int64_t i = 0; i < count; i++) lower[order[i].token] = 0;
    for (int64_t x = 0; x < vocabulary; x++) {
        double own = lower[x];
        lower[x] = sum;
        sum += own;
    }
    for (int64_t i = 0; i < count; i++) lower[order[i].token] = sum, sum += q[order[i].token];
}

/* The law of the kept path's next token at node n. */
static void law_of_greatest(const Standing *at, int64_t n, const float *q, const double *lower, int64_t vocabulary,
                            float *law) {
    const double below = at->below[n], joint = at->joint[n];
    const int64_t k = at->paths[n];
    const double whole = power_sum(below + joint, below, k);
    double high[BLOCK], sum[BLOCK], power[BLOCK];
    for (int64_t block = 0; block < vocabulary; block += BLOCK) {
        int64_t size = vocabulary - block < BLOCK ? vocabulary - block : BLOCK;
        for (int64_t x = 0; x < size; x++) {
            high[x] = below + joint * lower[block + x] + joint * q[block + x];
            sum[x] = power[x] = 1;
        }
        for (int64_t i = 1; i < k; i++)
            for (int64_t x = 0; x < size; x++) {
                power[x] *= high[x];
                sum[x] = sum[x] * (below + joint * lower[block + x]) + power[x];
            }
        for (int64_t x = 0; x < size; x++) law[block + x] = (float)(q[block + x] * sum[x] / whole);
    }
}

/* The mass two laws have in common. */
static double overlap(const float *a, const float *b, int64_t count) {
    double sum = 0;
    for (int64_t block = 0; block < count; block += BLOCK) {
        int64_t end = block + BLOCK < count ? block + BLOCK : count, x = block;
        double lanes[LANES] = {0};
        for (; x + LANES <= end; x += LANES)
            for (int64_t lane = 0; lane < LANES; lane++)
                lanes[lane] += a[x + lane] < b[x + lane] ? a[x + lane] : b[x + lane];
        for (; x < end; x++) lanes[0] += a[x] < b[x] ? a[x] : b[x];
        for (int64_t lane = 0; lane < LANES; lane++) sum += lanes[lane];
    }
    return sum;
}

static float left_at(const Call *c, const Work *k, int64_t n, const float *law, int64_t x) {
    float left = (float)k->weight[n] * c->p[n * c->vocabulary + x] - law[x];
    return left > 0 ? left : 0;
}

static int64_t count_tries(const Call *c, int64_t n) {
    int64_t count = 0;
    while (count < c->width && child_of(c, n, count) >= 0) count++;
    return count;
}

static const float *draft_row(const Call *c, int64_t n) {
    const int64_t row = c->q_row[child_of(c, n, 0)];
    return c->q + (row < 0 ? 0 : row) * c->vocabulary; /* any where nothing was drawn: such a verdict does not count */
}

/* Set where the kept child stands. */
static void keep(const Call *c, const Work *k, const Standing *at, int64_t n, int64_t kept, const float *law,
                 double mass_below) {
    const int64_t token = c->tokens[kept];
    const double wanted = c->p[n * c->vocabulary + token];
    int64_t many = 0;
    for (int64_t j = 0; j < c->width; j++) many += child_of(c, n, j) == kept;
    const int goes_on = count_tries(c, kept) == many; /* otherwise new paths begin there */
    at->kept[n] = kept;
    k->weight[kept] = fmin(k->weight[n] * ratio(wanted, law[token]), 1);
    if (goes_on) at->paths[kept] = at->paths[n];
    at->below[kept] = goes_on ? at->below[n] + at->joint[n] * mass_below : 0;
    at->joint[kept] = goes_on ? at->joint[n] * draft_row(c, n)[token] : 1;
}

/* Choose the kept child of node n; returns the law of its token. `memory`: three rows. */
static const float *settle(const Call *c, const Work *k, const Standing *at, int64_t n, float *memory) {
    const float *p = c->p + n * c->vocabulary, *q = draft_row(c, n), *law = q;
    double *lower = (double *)memory;
    Ranked order[RANKED];
    int64_t best = 0, ranked = 0;
    if (at->paths[n] > 1) {
        float *greatest = memory + 2 * c->vocabulary;
        ranked = rank_likely(p, q, c->vocabulary, order);
        masses_below(q, c->vocabulary, order, ranked, lower);
        law_of_greatest(at, n, q, lower, c->vocabulary, greatest);
        if (at->joint[n] == 1 && overlap(p, greatest, c->vocabulary) < overlap(p, q, c->vocabulary)) at->paths[n] = 1;
        else law = greatest;
    }
    for (int64_t j = 1; j < c->width && at->paths[n] > 1 && child_of(c, n, j) >= 0; j++) {
        int64_t mine = rank_of(order, ranked, c->tokens[child_of(c, n, j)], c->vocabulary);
        if (mine > rank_of(order, ranked, c->tokens[child_of(c, n, best)], c->vocabulary)) best = j;
    }
    const int64_t kept = child_of(c, n, best);
    keep(c, k, at, n, kept, law, at->paths[n] > 1 ? lower[c->tokens[kept]] : 0);
    return law;
}

static void weigh_paths(const Call *c, const Work *k, const Standing *at, int64_t n) {
    at->taken[n] = k->weight[n];
    if (child_of(c, n, 0) < 0) return;
    float *memory = dw_scratch(3 * c->vocabulary);
    const float *law = settle(c, k, at, n, memory);
    const double mass = dw_left_mass(c->p + n * c->vocabulary, k->weight[n], law, c->vocabulary);
    at->taken[n] = ratio(mass, mass + (1 - k->weight[n]));
    for (int64_t j = 0; j < c->width && child_of(c, n, j) >= 0; j++) {
        int64_t child = child_of(c, n, j);
        if (child != at->kept[n]) at->hits[child] = mass > 0 ? left_at(c, k, n, law, c->tokens[child]) / mass : 0;
    }
}

/* Block verification's chances along every kept path, handed on to the paths that begin where others end. */
static void stops(const Call *c, const Work *k, const Standing *at, int64_t b) {
    EACH_NODE(c, b, n) {
        const int64_t above = c->parents[n];
        if (above < 0 || at->kept[above] != n) at->taken[n] = !is_absent(c, n); /* the head of a path */
    }
    for (int64_t n = c->offsets[b + 1] - 1; n >= c->offsets[b]; n--) {
        const int64_t kept = at->kept[n];
        at->missed[n] = kept < 0 ? 1 : (1 - at->taken[kept]) * at->missed[kept];
        k->stop[n] = at->taken[n] * at->missed[n];
    }
    EACH_NODE(c, b, n) {
        const int64_t above = c->parents[n];
        const double ends = above < 0 ? 0 : at->taken[above] * at->missed[above] * at->hits[n];
        at->enters[n] = above < 0 ? 1 : at->enters[above];
        if (above < 0 || at->kept[above] == n) continue;
        at->enters[n] *= ends;
        k->stop[above] -= ends;
    }
    EACH_NODE(c, b, n) k->stop[n] = at->enters[n] * fmax(k->stop[n], 0);
}

static int64_t token_after(const Call *c, const Work *k, const Standing *at, int64_t n, double u) {
    const float *p = c->p + n * c->vocabulary;
    if (at->kept[n] < 0) return dw_pick_row(p, c->vocabulary, u);
    float *memory = dw_scratch(3 * c->vocabulary), *left = memory + 2 * c->vocabulary;
    const float *q = draft_row(c, n), *law = q;
    if (at->paths[n] > 1) {
        Ranked order[RANKED];
        int64_t ranked = rank_likely(p, q, c->vocabulary, order);
        masses_below(q, c->vocabulary, order, ranked, (double *)memory);
        law_of_greatest(at, n, q, (double *)memory, c->vocabulary, left);
        law = left;
    }
    for (int64_t x = 0; x < c->vocabulary; x++) left[x] = left_at(c, k, n, law, x);
    for (int64_t j = 0; j < c->width && child_of(c, n, j) >= 0; j++) left[c->tokens[child_of(c, n, j)]] = 0;
    int64_t token = dw_pick_row(left, c->vocabulary, u);
    return left[token] > 0 ? token : dw_pick_row(p, c->vocabulary, u);
}

static Standing stand(const Call *c, const Work *k) {
    const int64_t m = c->nodes;
    double *at = calloc(8 * m, sizeof(double));
    Standing s = {at, at + m, at + 2 * m, at + 3 * m, at + 4 * m, at + 5 * m,
                  (int64_t *)(at + 6 * m), (int64_t *)(at + 7 * m), at};
    for (int64_t n = 0; n < m; n++) s.joint[n] = 1, k->weight[n] = 1, s.kept[n] = -1, s.paths[n] = count_tries(c, n);
    return s;
}

EXPORT void dw_verdict_greatest(const Call *c) {
    Work k = begin(c);
    Standing at = stand(c, &k);
#pragma omp parallel for schedule(dynamic, 1) if (c->trees > 1)
    for (int64_t b = 0; b < c->trees; b++) {
        EACH_NODE(c, b, n) weigh_paths(c, &k, &at, n);
        stops(c, &k, &at, b);
        const int64_t node = pick_node(c, k.stop, b);
        write_path(c, &k, b, node);
        c->bonus[b] = token_after(c, &k, &at, node, uniform(key_of(c, b, RESIDUAL)));
    }
    free(at.memory);
    free(k.memory);
}
