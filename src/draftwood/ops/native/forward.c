/* One forward of a decoder over the rows of a batch: a single parallel region, a barrier between operations. */
#include <omp.h>

#include "adapters.h"
#include "attention.h"
#include "forward.h"
#include "mixture.h"
#include "packed.h"
#include "simd.h"

#define EXPORT __attribute__((visibility("default")))

void norm_row(const float *x, const Norm *norm, int64_t at, int64_t size, float *out) {
    const float *weight = norm->weight + at;
    float mean = 0, rest = 0;
    vf sum = splat(0);
    int64_t i = 0;
    if (norm->centred) {
        for (; i + LANES <= size; i += LANES) sum += load(x + i);
        for (; i < size; i++) rest += x[i];
        mean = (sum16(sum) + rest) / (float)size;
        sum = splat(0);
        rest = 0;
        i = 0;
    }
    for (; i + LANES <= size; i += LANES) {
        const vf off = load(x + i) - mean;
        sum = fma16(off, off, sum);
    }
    for (; i < size; i++) rest = fmaf(x[i] - mean, x[i] - mean, rest);
    const float factor = 1.0f / sqrtf((sum16(sum) + rest) / (float)size + (float)norm->eps);
    for (i = 0; i < size; i++) out[i] = (x[i] - mean) * factor * weight[i];
    if (norm->bias)
        for (i = 0; i < size; i++) out[i] += norm->bias[at + i];
}

/* Whether products with this matrix take bytes. */
static int takes_bytes(const Model *m, const Matrix *w) { return m->byte_activations && in_groups(w); }

int takes_sums(const Model *m, const Matrix *w) { return takes_bytes(m, w) || w->storage == INT4; }

void summarise(const Model *m, const Matrix *w, const Summary *s, const float *values, int64_t row) {
    if (!takes_sums(m, w)) return;
    const int64_t stride = w->inputs, groups = stride / GROUP;
    int8_t *bytes = takes_bytes(m, w) ? s->bytes + row * stride : NULL;
    summarise_row(values + row * stride, stride, bytes, s->scale + row * groups, s->sums + row * groups,
                  s->offsets + row * groups);
}

Rows rows_for(const Model *m, const Matrix *w, const Summary *s, const float *values, int64_t first, int64_t count) {
    const int64_t stride = w->inputs, at = first * (stride / GROUP);
    int8_t *bytes = takes_bytes(m, w) ? s->bytes + first * stride : NULL;
    return (Rows){.values = values + first * stride, .bytes = bytes, .scale = s->scale + at, .sums = s->sums + at,
                  .offsets = s->offsets + at, .stride = stride, .rows = count};
}

/* A product of a layer, of which adapters may be a part. */
typedef struct {
    const Batch *batch;
    int64_t layer;
    enum Site site;
} Place;

static void multiply_at(const Place *at, const Matrix *w, const Rows *rows, Target target, const Team *team) {
    if (at && at->batch->adapters) adapt(at->batch, at->layer, at->site, w, rows, &target, team);
    multiply(w, rows, &target, team);
}

/* Product of rows that lie in `values`. */
static void plain_product(const Model *m, const Place *at, const Matrix *w, const float *values, const Scratch *s,
                          int64_t count, Target target, const Team *team) {
    if (takes_sums(m, w)) {
        SHARE(team, row, count) summarise(m, w, &s->summary, values, row);
        meet(team);
    }
    Rows rows = rows_for(m, w, &s->summary, values, 0, count);
    multiply_at(at, w, &rows, target, team);
}

/* Norm, summary and product of all rows; the residual stream may be read through `index`. */
static void normed_product(const Model *m, const Place *at, const Matrix *w, const Norm *norm, const Scratch *s,
                           const int64_t *index, int64_t count, Target target, const Team *team) {
    const int64_t stride = padded(m->hidden);
    if (!norm->weight && !index) {
        plain_product(m, at, w, s->hidden, s, count, target, team);
        return;
    }
    SHARE(team, row, count) {
        const int64_t from = index ? index[row] : row;
        norm_row(s->hidden + from * stride, norm, 0, m->hidden, s->input + row * stride);
        summarise(m, w, &s->summary, s->input, row);
    }
    meet(team);
    Rows rows = rows_for(m, w, &s->summary, s->input, 0, count);
    multiply_at(at, w, &rows, target, team);
}

