/* The graph names the cells of the tokens that it evaluates, but not those of restored tokens. llama.cpp fills the
 * lowest free cells first, so tokens restored in order of position lie in ascending cells. These are the visible cells
 * that are otherwise unknown, if there are as many as restored positions. */
#include "attention/density_cells.h"

#include <stdlib.h>
#include <string.h>

void llmaas_cell_map_free(llmaas_cell_map * map) {
    free(map->positions);
    free(map->cells);
    *map = (llmaas_cell_map){0};
}

/* Lengthen an array; new elements are -1. NULL if out of memory, and the old array stays. */
static int32_t * extend(int32_t * array, size_t n, size_t n_more) {
    int32_t * longer = realloc(array, (n + n_more) * sizeof *longer);
    if (longer) {
        memset(longer + n, 0xff, n_more * sizeof *longer);
    }
    return longer;
}

bool llmaas_cell_map_reserve(llmaas_cell_map * map, int64_t n_cells, uint32_t n_pos) {
    if (n_cells > map->n_cells) {
        int32_t * positions = extend(map->positions, (size_t) map->n_cells, (size_t) (n_cells - map->n_cells));
        if (!positions) {
            return false;
        }
        map->positions = positions;
        map->n_cells   = n_cells;
    }
    if (n_pos > map->n_pos) {
        int32_t * cells = extend(map->cells, map->n_pos, n_pos - map->n_pos);
        if (!cells) {
            return false;
        }
        map->cells = cells;
        map->n_pos = n_pos;
    }
    return true;
}

int32_t llmaas_cell_map_position(const llmaas_cell_map * map, int64_t cell) {
    return cell < map->n_cells ? map->positions[cell] : -1;
}

void llmaas_cell_map_read(const llmaas_cell_map * map, uint32_t n, int32_t * cells) {
    for (uint32_t i = 0; i < n; ++i) {
        cells[i] = i < map->n_pos ? map->cells[i] : LLMAAS_CELL_UNKNOWN;
    }
}

static void forget(llmaas_cell_map * map, uint32_t position) {
    if (map->cells[position] >= 0) {
        map->positions[map->cells[position]] = -1;
    }
    map->cells[position] = LLMAAS_CELL_UNKNOWN;
}

static void put(llmaas_cell_map * map, int64_t position, int64_t cell) {
    const bool is_counted = position >= 0 && position < map->n_pos;
    if (is_counted) {
        forget(map, (uint32_t) position);
    }
    if (cell >= map->n_cells) {
        return; /* the map has no room for it */
    }
    if (map->positions[cell] >= 0) {
        forget(map, (uint32_t) map->positions[cell]);
    }
    if (is_counted) {
        map->cells[position]  = (int32_t) cell;
        map->positions[cell] = (int32_t) position;
    }
}

void llmaas_cell_map_place(llmaas_cell_map * map, uint32_t n_kept, uint32_t n, const int32_t * cells) {
    for (uint32_t position = n_kept; position < map->n_pos; ++position) {
        forget(map, position);
    }
    for (uint32_t position = n_kept; position < n && position < map->n_pos; ++position) {
        const int32_t cell = cells ? cells[position] : LLMAAS_CELL_RESTORED;
        if (cell >= 0) {
            put(map, position, cell);
        } else {
            map->cells[position] = cell == LLMAAS_CELL_RESTORED ? cell : LLMAAS_CELL_UNKNOWN;
        }
    }
}

/* -- restored positions -------------------------------------------------------------------------------------------- */

static uint32_t count_restored(const llmaas_cell_map * map, uint32_t end) {
    uint32_t n = 0;
    for (uint32_t position = 0; position < end; ++position) {
        n += map->cells[position] == LLMAAS_CELL_RESTORED;
    }
    return n;
}

bool llmaas_cell_map_has_restored(const llmaas_cell_map * map) { return count_restored(map, map->n_pos) > 0; }

static bool is_restored(const llmaas_cell_map * map, const llmaas_attention * node, int64_t row, int64_t cell) {
    return map->positions[cell] < 0 && llmaas_attention_sees(node, row, cell);
}

/* Find the cells of the restored positions before `end`, given a row that sees them all. If the number of cells
 * differs, something else happened, and the positions become unknown. */
static void find_restored(llmaas_cell_map * map, const llmaas_attention * node, int64_t row, uint32_t end) {
    const int64_t  end_cell   = node->first_cell + node->n_kv;
    const int64_t  n_cells    = end_cell < map->n_cells ? end_cell : map->n_cells;
    const uint32_t n_restored = count_restored(map, end);
    int64_t        n_found    = 0;
    for (int64_t cell = 0; n_restored && cell < n_cells; ++cell) {
        n_found += is_restored(map, node, row, cell);
    }
    int64_t cell = 0;
    for (uint32_t position = 0; n_restored && position < end; ++position) {
        if (map->cells[position] != LLMAAS_CELL_RESTORED) {
            continue;
        }
        map->cells[position] = LLMAAS_CELL_UNKNOWN;
        if (n_found == n_restored) {
            while (!is_restored(map, node, row, cell)) {
                ++cell;
            }
            put(map, position, cell);
        }
    }
}

void llmaas_cell_map_learn(llmaas_cell_map * map, const llmaas_attention * node) {
    int64_t first = map->n_pos;
    int64_t row   = 0;
    for (int64_t token = 0; token < node->n_tokens; ++token) {
        const int64_t position = llmaas_attention_position(node->view, token);
        put(map, position, ((const int64_t *) node->view->cells->data)[token]);
        first = position < first ? position : first;
        row   = position > llmaas_attention_position(node->view, row) ? token : row;
    }
    find_restored(map, node, row, first > 0 ? (uint32_t) first : 0);
}
