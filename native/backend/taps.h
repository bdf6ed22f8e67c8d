/* Finding the nodes that taps want, and putting their steps into a graph. */
#ifndef LLMAAS_TAPS_H
#define LLMAAS_TAPS_H

#include "graph.h"
#include "llmaas/tap.h"

#define LLMAAS_MAX_TAPS 16

typedef struct llmaas_taps {
    llmaas_tap taps[LLMAAS_MAX_TAPS];
    int        last_layer[LLMAAS_MAX_TAPS]; /* of the node that the tap saw last: a graph's layers ascend */
    int        n_taps;
    /* Seen on the way through a graph; it may come in pieces. */
    const struct ggml_tensor * cells;
    const struct ggml_tensor * positions;
} llmaas_taps;

llmaas_status llmaas_taps_add(llmaas_taps * taps, const llmaas_tap * tap);
llmaas_status llmaas_taps_remove(llmaas_taps * taps, const void * user);

/* Take notice of a node that says where tokens go: their positions, or their cells. */
void llmaas_taps_notice(llmaas_taps * taps, const struct ggml_tensor * node);
/* Before a graph's memory is laid out: that tensor must not be overwritten after its last use, as taps read it later. */
void llmaas_taps_keep(const struct ggml_tensor * node);
/* Another graph follows. */
void llmaas_taps_forget(llmaas_taps * taps);
/* Serve the taps that want the states which a weight's product reads; how many. */
uint32_t llmaas_taps_states(
    llmaas_taps * taps, llmaas_graph * graph, llmaas_tap_kind kind, int layer, const struct ggml_tensor * states);
/* Likewise attention: before a FLASH_ATTN_EXT node, after a SOFT_MAX node. 0 for any other node. */
uint32_t llmaas_taps_attention(
    llmaas_taps * taps, llmaas_graph * graph, const struct ggml_tensor * node, int64_t first_cell);

#endif
