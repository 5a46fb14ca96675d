/* Whole verdicts in one call: the odds of verifiers/ in float64, then the two draws that rng.py says.

   Rows are looked at in parallel, node by node; everything after that is a few numbers a node, one tree at a time. */
#include "draws.h"
#include "verdict.h"

/* --- One node */

typedef struct {
    int64_t rows[64], tokens[64];
    double own[64];
    uint8_t exists[64], without[64];
    Draws draws;
} Behind;

/* Whether two children of a node are different nodes with the same token: then repeats were not merged there. */
static int has_twins(const Call *c, int64_t n) {
    for (int64_t j = 0; j < c->width; j++)
        for (int64_t i = 0; i < j; i++) {
            int64_t a = child_of(c, n, i), b = child_of(c, n, j);
            if (a >= 0 && b >= 0 && a != b && c->tokens[a] == c->tokens[b]) return 1;
        }
    return 0;
}

static void look_behind(const Call *c, int64_t n, Behind *d) {
    const int merged = c->distinct && (!c->merged || c->merged[n]) && !has_twins(c, n);
    for (int64_t j = 0; j < c->width; j++) {
        int64_t child = child_of(c, n, j);
        d->exists[j] = child >= 0;
        for (int64_t i = 0; i < j && c->distinct; i++)
            if (child_of(c, n, i) == child) d->exists[j] = 0;
        d->tokens[j] = child < 0 ? 0 : c->tokens[child];
        d->rows[j] = child < 0 ? -1 : c->q_row[child];
        d->own[j] = d->rows[j] < 0 ? 1 : c->q[d->rows[j] * c->vocabulary + d->tokens[j]];
        d->without[j] = merged && child >= 0 && c->draw[child] == IID;
    }
    d->draws = (Draws){c->width, d->rows, d->tokens, d->own, d->exists, c->distinct ? d->without : NULL};
}

static Offer offer_at(const Call *c, const Work *k, int64_t n) {
    const float *p = c->rule == MIXTURE ? dw_mixed_row(c, k, n) : c->p + n * c->vocabulary;
    return (Offer){p, c->q, c->vocabulary, k->weight[n]};
}

/* The law of independent draws; any where nothing was drawn: such a verdict does not count. */
static const float *law_behind(const Call *c, const Behind *d) {
    return c->q + (d->rows[0] < 0 ? 0 : d->rows[0]) * c->vocabulary;
}

static void weigh_kseq(const Call *c, const Work *k, int64_t n, const Behind *d) {
    const Offer offer = offer_at(c, k, n);
    int64_t count = 0;
    for (int64_t j = 0; j < c->width; j++) count += d->exists[j];
    double bar = 1, beta = 0, missed = 1;
    if (count) dw_kseq_bar_one(offer.p, law_behind(c, d), c->vocabulary, offer.weight, count, &bar, &beta);
    for (int64_t i = 0; i < count; i++) missed *= 1 - beta;
    const double accepted = 1 - missed, scale = beta > 0 ? accepted / beta : 0;
    k->bar[n] = bar, k->scale[n] = scale;
    k->mass[n] = fmax(offer.weight - accepted, 0);
    for (int64_t j = 0; j < c->width; j++) {
        double wanted = offer.weight * offer.p[d->tokens[j]], lowered = bar * wanted;
        k->chance[n * c->width + j] = d->exists[j] ? fmin(ratio(lowered, d->own[j]), 1) : 0;
        k->values[n * c->width + j] = d->exists[j] ? fmax(wanted - scale * fmin(lowered, d->own[j]), 0) : 0;
    }
}

static void weigh(const Call *c, const Work *k, int64_t n) {
    Behind d;
    if (child_of(c, n, 0) < 0) { /* a leaf */
        k->mass[n] = k->weight[n];
        return;
    }
    if (c->rule == LOWERED_BARS) {
        dw_weigh_lowered_bars(c, k, n);
        return;
    }
    look_behind(c, n, &d);
    if (c->rule == KSEQ) {
        weigh_kseq(c, k, n, &d);
        return;
    }
    const Offer offer = offer_at(c, k, n);
    const int64_t at = n * c->width;
    k->mass[n] = dw_reject_one(&offer, &d.draws, c->tried, k->chance + at, k->scales + at, k->values + at);
    for (int64_t j = at; j < at + c->width && c->rule == LENIENT; j++)
        k->chance[j] = fmin(k->chance[j] / c->settings[0], 1);
}

