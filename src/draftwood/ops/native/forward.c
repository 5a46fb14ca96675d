/* One forward of a decoder over the rows of a batch: a single parallel region, a barrier between operations. */
#include <omp.h>

#include "attention.h"
#include "products.h"
#include "simd.h"

#define EXPORT __attribute__((visibility("default")))

static int64_t padded(int64_t size) { return (size + GROUP - 1) / GROUP * GROUP; }

static void norm_row(const float *x, const float *weight, int64_t size, float eps, float *out) {
    vf sum = splat(0);
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sum = fma16(load(x + i), load(x + i), sum);
    for (; i < size; i++) rest = fmaf(x[i], x[i], rest);
    const float factor = 1.0f / sqrtf((sum16(sum) + rest) / (float)size + eps);
    for (i = 0; i < size; i++) out[i] = x[i] * factor * weight[i];
}

/* Whether products with this matrix take bytes, or the sums of groups. */
static int takes_bytes(const Model *m, const Matrix *w) { return m->byte_activations && in_groups(w); }
static int takes_sums(const Model *m, const Matrix *w) { return takes_bytes(m, w) || w->storage == INT4; }

static void summarise(const Model *m, const Matrix *w, const Scratch *s, const float *values, int64_t row) {
    if (!takes_sums(m, w)) return;
    const int64_t stride = w->inputs, groups = stride / GROUP;
    int8_t *bytes = takes_bytes(m, w) ? s->bytes + row * stride : NULL;
    summarise_row(values + row * stride, stride, bytes, s->scale + row * groups, s->sums + row * groups,
                  s->offsets + row * groups);
}

static Rows rows_for(const Model *m, const Matrix *w, const Scratch *s, const float *values, int64_t count) {
    const int8_t *bytes = takes_bytes(m, w) ? s->bytes : NULL;
    return (Rows){.values = values, .bytes = bytes, .scale = s->scale, .sums = s->sums, .offsets = s->offsets,
                  .stride = w->inputs, .rows = count};
}

/* Norm, summary and product of all rows; the residual stream may be read through `index`. */
static void normed_product(const Model *m, const Matrix *w, const float *weight, const Scratch *s, const int64_t *index,
                           int64_t count, Target target, const Team *team) {
    const int64_t stride = padded(m->hidden);
    SHARE(team, row, count) {
        const int64_t from = index ? index[row] : row;
        norm_row(s->hidden + from * stride, weight, m->hidden, m->eps, s->input + row * stride);
        summarise(m, w, s, s->input, row);
    }
    meet(team);
    Rows rows = rows_for(m, w, s, s->input, count);
    multiply(w, &rows, &target, team);
}

/* Product of rows that lie in `values`. */
static void plain_product(const Model *m, const Matrix *w, const float *values, const Scratch *s, int64_t count,
                          Target target, const Team *team) {
    if (takes_sums(m, w)) {
        SHARE(team, row, count) summarise(m, w, s, values, row);
        meet(team);
    }
    Rows rows = rows_for(m, w, s, values, count);
    multiply(w, &rows, &target, team);
}

/* The same, added to the residual stream. */
static void added_product(const Model *m, const Matrix *w, const float *values, const Scratch *s, int64_t count,
                          const Team *team) {
    const int64_t stride = padded(m->hidden);
    Target target = {.kind = ADD, .out = s->hidden, .stride = stride, .limit = stride};
    plain_product(m, w, values, s, count, target, team);
}

/* Turn one head of one row to its position: dimension i with i + head_dim / 2. */
static void turn(float *x, const float *rotation, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half], cosine = rotation[i], sine = rotation[half + i];
        x[i] = fmaf(a, cosine, -(b * sine));
        x[i + half] = fmaf(b, cosine, a * sine);
    }
}

/* Head norms and rotation of queries and keys, and the write of keys and values to their slots. */
static void place(const Model *m, const Layer *layer, const Batch *b, const Scratch *s, int64_t index, const Team *team) {
    const int64_t dim = m->head_dim, heads = m->num_heads + 2 * m->num_kv_heads, stride = layer->qkv.outputs;
    const int64_t first_value = m->num_heads + m->num_kv_heads, head_size = b->num_slots * dim;
    float *store = b->store + index * 2 * m->num_kv_heads * head_size;
    SHARE(team, item, b->num_rows * heads) {
        const int64_t row = item / heads, head = item % heads;
        float *x = s->qkv + row * stride + head * dim;
        const float *norm = head < m->num_heads ? layer->query_norm : layer->key_norm;
        if (head < first_value) {
            if (norm) norm_row(x, norm, dim, m->eps, x);
            turn(x, b->rotation + b->positions[row] * dim, dim);
        }
        if (head >= m->num_heads)
            memcpy(store + (head - m->num_heads) * head_size + b->slots[row] * dim, x, dim * sizeof(float));
    }
    meet(team);
}

