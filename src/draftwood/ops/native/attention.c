/* A row's keys are numbered along its own path: the linear keys it sees, then its ancestors in the tree. All sums run
   by that number, so a token gets the same bits whether its past is committed, pending in the same chunk, or a branch.

   Scores of all keys are computed first and kept; the softmax then knows its maximum and needs no running correction,
   whose rounding would depend on where blocks of keys end. */
#include "attention.h"

#include "simd.h"

#define MAX_BLOCK_ROWS 16
#define SCORES (128 * 1024)
#define QUERIES 6 /* taken through a block of keys together */

typedef struct {
    const Model *model;
    const Batch *batch;
    const float *keys, *values; /* of one key head: [slots][head_dim] */
    const int64_t *pages;
    int64_t sequence, first_row, num_rows;
    int64_t first_head, num_heads; /* query heads */
    const float *queries;          /* of the first row and head */
    int64_t stride;                /* between rows of queries */
    float *scores;                 /* [queries][width] */
    int64_t width, num_linear, num_nodes;
    float scale, softcap;
} Block;

INLINE int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

INLINE const float *at_key(const Block *b, const float *base, int64_t key) {
    int64_t slot = b->pages[key / b->batch->page_size] * b->batch->page_size + key % b->batch->page_size;
    return base + slot * b->model->head_dim;
}

static const float *query_of(const Block *b, int64_t index) {
    return b->queries + index / b->num_heads * b->stride + index % b->num_heads * b->model->head_dim;
}

/* Sixteen keys from number `first` on, turned to [head_dim][16]; beyond the last the first stands again, whose scores are not read. */
static void turn_keys(const Block *b, int64_t first, int64_t count, float *turned) {
    const int64_t dim = b->model->head_dim;
    const float *key[LANES];
    for (int64_t i = 0; i < LANES; i++) key[i] = at_key(b, b->keys, first + (i < count ? i : 0));
    int64_t d = 0;
#ifdef __AVX512F__
    for (; d + LANES <= dim; d += LANES) {
        __m512 r[LANES], t[LANES];
        for (int i = 0; i < LANES; i++) r[i] = _mm512_loadu_ps(key[i] + d);
        for (int i = 0; i < LANES; i += 2) {
            t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
            t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
        }
        for (int i = 0; i < LANES; i += 4)
            for (int j = 0; j < 2; j++) {
                r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[i + j]), _mm512_castps_pd(t[i + j + 2])));
                r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[i + j]), _mm512_castps_pd(t[i + j + 2])));
            }
        for (int j = 0; j < 4; j++) {
            t[j] = _mm512_shuffle_f32x4(r[j], r[4 + j], 0x88);
            t[4 + j] = _mm512_shuffle_f32x4(r[j], r[4 + j], 0xdd);
            t[8 + j] = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0x88);
            t[12 + j] = _mm512_shuffle_f32x4(r[8 + j], r[12 + j], 0xdd);
        }
        for (int j = 0; j < 8; j++) {
            _mm512_storeu_ps(turned + (d + j) * LANES, _mm512_shuffle_f32x4(t[j], t[j + 8], 0x88));
            _mm512_storeu_ps(turned + (d + 8 + j) * LANES, _mm512_shuffle_f32x4(t[j], t[j + 8], 0xdd));
        }
    }
#endif
    for (; d < dim; d++)
        for (int i = 0; i < LANES; i++) turned[d * LANES + i] = key[i][d];
}

/* Scores of keys [first, first + count) for all queries, written from column `column` on. */
static void score_keys(const Block *b, int64_t first, int64_t count, int64_t column, float *turned) {
    const int64_t dim = b->model->head_dim, queries = b->num_rows * b->num_heads;
    const vf scale = splat(b->scale);
    for (int64_t done = 0; done < count; done += LANES) {
        turn_keys(b, first + done, count - done, turned);
        for (int64_t q = 0; q < queries; q += QUERIES) {
            const float *query[QUERIES];
            vf sum[QUERIES];
            for (int i = 0; i < QUERIES; i++) {
                query[i] = query_of(b, q + i < queries ? q + i : q);
                sum[i] = splat(0);
            }
            for (int64_t d = 0; d < dim; d++) {
                vf key = load(turned + d * LANES);
                for (int i = 0; i < QUERIES; i++) sum[i] = fma16(splat(query[i][d]), key, sum[i]);
            }
            for (int i = 0; i < QUERIES && q + i < queries; i++) {
                sum[i] *= scale;
                if (b->softcap) sum[i] = softcap16(sum[i], b->softcap);
                store(b->scores + (q + i) * b->width + column + done, sum[i]);
            }
        }
    }
}

