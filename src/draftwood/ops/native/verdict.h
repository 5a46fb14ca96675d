/* What all whole verdicts share: what they are asked, room to work in, and the two draws at the end. */
#pragma once

#include "random.h"

#include <stddef.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))
#define EACH_NODE(c, b, n) for (int64_t n = (c)->offsets[b]; n < (c)->offsets[(b) + 1]; n++)

enum { TARGET = 1, ACCEPT = 2, RESIDUAL = 3, ROUND = 6 }; /* rng.Purpose */
enum { POINT = 0, IID = 1 };                              /* tree.Draw */

/* What is accepted; `Rule` of ops/verdict.py. */
enum { REJECTION = 0, KSEQ = 1, LENIENT = 2, LOWERED_BARS = 3, MIXTURE = 4, TYPICAL = 5, RELAXED = 6 };

/* As in structs.py. */
typedef struct {
    const float *p, *q;
    int64_t vocabulary, nodes, trees, width, steps;
    const int64_t *tokens, *parents, *offsets, *tries, *q_row, *draw;
    const uint64_t *seeds, *lengths;
    int64_t tried; /* draws that are weighed; the residual may still hit the others */
    int64_t rule;
    int64_t distinct;      /* repeated draws count once, as draws without replacement */
    const uint8_t *merged; /* behind which nodes they do; NULL: behind all */
    double settings[2]; /* of a rule that is not lossless, as verifiers/lossy.py names them */
    int64_t *path, *length, *bonus;
    double *drift; /* NULL: the law is lossless */
} Call;

/* What became of the draws behind every node. */
typedef struct {
    double *weight, *mass, *bar, *scale; /* [M]; bar, scale: of K-SEQ */
    double *chance, *scales, *values;    /* [M, W] */
    double *stop, *spare;                /* [M] the odds, and room for what a lift wants to remember */
    double *away;                        /* [M] how far from p the row is that a node was weighed with */
    int64_t *depth;                      /* [M], -1: absent */
    void *memory;
} Work;

/* It has no token, is its own parent and no node's child. */
static inline int is_absent(const Call *c, int64_t n) { return c->tokens[n] < 0; }

static inline Work begin(const Call *c) {
    int64_t m = c->nodes, w = c->nodes * c->width;
    double *at = calloc(8 * m + 3 * w, sizeof(double));
    Work k = {at, at + m, at + 2 * m, at + 3 * m, at + 4 * m, at + 4 * m + w, at + 4 * m + 2 * w,
              at + 4 * m + 3 * w, at + 5 * m + 3 * w, at + 6 * m + 3 * w, (int64_t *)(at + 7 * m + 3 * w), at};
    for (int64_t n = 0; n < m; n++)
        k.depth[n] = is_absent(c, n) ? -1 : c->parents[n] < 0 ? 0 : k.depth[c->parents[n]] + 1;
    return k;
}

static inline double ratio(double part, double whole) { return whole > 0 ? part / whole : 1; }

static inline int64_t child_of(const Call *c, int64_t n, int64_t j) { return c->tries[n * c->width + j]; }

static inline int first_of_its_token(const Call *c, int64_t n, int64_t j) {
    for (int64_t i = 0; i < j; i++)
        if (c->tokens[child_of(c, n, i)] == c->tokens[child_of(c, n, j)]) return 0;
    return 1;
}

/* --- The two draws */

/* rng.round_keys */
static inline uint64_t key_of(const Call *c, int64_t b, uint64_t purpose) {
    return fold(fold(fold(c->seeds[b], ROUND), c->lengths[b]), purpose);
}

static inline int64_t pick_node(const Call *c, const double *stop, int64_t b) {
    double total = 0, border = 0;
    int64_t last = c->offsets[b];
    EACH_NODE(c, b, n) total += stop[n];
    const double aim = aim_at(uniform(key_of(c, b, ACCEPT)), total);
    EACH_NODE(c, b, n) {
        border += stop[n];
        if (stop[n] > 0) last = n;
        if (stop[n] > 0 && border > aim) break;
    }
    return last;
}

static inline void write_path(const Call *c, const Work *k, int64_t b, int64_t node) {
    int64_t *path = c->path + b * (c->steps + 1);
    c->length[b] = k->depth[node];
    for (int64_t i = 0; i <= c->steps; i++) path[i] = -1;
    for (int64_t n = node; n >= 0; n = c->parents[n]) path[k->depth[n]] = n;
}

/* --- Laws that are not lossless (lossy.c) */

/* One coin for all children of a node, against what they have in common with the target so far. */
void dw_weigh_lowered_bars(const Call *c, const Work *k, int64_t n);

/* The mixture of p and the law of the first draw at node n, in memory of the calling thread until it asks again. */
const float *dw_mixed_row(const Call *c, const Work *k, int64_t n);

/* How far from the model's law a verdict may be, where that is asked; after its path was written. */
void dw_write_drift(const Call *c, const Work *k, int64_t b);