static void run_layer(const Model *m, const Batch *b, const Scratch *s, int64_t index, const Team *team) {
    const Layer *layer = &m->layers[index];
    const int64_t head_size = b->num_slots * m->head_dim;
    const float *keys = b->store + index * 2 * m->num_kv_heads * head_size, *values = keys + m->num_kv_heads * head_size;
    Target qkv = {.kind = STORE, .out = s->qkv, .stride = layer->qkv.outputs, .limit = layer->qkv.outputs};
    Target gated = {.kind = GATED, .out = s->gated, .stride = layer->down.inputs, .activation = m->activation};
    if (b->wide && index == 0)
        plain_product(m, &layer->qkv, b->wide, s, b->num_rows, qkv, team);
    else
        normed_product(m, &layer->qkv, layer->attention_norm, s, NULL, b->num_rows, qkv, team);
    place(m, layer, b, s, index, team);
    attend(m, layer, keys, values, b, s, s->qkv, layer->qkv.outputs, s->mixed, layer->output.inputs, team);
    added_product(m, &layer->output, s->mixed, s, b->num_rows, team);
    normed_product(m, &layer->gate_up, layer->mlp_norm, s, NULL, b->num_rows, gated, team);
    added_product(m, &layer->down, s->gated, s, b->num_rows, team);
}

static void copy_features(const Model *m, const Batch *b, const Scratch *s, int64_t index, const Team *team) {
    for (int64_t i = 0; i < b->num_wanted; i++) {
        if (b->wanted[i] != index) continue;
        SHARE(team, row, b->num_rows)
            memcpy(b->features + (i * b->num_rows + row) * m->hidden, s->hidden + row * padded(m->hidden),
                   m->hidden * sizeof(float));
    }
}

EXPORT void dw_forward(const Model *m, const Batch *b, const Scratch *s) {
#pragma omp parallel num_threads(s->threads)
    {
        const Team me = {omp_get_thread_num(), omp_get_num_threads(), s->barrier}, *team = &me;
        SHARE(team, row, b->num_rows) {
            float *begin = s->hidden + row * padded(m->hidden);
            if (b->residual) memcpy(begin, b->residual + row * m->hidden, m->hidden * sizeof(float));
            else read_output(&m->embedding, b->tokens[row], begin);
        }
        meet(team);
        for (int64_t i = 0; i < m->num_layers; i++) {
            run_layer(m, b, s, i, team);
            copy_features(m, b, s, i, team); /* needs no barrier: nobody writes there before the next product's */
        }
        Target logits = {.kind = STORE, .out = b->logits, .stride = m->vocabulary, .limit = m->vocabulary};
        if (b->num_logits) normed_product(m, &m->head, m->final_norm, s, b->logit_rows, b->num_logits, logits, team);
    }
}

EXPORT int64_t dw_attention_scores(const Model *m, int64_t num_keys, int64_t num_nodes) {
    return attention_scores(m, num_keys, num_nodes);
}

/* All matrix products of a forward and nothing else: what benchmarks measure a step against. */
EXPORT void dw_products(const Model *m, const Scratch *s, int64_t count, float *logits) {
#pragma omp parallel num_threads(s->threads)
    {
        const Team me = {omp_get_thread_num(), omp_get_num_threads(), s->barrier}, *team = &me;
        const float *inputs[] = {s->input, s->mixed, s->input, s->gated};
        float *outputs[] = {s->qkv, s->hidden, s->gated, s->hidden};
        for (int64_t i = 0; i < m->num_layers; i++) {
            const Layer *layer = &m->layers[i];
            const Matrix *matrices[] = {&layer->qkv, &layer->output, &layer->gate_up, &layer->down};
            for (int64_t j = 0; j < 4; j++) {
                Rows rows = rows_for(m, matrices[j], s, inputs[j], count);
                const int64_t width = j == 2 ? layer->down.inputs : matrices[j]->outputs;
                Target target = {.kind = j == 2 ? GATED : STORE, .out = outputs[j], .stride = width, .limit = width};
                multiply(matrices[j], &rows, &target, team);
            }
        }
        Rows rows = rows_for(m, &m->head, s, s->input, count);
        Target target = {.kind = STORE, .out = logits, .stride = m->vocabulary, .limit = m->vocabulary};
        multiply(&m->head, &rows, &target, team);
    }
}
