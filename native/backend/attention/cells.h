/* The memory of a context's KV cells: how much of it is in use, and giving it back. */
#ifndef LLMAAS_CELLS_H
#define LLMAAS_CELLS_H

#include "base/abi.h"
#include "llmaas/engine.h"

typedef struct llmaas_cells {
    ggml_backend_buffer_t buffer;  /* holds all cells; NULL: not seen yet */
    bool                  is_whole; /* no other buffer holding cells was seen */
    uint32_t              n_cells;
    uint32_t              n_graph;   /* the graphs that follow reach cells 0..n_graph-1 */
    uint32_t              n_reached; /* cells reached since the last release */
    uint32_t              n_counted; /* n_reached when n_resident was counted */
    uint64_t              n_resident;
} llmaas_cells;

/* Learn from a new graph of the context where its cells are, and how many of them the graph reaches. */
void llmaas_cells_notice(llmaas_cells * cells, const struct ggml_cgraph * graph, bool is_creation);
/* Record that a graph is computed, which reaches n_graph cells. */
void llmaas_cells_reach(llmaas_cells * cells);

llmaas_cell_memory llmaas_cells_memory(llmaas_cells * cells);
llmaas_status      llmaas_cells_release(llmaas_cells * cells);

/* Implement llmaas_engine_land (landing.c). */
llmaas_status llmaas_cells_land(llmaas_cells * cells, llmaas_set_data set_data, void * ctx, int32_t sequence,
                                const uint8_t * blob, uint64_t n_bytes, llmaas_landing * landings, uint32_t n_landings);

#endif
