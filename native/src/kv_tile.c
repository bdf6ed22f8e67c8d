#include "kv_tile.h"

#include "../kernels/bytes.h"

static uint64_t rows_offset(const llmaas_kv_span * span) { return (uint64_t) span->first_cell * span->plane.row; }

const uint8_t * llmaas_kv_span_rows(const llmaas_kv_span * span) {
    return span->plane.trans ? NULL : span->src + rows_offset(span);
}

uint8_t * llmaas_kv_span_rows_mut(const llmaas_kv_span * span) {
    return span->plane.trans ? NULL : span->dst + rows_offset(span);
}

static uint64_t rect_offset(const llmaas_kv_span * span, llmaas_kv_rect rect) {
    return (rect.c * span->n_cells + span->first_cell + rect.t) * span->plane.el;
}

static void transpose_u32(
    const uint8_t * src, size_t src_stride, size_t n_rows, size_t n_cols, uint8_t * dst, size_t dst_stride) {
    for (size_t r = 0; r < n_rows; ++r) {
        for (size_t c = 0; c < n_cols; ++c) {
            store_u32(dst + c * dst_stride + 4 * r, load_u32(src + r * src_stride + 4 * c));
        }
    }
}

void llmaas_kv_rect_load(const llmaas_kv_span * span, llmaas_kv_rect rect, uint8_t * rows, size_t stride) {
    const uint8_t * src        = span->src + rect_offset(span, rect);
    const size_t    src_stride = (size_t) span->n_cells * span->plane.el;
    if (span->plane.el == 2) {
        llmaas_k()->transpose(src, src_stride, rect.n_cols, rect.n_rows, rows, stride);
    } else {
        transpose_u32(src, src_stride, rect.n_cols, rect.n_rows, rows, stride);
    }
}

void llmaas_kv_rect_store(const llmaas_kv_span * span, llmaas_kv_rect rect, const uint8_t * rows, size_t stride) {
    uint8_t *    dst        = span->dst + rect_offset(span, rect);
    const size_t dst_stride = (size_t) span->n_cells * span->plane.el;
    if (span->plane.el == 2) {
        llmaas_k()->transpose(rows, stride, rect.n_rows, rect.n_cols, dst, dst_stride);
    } else {
        transpose_u32(rows, stride, rect.n_rows, rect.n_cols, dst, dst_stride);
    }
}

static uint32_t at_most(uint32_t n, uint32_t limit) { return n < limit ? n : limit; }

bool llmaas_kv_rect_next(const llmaas_kv_span * span, llmaas_kv_rect * rect) {
    const uint32_t n_cols = span->plane.row / span->plane.el;
    rect->t += rect->n_rows;
    if (rect->t == span->n_tokens) {
        rect->t  = 0;
        rect->c += rect->n_cols;
    }
    rect->n_rows = at_most(span->n_tokens - rect->t, LLMAAS_TILE);
    rect->n_cols = at_most(n_cols - rect->c, LLMAAS_GROUP);
    return rect->c < n_cols;
}
