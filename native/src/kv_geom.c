#include "llmaas/kv.h"

#include "kv_plane.h"

uint32_t llmaas_type_bytes(int32_t type) {
    switch (type) {
        case LLMAAS_TYPE_F32:  return 4;
        case LLMAAS_TYPE_F16:
        case LLMAAS_TYPE_BF16: return 2;
        case LLMAAS_TYPE_Q8_0: return 34;
        default:               return 1;
    }
}

static bool row_ok(uint64_t row, int32_t type) {
    return row >= 2 && row <= LLMAAS_KV_MAX_ROW && row % llmaas_type_bytes(type) == 0;
}

llmaas_status llmaas_kv_geom_check(const llmaas_kv_geom * geom) {
    if (!geom || !geom->k_row || !geom->v_row || geom->n_layer < 1 || geom->n_layer > LLMAAS_KV_MAX_LAYERS ||
        geom->v_trans > 1 || (geom->n_first != 0 && geom->n_first >= geom->n_layer)) {
        return LLMAAS_EINVAL;
    }
    const uint32_t v_bytes = llmaas_type_bytes(geom->type_v);
    if (geom->v_trans && v_bytes != 2 && v_bytes != 4) {
        return LLMAAS_EINVAL; /* the engine never transposes quantized values */
    }
    for (uint32_t il = 0; il < geom->n_layer; ++il) {
        if (!row_ok(geom->k_row[il], geom->type_k) || (geom->v_row[il] != 0 && !row_ok(geom->v_row[il], geom->type_v))) {
            return LLMAAS_EINVAL;
        }
    }
    return LLMAAS_OK;
}

static uint64_t mix(uint64_t hash, uint64_t value) {
    for (unsigned i = 0; i < 8; ++i) {
        hash = (hash ^ (value >> (8 * i) & 0xff)) * 0x100000001b3ull; /* FNV-1a */
    }
    return hash;
}

uint64_t llmaas_kv_geom_hash(const llmaas_kv_geom * geom) {
    if (llmaas_kv_geom_check(geom) != LLMAAS_OK) {
        return 0;
    }
    uint64_t hash = 0xcbf29ce484222325ull;
    hash = mix(hash, geom->n_layer);
    hash = mix(hash, (uint32_t) geom->type_k);
    hash = mix(hash, (uint32_t) geom->type_v);
    for (uint32_t il = 0; il < geom->n_layer; ++il) {
        hash = mix(hash, geom->k_row[il]);
        hash = mix(hash, geom->v_row[il]);
    }
    if (geom->n_first != 0) {
        hash = mix(hash, geom->n_first);
    }
    return hash ? hash : 1;
}

uint32_t llmaas_kv_first(const llmaas_kv_geom * geom) {
    return geom->n_first ? geom->n_first : geom->n_layer;
}

llmaas_kv_walk llmaas_kv_walk_begin(const llmaas_kv_geom * geom, uint32_t n_cells) {
    return (llmaas_kv_walk) {
        .geom    = geom,
        .n_cells = n_cells,
        .offset  = LLMAAS_BLOB_HEAD + (uint64_t) n_cells * LLMAAS_BLOB_CELL + LLMAAS_BLOB_TAIL,
        .second  = 0,
        .next    = 0,
    };
}

bool llmaas_kv_walk_next(llmaas_kv_walk * walk, llmaas_kv_plane * plane) {
    const llmaas_kv_geom * geom    = walk->geom;
    const uint32_t         n_first = llmaas_kv_first(geom);
    for (; walk->next < 2 * geom->n_layer; ++walk->next) {
        const bool     is_first = walk->next < 2 * n_first;
        const uint32_t begin    = is_first ? 0 : n_first;
        const uint32_t n        = is_first ? n_first : geom->n_layer - n_first;
        const uint32_t at       = walk->next - 2 * begin;
        const bool     is_v     = at >= n;
        const uint64_t row      = is_v ? geom->v_row[begin + at - n] : geom->k_row[begin + at];
        if (!is_first && walk->second == 0) {
            walk->second = walk->offset;
            walk->offset += LLMAAS_BLOB_CACHE + walk->n_cells * LLMAAS_BLOB_CELL + LLMAAS_BLOB_TAIL;
        }
        if (row == 0) {
            continue;
        }
        plane->type  = is_v ? geom->type_v : geom->type_k;
        plane->row   = (uint32_t) row;
        plane->is_v  = is_v;
        plane->trans = is_v && geom->v_trans;
        plane->head  = walk->offset;
        plane->data  = walk->offset + LLMAAS_BLOB_ROW_HEAD;
        const uint32_t bytes = llmaas_type_bytes(plane->type);
        plane->el    = bytes == 2 || bytes == 4 ? bytes : 1;
        walk->offset = plane->data + walk->n_cells * row;
        ++walk->next;
        return true;
    }
    return false;
}
