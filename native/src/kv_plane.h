/* A plane is the K or the V of one layer: the unit in which blob and body are walked. K of all layers of a cache comes
 * first. */
#ifndef LLMAAS_KV_PLANE_H
#define LLMAAS_KV_PLANE_H

#include "llmaas/kv.h"

#include <stdbool.h>

enum {
    LLMAAS_BLOB_HEAD     = 16, /* magic, seq_id, n_stream, n_cells */
    LLMAAS_BLOB_CACHE    = 8,  /* n_stream, n_cells: the start of each cache */
    LLMAAS_BLOB_CELL     = 12, /* pos, n_seq_id, seq_id */
    LLMAAS_BLOB_TAIL     = 8,  /* v_trans, n_layer, after the cells */
    LLMAAS_BLOB_ROW_HEAD = 12, /* type and row size, in both orientations */
};

typedef struct llmaas_kv_plane {
    int32_t  type;
    uint32_t row;   /* bytes per token */
    uint32_t el;    /* bytes per element: 2 or 4; 1 for opaque rows */
    bool     is_v;
    bool     trans;
    uint64_t head;  /* offset of the plane's header in the blob */
    uint64_t data;  /* offset of the plane's rows */
} llmaas_kv_plane;

typedef struct llmaas_kv_walk {
    const llmaas_kv_geom * geom;
    uint64_t n_cells;
    uint64_t offset;
    uint64_t second; /* offset of the second cache's n_stream; 0 until the walk reaches it */
    uint32_t next;   /* 0..2 × n_layer */
} llmaas_kv_walk;

/* Return the bytes of a block of this type, which for types of 2 or 4 bytes is an element; 1 for opaque types. */
uint32_t llmaas_type_bytes(int32_t type);

/* Return the number of layers of the first cache. */
uint32_t llmaas_kv_first(const llmaas_kv_geom * geom);

llmaas_kv_walk llmaas_kv_walk_begin(const llmaas_kv_geom * geom, uint32_t n_cells);

/* Get the next plane that exists. False after the last one; walk->offset is then the size of the blob. */
bool llmaas_kv_walk_next(llmaas_kv_walk * walk, llmaas_kv_plane * plane);

#endif
