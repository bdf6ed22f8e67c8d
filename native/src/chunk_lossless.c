/* LOSSLESS blocks: u32 block bytes, u8 mode, u8 n_symbols, u16 0, then raw rows (mode 0) or bit planes (mode 1).
 * native/FORMAT.md describes the planes. A block is never larger than its raw form. */
#include "../kernels/bytes.h"
#include "chunk_codec.h"

enum { BLOCK_HEAD = 8, MODE_RAW = 0, MODE_PLANES = 1 };

typedef struct layout {
    uint64_t n_low, n_fixed, var_bits;
    uint32_t n_symbols;
    uint8_t  symbols[LLMAAS_SYMBOLS]; /* most frequent first */
} layout;

static void layout_streams(layout * l, const llmaas_kv_span * span) {
    const uint64_t n_cols = span->plane.row / 2;
    l->n_low   = n_cols * span->n_tokens;
    l->n_fixed = (n_cols + LLMAAS_GROUP - 1) / LLMAAS_GROUP * span->n_tokens * LLMAAS_FIXED;
}

static uint64_t layout_bytes(const layout * l) {
    return BLOCK_HEAD + l->n_symbols + l->n_low + l->n_fixed + (l->var_bits + 7) / 8;
}

static void count_exponents(const llmaas_kv_span * span, uint32_t * counts) {
    const llmaas_kernels * k = llmaas_k();
    const uint8_t * rows = llmaas_kv_span_rows(span);
    if (rows) {
        k->exponents(rows, span->plane.row, span->n_tokens, span->plane.row / 2, counts);
        return;
    }
    const size_t n_cols = (size_t) span->n_cells; /* counts do not depend on the orientation */
    k->exponents(span->src + 2 * (size_t) span->first_cell, 2 * n_cols, span->plane.row / 2, span->n_tokens, counts);
}

/* Rank the exponents by frequency (insertion sort of 32), and add up the bits of the variable levels. */
static void layout_ranks(layout * l, uint32_t * counts) {
    l->n_symbols = 0;
    for (uint8_t e = 0; e < LLMAAS_SYMBOLS; ++e) {
        if (counts[e] == 0) {
            continue;
        }
        uint32_t at = l->n_symbols++;
        for (; at > 0 && counts[l->symbols[at - 1]] < counts[e]; --at) {
            l->symbols[at] = l->symbols[at - 1];
        }
        l->symbols[at] = e;
    }
    l->var_bits = 0; /* the fixed planes hold the first level; rank r takes two bits in each of r / 3 further levels */
    for (uint32_t r = 3; r < l->n_symbols; ++r) {
        l->var_bits += 2ull * (r / 3) * counts[l->symbols[r]];
    }
}

static void write_planes(const llmaas_kv_span * span, const layout * l, uint8_t * dst) {
    const llmaas_kernels * k = llmaas_k();
    llmaas_planes_writer w = {.low = dst + l->n_symbols};
    memcpy(dst, l->symbols, l->n_symbols);
    w.fixed = w.low + l->n_low;
    w.var   = w.fixed + l->n_fixed;
    for (uint8_t r = 0; r < l->n_symbols; ++r) {
        w.ranks[l->symbols[r]] = r;
    }
    _Alignas(64) uint8_t tile[LLMAAS_TILE_BYTES];
    const uint8_t * rows = llmaas_kv_span_rows(span);
    for (llmaas_kv_rect rect = {0}; llmaas_kv_rect_next(span, &rect);) {
        if (rows) {
            k->planes_encode(&w, rows + (size_t) rect.t * span->plane.row + 2 * (size_t) rect.c, span->plane.row,
                             rect.n_rows, rect.n_cols);
        } else {
            llmaas_kv_rect_load(span, rect, tile, LLMAAS_GROUP * 2);
            k->planes_encode(&w, tile, LLMAAS_GROUP * 2, rect.n_rows, rect.n_cols);
        }
    }
    memcpy(w.var, &w.acc, (w.n_acc + 7) / 8);
}

uint64_t llmaas_lossless_encode(const llmaas_kv_span * span, uint8_t * dst) {
    uint32_t counts[LLMAAS_SYMBOLS] = {0};
    layout   l;
    count_exponents(span, counts);
    layout_streams(&l, span);
    layout_ranks(&l, counts);
    const uint64_t raw = BLOCK_HEAD + (uint64_t) span->plane.row * span->n_tokens;
    const bool     pack  = layout_bytes(&l) < raw;
    const uint64_t bytes = pack ? layout_bytes(&l) : raw;
    store_u32(dst, (uint32_t) bytes); /* fits: at most 256 rows of 1 MiB */
    store_u32(dst + 4, pack ? MODE_PLANES | l.n_symbols << 8 : MODE_RAW);
    if (pack) {
        write_planes(span, &l, dst + BLOCK_HEAD);
    } else {
        llmaas_raw_encode(span, dst + BLOCK_HEAD);
    }
    return bytes;
}

static bool read_planes(const llmaas_kv_span * span, layout * l, const uint8_t * src, uint64_t bytes) {
    const llmaas_kernels * k = llmaas_k();
    layout_streams(l, span);
    l->var_bits = 0;
    if (l->n_symbols < 1 || l->n_symbols > LLMAAS_SYMBOLS || bytes < layout_bytes(l)) {
        return false;
    }
    llmaas_planes_reader r = {.low = src + BLOCK_HEAD + l->n_symbols};
    for (uint32_t i = 0; i < l->n_symbols; ++i) {
        if (src[BLOCK_HEAD + i] >= LLMAAS_SYMBOLS) {
            return false;
        }
        r.symbols[i] = (uint8_t) (src[BLOCK_HEAD + i] << 2);
    }
    r.fixed = r.low + l->n_low;
    r.var   = r.fixed + l->n_fixed;
    r.end   = (bytes - layout_bytes(l)) * 8;
    _Alignas(64) uint8_t tile[LLMAAS_TILE_BYTES];
    uint8_t * rows = llmaas_kv_span_rows_mut(span);
    for (llmaas_kv_rect rect = {0}; llmaas_kv_rect_next(span, &rect);) {
        uint8_t *    dst    = rows ? rows + (size_t) rect.t * span->plane.row + 2 * (size_t) rect.c : tile;
        const size_t stride = rows ? span->plane.row : LLMAAS_GROUP * 2;
        if (!k->planes_decode(&r, rect.n_rows, rect.n_cols, dst, stride)) {
            return false;
        }
        if (!rows) {
            llmaas_kv_rect_store(span, rect, tile, stride);
        }
    }
    return r.end - r.pos < 8;
}

uint64_t llmaas_lossless_decode(const llmaas_kv_span * span, const uint8_t * src, uint64_t left) {
    if (left < BLOCK_HEAD) {
        return 0;
    }
    const uint64_t bytes = load_u32(src);
    const uint32_t mode  = src[4];
    layout l = {.n_symbols = src[5]};
    if (bytes < BLOCK_HEAD || bytes > left || load_u16(src + 6) != 0) {
        return 0;
    }
    if (mode == MODE_RAW) {
        if (bytes != BLOCK_HEAD + (uint64_t) span->plane.row * span->n_tokens) {
            return 0;
        }
        llmaas_raw_decode(span, src + BLOCK_HEAD);
        return bytes;
    }
    return mode == MODE_PLANES && read_planes(span, &l, src, bytes) ? bytes : 0;
}
