/* The body of PLANES, matrix by matrix and tile by tile. Whole tiles are coded in place. If a row is not a multiple of
 * 64, its last columns go through a tile padded with zeros, and only the bytes of existing columns are kept. */
#include "../kernels/bytes.h"
#include "chunk_codec.h"

enum {
    SIDE   = 2 * LLMAAS_GROUP, /* most side bytes of one tile */
    STRIDE = LLMAAS_TILE * 8,  /* bytes of one plane of one tile */
    ROW    = 2 * LLMAAS_GROUP, /* bytes of a tile's row */
};

static uint64_t side_bytes(bool is_v, uint64_t n_rows, uint64_t n_cols) { return is_v ? n_rows : 2 * n_cols; }
static uint64_t plane_row(uint64_t n_cols) { return (n_cols + 7) / 8; }

static void measure_plane(const llmaas_kv_plane * plane, uint32_t n_tokens, llmaas_embed_sizes * sizes) {
    if (plane->type != LLMAAS_TYPE_F16) {
        sizes->raw += (uint64_t) plane->row * n_tokens;
        return;
    }
    const uint64_t n_cols  = plane->row / 2;
    const uint64_t n_tiles = plane->is_v ? (n_cols + LLMAAS_GROUP - 1) / LLMAAS_GROUP : (n_tokens + LLMAAS_TILE - 1) / LLMAAS_TILE;
    sizes->side  += n_tiles * side_bytes(plane->is_v, n_tokens, n_cols);
    sizes->plane += n_tokens * plane_row(n_cols);
}

llmaas_embed_sizes llmaas_embed_measure(const llmaas_kv_geom * geom, uint32_t n_tokens) {
    llmaas_embed_sizes sizes = {0};
    llmaas_kv_walk     walk  = llmaas_kv_walk_begin(geom, n_tokens);
    llmaas_kv_plane    plane;
    while (llmaas_kv_walk_next(&walk, &plane)) {
        measure_plane(&plane, n_tokens, &sizes);
    }
    return sizes;
}

llmaas_embed_at llmaas_embed_begin(const llmaas_embed_sizes * sizes, uint32_t bits) {
    return (llmaas_embed_at) {0, sizes->raw, sizes->raw + sizes->side, sizes->plane, bits};
}

/* Move the offsets past a tile. */
static void advance(const llmaas_kv_span * span, llmaas_kv_rect rect, llmaas_embed_at * at) {
    at->side  += side_bytes(span->plane.is_v, rect.n_rows, rect.n_cols);
    at->plane += rect.n_rows * plane_row(rect.n_cols);
}

/* Return the tile as token-major rows of *stride bytes: in place in the blob, or copied into buffer. */
static const uint8_t * tile_load(const llmaas_kv_span * span, llmaas_kv_rect rect, uint8_t * buffer, size_t * stride) {
    const bool whole = rect.n_cols == LLMAAS_GROUP;
    if (!whole) {
        memset(buffer, 0, LLMAAS_TILE * ROW);
    }
    *stride = ROW;
    if (span->plane.trans) {
        llmaas_kv_rect_load(span, rect, buffer, ROW);
        return buffer;
    }
    const uint8_t * rows = llmaas_kv_span_rows(span) + (size_t) rect.t * span->plane.row + 2 * rect.c;
    if (whole) {
        *stride = span->plane.row;
        return rows;
    }
    for (size_t r = 0; r < rect.n_rows; ++r) {
        memcpy(buffer + r * ROW, rows + r * span->plane.row, 2 * rect.n_cols);
    }
    return buffer;
}

static bool encode_narrow(const uint8_t * rows, llmaas_kv_rect rect, bool is_v, const llmaas_embed_at * at, uint8_t * body) {
    uint8_t      side[SIDE], planes[LLMAAS_BITS * STRIDE];
    const size_t bytes = (size_t) plane_row(rect.n_cols);
    if (!llmaas_k()->embed_encode(rows, ROW, rect.n_rows, !is_v, side, planes, STRIDE, at->bits)) {
        return false;
    }
    memcpy(body + at->side, side, is_v ? rect.n_rows : rect.n_cols);
    if (!is_v) {
        memcpy(body + at->side + rect.n_cols, side + LLMAAS_GROUP, rect.n_cols);
    }
    for (size_t p = 0; p < at->bits; ++p) {
        for (size_t r = 0; r < rect.n_rows; ++r) {
            memcpy(body + at->plane + p * at->stride + r * bytes, planes + p * STRIDE + 8 * r, bytes);
        }
    }
    return true;
}