static void weigh_all(const Call *c, const Work *k) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t n = 0; n < c->nodes; n++) weigh(c, k, n);
}

/* All nodes of a depth, in order. */
static int64_t level(const Call *c, const Work *k, int64_t depth, int64_t *nodes) {
    int64_t count = 0;
    for (int64_t n = 0; n < c->nodes; n++)
        if (k->depth[n] == depth) nodes[count++] = n;
    return count;
}

static void weigh_level(const Call *c, const Work *k, const int64_t *nodes, int64_t count) {
#pragma omp parallel for schedule(dynamic, 1) if (count > 1)
    for (int64_t i = 0; i < count; i++) weigh(c, k, nodes[i]);
}

/* --- The two draws */

static void write_left(const Call *c, const Work *k, int64_t n, int children, float *left) {
    Behind d;
    look_behind(c, n, &d);
    const Offer offer = offer_at(c, k, n);
    if (c->rule == KSEQ && d.exists[0]) {
        const float w = (float)offer.weight, bar = (float)k->bar[n], scale = (float)k->scale[n];
        const float *law = law_behind(c, &d);
        for (int64_t x = 0; x < c->vocabulary; x++) {
            float mine = w * offer.p[x], lowered = mine * bar;
            float rest = mine - scale * (lowered < law[x] ? lowered : law[x]);
            left[x] = rest > 0 ? rest : 0;
        }
    } else {
        dw_residual_row(&offer, &d.draws, k->scales + n * c->width, left);
    }
    for (int64_t j = 0; j < c->width && !children; j++)
        if (child_of(c, n, j) >= 0) left[d.tokens[j]] = 0;
}

/* `children`: whether the token after a path may be one of its last node's children. */
static void finish(const Call *c, const Work *k, int children) {
#pragma omp parallel for schedule(dynamic, 1) if (c->trees > 1)
    for (int64_t b = 0; b < c->trees; b++) {
        const int64_t node = pick_node(c, k->stop, b);
        const double u = uniform(key_of(c, b, RESIDUAL));
        float *left = dw_scratch(c->vocabulary);
        write_path(c, k, b, node);
        dw_write_drift(c, k, b);
        write_left(c, k, node, children, left);
        int64_t token = dw_pick_row(left, c->vocabulary, u);
        /* Nothing is left: ending there has no chance, up to rounding, and no mass is invented. */
        c->bonus[b] = left[token] > 0 ? token : dw_pick_row(c->p + node * c->vocabulary, c->vocabulary, u);
    }
    free(k->memory);
}

/* --- Top down (verifiers/walk.py) */

/* Hand what comes to node n on to its children; what is not handed on ends there. `spare`: what comes. */
static void pass_on(const Call *c, const Work *k, int64_t n) {
    const double *chance = k->chance + n * c->width, *values = k->values + n * c->width;
    double missed = 1, hits = 0;
    for (int64_t j = 0; j < c->width; j++) missed *= 1 - chance[j];
    const double share = k->mass[n] > 0 ? missed / k->mass[n] : 0;
    double before = 1;
    for (int64_t j = 0; j < c->width && child_of(c, n, j) >= 0; j++) {
        double hit = first_of_its_token(c, n, j) ? values[j] : 0;
        k->spare[child_of(c, n, j)] += k->spare[n] * (hit * share + chance[j] * before);
        before *= 1 - chance[j];
        hits += hit;
    }
    k->stop[n] = k->spare[n] * fmax(k->mass[n] > 0 ? share * (k->mass[n] - hits) : missed, 0);
}

EXPORT void dw_verdict_walk(const Call *c) {
    Work k = begin(c);
    for (int64_t n = 0; n < c->nodes; n++) k.weight[n] = 1;
    weigh_all(c, &k);
    for (int64_t n = 0; n < c->nodes; n++) {
        if (c->parents[n] < 0) k.spare[n] = 1;
        pass_on(c, &k, n);
    }
    finish(c, &k, 0);
}

