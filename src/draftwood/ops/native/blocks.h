/* Weights in the blocks of GGUF files, decoded as they are multiplied.

   A matrix in blocks has `rows` and `kinds` instead of `words`: where each output's weights begin, and what they are in.
   Every decoded weight is the float32 that the format defines, bit for bit: the products of a block's scales and codes
   have at most 24 bits, so that only adding a minimum rounds, once. */
#pragma once

#include "products.h"
#include "simd.h"

#define SPAN 256 /* inputs decoded at a time: the largest block */

/* Numbers of the GGUF format. */
enum Kind {
    KIND_F32 = 0, KIND_F16 = 1, KIND_Q4_0 = 2, KIND_Q4_1 = 3, KIND_Q5_0 = 6, KIND_Q5_1 = 7, KIND_Q8_0 = 8,
    KIND_Q2_K = 10, KIND_Q3_K = 11, KIND_Q4_K = 12, KIND_Q5_K = 13, KIND_Q6_K = 14, KIND_IQ4_NL = 20,
    KIND_IQ4_XS = 23, KIND_BF16 = 30, KIND_MXFP4 = 39,
    /* Our own, for what safetensors hold in groups: a float16 or bfloat16 scale, a byte of zero and 32 codes from 0 to
       15; a float32 scale and 32 signed bytes; the same with 8-bit floats (e4m3); a float32 scale and 32 indices of a
       table of bitsandbytes'. */
    KIND_INT4_F16 = 64, KIND_INT4_BF16 = 65, KIND_INT8 = 66, KIND_FP8 = 67, KIND_NF4 = 68, KIND_FP4 = 69, NUM_KINDS = 70
};

/* Decode `count` weights of a row from number `start` on, both multiples of 32 and of the block. */
void decode_blocks(int64_t kind, const uint8_t *row, int64_t start, int64_t count, float *out);

/* Products of the same weights with as many numbers, summed by lanes in their order. AVX-512 alone. */
vf sum_blocks(int64_t kind, const uint8_t *row, int64_t start, int64_t count, const float *x);

/* Products with 1, 2 ... MAX_ROWS rows. */
extern Tile *const block_tiles[];

/* One row of a matrix in blocks. */
void read_block_row(const Matrix *matrix, int64_t index, float *out);
