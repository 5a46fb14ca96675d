#include "mixture.h"

#include "simd.h"

#define LINE 64 /* bytes that parts of the memory are aligned to */

/* What a layer's mixture keeps for a forward. A *place* is one choice of one row; places of the same expert lie together,
   in the order of their rows. */
typedef struct {
    float *routes;   /* [rows][experts, padded] the router's logits */
    float *shares;   /* [rows][top_k] weights of the experts chosen */
    int64_t *chosen; /* [rows][top_k] their numbers */
    int64_t *places; /* [rows][top_k] where their inputs and outputs lie */
    int64_t *rows;   /* [places] whose they are */
    int64_t *starts; /* [experts + 1] the first place of each */
    float *input, *gated, *output; /* [places][width] */
    float *shared, *strength;      /* [rows][width] of the MLP that all rows run */
    Summary summary;               /* of places */
    Product *products;             /* gate and up of every expert that has rows, then as many of down */
    int64_t *num_products;
} Mixing;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static void *part(char **next, int64_t bytes) {
    void *begin = *next;
    *next += (bytes + LINE - 1) / LINE * LINE;
    return begin;
}

/* Returns where the memory ends. */
static char *lay_out(const Model *m, const Layer *layer, int64_t rows, char *next, Mixing *x) {
    const Mixture *mixture = layer->mixture;
    const int64_t hidden = padded(m->hidden), inner = mixture->experts->down.inputs, places = rows * mixture->top_k;
    const int64_t widest = hidden > inner ? hidden : inner, groups = widest / GROUP;
    const int64_t most = least(mixture->count, places) + 2;
    x->routes = part(&next, rows * mixture->router.outputs * sizeof(float));
    x->shares = part(&next, places * sizeof(float));
    x->chosen = part(&next, places * sizeof(int64_t));
    x->places = part(&next, places * sizeof(int64_t));
    x->rows = part(&next, places * sizeof(int64_t));
    x->starts = part(&next, (mixture->count + 1) * sizeof(int64_t));
    x->input = part(&next, places * hidden * sizeof(float));
    x->gated = part(&next, places * inner * sizeof(float));
    x->output = part(&next, places * hidden * sizeof(float));
    x->shared = part(&next, rows * hidden * sizeof(float));
    x->strength = part(&next, rows * PANEL * sizeof(float));
    x->summary.bytes = part(&next, places * widest);
    x->summary.scale = part(&next, places * groups * sizeof(float));
    x->summary.sums = part(&next, places * groups * sizeof(float));
    x->summary.offsets = part(&next, places * groups * sizeof(int32_t));
    x->products = part(&next, 2 * most * sizeof(Product));
    x->num_products = part(&next, 2 * sizeof(int64_t));
    return next;
}

static Mixing mixing_of(const Model *m, const Layer *layer, const Scratch *s, int64_t rows) {
    Mixing x;
    lay_out(m, layer, rows, s->mixture, &x);
    return x;
}

int64_t mixture_bytes(const Model *model, int64_t rows) {
    int64_t most = 0;
    for (int64_t i = 0; i < model->num_layers; i++) {
        if (!model->layers[i].mixture) continue;
        char *const base = (char *)(intptr_t)LINE; /* only the distance counts */
        Mixing x;
        const int64_t bytes = lay_out(model, model->layers + i, rows, base, &x) - base;
        most = bytes > most ? bytes : most;
    }
    return most;
}

Target routes_target(const Model *m, const Layer *layer, const Scratch *s, int64_t rows) {
    const int64_t outputs = layer->mixture->router.outputs;
    return (Target){.kind = STORE, .out = mixing_of(m, layer, s, rows).routes, .stride = outputs, .limit = outputs};
}

/* The likeliest experts of one row, of those allowed, in that order; overwrites the logits. */
static void choose(const Mixture *mixture, float *routes, int64_t *chosen, float *shares) {
    const uint8_t *allowed = mixture->allowed;
    float largest = -INFINITY, total = 0, taken = 0;
    for (int64_t i = 0; i < mixture->count; i++)
        if (!allowed || allowed[i]) largest = routes[i] > largest ? routes[i] : largest;
    for (int64_t i = 0; i < mixture->count; i++) {
        const int open = !allowed || allowed[i];
        routes[i] = open ? expf(routes[i] - largest) : -1;
        total += open ? routes[i] : 0;
    }
    for (int64_t j = 0; j < mixture->top_k; j++) {
        int64_t best = 0;
        for (int64_t i = 1; i < mixture->count; i++) best = routes[i] > routes[best] ? i : best;
        chosen[j] = best;
        taken += shares[j] = routes[best] / total;
        routes[best] = -1; /* less than every chance */
    }
    for (int64_t j = 0; mixture->normalised && j < mixture->top_k; j++) shares[j] /= taken;
}

