/* What adapters add to products. */
#pragma once

#include "products.h"

/* Fill in `target` what is added to the product of `rows` at a place of a layer; every thread of the team calls it. */
void adapt(const Batch *b, int64_t layer, enum Site site, const Matrix *w, const Rows *rows, Target *target,
           const Team *team);