/* The same, added to the residual stream; through a norm, if there is one. */
static void added_product(const Model *m, const Place *at, const Layer *layer, const Matrix *w, const Norm *norm,
                          const float *values, const Scratch *s, int64_t count, const Team *team) {
    const int64_t stride = padded(m->hidden);
    const float scale = (float)layer->residual_scale;
    Target target = {.kind = ADD, .out = s->hidden, .stride = stride, .limit = stride, .scale = scale};
    if (norm->weight) target.kind = STORE, target.out = s->input;
    plain_product(m, at, w, values, s, count, target, team);
    if (!norm->weight) return;
    SHARE(team, row, count) {
        float *made = s->input + row * stride, *out = s->hidden + row * stride;
        norm_row(made, norm, 0, m->hidden, made);
        for (int64_t i = 0; i < m->hidden; i++) out[i] += scale * made[i];
    }
    meet(team);
}

/* Turn the first dimensions of one head of one row to its position: dimension i with i + rotated / 2. */
static void turn(float *x, const float *rotation, int64_t rotated) {
    const int64_t half = rotated / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half], cosine = rotation[i], sine = rotation[half + i];
        x[i] = fmaf(a, cosine, -(b * sine));
        x[i + half] = fmaf(b, cosine, a * sine);
    }
}

/* The same by time, height and width of the row: each pair by its own. */
static void turn_in_sections(const Model *m, const Batch *b, int64_t row, float *x, const float *table, int64_t rotated) {
    const int64_t half = rotated / 2;
    int64_t i = 0;
    for (int64_t plane = 0; plane < 3; plane++) {
        const float *rotation = table + b->turns[plane * b->num_rows + row] * rotated;
        for (int64_t end = i + m->sections[plane]; i < end; i++) {
            const float first = x[i], second = x[i + half], cosine = rotation[i], sine = rotation[half + i];
            x[i] = fmaf(first, cosine, -(second * sine));
            x[i + half] = fmaf(second, cosine, first * sine);
        }
    }
}

static void turn_row(const Model *m, const Layer *layer, const Batch *b, int64_t row, float *x, const float *table) {
    if (b->turns && m->sections[0]) turn_in_sections(m, b, row, x, table, layer->rotated);
    else turn(x, table + b->positions[row] * layer->rotated, layer->rotated);
}

/* Norms of whole rows of queries, and of keys. */
static void norm_rows(const Model *m, const Layer *layer, const Batch *b, const Scratch *s, const Team *team) {
    const int64_t queries = m->num_heads * m->head_dim, keys = m->num_kv_heads * m->head_dim;
    SHARE(team, row, b->num_rows) {
        float *x = s->qkv + row * layer->qkv.outputs;
        norm_row(x, &layer->query_norm, 0, queries, x);
        norm_row(x + queries, &layer->key_norm, 0, keys, x + queries);
    }
    meet(team);
}

static void norm_head(const Model *m, const Layer *layer, int64_t head, float *x) {
    const int is_query = head < m->num_heads;
    const Norm *norm = is_query ? &layer->query_norm : &layer->key_norm;
    const int64_t own = layer->head_norms == OWN_WEIGHTS ? head - (is_query ? 0 : m->num_heads) : 0;
    if (norm->weight && layer->head_norms != WHOLE_ROWS) norm_row(x, norm, own * m->head_dim, m->head_dim, x);
}

/* Head norms and rotation of queries and keys, and the write of keys and values to their slots. */
static void place(const Model *m, const Layer *layer, const Batch *b, const Scratch *s, const Team *team) {
    const int64_t dim = m->head_dim, heads = m->num_heads + 2 * m->num_kv_heads, stride = layer->qkv.outputs;
    const int64_t first_value = m->num_heads + m->num_kv_heads, bytes = vector_bytes(m, b);
    const float *table = layer->rotation < 0 ? NULL : b->rotations[layer->rotation];
    char *vectors = vectors_of(m, b, layer->cached, 0, 0); /* values' heads behind keys' */
    if (layer->query_norm.weight && layer->head_norms == WHOLE_ROWS) norm_rows(m, layer, b, s, team);
    SHARE(team, item, b->num_rows * heads) {
        const int64_t row = item / heads, head = item % heads;
        float *x = s->qkv + row * stride + head * dim;
        if (head < first_value) {
            if (!layer->norms_turned) norm_head(m, layer, head, x);
            if (table) turn_row(m, layer, b, row, x, table);
            if (layer->norms_turned) norm_head(m, layer, head, x);
        }
        if (head >= m->num_heads)
            write_vector(b, x, dim, vectors + ((head - m->num_heads) * b->num_slots + b->slots[row]) * bytes);
    }
    meet(team);
}

