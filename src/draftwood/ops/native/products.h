/* Products of a few rows with a packed matrix. */
#pragma once

#include "model.h"
#include "team.h"

/* Rows to multiply: as they are, and with what quantised weights want to know of them. */
typedef struct {
    const float *values;  /* [rows][stride] */
    const int8_t *bytes;  /* [rows][stride], or null: use the values */
    const float *scale;   /* [rows][stride / 32] */
    const float *sums;    /* [rows][stride / 32], of the bytes if there are any, else of the values */
    const int32_t *offsets; /* [rows][stride / 32], -128 times the sums of the bytes */
    int64_t stride, rows;
} Rows;

typedef struct {
    enum Epilogue kind;
    float *out;
    int64_t stride, limit; /* of `limit` columns */
    int64_t activation;
    float scale; /* of what is added */
} Target;

#ifdef __AVX512F__
#define MAX_ROWS 12
#define MAX_BYTE_ROWS 8
#else
#define MAX_ROWS 3
#define MAX_BYTE_ROWS 3
#endif

/* Up to MAX_ROWS rows times the outputs of one panel. */
typedef void Tile(const Matrix *, int64_t panel, const Rows *, int64_t row, float out[][PANEL]);

/* One of several products that are made together. */
typedef struct {
    const Matrix *matrix;
    Rows rows;
    Target target;
    int64_t first; /* pieces of work of the products before it */
} Product;

/* Fill in what products made together need to know of each other. */
void line_up(Product *products, int64_t count);

/* Called by every thread of a team; they share the work, and none returns before all are done. */
void multiply_all(const Product *products, int64_t count, const Team *team);
void multiply(const Matrix *matrix, const Rows *rows, const Target *target, const Team *team);

/* Fill in what products with quantised weights need of rows [values, stride]; one row, by one thread. */
void summarise_row(const float *values, int64_t stride, int8_t *bytes, float *scale, float *sums, int32_t *offsets);

/* One row of the matrix. */
void read_output(const Matrix *matrix, int64_t index, float *out);
