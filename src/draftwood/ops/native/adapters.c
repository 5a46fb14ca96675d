#include "adapters.h"

#include "simd.h"

/* One order of summation for every row, whatever other rows there are. */
static float dot(const float *a, const float *b, int64_t size) {
    vf sum = splat(0);
    for (int64_t i = 0; i < size; i += LANES) sum = fma16(load(a + i), load(b + i), sum);
    return sum16(sum);
}

void adapt(const Batch *b, int64_t layer, enum Site site, const Matrix *w, const Rows *rows, Target *target,
           const Team *team) {
    const int64_t most = b->most_ranks, panels = w->outputs / PANEL;
    const LowRank *places = b->low_ranks + layer * SITES + site;
    const int64_t step = b->adapted_layers * SITES;
    SHARE(team, item, rows->rows * most) {
        const int64_t row = item / most, r = item % most, adapter = b->adapters[row];
        if (adapter < 0 || r >= places[adapter * step].rank) continue;
        b->shrunk[item] = dot(places[adapter * step].down + r * w->inputs, rows->values + row * rows->stride, w->inputs);
    }
    meet(team);
    SHARE(team, part, rows->rows * panels) {
        const int64_t row = part / panels, column = part % panels * PANEL, adapter = b->adapters[row];
        if (adapter < 0) continue;
        const LowRank *own = places + adapter * step;
        vf low = splat(0), high = splat(0);
        for (int64_t r = 0; r < own->rank; r++) {
            const vf factor = splat(b->shrunk[row * most + r]);
            low = fma16(factor, load(own->up + r * w->outputs + column), low);
            high = fma16(factor, load(own->up + r * w->outputs + column + LANES), high);
        }
        store(b->added + row * w->outputs + column, low);
        store(b->added + row * w->outputs + column + LANES, high);
    }
    meet(team);
    target->added = b->added;
    target->adapters = b->adapters;
}
