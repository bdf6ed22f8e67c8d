/* Finding the nodes that taps want, and inserting their steps into a graph. */
#ifndef LLMAAS_TAPS_H
#define LLMAAS_TAPS_H

#include "base/graph.h"
#include "llmaas/tap.h"

#define LLMAAS_MAX_TAPS 16

typedef struct llmaas_taps {
    llmaas_tap taps[LLMAAS_MAX_TAPS];
    int        last_layer[LLMAAS_MAX_TAPS]; /* layer of the node that the tap saw last: a graph's layers ascend */
    int        n_taps;
    /* Tensors seen on the way through a graph, which may come in several parts. */
    const struct ggml_tensor * cells;
    const struct ggml_tensor * positions;
} llmaas_taps;

llmaas_status llmaas_taps_add(llmaas_taps * taps, const llmaas_tap * tap);
llmaas_status llmaas_taps_remove(llmaas_taps * taps, const void * user);

/* Take note of a node that tells where tokens go: their positions or their cells. */
void llmaas_taps_notice(llmaas_taps * taps, const struct ggml_tensor * node);
/* Mark such a tensor as an output, before memory is assigned: taps read it later, so it must not be overwritten. */
void llmaas_taps_keep(const struct ggml_tensor * node);
/* Forget the tensors of the last graph. */
void llmaas_taps_forget(llmaas_taps * taps);
/* Add the steps of taps that want the states that a weight's product reads. Return the number of taps served. */
uint32_t llmaas_taps_states(
    llmaas_taps * taps, llmaas_graph * graph, llmaas_tap_kind kind, int layer, const struct ggml_tensor * states);
/* Add the steps of taps that want attention: before a FLASH_ATTN_EXT node, after a SOFT_MAX node. Return the number of
 * taps served; 0 for any other node. */
uint32_t llmaas_taps_attention(
    llmaas_taps * taps, llmaas_graph * graph, const struct ggml_tensor * node, int64_t first_cell);

#endif
