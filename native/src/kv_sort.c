#include "llmaas/kv.h"

#include "../kernels/bytes.h"
#include "kv_plane.h"

#include <stdlib.h>

/* Cells that are adjacent both before and after sorting; one copy moves them. */
typedef struct run {
    uint32_t from;
    uint32_t n;
} run;

/* How the cells of one cache must move. Each array has room for all cells. */
typedef struct moves {
    uint32_t   n_cells;
    uint32_t   n_runs;
    uint64_t * keys;
    run *      runs;
    uint8_t *  scratch; /* as large as the largest plane, or the cells */
} moves;

static int compare_keys(const void * a, const void * b) {
    const uint64_t x = *(const uint64_t *) a, y = *(const uint64_t *) b;
    return (x > y) - (x < y);
}

static bool is_sorted(const uint8_t * cells, uint32_t n_cells) {
    for (uint32_t i = 1; i < n_cells; ++i) {
        const uint8_t * cell = cells + (size_t) i * LLMAAS_BLOB_CELL;
        if (load_i32(cell) < load_i32(cell - LLMAAS_BLOB_CELL)) {
            return false;
        }
    }
    return true;
}

/* Sort keys of position and index, then join adjacent indices. */
static void moves_find(moves * m, const uint8_t * cells) {
    for (uint32_t i = 0; i < m->n_cells; ++i) {
        const uint32_t pos = load_u32(cells + (size_t) i * LLMAAS_BLOB_CELL) ^ 0x80000000u; /* unsigned, in the same
                                                                                             * order */
        m->keys[i] = (uint64_t) pos << 32 | i;
    }
    qsort(m->keys, m->n_cells, sizeof *m->keys, compare_keys);
    m->n_runs = 0;
    for (uint32_t i = 0; i < m->n_cells; ++i) {
        const uint32_t from = (uint32_t) m->keys[i];
        if (i == 0 || from != (uint32_t) m->keys[i - 1] + 1) {
            m->runs[m->n_runs++] = (run) {from, 0};
        }
        m->runs[m->n_runs - 1].n++;
    }
}

/* Move n_cells items of `item` bytes each. */
static void moves_apply(const moves * m, uint8_t * items, size_t item) {
    uint8_t * out = m->scratch;
    for (uint32_t i = 0; i < m->n_runs; ++i) {
        const size_t n = m->runs[i].n * item;
        memcpy(out, items + m->runs[i].from * item, n);
        out += n;
    }
    memcpy(items, m->scratch, m->n_cells * item);
}

static void plane_sort(const moves * m, uint8_t * blob, const llmaas_kv_plane * plane) {
    const size_t   item  = plane->trans ? plane->el : plane->row;
    const uint32_t n     = plane->trans ? plane->row / plane->el : 1;
    uint8_t *      items = blob + plane->data;
    for (uint32_t i = 0; i < n; ++i, items += m->n_cells * item) {
        moves_apply(m, items, item);
    }
}

static size_t largest_row(const llmaas_kv_geom * geom) {
    uint64_t most = LLMAAS_BLOB_CELL;
    for (uint32_t il = 0; il < geom->n_layer; ++il) {
        most = geom->k_row[il] > most ? geom->k_row[il] : most;
        most = geom->v_row[il] > most ? geom->v_row[il] : most;
    }
    return (size_t) most;
}

/* Sort one of the caches: its cells, then its planes, which lie behind the cells and before end. */
static void cache_sort(moves * m, const llmaas_kv_geom * geom, uint8_t * blob, uint64_t cells, uint64_t end) {
    if (is_sorted(blob + cells, m->n_cells)) {
        return;
    }
    moves_find(m, blob + cells);
    moves_apply(m, blob + cells, LLMAAS_BLOB_CELL);
    llmaas_kv_walk  walk = llmaas_kv_walk_begin(geom, m->n_cells);
    llmaas_kv_plane plane;
    while (llmaas_kv_walk_next(&walk, &plane)) {
        if (plane.head > cells && plane.head < end) {
            plane_sort(m, blob, &plane);
        }
    }
}

/* Return where the second cache's cells begin; 0 if there is no second cache. */
static uint64_t second_cells(const llmaas_kv_geom * geom, uint32_t n_cells) {
    llmaas_kv_walk  walk = llmaas_kv_walk_begin(geom, n_cells);
    llmaas_kv_plane plane;
    while (llmaas_kv_walk_next(&walk, &plane)) {
    }
    return walk.second == 0 ? 0 : walk.second + LLMAAS_BLOB_CACHE;
}

llmaas_status llmaas_blob_sort(const llmaas_kv_geom * geom, uint8_t * blob, size_t size, uint32_t n_cells) {
    const llmaas_status status = llmaas_blob_check(geom, blob, size, NULL, n_cells);
    if (status != LLMAAS_OK) {
        return status;
    }
    const uint64_t second = second_cells(geom, n_cells);
    if (is_sorted(blob + LLMAAS_BLOB_HEAD, n_cells) && (second == 0 || is_sorted(blob + second, n_cells))) {
        return LLMAAS_OK;
    }
    moves m = {
        .n_cells = n_cells,
        .keys    = malloc(n_cells * sizeof *m.keys),
        .runs    = malloc(n_cells * sizeof *m.runs),
        .scratch = malloc(n_cells * largest_row(geom)), /* no more than the blob's size */
    };
    const bool has_room = m.keys && m.runs && m.scratch;
    if (has_room) {
        cache_sort(&m, geom, blob, LLMAAS_BLOB_HEAD, second == 0 ? size : second);
        if (second != 0) {
            cache_sort(&m, geom, blob, second, size);
        }
    }
    free(m.keys), free(m.runs), free(m.scratch);
    return has_room ? LLMAAS_OK : LLMAAS_EBUDGET;
}
