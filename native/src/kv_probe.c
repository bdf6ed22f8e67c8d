/* Geometry of an untrusted engine blob. Every read goes through take(), which checks how much is left. */
#include "llmaas/kv.h"

#include "../kernels/bytes.h"
#include "kv_plane.h"

typedef struct cursor {
    const uint8_t * p;
    uint64_t left;
} cursor;

static const uint8_t * take(cursor * c, uint64_t n) {
    if (n > c->left) {
        return NULL;
    }
    const uint8_t * p = c->p;
    c->p    += n;
    c->left -= n;
    return p;
}

static llmaas_status probe_cells(cursor * c, llmaas_blob_info * info) {
    const uint8_t * head = take(c, LLMAAS_BLOB_HEAD);
    if (!head || load_u32(head) != LLMAAS_BLOB_MAGIC) {
        return LLMAAS_ECORRUPT;
    }
    info->n_cells = load_u32(head + 12);
    if (load_u32(head + 8) != 1 || info->n_cells == 0) {
        return LLMAAS_EUNSUPPORTED;
    }
    const uint8_t * cells = take(c, (uint64_t) info->n_cells * LLMAAS_BLOB_CELL);
    const uint8_t * tail  = take(c, LLMAAS_BLOB_TAIL);
    if (!cells || !tail) {
        return LLMAAS_ECORRUPT;
    }
    for (uint64_t i = 0; i < info->n_cells; ++i) {
        if (load_u32(cells + i * LLMAAS_BLOB_CELL + 4) != 1) {
            return LLMAAS_EUNSUPPORTED;
        }
    }
    info->v_trans = load_u32(tail);
    info->n_layer = load_u32(tail + 4);
    if (info->v_trans > 1 || info->n_layer < 1 || info->n_layer > LLMAAS_KV_MAX_LAYERS) {
        return LLMAAS_EUNSUPPORTED;
    }
    return LLMAAS_OK;
}

/* Parse the header and rows of one plane. */
static llmaas_status probe_plane(cursor * c, uint32_t n_cells, bool trans, int32_t * type, uint64_t * row) {
    const uint8_t * head = take(c, LLMAAS_BLOB_ROW_HEAD);
    if (!head) {
        return LLMAAS_ECORRUPT;
    }
    *type = load_i32(head);
    *row  = trans ? (uint64_t) load_u32(head + 4) * load_u32(head + 8) : load_u64(head + 4);
    if (trans && load_u32(head + 4) != llmaas_type_bytes(*type)) {
        return LLMAAS_EUNSUPPORTED;
    }
    if (*row > LLMAAS_KV_MAX_ROW) {
        return LLMAAS_EUNSUPPORTED;
    }
    return take(c, *row * n_cells) ? LLMAAS_OK : LLMAAS_ECORRUPT;
}

/* Parse the K or the V of layers [begin, end). */
static llmaas_status probe_planes(
    cursor * c, uint32_t n_cells, bool trans, uint32_t begin, uint32_t end, int32_t * type, uint64_t * rows) {
    for (uint32_t il = begin; il < end; ++il) {
        int32_t found = 0;
        const llmaas_status status = probe_plane(c, n_cells, trans, &found, &rows[il]);
        if (status != LLMAAS_OK) {
            return status;
        }
        if (il > 0 && found != *type) {
            return LLMAAS_EUNSUPPORTED;
        }
        *type = found;
    }
    return LLMAAS_OK;
}

static llmaas_status probe_layers(
    cursor * c, llmaas_blob_info * info, uint32_t begin, uint64_t * k_row, uint64_t * v_row) {
    llmaas_status status = probe_planes(c, info->n_cells, false, begin, info->n_layer, &info->type_k, k_row);
    if (status != LLMAAS_OK) {
        return status;
    }
    if (c->left == 0 && begin == 0) { /* latent attention: no layer has a V */
        info->type_v = info->type_k;
        memset(v_row, 0, info->n_layer * sizeof *v_row);
        return LLMAAS_OK;
    }
    return probe_planes(c, info->n_cells, info->v_trans != 0, begin, info->n_layer, &info->type_v, v_row);
}

/* Parse the start of a second cache with the same cells; anything else after the first cache is not supported. */
static llmaas_status probe_second(cursor * c, llmaas_blob_info * info, const uint8_t * first) {
    const uint64_t  bytes  = LLMAAS_BLOB_CACHE + (uint64_t) info->n_cells * LLMAAS_BLOB_CELL + 4;
    const uint8_t * second = take(c, bytes);
    const uint8_t * tail   = take(c, 4);
    if (!second || !tail || memcmp(first, second, (size_t) bytes) != 0) {
        return LLMAAS_EUNSUPPORTED;
    }
    const uint32_t n_layer = load_u32(tail);
    if (n_layer < 1 || n_layer > LLMAAS_KV_MAX_LAYERS - info->n_layer) {
        return LLMAAS_EUNSUPPORTED;
    }
    info->n_first  = info->n_layer;
    info->n_layer += n_layer;
    return LLMAAS_OK;
}

llmaas_status llmaas_blob_probe(
    const uint8_t * blob, size_t size, uint32_t max_layers, llmaas_blob_info * info, uint64_t * k_row, uint64_t * v_row) {
    if (!blob || !info || !k_row || !v_row) {
        return LLMAAS_EINVAL;
    }
    cursor c = {blob, size};
    *info = (llmaas_blob_info) {0};
    llmaas_status status = probe_cells(&c, info);
    for (uint32_t begin = 0; status == LLMAAS_OK;) {
        if (info->n_layer > max_layers) {
            return LLMAAS_ESPACE;
        }
        status = probe_layers(&c, info, begin, k_row, v_row);
        if (status != LLMAAS_OK || c.left == 0) {
            break;
        }
        if (begin != 0) {
            return LLMAAS_EUNSUPPORTED;
        }
        begin  = info->n_layer;
        status = probe_second(&c, info, blob + LLMAAS_BLOB_HEAD - LLMAAS_BLOB_CACHE);
    }
    if (status != LLMAAS_OK) {
        return status;
    }
    const llmaas_kv_geom geom = {
        info->n_layer, info->v_trans, info->type_k, info->type_v, k_row, v_row, info->n_first};
    return llmaas_kv_geom_check(&geom) == LLMAAS_OK ? LLMAAS_OK : LLMAAS_EUNSUPPORTED;
}
