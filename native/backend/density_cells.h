/* Where the tokens of one layer lie: which KV cell holds which position. */
#ifndef LLMAAS_DENSITY_CELLS_H
#define LLMAAS_DENSITY_CELLS_H

#include "density_worker.h"

/* Kept both ways, so that neither a position nor a cell is ever taken for two. All zero at first. */
typedef struct llmaas_cell_map {
    int32_t * positions; /* by cell; -1: none that is known */
    int64_t   n_cells;
    int32_t * cells;     /* by position; or LLMAAS_CELL_UNKNOWN, LLMAAS_CELL_RESTORED */
    uint32_t  n_pos;
} llmaas_cell_map;

void llmaas_cell_map_free(llmaas_cell_map * map);

/* Have room for this many. False: out of memory; the map is as it was. */
bool llmaas_cell_map_reserve(llmaas_cell_map * map, int64_t n_cells, uint32_t n_pos);

/* The position in a cell; -1: none that is known. */
int32_t llmaas_cell_map_position(const llmaas_cell_map * map, int64_t cell);

/* Copy out, for positions 0..n-1: the cell, or LLMAAS_CELL_... */
void llmaas_cell_map_read(const llmaas_cell_map * map, uint32_t n, int32_t * cells);

/* See llmaas_density_place. */
void llmaas_cell_map_place(llmaas_cell_map * map, uint32_t n_kept, uint32_t n, const int32_t * cells);

/* Whether some position waits to be found among the cells that a query sees. */
bool llmaas_cell_map_has_restored(const llmaas_cell_map * map);
/* Learn from a node: where its tokens went, then where restored ones must be. */
void llmaas_cell_map_learn(llmaas_cell_map * map, const llmaas_attention * node);

#endif
