/* What the parts of a forward share: norms of rows, and rows as products want them. */
#pragma once

#include "products.h"

static inline int64_t padded(int64_t size) { return (size + GROUP - 1) / GROUP * GROUP; }

/* Weights from number `at` on, for `size` numbers. */
void norm_row(const float *x, const Norm *norm, int64_t at, int64_t size, float *out);

/* Whether products with this matrix take the sums of groups, or bytes and their sums. */
int takes_sums(const Model *m, const Matrix *w);

/* Fill in what products with this matrix want to know of a row of `values`, if it is anything. */
void summarise(const Model *m, const Matrix *w, const Summary *s, const float *values, int64_t row);

/* `count` rows of `values` from number `first` on. */
Rows rows_for(const Model *m, const Matrix *w, const Summary *s, const float *values, int64_t first, int64_t count);
