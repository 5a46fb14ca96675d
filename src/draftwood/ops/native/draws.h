/* The draws behind one node of a tree, tried against what the target offers there; see ops/residual.py, ops/kseq.py. */
#pragma once

#include <stdint.h>

/* Up to `width` draws in the order they are tried. */
typedef struct {
    int64_t width;
    const int64_t *rows, *tokens; /* rows of q, -1: a point mass */
    const double *own;            /* the chance of a draw's token under its row */
    const uint8_t *exists;
    const uint8_t *without; /* drawn from what the draws before it leave of its row; NULL: none is */
} Draws;

/* The target's row and all draft rows. */
typedef struct {
    const float *p, *q;
    int64_t vocabulary;
    double weight; /* of p that is offered */
} Offer;

/* One node while its draws are tried. */
typedef struct {
    Offer offer;
    const Draws *draws;
    double *values;   /* what is left at the draws' tokens */
    double mass;      /* what is left in all */
    float *left;      /* what is left, once that is written down */
    int64_t last_law; /* the last draw that needs it */
    int written;
} Trial;

/* Memory of the calling thread, until it asks again. */
float *dw_scratch(int64_t floats);

/* The mass of (weight p - law)+. */
double dw_left_mass(const float *p, double weight, const float *law, int64_t count);

double dw_row_sum(const float *row, int64_t count);

Trial dw_begin_trial(const Offer *offer, const Draws *draws, int64_t tried, double *values);

/* 1, or what makes a row without the tokens drawn before draw `i` a law again. */
double dw_normaliser(const Offer *offer, const Draws *draws, int64_t i);

/* Take `survives` times the law of draw `i` away. */
void dw_try(Trial *trial, int64_t i, double survives, double normaliser);

/* One draw after the other; returns what is left in all. */
double dw_reject_one(const Offer *offer, const Draws *draws, int64_t tried, double *chance, double *scales,
                     double *values);

/* What is left once the draws' laws were taken, each times its scale. */
void dw_residual_row(const Offer *offer, const Draws *draws, const double *scales, float *out);

/* K-SEQ's bar for `count` draws from `law`, and beta there. */
void dw_kseq_bar_one(const float *target, const float *law, int64_t vocabulary, double weight, int64_t count,
                     double *bar, double *beta);
