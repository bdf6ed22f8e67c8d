/* Copies between token-major rows and the blob, whatever the plane's orientation. */
#ifndef LLMAAS_KV_TILE_H
#define LLMAAS_KV_TILE_H

#include "../kernels/kernels.h"
#include "kv_plane.h"

/* Consecutive cells of one plane. */
typedef struct llmaas_kv_span {
    llmaas_kv_plane plane;
    const uint8_t * src;   /* the plane's rows, for reading */
    uint8_t * dst;         /* the same, for writing; NULL if the blob is read only */
    uint64_t  n_cells;
    uint32_t  first_cell;
    uint32_t  n_tokens;
    bool      past_cache; /* dst is far larger than the caches and read much later */
} llmaas_kv_span;

/* Rows [t, t + n_rows) × columns [c, c + n_cols) of the span, in elements. */
typedef struct llmaas_kv_rect {
    uint32_t t, c, n_rows, n_cols;
} llmaas_kv_rect;

enum { LLMAAS_TILE_BYTES = LLMAAS_TILE * LLMAAS_GROUP * 4 };

/* Return the span as contiguous token-major rows; NULL if it is transposed. */
const uint8_t * llmaas_kv_span_rows(const llmaas_kv_span * span);
uint8_t * llmaas_kv_span_rows_mut(const llmaas_kv_span * span);

/* For transposed spans only: gather a rect into rows of `stride` bytes, or scatter rows into it. */
void llmaas_kv_rect_load(const llmaas_kv_span * span, llmaas_kv_rect rect, uint8_t * rows, size_t stride);
void llmaas_kv_rect_store(const llmaas_kv_span * span, llmaas_kv_rect rect, const uint8_t * rows, size_t stride);

/* Step through a span tile by tile, in stream order: for each 64 columns, each 16 rows. Start with a zeroed rect. False
 * after the last tile. */
bool llmaas_kv_rect_next(const llmaas_kv_span * span, llmaas_kv_rect * rect);

#endif
