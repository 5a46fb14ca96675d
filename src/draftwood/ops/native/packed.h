/* Keys and values in the store: as numbers, or packed in 8 bits with a scale for each vector (ops/packed.py). */
#pragma once

#include "model.h"

/* Where the vectors of a layer's key head begin, of keys (0) or values (1), and how many bytes each has. */
char *vectors_of(const Model *m, const Batch *b, int64_t layer, int64_t which, int64_t head);
int64_t vector_bytes(const Model *m, const Batch *b);

void write_vector(const Batch *b, const float *x, int64_t size, char *out);
void read_vector(const Batch *b, const char *packed, int64_t size, float *out);
