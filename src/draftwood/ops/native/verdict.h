/* What all whole verdicts share: what they are asked, room to work in, and the two draws at the end. */
#pragma once

#include "random.h"

#include <stddef.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))
#define EACH_NODE(c, b, n) for (int64_t n = (c)->offsets[b]; n < (c)->offsets[(b) + 1]; n++)

enum { TARGET = 1, ACCEPT = 2, RESIDUAL = 3 }; /* rng.Purpose */
enum { POINT = 0, IID = 1 };                   /* tree.Draw */

/* As in structs.py. */
typedef struct {
    const float *p, *q;
    int64_t vocabulary, nodes, trees, width, steps;
    const int64_t *tokens, *parents, *offsets, *tries, *q_row, *draw;
    const uint64_t *seeds, *lengths;
    int64_t tried;    /* draws that are weighed; the residual may still hit the others */
    int64_t kseq;     /* all draws behind a node at one lowered bar, not one after the other */
    int64_t distinct; /* repeated draws count once, as draws without replacement */
    int64_t *path, *length, *bonus;
} Call;

/* What became of the draws behind every node. */
typedef struct {
    double *weight, *mass, *bar, *scale; /* [M]; bar, scale: of K-SEQ */
    double *chance, *scales, *values;    /* [M, W] */
    double *stop, *spare;                /* [M] the odds, and room for what a lift wants to remember */
    int64_t *depth;                      /* [M] */
    void *memory;
} Work;

static inline Work begin(const Call *c) {
    int64_t m = c->nodes, w = c->nodes * c->width;
    double *at = calloc(7 * m + 3 * w, sizeof(double));
    Work k = {at, at + m, at + 2 * m, at + 3 * m, at + 4 * m, at + 4 * m + w, at + 4 * m + 2 * w,
              at + 4 * m + 3 * w, at + 5 * m + 3 * w, (int64_t *)(at + 6 * m + 3 * w), at};
    for (int64_t n = 0; n < m; n++) k.depth[n] = c->parents[n] < 0 ? 0 : k.depth[c->parents[n]] + 1;
    return k;
}

static inline double ratio(double part, double whole) { return whole > 0 ? part / whole : 1; }

static inline int64_t child_of(const Call *c, int64_t n, int64_t j) { return c->tries[n * c->width + j]; }

/* --- The two draws */

static inline uint64_t key_of(const Call *c, int64_t b, uint64_t purpose) {
    return fold(fold(c->seeds[b], c->lengths[b]), purpose);
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