bool llmaas_embed_encode(const llmaas_kv_span * span, llmaas_embed_at * at, uint8_t * body) {
    if (span->plane.type != LLMAAS_TYPE_F16) {
        llmaas_raw_encode(span, body + at->raw);
        at->raw += (uint64_t) span->plane.row * span->n_tokens;
        return true;
    }
    const llmaas_kernels * k    = llmaas_k();
    const bool             is_v = span->plane.is_v;
    _Alignas(64) uint8_t   buffer[LLMAAS_TILE * ROW];
    for (llmaas_kv_rect rect = {0}; llmaas_kv_rect_next(span, &rect); advance(span, rect, at)) {
        size_t          stride;
        const uint8_t * rows  = tile_load(span, rect, buffer, &stride);
        const bool      whole = rect.n_cols == LLMAAS_GROUP;
        if (whole ? !k->embed_encode(rows, stride, rect.n_rows, !is_v, body + at->side, body + at->plane,
                                     (size_t) at->stride, at->bits)
                  : !encode_narrow(rows, rect, is_v, at, body)) {
            return false;
        }
    }
    return true;
}

static void decode_narrow(const uint8_t * body, const llmaas_embed_at * at, bool is_v, llmaas_kv_rect rect, uint8_t * rows) {
    uint8_t      side[SIDE] = {0}, planes[LLMAAS_BITS * STRIDE] = {0};
    const size_t bytes      = (size_t) plane_row(rect.n_cols);
    memcpy(side, body + at->side, is_v ? rect.n_rows : rect.n_cols);
    if (!is_v) {
        memcpy(side + LLMAAS_GROUP, body + at->side + rect.n_cols, rect.n_cols);
    }
    for (size_t p = 0; p < at->bits; ++p) {
        for (size_t r = 0; r < rect.n_rows; ++r) {
            memcpy(planes + p * STRIDE + 8 * r, body + at->plane + p * at->stride + r * bytes, bytes);
        }
    }
    llmaas_k()->embed_decode(side, !is_v, planes, STRIDE, at->bits, rect.n_rows, rows, ROW, false);
}

static void tile_store(const llmaas_kv_span * span, llmaas_kv_rect rect, const uint8_t * rows) {
    if (span->plane.trans) {
        llmaas_kv_rect_store(span, rect, rows, ROW);
        return;
    }
    uint8_t * dst = llmaas_kv_span_rows_mut(span) + (size_t) rect.t * span->plane.row + 2 * rect.c;
    for (size_t r = 0; r < rect.n_rows; ++r) {
        memcpy(dst + r * span->plane.row, rows + r * ROW, 2 * rect.n_cols);
    }
}

void llmaas_embed_decode(const llmaas_kv_span * span, llmaas_embed_at * at, const uint8_t * body) {
    if (span->plane.type != LLMAAS_TYPE_F16) {
        llmaas_raw_decode(span, body + at->raw);
        at->raw += (uint64_t) span->plane.row * span->n_tokens;
        return;
    }
    const llmaas_kernels * k    = llmaas_k();
    const bool             is_v = span->plane.is_v;
    _Alignas(64) uint8_t   buffer[LLMAAS_TILE * ROW];
    for (llmaas_kv_rect rect = {0}; llmaas_kv_rect_next(span, &rect); advance(span, rect, at)) {
        const uint8_t * side   = body + at->side;
        const uint8_t * planes = body + at->plane;
        if (rect.n_cols < LLMAAS_GROUP) {
            decode_narrow(body, at, is_v, rect, buffer);
        } else if (span->plane.trans) {
            k->embed_decode(side, !is_v, planes, (size_t) at->stride, at->bits, rect.n_rows, buffer, ROW, false);
        } else {
            uint8_t * dst = llmaas_kv_span_rows_mut(span) + (size_t) rect.t * span->plane.row + 2 * rect.c;
            k->embed_decode(side, !is_v, planes, (size_t) at->stride, at->bits, rect.n_rows, dst, span->plane.row,
                            span->past_cache);
            continue;
        }
        tile_store(span, rect, buffer);
    }
}
