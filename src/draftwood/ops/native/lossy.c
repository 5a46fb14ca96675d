/* Laws that are not lossless, in one call: what verifiers/lossy.py says, on rows of single precision. */
#include "draws.h"
#include "simd.h"
#include "verdict.h"

#define BLOCK 256 /* summed in single precision, in LANES parts */

static const float *row_at(const Call *c, int64_t n) { return c->p + n * c->vocabulary; }

/* LANES numbers from `x` on; zeros behind the end. */
static inline vf load_up_to(const float *row, int64_t x, int64_t count) {
    if (x + LANES <= count) return load(row + x);
    float padded[LANES] = {0};
    for (int64_t i = 0; x + i < count; i++) padded[i] = row[x + i];
    return load(padded);
}

/* --- Rules of the walk down (verdict.c) */

void dw_weigh_lowered_bars(const Call *c, const Work *k, int64_t n) {
    const double single = c->settings[0], total = c->settings[1];
    double seen = 0, before = 1;
    int likely = 0;
    for (int64_t j = 0; j < c->width; j++) {
        const int64_t child = child_of(c, n, j);
        const int counts = child >= 0 && first_of_its_token(c, n, j);
        const double wanted = counts ? k->weight[n] * row_at(c, n)[c->tokens[child]] : 0;
        seen += wanted;
        likely |= wanted >= single;
        const double missed = likely ? 0 : fmax(1 - seen / total, 0);
        k->chance[n * c->width + j] = before > 0 ? 1 - missed / before : 1;
        before = missed;
    }
    k->mass[n] = fmax(k->weight[n] - seen, 0);
}

/* q + weight (p - q), from whichever end is nearer; returns the sum of |p - q|. */
static double mix_rows(const float *p, const float *q, float weight, float *to, int64_t count) {
    const float *near = weight < 0.5f ? q : p;
    const float part = weight < 0.5f ? weight : weight - 1;
    double sum = 0;
    for (int64_t block = 0; block < count; block += BLOCK) {
        int64_t end = block + BLOCK < count ? block + BLOCK : count, x = block;
        float lanes[LANES] = {0};
        for (; x + LANES <= end; x += LANES)
            for (int64_t lane = 0; lane < LANES; lane++) {
                float gap = p[x + lane] - q[x + lane];
                to[x + lane] = near[x + lane] + part * gap;
                lanes[lane] += fabsf(gap);
            }
        for (; x < end; x++) {
            to[x] = near[x] + part * (p[x] - q[x]);
            lanes[0] += fabsf(p[x] - q[x]);
        }
        for (int64_t lane = 0; lane < LANES; lane++) sum += lanes[lane];
    }
    return sum;
}

/* The same where q is a point mass. */
static double mix_point(const float *p, int64_t token, float weight, float *to, int64_t count) {
    for (int64_t x = 0; x < count; x++) to[x] = weight * p[x];
    to[token] = weight < 0.5f ? 1 + weight * (p[token] - 1) : p[token] + (weight - 1) * (p[token] - 1);
    return dw_row_sum(p, count) - p[token] + fabsf(p[token] - 1);
}

const float *dw_mixed_row(const Call *c, const Work *k, int64_t n) {
    static _Thread_local float *memory;
    static _Thread_local int64_t size;
    const int64_t first = child_of(c, n, 0), count = c->vocabulary;
    if (first < 0) return row_at(c, n);
    if (count > size) {
        free(memory);
        memory = malloc(count * sizeof(float));
        size = count;
    }
    const double weight = c->settings[0];
    const int64_t row = c->q_row[first];
    const double gaps = row < 0 ? mix_point(row_at(c, n), c->tokens[first], (float)weight, memory, count)
                                : mix_rows(row_at(c, n), c->q + row * count, (float)weight, memory, count);
    k->away[n] = (1 - weight) * gaps / 2;
    return memory;
}

void dw_write_drift(const Call *c, const Work *k, int64_t b) {
    if (!c->drift) return;
    const int64_t *path = c->path + b * (c->steps + 1);
    double drift = 0;
    for (int64_t i = 0; i <= c->length[b]; i++) drift += k->away[path[i]];
    const int unknown = c->rule != MIXTURE && child_of(c, c->offsets[b], 0) >= 0;
    c->drift[b] = unknown ? NAN : drift;
}

/* --- The longest path of tokens that are good enough */