/* --- Depth first (verifiers/block.py) */

static void weigh_chains(const Call *c, const Work *k) {
    for (int64_t n = 0; n < c->nodes; n++) {
        int64_t above = c->parents[n], row = c->q_row[n];
        if (is_absent(c, n)) continue;
        double wanted = above < 0 ? 1 : c->p[above * c->vocabulary + c->tokens[n]];
        double offered = above < 0 || row < 0 ? 1 : c->q[row * c->vocabulary + c->tokens[n]];
        k->weight[n] = above < 0 ? 1 : fmin(1, k->weight[above] * ratio(wanted, offered));
    }
    weigh_all(c, k);
}

static void weigh_by_level(const Call *c, const Work *k) {
    int64_t *nodes = malloc(c->nodes * sizeof(int64_t));
    for (int64_t n = 0; n < c->nodes; n++) k->weight[n] = 1;
    for (int64_t depth = 0; depth <= c->steps; depth++) {
        int64_t count = level(c, k, depth, nodes);
        weigh_level(c, k, nodes, count);
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < c->width; j++) {
                int64_t child = child_of(c, nodes[i], j), again = 0;
                for (int64_t before = 0; before < j; before++) again |= child_of(c, nodes[i], before) == child;
                if (child >= 0 && !again) k->weight[child] = k->chance[nodes[i] * c->width + j];
            }
    }
    free(nodes);
}

EXPORT void dw_verdict_search(const Call *c) {
    Work k = begin(c);
    double *taken = k.stop, *fails = k.spare, *enters = malloc(c->nodes * sizeof(double));
    if (c->width == 1) weigh_chains(c, &k);
    else weigh_by_level(c, &k);
    for (int64_t n = 0; n < c->nodes; n++) {
        taken[n] = c->parents[n] < 0 ? 1 : is_absent(c, n) ? 0 : ratio(k.mass[n], k.mass[n] + (1 - k.weight[n]));
        fails[n] = 1 - taken[n];
        enters[n] = 1; /* here first: that no child is taken */
    }
    for (int64_t n = c->nodes - 1; n >= 0; n--) {
        fails[n] *= enters[n];
        if (k.depth[n] > 0) enters[c->parents[n]] *= fails[n];
    }
    for (int64_t n = 0; n < c->nodes; n++) taken[n] *= enters[n];
    for (int64_t n = 0; n < c->nodes; n++) {
        if (c->parents[n] < 0) enters[n] = 1;
        double before = enters[n];
        for (int64_t j = 0; j < c->width; j++) {
            int64_t child = child_of(c, n, j), again = 0;
            for (int64_t i = 0; i < j; i++) again |= child_of(c, n, i) == child;
            if (child < 0 || again) continue;
            enters[child] = before;
            before *= fails[child];
        }
        taken[n] *= enters[n];
    }
    free(enters);
    finish(c, &k, 1);
}

/* --- A layer at a time (verifiers/layer.py) */

/* From the deepest layer up: `stop` holds the chance to end at a node once its layer is reached. */
static void sweep_layers(const Call *c, const Work *k) {
    for (int64_t b = 0; b < c->trees; b++) {
        double passed = 1;
        for (int64_t depth = c->steps; depth >= 0; depth--) {
            double ends = 0;
            EACH_NODE(c, b, n) if (k->depth[n] == depth) ends += k->stop[n], k->stop[n] *= passed;
            passed *= fmax(1 - ends, 0);
        }
    }
    finish(c, k, 1);
}

/* The weights of one layer's children; `spare`: a node's score, `weight`: its layer's whole mass. */
static void share_layer(const Call *c, const Work *k, int64_t b, int64_t depth) {
    double all = 0;
    EACH_NODE(c, b, n) {
        if (k->depth[n] != depth) continue;
        double share = k->weight[n] > 0 ? k->spare[n] / k->weight[n] : 0, missed = 1;
        for (int64_t j = 0; j < c->width; j++) {
            double chance = k->chance[n * c->width + j];
            if (child_of(c, n, j) >= 0) k->spare[child_of(c, n, j)] += share * chance * missed;
            missed *= 1 - chance;
        }
        all += k->stop[n] = share * missed;
    }
    EACH_NODE(c, b, n)
        if (k->depth[n] == depth)
            k->stop[n] = ratio(k->stop[n], all) * ratio(k->mass[n], k->mass[n] + (1 - k->weight[n]));
}

