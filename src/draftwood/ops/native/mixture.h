/* Mixtures of experts. Rows that a router gives to the same expert are multiplied together, all experts of a layer at
   once; what a row gets does not depend on which rows those are.

   Called by every thread of a team, in this order: the router's product to `routes_target`, `choose_experts`,
   `run_experts_up` and `run_experts_down`, which adds to the residual stream. */
#pragma once

#include "forward.h"

/* Bytes of `Scratch.mixture` for so many rows. */
int64_t mixture_bytes(const Model *model, int64_t rows);

/* Where the router's logits go. */
Target routes_target(const Model *m, const Layer *layer, const Scratch *s, int64_t rows);

/* Which experts each row gets, and how much of each. */
void choose_experts(const Model *m, const Layer *layer, const Scratch *s, int64_t rows, const Team *team);

/* Write down the choices of a layer, [rows][mixtures][top_k]. */
void tell_routes(const Model *m, int64_t index, const Scratch *s, int64_t rows, int64_t *routes, const Team *team);

/* The same without looking at the logits: experts in turn. */
void take_turns(const Model *m, const Layer *layer, const Scratch *s, int64_t rows, const Team *team);

/* The middle of all MLPs; `values` is what they read. */
void run_experts_up(const Model *m, const Layer *layer, const float *values, const Scratch *s, int64_t rows,
                    const Team *team);
void run_experts_down(const Model *m, const Layer *layer, const Scratch *s, int64_t rows, const Team *team);
