/* Attention of rows with (visible, ancestors) masks over paged keys and values. */
#pragma once

#include "model.h"
#include "team.h"

/* One layer: queries in qkv [rows][stride], keys and values already in the store, results to mixed [rows][width].
   Called by every thread of a team, like `multiply`. */
void attend(const Model *model, int64_t layer, const Batch *batch, const Scratch *scratch, const float *qkv,
            int64_t stride, float *mixed, int64_t width, const Team *team);

/* Numbers of score memory that one thread needs for a batch with at most `num_keys` keys and `num_nodes` tree nodes. */
int64_t attention_scores(const Model *model, int64_t num_keys, int64_t num_nodes);