static void run_attention(const Model *m, const Batch *b, const Scratch *s, int64_t index, const Team *team) {
    const Layer *layer = &m->layers[index];
    const Place at = {b, layer->cached, QKV};
    Target qkv = {.kind = STORE, .out = s->qkv, .stride = layer->qkv.outputs, .limit = layer->qkv.outputs};
    if (b->wide && index == 0)
        plain_product(m, &at, &layer->qkv, b->wide, s, b->num_rows, qkv, team);
    else
        normed_product(m, &at, &layer->qkv, &layer->attention_norm, s, NULL, b->num_rows, qkv, team);
    place(m, layer, b, s, team);
    attend(m, index, b, s, s->qkv, layer->qkv.outputs, s->mixed, layer->output.inputs, team);
}

/* What the MLP reads, or the router in front of several, times a matrix. Beside attention it may read the very norm that
   attention has read, which still lies there. */
static void mlp_product(const Model *m, const Place *at, const Layer *layer, const Matrix *w, const Scratch *s,
                        int64_t count, Target target, const Team *team) {
    if (layer->parallel && !layer->mlp_norm.weight)
        plain_product(m, at, w, s->input, s, count, target, team);
    else
        normed_product(m, at, w, &layer->mlp_norm, s, NULL, count, target, team);
}

/* The MLP up to its middle. */
static void run_up(const Model *m, const Batch *b, const Scratch *s, int64_t index, const Team *team) {
    const Layer *layer = &m->layers[index];
    const Place at = {b, layer->cached, GATE_UP};
    const int64_t width = layer->down.inputs, count = b->num_rows;
    if (layer->mixture) {
        mlp_product(m, NULL, layer, &layer->mixture->router, s, count, routes_target(m, layer, s, count), team);
        choose_experts(m, layer, s, count, team);
        if (b->routes) tell_routes(m, index, s, count, b->routes, team);
        run_experts_up(m, layer, layer->mlp_norm.weight || layer->parallel ? s->input : s->hidden, s, count, team);
        return;
    }
    Target target = {.kind = layer->gated ? GATED : ACTIVATED, .out = s->gated, .stride = width, .limit = width,
                     .activation = layer->activation};
    mlp_product(m, &at, layer, &layer->gate_up, s, count, target, team);
}

static void run_down(const Model *m, const Batch *b, const Scratch *s, int64_t index, const Team *team) {
    const Layer *layer = &m->layers[index];
    const Place at = {b, layer->cached, DOWN};
    if (layer->mixture) run_experts_down(m, layer, s, b->num_rows, team);
    else added_product(m, &at, layer, &layer->down, &layer->mlp_output_norm, s->gated, s, b->num_rows, team);
}

static void run_layer(const Model *m, const Batch *b, const Scratch *s, int64_t index, const Team *team) {
    const Layer *layer = &m->layers[index];
    const Place at = {b, layer->cached, OUTPUT};
    if (layer->output.outputs) { /* drafts leave attention or MLPs of some layers out */
        run_attention(m, b, s, index, team);
        if (layer->parallel) run_up(m, b, s, index, team);
        added_product(m, &at, layer, &layer->output, &layer->attention_output_norm, s->mixed, s, b->num_rows, team);
    }
    if (!layer->down.outputs && !layer->mixture) return;
    if (!layer->parallel) run_up(m, b, s, index, team);
    run_down(m, b, s, index, team);
}

/* What the residual stream of a row begins with. */
static void begin_row(const Model *m, const Batch *b, int64_t row, float *begin) {
    if (b->residual) {
        memcpy(begin, b->residual + row * m->hidden, m->hidden * sizeof(float));
        return;
    }
    if (b->which && b->which[row] >= 0) {
        memcpy(begin, b->embeds + b->which[row] * m->hidden, m->hidden * sizeof(float));
        return;
    }
    const float scale = (float)m->embedding_scale;
    if (b->words) memcpy(begin, b->words + row * m->hidden, m->hidden * sizeof(float));
    else read_output(&m->embedding, b->tokens[row], begin);
    if (scale != 1.0f)
        for (int64_t i = 0; i < m->hidden; i++) begin[i] *= scale;
    if (m->positions)
        for (int64_t i = 0; i < m->hidden; i++) begin[i] += m->positions[b->positions[row] * m->hidden + i];
}

