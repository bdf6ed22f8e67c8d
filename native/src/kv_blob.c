#include "llmaas/kv.h"

#include "../kernels/bytes.h"
#include "kv_plane.h"

/* Return the bytes of a blob. They cannot overflow 64 bits: 2^32 cells × 2^20 bytes × 2^11 planes, plus headers of a
 * few bytes each. */
static uint64_t blob_bytes(const llmaas_kv_geom * geom, uint32_t n_cells) {
    llmaas_kv_walk  walk = llmaas_kv_walk_begin(geom, n_cells);
    llmaas_kv_plane plane;
    while (llmaas_kv_walk_next(&walk, &plane)) {
    }
    return walk.offset;
}

size_t llmaas_blob_size(const llmaas_kv_geom * geom, uint32_t n_cells) {
    if (n_cells == 0 || llmaas_kv_geom_check(geom) != LLMAAS_OK) {
        return 0;
    }
    const uint64_t size = blob_bytes(geom, n_cells);
    return size > SIZE_MAX / 2 ? 0 : (size_t) size;
}

static void row_head_write(uint8_t * p, const llmaas_kv_plane * plane) {
    store_i32(p, plane->type);
    if (plane->trans) {
        store_u32(p + 4, plane->el);
        store_u32(p + 8, plane->row / plane->el);
    } else {
        store_u64(p + 4, plane->row);
    }
}

/* Write everything that precedes a cache's rows. */
static void cache_write(
    uint8_t * p, const llmaas_kv_geom * geom, uint32_t n_layer, const int32_t * pos, uint32_t n_cells) {
    store_u32(p, 1);
    store_u32(p + 4, n_cells);
    uint8_t * cell = p + LLMAAS_BLOB_CACHE;
    for (uint32_t i = 0; i < n_cells; ++i, cell += LLMAAS_BLOB_CELL) {
        store_i32(cell, pos[i]);
        store_u32(cell + 4, 1);
        store_i32(cell + 8, 0);
    }
    store_u32(cell, geom->v_trans);
    store_u32(cell + 4, n_layer);
}

static bool cache_ok(
    const uint8_t * p, const llmaas_kv_geom * geom, uint32_t n_layer, const int32_t * pos, uint32_t n_cells) {
    bool            ok   = load_u32(p) == 1 && load_u32(p + 4) == n_cells;
    const uint8_t * cell = p + LLMAAS_BLOB_CACHE;
    for (uint32_t i = 0; i < n_cells; ++i, cell += LLMAAS_BLOB_CELL) {
        ok &= (!pos || load_i32(cell) == pos[i]) && load_u32(cell + 4) == 1;
    }
    return ok && load_u32(cell) == geom->v_trans && load_u32(cell + 4) == n_layer;
}

llmaas_status llmaas_blob_init(
    const llmaas_kv_geom * geom, uint8_t * blob, size_t size, const int32_t * pos, uint32_t n_cells) {
    const size_t expected = llmaas_blob_size(geom, n_cells);
    if (!blob || !pos || expected == 0) {
        return LLMAAS_EINVAL;
    }
    if (size != expected) {
        return LLMAAS_ESPACE;
    }
    store_u32(blob, LLMAAS_BLOB_MAGIC);
    store_i32(blob + 4, 0);
    cache_write(blob + 8, geom, llmaas_kv_first(geom), pos, n_cells);
    llmaas_kv_walk  walk = llmaas_kv_walk_begin(geom, n_cells);
    llmaas_kv_plane plane;
    while (llmaas_kv_walk_next(&walk, &plane)) {
        row_head_write(blob + plane.head, &plane);
    }
    if (walk.second != 0) {
        cache_write(blob + walk.second, geom, geom->n_layer - geom->n_first, pos, n_cells);
    }
    return LLMAAS_OK;
}

llmaas_status llmaas_blob_check(
    const llmaas_kv_geom * geom, const uint8_t * blob, size_t size, const int32_t * pos, uint32_t n_cells) {
    const size_t expected = llmaas_blob_size(geom, n_cells);
    if (!blob || expected == 0) {
        return LLMAAS_EINVAL;
    }
    if (size != expected || load_u32(blob) != LLMAAS_BLOB_MAGIC ||
        !cache_ok(blob + 8, geom, llmaas_kv_first(geom), pos, n_cells)) {
        return LLMAAS_ECORRUPT;
    }
    llmaas_kv_walk  walk = llmaas_kv_walk_begin(geom, n_cells);
    llmaas_kv_plane plane;
    while (llmaas_kv_walk_next(&walk, &plane)) {
        uint8_t head[LLMAAS_BLOB_ROW_HEAD];
        row_head_write(head, &plane);
        if (memcmp(blob + plane.head, head, sizeof head) != 0) {
            return LLMAAS_ECORRUPT;
        }
    }
    if (walk.second != 0 && !cache_ok(blob + walk.second, geom, geom->n_layer - geom->n_first, pos, n_cells)) {
        return LLMAAS_ECORRUPT;
    }
    return LLMAAS_OK;
}

llmaas_status llmaas_blob_positions(const uint8_t * blob, size_t size, int32_t * pos, uint32_t n_cells) {
    if (!blob || !pos) {
        return LLMAAS_EINVAL;
    }
    if (size < LLMAAS_BLOB_HEAD || load_u32(blob) != LLMAAS_BLOB_MAGIC || load_u32(blob + 12) != n_cells ||
        (size - LLMAAS_BLOB_HEAD) / LLMAAS_BLOB_CELL < n_cells) {
        return LLMAAS_ECORRUPT;
    }
    for (uint32_t i = 0; i < n_cells; ++i) {
        pos[i] = load_i32(blob + LLMAAS_BLOB_HEAD + (size_t) i * LLMAAS_BLOB_CELL);
    }
    return LLMAAS_OK;
}
