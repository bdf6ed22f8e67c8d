/* A small model's attention: cells with tokens' keys, nodes built by ggml, and the expected density. */
#ifndef LLMAAS_ATTENTION_MODEL_H
#define LLMAAS_ATTENTION_MODEL_H

#include "tap_threads.h"

enum { N_LAYER = 3, N_CELLS = 83, N_POS = 64, MAX_D = 256 };

typedef struct shape {
    enum ggml_type type; /* of the keys */
    int            d, n_head, n_head_kv; /* d <= MAX_D */
    float          softcap, max_bias;
    bool           has_sinks;
    bool           is_soft_max; /* no flash attention: ggml-cpu computes the probabilities */
    enum ggml_type mask_type;
    bool           has_head_masks;
    bool           has_no_holes; /* a query sees every position before its own */
    uint32_t       row_step, layer_step;
    int            n_threads;
    double         tolerance;
} shape;

typedef struct model {
    shape            of;
    llmaas_density * density;
    uint8_t *        keys[N_LAYER];              /* [N_CELLS][n_head_kv][d] of `type` */
    int              resident[N_LAYER][N_CELLS]; /* position of the token in a cell; -1: empty */
    bool             is_noted[N_LAYER][N_CELLS]; /* the tap was subscribed when it was stored */
    double           sums[N_POS];
    uint64_t         counts[N_POS];
} model;

model * model_new(shape of);
void    model_free(model * m);

/* Evaluate tokens at positions from.. in one graph, and add up what the tap should count. */
void evaluate(model * m, int from, int n_tokens);
/* Remove the tokens at positions from.. from all cells. */
void forget_from(model * m, int position);
/* Put tokens at positions from..end-1 into the lowest free cells, without a graph. With is_told, the tap should learn
 * where they are. */
void restore(model * m, int from, int end, bool is_told);
/* Tell the tap where positions kept..n-1 are or will be; it should restart these at 0. */
void place(model * m, uint32_t kept, uint32_t n, const int32_t * cells);
/* Replace the context in the cells by another one: by the context that was replaced before, if any. */
void switch_contexts(model * m);
/* Check the tap's sums and counts against the expected ones. */
void check_density(const model * m);

/* Return what the mask adds to a score, for attention_reference.c. */
float     mask_at(const model * m, int layer, int cell, int position, int head);
uint8_t * key_at(const model * m, int layer, int cell, int head);

/* Add the expected result of a query under one head. */
void expect_row(model * m, int layer, int position, int head, const float * query, const float * sinks, uint32_t weight);

#endif
