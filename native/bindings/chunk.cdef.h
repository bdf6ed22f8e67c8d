#define LLMAAS_CHUNK_HEADER ...
#define LLMAAS_CHUNK_VERSION ...
#define LLMAAS_CHUNK_MAX_TOKENS ...
#define LLMAAS_CHUNK_BITS ...

typedef struct llmaas_chunk_info {
    uint32_t codec;
    uint32_t n_tokens;
    uint32_t n_layer;
    int32_t  type_k;
    int32_t  type_v;
    uint64_t geom_hash;
    uint64_t body_bytes;
    uint32_t bits;
} llmaas_chunk_info;

size_t llmaas_chunk_bound(const llmaas_kv_geom * geom, int codec, uint32_t bits, uint32_t n_tokens);
llmaas_status llmaas_chunk_encode(
    const llmaas_kv_geom * geom, int codec, uint32_t bits, const uint8_t * blob, size_t size, uint32_t n_cells,
    uint32_t first_cell, uint32_t n_tokens, const uint8_t * key, uint8_t * dst, size_t cap, size_t * n_written);
llmaas_status llmaas_chunk_peek(const uint8_t * payload, size_t size, llmaas_chunk_info * info);
llmaas_status llmaas_chunk_cut(const uint8_t * payload, size_t size, uint32_t bits, size_t * new_size);
llmaas_status llmaas_chunk_verify(const uint8_t * payload, size_t size, const uint8_t * key);
llmaas_status llmaas_chunks_decode(
    const llmaas_kv_geom * geom, uint32_t n, const uint8_t * const * payloads, const uint64_t * sizes,
    const uint32_t * first_cells, uint8_t * blob, size_t blob_size, uint32_t n_cells, uint32_t * n_done);

bool llmaas_landings_fit(
    const llmaas_kv_geom * geom, const llmaas_landing * landings, uint32_t n_landings, uint32_t n_cells);
llmaas_status llmaas_chunks_land(
    const llmaas_kv_geom * geom, uint32_t n, const uint8_t * const * payloads, const uint64_t * sizes,
    const uint32_t * first_cells, const llmaas_landing * landings, uint32_t n_landings, uint32_t n_cells,
    uint32_t * n_done);