/* Which places each expert has; by one thread. */
static void assign_places(const Mixture *mixture, const Mixing *x, int64_t rows) {
    const int64_t places = rows * mixture->top_k;
    memset(x->starts, 0, (mixture->count + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < places; i++) x->starts[x->chosen[i] + 1]++;
    for (int64_t e = 0; e < mixture->count; e++) x->starts[e + 1] += x->starts[e];
    for (int64_t i = 0; i < places; i++) {
        x->places[i] = x->starts[x->chosen[i]]++;
        x->rows[x->places[i]] = i / mixture->top_k;
    }
    for (int64_t e = mixture->count; e > 0; e--) x->starts[e] = x->starts[e - 1]; /* they were moved to their ends */
    x->starts[0] = 0;
}

/* Products of the layer with the rows of every expert, and those of the MLP that all rows run; by one thread. */
static void plan_products(const Model *m, const Layer *layer, const Mixing *x, const Scratch *s, const float *values,
                          int64_t rows) {
    const Mixture *mixture = layer->mixture;
    const int64_t hidden = padded(m->hidden), inner = mixture->experts->down.inputs, own = layer->down.inputs;
    int64_t ups = 0;
    for (int64_t e = 0; e < mixture->count; e++) ups += x->starts[e + 1] > x->starts[e];
    const int64_t shared = mixture->shared_gate.outputs > 0;
    Product *up = x->products, *down = x->products + ups + 2 * shared;
    for (int64_t e = 0; e < mixture->count; e++) {
        const int64_t first = x->starts[e], count = x->starts[e + 1] - first;
        if (!count) continue;
        const Expert *expert = mixture->experts + e;
        Target middle = {.kind = GATED, .out = x->gated + first * inner, .stride = inner, .limit = inner,
                         .activation = layer->activation};
        Target end = {.kind = STORE, .out = x->output + first * hidden, .stride = hidden, .limit = hidden};
        *up++ = (Product){.matrix = &expert->gate_up, .target = middle,
                          .rows = rows_for(m, &expert->gate_up, &x->summary, x->input, first, count)};
        *down++ = (Product){.matrix = &expert->down, .target = end,
                            .rows = rows_for(m, &expert->down, &x->summary, x->gated, first, count)};
    }
    if (shared) {
        Target middle = {.kind = GATED, .out = s->gated, .stride = own, .limit = own, .activation = layer->activation};
        Target strength = {.kind = STORE, .out = x->strength, .stride = PANEL, .limit = PANEL};
        Target end = {.kind = STORE, .out = x->shared, .stride = hidden, .limit = hidden};
        *up++ = (Product){.matrix = &layer->gate_up, .target = middle,
                          .rows = rows_for(m, &layer->gate_up, &s->summary, values, 0, rows)};
        *up++ = (Product){.matrix = &mixture->shared_gate, .target = strength,
                          .rows = rows_for(m, &mixture->shared_gate, &s->summary, values, 0, rows)};
        *down++ = (Product){.matrix = &layer->down, .target = end,
                            .rows = rows_for(m, &layer->down, &s->summary, s->gated, 0, rows)};
    }
    x->num_products[0] = ups + 2 * shared;
    x->num_products[1] = ups + shared;
    line_up(x->products, x->num_products[0]);
    line_up(x->products + x->num_products[0], x->num_products[1]);
}

void choose_experts(const Model *m, const Layer *layer, const Scratch *s, int64_t rows, const Team *team) {
    const Mixture *mixture = layer->mixture;
    const Mixing x = mixing_of(m, layer, s, rows);
    SHARE(team, row, rows)
        choose(mixture, x.routes + row * mixture->router.outputs, x.chosen + row * mixture->top_k,
               x.shares + row * mixture->top_k);
    meet(team);
}

void tell_routes(const Model *m, int64_t index, const Scratch *s, int64_t rows, int64_t *routes, const Team *team) {
    const int64_t top_k = m->layers[index].mixture->top_k;
    const Mixing x = mixing_of(m, m->layers + index, s, rows);
    int64_t mixtures = 0, number = 0;
    for (int64_t i = 0; i < m->num_layers; i++) {
        number += i < index && m->layers[i].mixture;
        mixtures += m->layers[i].mixture != 0;
    }
    SHARE(team, row, rows)
        memcpy(routes + (row * mixtures + number) * top_k, x.chosen + row * top_k, top_k * sizeof(int64_t));
}

void take_turns(const Model *m, const Layer *layer, const Scratch *s, int64_t rows, const Team *team) {
    const Mixing x = mixing_of(m, layer, s, rows);
    SHARE(team, i, rows * layer->mixture->top_k) {
        x.chosen[i] = i % layer->mixture->count;
        x.shares[i] = 0;
    }
    meet(team);
}

void run_experts_up(const Model *m, const Layer *layer, const float *values, const Scratch *s, int64_t rows,
                    const Team *team) {
    const Mixture *mixture = layer->mixture;
    const Mixing x = mixing_of(m, layer, s, rows);
    const int64_t stride = padded(m->hidden), shared = mixture->shared_gate.outputs > 0;
    if (team->index == 0) {
        assign_places(mixture, &x, rows);
        plan_products(m, layer, &x, s, values, rows);
    }
    meet(team);
    SHARE(team, place, rows * mixture->top_k) {
        memcpy(x.input + place * stride, values + x.rows[place] * stride, stride * sizeof(float));
        summarise(m, &mixture->experts->gate_up, &x.summary, x.input, place);
    }
    if (shared) {
        SHARE(team, row, rows) summarise(m, &layer->gate_up, &s->summary, values, row);
    }
    meet(team);
    multiply_all(x.products, x.num_products[0], team);
}

/* Numbers between the outputs of gate and up and the inputs of down are no one's output: they have to be zero. */
static void finish_middle(const Model *m, const Matrix *up, const Matrix *down, const Summary *summary, float *gated,
                          int64_t row) {
    for (int64_t i = up->outputs / 2; i < down->inputs; i++) gated[row * down->inputs + i] = 0;
    summarise(m, down, summary, gated, row);
}

/* What all MLPs of a row add up to. */
static void mix(const Mixture *mixture, const Mixing *x, int64_t row, int64_t hidden, int64_t stride, float *out) {
    for (int64_t i = 0; i < hidden; i++) out[i] = 0;
    for (int64_t j = 0; j < mixture->top_k; j++) {
        const float share = x->shares[row * mixture->top_k + j];
        const float *made = x->output + x->places[row * mixture->top_k + j] * stride;
        for (int64_t i = 0; i < hidden; i++) out[i] += share * made[i];
    }
    if (!mixture->shared_gate.outputs) return;
    const float share = 1.0f / (1.0f + expf(-x->strength[row * PANEL]));
    for (int64_t i = 0; i < hidden; i++) out[i] += share * x->shared[row * stride + i];
}

void run_experts_down(const Model *m, const Layer *layer, const Scratch *s, int64_t rows, const Team *team) {
    const Mixture *mixture = layer->mixture;
    const Mixing x = mixing_of(m, layer, s, rows);
    const Expert *any = mixture->experts;
    const int64_t stride = padded(m->hidden);
    const float scale = (float)layer->residual_scale;
    SHARE(team, place, rows * mixture->top_k) finish_middle(m, &any->gate_up, &any->down, &x.summary, x.gated, place);
    if (mixture->shared_gate.outputs) {
        SHARE(team, row, rows) finish_middle(m, &layer->gate_up, &layer->down, &s->summary, s->gated, row);
    }
    meet(team);
    multiply_all(x.products + x.num_products[0], x.num_products[1], team);
    SHARE(team, row, rows) {
        float *made = s->input + row * stride, *out = s->hidden + row * stride;
        mix(mixture, &x, row, m->hidden, stride, made);
        if (layer->mlp_output_norm.weight) norm_row(made, &layer->mlp_output_norm, 0, m->hidden, made);
        for (int64_t i = 0; i < m->hidden; i++) out[i] += scale * made[i];
    }
    meet(team);
}
