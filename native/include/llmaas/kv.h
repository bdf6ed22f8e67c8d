/* Geometry of an engine's KV cells, and the blob that llama_state_seq_get_data/set_data exchange for ONE sequence.
 *
 * Blob, little endian, no padding (llama.cpp src/llama-kv-cache.cpp, state_write):
 *   u32 magic, i32 seq_id, u32 n_stream (1), u32 n_cells
 *   n_cells × { i32 pos, u32 n_seq_id (1), i32 seq_id }
 *   u32 v_trans, u32 n_layer
 *   per layer:            { i32 type, u64 row_bytes } + n_cells rows
 *   per layer with a V:   { i32 type, u64 row_bytes } + n_cells rows, or, transposed,
 *                         { i32 type, u32 el_bytes, u32 n_embd } + n_embd × n_cells elements
 * A sliding-window model has two caches: one for the layers that see all cells, one for the others. Its blob repeats
 * everything from n_stream on, with the same cells, for the layers of the second cache.
 * Models with extended cells (M-RoPE, n-gram hashes) store more per cell. They are not supported; callers avoid
 * them. */
#ifndef LLMAAS_KV_H
#define LLMAAS_KV_H

#include "llmaas/base.h"

#define LLMAAS_KV_MAX_LAYERS 1024u
#define LLMAAS_KV_MAX_ROW    (1u << 20)
#define LLMAAS_BLOB_MAGIC    0xaf143cd8u

/* ggml_type ids that the core knows by name; a row of any other type is opaque bytes. */
enum {
    LLMAAS_TYPE_F32  = 0,
    LLMAAS_TYPE_F16  = 1,
    LLMAAS_TYPE_Q8_0 = 8,
    LLMAAS_TYPE_BF16 = 30,
};

typedef struct llmaas_kv_geom {
    uint32_t n_layer;       /* 1..LLMAAS_KV_MAX_LAYERS */
    uint32_t v_trans;       /* 1: the engine stores V transposed (no flash attention) */
    int32_t  type_k;        /* ggml_type ids, the same for all layers */
    int32_t  type_v;
    const uint64_t * k_row; /* [n_layer]: bytes of one token's K row, 2..LLMAAS_KV_MAX_ROW */
    const uint64_t * v_row; /* [n_layer]: bytes of one token's V row; 0: the layer has no V */
    uint32_t n_first;       /* layers in the first of two caches; 0: there is only one cache */
} llmaas_kv_geom;

typedef struct llmaas_blob_info {
    uint32_t n_layer;
    uint32_t v_trans;
    int32_t  type_k;
    int32_t  type_v;
    uint32_t n_cells;
    uint32_t n_first;
} llmaas_blob_info;

LLMAAS_API llmaas_status llmaas_kv_geom_check(const llmaas_kv_geom * geom);

/* Return a hash of layer count, types and row sizes; 0 on a bad geom. v_trans is left out because chunks do not depend
 * on it. */
LLMAAS_API uint64_t llmaas_kv_geom_hash(const llmaas_kv_geom * geom);

/* Return the bytes of a blob of n_cells >= 1 cells; 0 on a bad geom or on overflow. */
LLMAAS_API size_t llmaas_blob_size(const llmaas_kv_geom * geom, uint32_t n_cells);

/* Write every header (sequence id 0) and leave the rows unchanged. size must be llmaas_blob_size(). */
LLMAAS_API llmaas_status llmaas_blob_init(
    const llmaas_kv_geom * geom, uint8_t * blob, size_t size, const int32_t * pos, uint32_t n_cells);

/* Check that the blob has exactly this layout and these positions (any positions if pos is NULL). Sequence ids are
 * ignored. ECORRUPT otherwise. */
LLMAAS_API llmaas_status llmaas_blob_check(
    const llmaas_kv_geom * geom, const uint8_t * blob, size_t size, const int32_t * pos, uint32_t n_cells);

/* Sort the cells of an untrusted blob by position, in place; the engine lists cells in memory order. Cells at the same
 * position keep their order. ECORRUPT, with no change: the blob has another layout. EBUDGET, with no change: no memory
 * to move the cells of a layer through. A sorted blob needs no memory. */
LLMAAS_API llmaas_status llmaas_blob_sort(const llmaas_kv_geom * geom, uint8_t * blob, size_t size, uint32_t n_cells);

/* Parse an untrusted blob. k_row and v_row have room for max_layers values.
 * ECORRUPT: truncated or inconsistent. EUNSUPPORTED: a valid blob that chunks cannot hold. Such a blob has no cells,
 * several streams, or several sequence ids per cell; types that differ between layers, or only some layers without V;
 * more than two caches, or caches with different cells.
 * ESPACE: more than max_layers layers. */
LLMAAS_API llmaas_status llmaas_blob_probe(
    const uint8_t * blob, size_t size, uint32_t max_layers, llmaas_blob_info * info, uint64_t * k_row, uint64_t * v_row);

/* Copy out the n_cells positions of an untrusted blob that has exactly n_cells cells. */
LLMAAS_API llmaas_status llmaas_blob_positions(const uint8_t * blob, size_t size, int32_t * pos, uint32_t n_cells);

#endif