/* Where a row's path begins (a window may cut it), ends among linear keys, and ends with its ancestors. */
typedef struct {
    int64_t oldest, linear, length;
} Path;

/* Move the scores of a row's ancestors right behind its linear keys, and write their node numbers down. */
static Path follow_path(const Block *b, int64_t row, float *scores, int64_t *nodes, int64_t window) {
    const Batch *batch = b->batch;
    Path path = {0, batch->visible[row], batch->visible[row]};
    if (window && batch->positions[row] - window + 1 > 0) path.oldest = batch->positions[row] - window + 1;
    const float *staged = scores + padded(b->num_linear);
    float found[b->num_nodes + 1];
    for (int64_t node = 0; node < b->num_nodes; node++) {
        if (!(batch->ancestors[row * batch->num_words + node / 64] >> (node % 64) & 1)) continue;
        nodes[path.length - path.linear] = node;
        found[path.length - path.linear] = staged[node];
        path.length++;
    }
    for (int64_t i = path.linear; i < path.length; i++) scores[i] = found[i - path.linear];
    return path;
}

/* e^(score - largest) in place, zero outside of [oldest, length), to the end of `width`; returns one over their sum.
   A sink takes part in both and stands nowhere; or null. */
static float soften(float *scores, Path path, int64_t width, const float *sink) {
    for (int64_t i = 0; i < path.oldest; i++) scores[i] = -INFINITY;
    for (int64_t i = path.length; i < width; i++) scores[i] = -INFINITY;
    vf largest = splat(-INFINITY), sum = splat(0);
    for (int64_t i = 0; i < padded(path.length); i += LANES) {
        vf s = load(scores + i);
        largest = either(s > largest, s, largest);
    }
    float most = max16(largest);
    if (sink && *sink > most) most = *sink;
    const vf top = splat(most);
    for (int64_t i = 0; i < padded(path.length); i += LANES) {
        vf weight = exp16(load(scores + i) - top);
        store(scores + i, weight);
        sum += weight;
    }
    for (int64_t i = padded(path.length); i < width; i += LANES) store(scores + i, splat(0));
    return 1.0f / (sum16(sum) + (sink ? exp16(splat(*sink) - top)[0] : 0.0f));
}

/* out[i] += weight[i][key] value[key] over keys [0, end), for Q queries and 16 * V numbers of each value. */
INLINE void mix(const Block *b, float *const *weights, int64_t end, int64_t d, const int Q, const int V,
                float *const *out) {
    vf sum[QUERIES][4];
    for (int i = 0; i < Q; i++)
        for (int v = 0; v < V; v++) sum[i][v] = load(out[i] + d + v * LANES);
    for (int64_t key = 0; key < end; key++) {
        const float *value = at_key(b, b->values, key) + d;
        vf part[4];
        for (int v = 0; v < V; v++) part[v] = load(value + v * LANES);
        for (int i = 0; i < Q; i++)
            for (int v = 0; v < V; v++) sum[i][v] = fma16(splat(weights[i][key]), part[v], sum[i][v]);
    }
    for (int i = 0; i < Q; i++)
        for (int v = 0; v < V; v++) store(out[i] + d + v * LANES, sum[i][v]);
}

static void mix_linear(const Block *b, float *const *weights, int64_t end, int64_t count, float *const *out) {
    const int64_t dim = b->model->head_dim;
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) {
        if (count == QUERIES) mix(b, weights, end, d, QUERIES, 4, out);
        else if (count == 3) mix(b, weights, end, d, 3, 4, out);
        else
            for (int64_t i = 0; i < count; i++) mix(b, weights + i, end, d, 1, 4, out + i);
    }
    for (; d + LANES <= dim; d += LANES)
        for (int64_t i = 0; i < count; i++) mix(b, weights + i, end, d, 1, 1, out + i);
    for (; d < dim; d++)
        for (int64_t i = 0; i < count; i++)
            for (int64_t key = 0; key < end; key++)
                out[i][d] = fmaf(weights[i][key], at_key(b, b->values, key)[d], out[i][d]);
}

