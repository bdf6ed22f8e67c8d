/* RAW and INT8 blocks. INT8: scales of all rows (f16, one per 64 columns; the last group may be shorter), then rows of
 * int8. */
#include "../kernels/bytes.h"
#include "chunk_codec.h"

llmaas_codec llmaas_block_codec(int codec, const llmaas_kv_plane * plane) {
    return plane->type == LLMAAS_TYPE_F16 ? (llmaas_codec) codec : LLMAAS_CODEC_RAW;
}

static uint64_t n_groups(const llmaas_kv_plane * plane) { return (plane->row / 2 + LLMAAS_GROUP - 1) / LLMAAS_GROUP; }

uint64_t llmaas_block_bound(llmaas_codec codec, const llmaas_kv_plane * plane, uint32_t n_tokens) {
    switch (codec) {
        case LLMAAS_CODEC_INT8:     return (n_groups(plane) * 2 + plane->row / 2) * n_tokens;
        case LLMAAS_CODEC_LOSSLESS: return 8 + (uint64_t) plane->row * n_tokens;
        default:                    return (uint64_t) plane->row * n_tokens;
    }
}

uint64_t llmaas_body_pad(int codec) { return codec == LLMAAS_CODEC_LOSSLESS ? LLMAAS_VAR_PAD : 0; }

void llmaas_raw_encode(const llmaas_kv_span * span, uint8_t * dst) {
    const size_t row = span->plane.row;
    if (!span->plane.trans) {
        memcpy(dst, llmaas_kv_span_rows(span), row * span->n_tokens);
        return;
    }
    for (llmaas_kv_rect rect = {0}; llmaas_kv_rect_next(span, &rect);) {
        llmaas_kv_rect_load(span, rect, dst + rect.t * row + rect.c * span->plane.el, row);
    }
}

void llmaas_raw_decode(const llmaas_kv_span * span, const uint8_t * src) {
    const size_t row = span->plane.row;
    if (!span->plane.trans) {
        memcpy(llmaas_kv_span_rows_mut(span), src, row * span->n_tokens);
        return;
    }
    for (llmaas_kv_rect rect = {0}; llmaas_kv_rect_next(span, &rect);) {
        llmaas_kv_rect_store(span, rect, src + rect.t * row + rect.c * span->plane.el, row);
    }
}

bool llmaas_int8_encode(const llmaas_kv_span * span, uint8_t * dst) {
    const llmaas_kernels * k = llmaas_k();
    const size_t n_cols = span->plane.row / 2;
    const size_t ns     = (size_t) n_groups(&span->plane) * 2;
    uint8_t *    q      = dst + ns * span->n_tokens;
    if (!span->plane.trans) {
        return k->int8_encode(llmaas_kv_span_rows(span), span->plane.row, span->n_tokens, n_cols, dst, ns, q, n_cols);
    }
    _Alignas(64) uint8_t rows[LLMAAS_TILE_BYTES];
    const size_t stride = LLMAAS_GROUP * 2;
    for (llmaas_kv_rect rect = {0}; llmaas_kv_rect_next(span, &rect);) {
        llmaas_kv_rect_load(span, rect, rows, stride);
        uint8_t * scales = dst + rect.t * ns + rect.c / LLMAAS_GROUP * 2;
        if (!k->int8_encode(rows, stride, rect.n_rows, rect.n_cols, scales, ns, q + rect.t * n_cols + rect.c, n_cols)) {
            return false;
        }
    }
    return true;
}

void llmaas_int8_decode(const llmaas_kv_span * span, const uint8_t * src) {
    const llmaas_kernels * k = llmaas_k();
    const size_t    n_cols = span->plane.row / 2;
    const size_t    ns     = (size_t) n_groups(&span->plane) * 2;
    const uint8_t * q      = src + ns * span->n_tokens;
    if (!span->plane.trans) {
        k->int8_decode(src, ns, q, n_cols, span->n_tokens, n_cols, llmaas_kv_span_rows_mut(span), span->plane.row);
        return;
    }
    _Alignas(64) uint8_t rows[LLMAAS_TILE_BYTES];
    const size_t stride = LLMAAS_GROUP * 2;
    for (llmaas_kv_rect rect = {0}; llmaas_kv_rect_next(span, &rect);) {
        const uint8_t * scales = src + rect.t * ns + rect.c / LLMAAS_GROUP * 2;
        k->int8_decode(scales, ns, q + rect.t * n_cols + rect.c, n_cols, rect.n_rows, rect.n_cols, rows, stride);
        llmaas_kv_rect_store(span, rect, rows, stride);
    }
}
