/* Where the tokens of one layer lie: which KV cell holds which position. */
#ifndef LLMAAS_DENSITY_CELLS_H
#define LLMAAS_DENSITY_CELLS_H

#include "attention/density_worker.h"

/* A one-to-one map between positions and cells. Both directions are stored, so that no position has two cells and no
 * cell two positions. All zero at first. */
typedef struct llmaas_cell_map {
    int32_t * positions; /* by cell; -1: unknown */
    int64_t   n_cells;
    int32_t * cells;     /* by position; may be LLMAAS_CELL_UNKNOWN or LLMAAS_CELL_RESTORED */
    uint32_t  n_pos;
} llmaas_cell_map;

void llmaas_cell_map_free(llmaas_cell_map * map);

/* Make room for n_cells cells and n_pos positions. False if out of memory; the map stays usable. */
bool llmaas_cell_map_reserve(llmaas_cell_map * map, int64_t n_cells, uint32_t n_pos);

/* Return the position in a cell; -1 if unknown. */
int32_t llmaas_cell_map_position(const llmaas_cell_map * map, int64_t cell);

/* Copy out the cells of positions 0..n-1, or LLMAAS_CELL_... values. */
void llmaas_cell_map_read(const llmaas_cell_map * map, uint32_t n, int32_t * cells);

/* Place positions as llmaas_density_place() describes. */
void llmaas_cell_map_place(llmaas_cell_map * map, uint32_t n_kept, uint32_t n, const int32_t * cells);

/* Return whether a restored position's cell is still to be found. */
bool llmaas_cell_map_has_restored(const llmaas_cell_map * map);
/* Learn from a node which cells its tokens were stored in, and deduce the cells of restored tokens. */
void llmaas_cell_map_learn(llmaas_cell_map * map, const llmaas_attention * node);

#endif
