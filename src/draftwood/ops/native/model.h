/* What Python hands over. Each struct is mirrored, field by field, in structs.py. */
#pragma once

#include <stdint.h>

#define PANEL 32 /* outputs whose weights lie side by side */
#define GROUP 32 /* inputs that share a scale */

enum Storage { FLOAT32, BFLOAT16, INT8, INT4, BLOCKS = 5 }; /* 4 is on accelerators alone */
enum Activation { SILU, GELU, GELU_TANH, RELU, RELU_SQUARED, CLAMPED }; /* clamped: of gated MLPs alone */
enum Epilogue { STORE, ADD, GATED, ACTIVATED };
enum HeadNorms { EACH_HEAD, OWN_WEIGHTS, WHOLE_ROWS };

/* A weight matrix [outputs, inputs], both padded with zeros to multiples of 32.
   By panels of 32 outputs; within a panel, for each input (float32), pair (bfloat16), four (int8) or eight (int4) of
   inputs, one 32-bit word for each output: a product reads one stream of memory from end to end.
     int8: weight = scale (byte - 128)
     int4: weight = scale nibble + minimum; of a word's eight inputs the first four are the low nibbles of its bytes */
typedef struct {
    int64_t storage;
    int64_t outputs, inputs; /* padded */
    const void *words;
    const uint16_t *scale;   /* float16 [panels][inputs / 32][32] */
    const uint16_t *minimum; /* float16, the same shape */
    const float *bias;       /* [outputs], padded, or null */
    const uint8_t *const *rows; /* in blocks (see blocks.h): where each output's weights lie, null for padding */
    const uint8_t *kinds;       /* and what they are in */
} Matrix;

/* Whether weights have one scale for each group of inputs: products with them may take bytes. */
static inline int in_groups(const Matrix *m) { return m->storage == INT8 || m->storage == INT4; }

/* A norm: of the root mean square, or, centred, with the mean taken off; none if there are no weights. */
typedef struct {
    const float *weight, *bias; /* bias: or null */
    int64_t centred;
    double eps;
} Norm;

/* One of the MLPs of a mixture; gated. */
typedef struct {
    Matrix gate_up, down;
} Expert;

/* A mixture of experts: a router picks `top_k` of them for each row and weighs what they give. */
typedef struct {
    Matrix router;
    Matrix shared_gate; /* one output, which weighs the layer's own MLP, if that runs beside them; or no outputs */
    const Expert *experts;
    int64_t count, top_k;
    int64_t normalised; /* weights of those that were picked add up to one */
    const uint8_t *allowed; /* [count] which may be picked; or null: all */
} Mixture;

typedef struct {
    Matrix qkv, output, gate_up, down; /* gate_up: sixteen of gate, sixteen of up, in turn; not gated: up alone */
    Norm attention_norm, attention_output_norm, mlp_norm, mlp_output_norm;
    Norm query_norm, key_norm;
    int64_t head_norms;           /* over what those two are */
    int64_t norms_turned;         /* whether they come behind the rotation */
    int64_t window;               /* 0: sees everything */
    int64_t rotation, rotated;    /* which table turns how many dimensions of a head; -1: none does */
    int64_t gated, activation;
    int64_t parallel;             /* the MLP reads what attention has read, or the stream before it */
    double scale, softcap;        /* of scores; softcap 0: none */
    double residual_scale;        /* of what attention and MLP add */
    const float *sinks;           /* [num_heads] a score of each head behind which no value stands; or null */
    const Mixture *mixture;       /* instead of one MLP, or around it; or null */
    int64_t cached;               /* where in the store its keys and values lie */
} Layer;

typedef struct {
    Matrix embedding, head;
    const Layer *layers;
    Norm final_norm;
    const float *positions; /* [positions][hidden], added to embeddings; or null */
    int64_t num_layers, hidden, num_heads, num_kv_heads, head_dim, vocabulary;
    int64_t byte_activations; /* whether products with int8 and int4 weights round their inputs to bytes */
    double embedding_scale, logit_scale, logit_softcap;
    int64_t sections[3]; /* pairs of a head that turn by time, height and width, where rows have `turns` */
} Model;

enum Packing { PLAIN, PACKED_INT8, PACKED_FP8 }; /* of keys and values: codes of a vector, then its scale in float32 */
enum Site { QKV, OUTPUT, GATE_UP, DOWN, SITES }; /* of a layer's products */

/* What an adapter adds to a matrix: up times down; nothing if its rank is 0. */
typedef struct {
    int64_t rank;
    const float *down; /* [rank][inputs], padded as the matrix's */
    const float *up;   /* [rank][outputs], in the order of the matrix's outputs, padded */
} LowRank;

typedef struct {
    int64_t num_rows, num_sequences, num_words, pages_per_sequence, num_logits;
    const int64_t *tokens, *positions, *slots, *visible, *ancestors;
    const int64_t *row_offsets, *tree_base, *num_keys, *block_table, *logit_rows;
    const float *const *rotations; /* tables [positions][2][rotated / 2]: cosines, then sines */
    float *store;               /* [layers, 2, kv heads, slots, head_dim]; packed: bytes, head_dim + 4 of each vector */
    int64_t num_slots, page_size;
    float *logits;              /* [num_logits, vocabulary] */
    const int64_t *wanted;      /* layers whose output is wanted, ascending */
    int64_t num_wanted;
    float *features;            /* [num_wanted, num_rows, hidden] */
    const float *residual;      /* [num_rows, hidden] what the stream begins with instead of tokens; or NULL */
    const float *wide;          /* [num_rows, inputs of the first layer's qkv] what it reads instead; or NULL */
    const int64_t *adapters;    /* which each row has, -1: none; or NULL */
    const LowRank *low_ranks;   /* [adapters, adapted_layers, SITES] */
    int64_t adapted_layers, most_ranks;
    float *shrunk;              /* [num_rows, most_ranks] working memory */
    float *added;               /* [num_rows, widest outputs] the same */
    int64_t packing;
    float *unpacked;            /* packed: working memory, a part of `unpacked_size` numbers for each thread */
    int64_t unpacked_size;
    const int64_t *turns;       /* [3, num_rows] what rotation goes by; NULL: positions */
    const int64_t *which;       /* [num_rows] which of `embeds` a row begins with, -1: its token's; NULL: all tokens' */
    const float *embeds;        /* [any, hidden] */
    const float *words;         /* [num_rows, hidden] the tokens' embeddings; NULL: the model has them */
    int64_t *routes;            /* [num_rows, mixtures, top_k] which experts rows went to; or NULL */
} Batch;

/* What products with matrices in groups read of rows, beside the rows. */
typedef struct {
    int8_t *bytes;    /* rows x widest input */
    float *scale;     /* rows x groups of the widest input */
    float *sums;      /* the same */
    int32_t *offsets; /* the same */
} Summary;

typedef struct {
    int64_t threads;
    /* Every buffer's rows are padded to multiples of 32 numbers; padding stays zero. */
    float *hidden, *input, *qkv, *mixed, *gated;
    Summary summary;
    float *scores;   /* one part for each thread */
    void *barrier;   /* see team.h */
    int64_t score_size;
    void *mixture;   /* see mixture.h */
} Scratch;