/* Scale and cap logits, sixteen at a time; the last ones beside others that are not read. */
static void finish_logits(const Model *m, float *logits) {
    const float scale = (float)m->logit_scale, cap = (float)m->logit_softcap;
    for (int64_t i = 0; i < m->vocabulary; i += LANES) {
        float part[LANES] = {0};
        const int64_t count = m->vocabulary - i < LANES ? m->vocabulary - i : LANES;
        memcpy(part, logits + i, count * sizeof(float));
        vf x = load(part) * scale;
        if (cap) x = softcap16(x, cap);
        store(part, x);
        memcpy(logits + i, part, count * sizeof(float));
    }
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
        SHARE(team, row, b->num_rows) begin_row(m, b, row, s->hidden + row * padded(m->hidden));
        meet(team);
        for (int64_t i = 0; i < m->num_layers; i++) {
            run_layer(m, b, s, i, team);
            copy_features(m, b, s, i, team); /* needs no barrier: nothing is written there before the next product's */
        }
        Target logits = {.kind = STORE, .out = b->logits, .stride = m->vocabulary, .limit = m->vocabulary};
        if (b->num_logits) normed_product(m, NULL, &m->head, &m->final_norm, s, b->logit_rows, b->num_logits, logits, team);
        if (m->logit_scale != 1 || m->logit_softcap)
            SHARE(team, row, b->num_logits) finish_logits(m, b->logits + row * m->vocabulary);
    }
}

EXPORT int64_t dw_attention_scores(const Model *m, int64_t num_keys, int64_t num_nodes) {
    return attention_scores(m, num_keys, num_nodes);
}

EXPORT int64_t dw_mixture_bytes(const Model *m, int64_t rows) { return mixture_bytes(m, rows); }

/* One product by itself; `barrier` is zeros. */
EXPORT void dw_linear(const Matrix *w, const float *values, int64_t count, float *out, int64_t outputs, int64_t threads,
                      void *barrier) {
#pragma omp parallel num_threads(threads)
    {
        const Team me = {omp_get_thread_num(), omp_get_num_threads(), barrier};
        const Rows rows = {.values = values, .stride = w->inputs, .rows = count};
        const Target target = {.kind = STORE, .out = out, .stride = outputs, .limit = outputs};
        multiply(w, &rows, &target, &me);
    }
}

/* All matrix products of a forward and nothing else: what benchmarks measure a step against. Rows of a mixture go to
   experts in turn. */
EXPORT void dw_products(const Model *m, const Scratch *s, int64_t count, float *logits) {
#pragma omp parallel num_threads(s->threads)
    {
        const Team me = {omp_get_thread_num(), omp_get_num_threads(), s->barrier}, *team = &me;
        const float *inputs[] = {s->input, s->mixed, s->input, s->gated};
        float *outputs[] = {s->qkv, s->hidden, s->gated, s->hidden};
        for (int64_t i = 0; i < m->num_layers; i++) {
            const Layer *layer = &m->layers[i];
            const Matrix *matrices[] = {&layer->qkv, &layer->output, &layer->gate_up, &layer->down};
            for (int64_t j = 0; j < (layer->mixture ? 2 : 4); j++) {
                Rows rows = rows_for(m, matrices[j], &s->summary, inputs[j], 0, count);
                const int64_t width = j == 2 ? layer->down.inputs : matrices[j]->outputs;
                const enum Epilogue kind = j != 2 ? STORE : layer->gated ? GATED : ACTIVATED;
                Target target = {.kind = kind, .out = outputs[j], .stride = width, .limit = width};
                multiply(matrices[j], &rows, &target, team);
            }
            if (layer->mixture) {
                plain_product(m, NULL, &layer->mixture->router, s->input, s, count, routes_target(m, layer, s, count), team);
                take_turns(m, layer, s, count, team);
                run_experts_up(m, layer, s->input, s, count, team);
                run_experts_down(m, layer, s, count, team);
            }
        }
        Rows rows = rows_for(m, &m->head, &s->summary, s->input, 0, count);
        Target target = {.kind = STORE, .out = logits, .stride = m->vocabulary, .limit = m->vocabulary};
        multiply(&m->head, &rows, &target, team);
    }
}
