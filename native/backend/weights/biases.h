/* Biases of products. A product's biases are added just before the product is read: the addition that usually follows
 * then adds them in the same pass. */
#ifndef LLMAAS_BIASES_H
#define LLMAAS_BIASES_H

#include "base/graph.h"

enum { LLMAAS_MAX_DEFERRED = 4 };

/* A tensor of the graph whose biases are still to be added. */
typedef struct llmaas_deferred_bias {
    struct ggml_tensor * to;
    const float *        biases; /* [to->ne[0]] */
} llmaas_deferred_bias;

typedef struct llmaas_biases {
    llmaas_deferred_bias deferred[LLMAAS_MAX_DEFERRED];
    int                  n_deferred;
} llmaas_biases;

/* Defer adding `biases` to `to`, the last node appended. `biases` must live until the graph is done. */
void llmaas_biases_defer(
    llmaas_biases * all, llmaas_graph * graph, const struct ggml_cgraph * original, struct ggml_tensor * to,
    const float * biases);

/* Add the deferred biases of everything that `node` reads, before `node` is appended. Return true if `node` is an
 * addition that the step with the biases replaces. */
bool llmaas_biases_fuse(
    llmaas_biases * all, llmaas_graph * graph, const struct ggml_cgraph * original, struct ggml_tensor * node);

/* Add all biases that are still deferred. Call after the last node. */
void llmaas_biases_flush(llmaas_biases * all, llmaas_graph * graph);

#endif