EXPORT void dw_verdict_layers(const Call *c) {
    Work k = begin(c);
    int64_t *nodes = malloc(c->nodes * sizeof(int64_t));
    for (int64_t b = 0; b < c->trees; b++) k.spare[c->offsets[b]] = 1;
    for (int64_t depth = 0; depth <= c->steps; depth++) {
        for (int64_t b = 0; b < c->trees; b++) {
            double mass = 0;
            EACH_NODE(c, b, n) if (k.depth[n] == depth) mass += k.spare[n];
            EACH_NODE(c, b, n) if (k.depth[n] == depth) k.weight[n] = fmin(mass, 1);
        }
        weigh_level(c, &k, nodes, level(c, &k, depth, nodes));
        for (int64_t b = 0; b < c->trees; b++) share_layer(c, &k, b, depth);
    }
    free(nodes);
    sweep_layers(c, &k);
}

/* All draws of a layer, one after the other, against one common target. */
static void pool_layer(const Call *c, const Work *k, int64_t b, int64_t depth) {
    double all = 0, reach = 1;
    EACH_NODE(c, b, n) if (k->depth[n] == depth) all += k->mass[n] = k->weight[n];
    const double dead = 1 - all, spare = fmax(dead, 0);
    EACH_NODE(c, b, n) {
        if (k->depth[n] != depth || child_of(c, n, 0) < 0) continue;
        Behind d;
        look_behind(c, n, &d);
        const Offer offer = offer_at(c, k, n);
        double *values = k->values + n * c->width;
        Trial trial = dw_begin_trial(&offer, &d.draws, c->width, values);
        for (int64_t j = 0; j < c->width && d.exists[j]; j++) {
            all = 0; /* in order, as if nothing had been known */
            EACH_NODE(c, b, m) if (k->depth[m] == depth) all += k->mass[m];
            const double survives = fmax(all + dead, 0), chance = fmin(ratio(values[j], survives * d.own[j]), 1);
            k->weight[child_of(c, n, j)] += reach * chance;
            reach *= 1 - chance;
            k->scales[n * c->width + j] = survives;
            dw_try(&trial, j, survives, 1);
            k->mass[n] = trial.mass;
        }
    }
    all = 0;
    EACH_NODE(c, b, n) if (k->depth[n] == depth) all += k->mass[n];
    EACH_NODE(c, b, n) if (k->depth[n] == depth) k->stop[n] = ratio(k->mass[n], all + spare);
}

EXPORT void dw_verdict_pooled(const Call *c) {
    Work k = begin(c);
#pragma omp parallel for schedule(dynamic, 1) if (c->trees > 1)
    for (int64_t b = 0; b < c->trees; b++) {
        k.weight[c->offsets[b]] = 1;
        for (int64_t depth = 0; depth <= c->steps; depth++) pool_layer(c, &k, b, depth);
    }
    sweep_layers(c, &k);
}

/* --- The target's own token (verifiers/match.py) */

EXPORT void dw_verdict_match(const Call *c) {
#pragma omp parallel for schedule(dynamic, 1) if (c->trees > 1)
    for (int64_t b = 0; b < c->trees; b++) {
        int64_t *path = c->path + b * (c->steps + 1), node = c->offsets[b], step = 0;
        const uint64_t key = fold(c->seeds[b], TARGET);
        for (int64_t i = 0; i <= c->steps; i++) path[i] = -1;
        for (int64_t next = node; next >= 0; step++) {
            path[step] = node = next;
            c->bonus[b] = dw_race_row(c->p + node * c->vocabulary, c->vocabulary, fold(key, c->lengths[b] + step));
            next = -1;
            for (int64_t j = c->width - 1; j >= 0; j--) {
                int64_t child = child_of(c, node, j);
                if (child >= 0 && c->tokens[child] == c->bonus[b]) next = child;
            }
        }
        c->length[b] = step - 1;
    }
}