/* log x of normal numbers to about one unit in the last place. */
static inline vf log16(vf x) {
    const vi bits = (vi)x, power = (bits - 0x3f3504f3) >> 23; /* leaves a number between sqrt(1/2) and sqrt(2) */
    const vf n = to_float(power), r = (vf)(bits - (power << 23)) - 1.0f;
    vf y = splat(7.0376836292e-2f);
    y = fma16(y, r, splat(-1.1514610310e-1f));
    y = fma16(y, r, splat(1.1676998740e-1f));
    y = fma16(y, r, splat(-1.2420140846e-1f));
    y = fma16(y, r, splat(1.4249322787e-1f));
    y = fma16(y, r, splat(-1.6668057665e-1f));
    y = fma16(y, r, splat(2.0000714765e-1f));
    y = fma16(y, r, splat(-2.4999993993e-1f));
    y = fma16(y, r, splat(3.3333331174e-1f));
    y = fma16(n, splat(-2.12194440e-4f), y * r * r * r);
    return fma16(n, splat(0.693359375f), r + fma16(r * r, splat(-0.5f), y));
}

static double entropy(const float *row, int64_t count) {
    double sum = 0;
    for (int64_t block = 0; block < count; block += BLOCK) {
        vf part = splat(0);
        for (int64_t x = block; x < block + BLOCK && x < count; x += LANES) {
            const vf p = load_up_to(row, x, count);
            part -= either(p >= 0x1p-126f, p * log16(p), splat(0));
        }
        sum += sum16(part);
    }
    return sum;
}

static float greatest(const float *row, int64_t count) {
    vf most = splat(0);
    for (int64_t x = 0; x < count; x += LANES) {
        const vf p = load_up_to(row, x, count);
        most = either(p > most, p, most);
    }
    return max16(most);
}

/* Whether fewer than `many` numbers of a row are above `bar`, which is not negative. */
static int few_above(const float *row, int64_t count, float bar, double many) {
    int64_t above = 0;
    for (int64_t block = 0; block < count && above < many; block += BLOCK) {
        vi found = splati(0);
        for (int64_t x = block; x < block + BLOCK && x < count; x += LANES)
            found -= load_up_to(row, x, count) > splat(bar);
        for (int lane = 0; lane < LANES; lane++) above += found[lane];
    }
    return above < many;
}

/* Mark the children of node n that are good enough in `stop`. */
static void judge_typical(const Call *c, const Work *k, int64_t n) {
    const float *p = row_at(c, n);
    const double bar = fmin(c->settings[0], c->settings[1] * exp(-entropy(p, c->vocabulary)));
    for (int64_t j = 0; j < c->width && child_of(c, n, j) >= 0; j++)
        k->stop[child_of(c, n, j)] = p[c->tokens[child_of(c, n, j)]] > bar;
}

static void judge_relaxed(const Call *c, const Work *k, int64_t n) {
    const float *p = row_at(c, n);
    const double best = log(greatest(p, c->vocabulary));
    for (int64_t j = 0; j < c->width && child_of(c, n, j) >= 0; j++) {
        const float wanted = p[c->tokens[child_of(c, n, j)]];
        const int near = wanted > 0 && best - log(wanted) <= c->settings[1];
        k->stop[child_of(c, n, j)] = near && few_above(p, c->vocabulary, wanted, c->settings[0]);
    }
}

/* Nodes of a depth that were reached and have children. */
static int64_t reached(const Call *c, const Work *k, int64_t depth, int64_t *nodes) {
    int64_t count = 0;
    for (int64_t n = 0; n < c->nodes; n++)
        if (k->depth[n] == depth && k->stop[n] > 0 && child_of(c, n, 0) >= 0) nodes[count++] = n;
    return count;
}

static void end_longest(const Call *c, const Work *k, int64_t b) {
    int64_t best = c->offsets[b];
    EACH_NODE(c, b, n) if (k->stop[n] > 0 && k->depth[n] > k->depth[best]) best = n;
    write_path(c, k, b, best);
    dw_write_drift(c, k, b);
    c->bonus[b] = dw_pick_row(row_at(c, best), c->vocabulary, uniform(key_of(c, b, RESIDUAL)));
}

EXPORT void dw_verdict_longest(const Call *c) {
    Work k = begin(c);
    int64_t *nodes = malloc(c->nodes * sizeof(int64_t));
    for (int64_t b = 0; b < c->trees; b++) k.stop[c->offsets[b]] = 1;
    for (int64_t depth = 0; depth <= c->steps; depth++) {
        const int64_t count = reached(c, &k, depth, nodes);
#pragma omp parallel for schedule(dynamic, 1) if (count > 1)
        for (int64_t i = 0; i < count; i++) {
            if (c->rule == TYPICAL) judge_typical(c, &k, nodes[i]);
            else judge_relaxed(c, &k, nodes[i]);
        }
    }
#pragma omp parallel for schedule(dynamic, 1) if (c->trees > 1)
    for (int64_t b = 0; b < c->trees; b++) end_longest(c, &k, b);
    free(nodes);
    free(k.memory);
}
