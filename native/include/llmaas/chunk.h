/* Chunks: n_tokens consecutive cells over all layers, K and V, in a self-describing payload.
 *
 * Payload: header of LLMAAS_CHUNK_HEADER bytes, then the body. Header, little endian:
 *   0 "LKVC"   4 u16 version   6 u16 header bytes   8 u8 codec   9 u8 0   10 u16 n_tokens   12 u32 n_layer
 *   16 i32 type_k   20 i32 type_v   24 u64 geometry hash   32 u64 body bytes   40 u8[32] key   72 zeros
 *   124 u32 crc32c of header bytes 0..123 followed by the body
 * The body is token-major for K and V whatever the engine's orientation. docs: native/FORMAT.md. */
#ifndef LLMAAS_CHUNK_H
#define LLMAAS_CHUNK_H

#include "llmaas/kv.h"

#define LLMAAS_CHUNK_HEADER     128u
#define LLMAAS_CHUNK_VERSION    1u
#define LLMAAS_CHUNK_MAX_TOKENS 256u
#define LLMAAS_CHUNK_KEY        32u

typedef enum llmaas_codec {
    LLMAAS_CODEC_RAW      = 0, /* rows as they are */
    LLMAAS_CODEC_LOSSLESS = 1, /* f16 rows: exponents entropy coded, exact for every bit pattern; other types raw */
    LLMAAS_CODEC_INT8     = 2, /* f16 rows: symmetric int8 in groups of 64 with an f16 scale; other types raw */
} llmaas_codec;

typedef struct llmaas_chunk_info {
    uint32_t codec;
    uint32_t n_tokens;
    uint32_t n_layer;
    int32_t  type_k;
    int32_t  type_v;
    uint64_t geom_hash;
    uint64_t body_bytes;
} llmaas_chunk_info;

/* Largest payload of n_tokens tokens (exact for RAW and INT8); 0 on a bad argument. */
LLMAAS_API size_t llmaas_chunk_bound(const llmaas_kv_geom * geom, int codec, uint32_t n_tokens);

/* Encode cells [first_cell, first_cell + n_tokens) of a blob of n_cells cells whose layout was checked before.
 * INT8: |x - x'| <= scale/2 plus half an f16 ulp of x', where scale = min(amax/127 rounded up to f16, 515.5).
 * EUNSUPPORTED: INT8 of a value that is not finite; use LOSSLESS. ESPACE: cap too small, try llmaas_chunk_bound(). */
LLMAAS_API llmaas_status llmaas_chunk_encode(
    const llmaas_kv_geom * geom, int codec, const uint8_t * blob, size_t size, uint32_t n_cells, uint32_t first_cell,
    uint32_t n_tokens, const uint8_t * key, uint8_t * dst, size_t cap, size_t * n_written);

/* Parse an untrusted header; the body is not read. ECORRUPT unless size is exactly header + body. */
LLMAAS_API llmaas_status llmaas_chunk_peek(const uint8_t * payload, size_t size, llmaas_chunk_info * info);

/* Header, key (ESTALE when it differs; NULL: any key), then crc over everything (ECORRUPT). */
LLMAAS_API llmaas_status llmaas_chunk_verify(const uint8_t * payload, size_t size, const uint8_t * key);

/* Decode n payloads into the blob; payload i fills cells from first_cells[i] on. Other cells keep their bytes.
 * Every byte is bounds-checked, so a hostile payload yields an error, but crc is llmaas_chunk_verify's business.
 * *n_done: that many leading payloads are completely in place, also when an error is returned for the next one. */
LLMAAS_API llmaas_status llmaas_chunks_decode(
    const llmaas_kv_geom * geom, uint32_t n, const uint8_t * const * payloads, const uint64_t * sizes,
    const uint32_t * first_cells, uint8_t * blob, size_t blob_size, uint32_t n_cells, uint32_t * n_done);

#endif