static void attend_block(const Block *b, const Layer *layer, float *mixed, int64_t width) {
    const int64_t dim = b->model->head_dim, queries = b->num_rows * b->num_heads;
    const int64_t row_width = padded(b->num_linear + b->num_nodes);
    float turned[dim * LANES] __attribute__((aligned(64)));
    const int64_t base = b->batch->tree_base[b->sequence];
    score_keys(b, 0, b->num_linear, 0, turned);
    score_keys(b, base, b->num_nodes, padded(b->num_linear), turned);
    for (int64_t q = 0; q < queries; q += QUERIES) {
        const int64_t count = queries - q < QUERIES ? queries - q : QUERIES;
        float *weights[QUERIES], *out[QUERIES], inverse[QUERIES];
        int64_t nodes[QUERIES][b->num_nodes + 1], end = 0;
        Path path[QUERIES];
        for (int64_t i = 0; i < count; i++) {
            const int64_t row = b->first_row + (q + i) / b->num_heads, head = b->first_head + (q + i) % b->num_heads;
            weights[i] = b->scores + (q + i) * b->width;
            out[i] = mixed + row * width + head * dim;
            memset(out[i], 0, dim * sizeof(float));
            path[i] = follow_path(b, row, weights[i], nodes[i], layer->window);
            inverse[i] = soften(weights[i], path[i], row_width, layer->sinks ? layer->sinks + head : NULL);
            end = path[i].linear > end ? path[i].linear : end;
        }
        /* Beyond its own path a row's weights are zero; but its ancestors' weights lie there, so they step aside. */
        float kept[QUERIES][b->num_nodes + 1];
        for (int64_t i = 0; i < count; i++)
            for (int64_t k = path[i].linear; k < path[i].length; k++) {
                kept[i][k - path[i].linear] = weights[i][k];
                weights[i][k] = 0;
            }
        mix_linear(b, weights, end, count, out);
        for (int64_t i = 0; i < count; i++) {
            for (int64_t k = 0; k < path[i].length - path[i].linear; k++) {
                const float *value = at_key(b, b->values, base + nodes[i][k]);
                for (int64_t d = 0; d < dim; d++) out[i][d] = fmaf(kept[i][k], value[d], out[i][d]);
            }
            for (int64_t d = 0; d < dim; d++) out[i][d] *= inverse[i];
        }
    }
}

/* Blocks small enough to keep their scores in a core's own cache, and enough of them for two turns of every thread. */
static int64_t num_blocks(const Model *model, int64_t columns, int64_t rows, int64_t threads) {
    int64_t fit = SCORES / (columns * (model->num_heads / model->num_kv_heads));
    fit = fit < 1 ? 1 : fit > MAX_BLOCK_ROWS ? MAX_BLOCK_ROWS : fit;
    const int64_t needed = (rows + fit - 1) / fit, wanted = (2 * threads + model->num_kv_heads - 1) / model->num_kv_heads;
    return needed > wanted ? needed : wanted < rows ? wanted : rows;
}

static int64_t num_columns(int64_t keys, int64_t nodes) { return padded(keys) + 2 * padded(nodes) + LANES; }

int64_t attention_scores(const Model *model, int64_t num_keys, int64_t num_nodes) {
    const int64_t one_row = num_columns(num_keys, num_nodes) * (model->num_heads / model->num_kv_heads);
    return one_row > SCORES ? one_row : SCORES;
}

void attend(const Model *model, const Layer *layer, const float *keys, const float *values, const Batch *batch,
            const Scratch *scratch, const float *qkv, int64_t stride, float *mixed, int64_t width,
            const Team *team) {
    const int64_t group = model->num_heads / model->num_kv_heads, head_size = batch->num_slots * model->head_dim;
    for (int64_t s = 0; s < batch->num_sequences; s++) {
        const int64_t first = batch->row_offsets[s], end = batch->row_offsets[s + 1], base = batch->tree_base[s];
        const int64_t nodes = batch->num_keys[s] - base, columns = num_columns(base, nodes);
        const int64_t blocks = num_blocks(model, columns, end - first, team->size);
        /* Work is shared by key heads and blocks of rows; by query heads too where a thread would be left idle. */
        const int64_t split = blocks * model->num_kv_heads < 2 * team->size ? group : 1;
        SHARE(team, item, blocks * model->num_kv_heads * split) {
            const int64_t part = item / (model->num_kv_heads * split), head = item % (model->num_kv_heads * split) * group / split;
            const int64_t begin = first + (end - first) * part / blocks, stop = first + (end - first) * (part + 1) / blocks;
            int64_t linear = 0;
            for (int64_t row = begin; row < stop; row++) linear = batch->visible[row] > linear ? batch->visible[row] : linear;
            Block block = {
                .model = model, .batch = batch, .sequence = s, .first_row = begin, .num_rows = stop - begin,
                .keys = keys + head / group * head_size, .values = values + head / group * head_size,
                .pages = batch->block_table + s * batch->pages_per_sequence,
                .first_head = head, .num_heads = group / split,
                .queries = qkv + begin * stride + head * model->head_dim, .stride = stride,
                .scores = scratch->scores + team->index * scratch->score_size, .width = columns,
                .num_linear = linear, .num_nodes = nodes,
                .scale = (float)layer->scale, .softcap = (float)layer->softcap,
            };
            attend_block(&block, layer, mixed, width);
        }
    }
    meet(team);
}
