/* Biases of products: added where a product is read, so that the addition that mostly follows takes them along. */
#ifndef LLMAAS_BIASES_H
#define LLMAAS_BIASES_H

#include "graph.h"

enum { LLMAAS_MAX_OWED = 4 };

/* A tensor of the graph that still lacks its biases. */
typedef struct llmaas_owed {
    struct ggml_tensor * to;
    const float *        biases; /* [to->ne[0]] */
} llmaas_owed;

typedef struct llmaas_biases {
    llmaas_owed owed[LLMAAS_MAX_OWED];
    int         n_owed;
} llmaas_biases;

/* `to`, the last node that was appended, lacks `biases`, which must live until the graph is done. */
void llmaas_biases_owe(
    llmaas_biases * all, llmaas_graph * graph, const struct ggml_cgraph * original, struct ggml_tensor * to,
    const float * biases);

/* Before `node` is appended: what it reads gets what it lacks. True: a step stands for `node`, which is an addition. */
bool llmaas_biases_settle(
    llmaas_biases * all, llmaas_graph * graph, const struct ggml_cgraph * original, struct ggml_tensor * node);

/* After the last node. */
void llmaas_biases_end(llmaas_biases * all, llmaas_graph * graph);

#endif
