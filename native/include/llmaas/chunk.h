/* Chunks: n_tokens consecutive KV cells, K and V of all layers, in a self-describing payload.
 *
 * Payload: header of LLMAAS_CHUNK_HEADER bytes, then the body. Header, little endian:
 *   0 "LKVC"   4 u16 version   6 u16 header bytes   8 u8 codec   9 u8 bits   10 u16 n_tokens   12 u32 n_layer
 *   16 i32 type_k   20 i32 type_v   24 u64 geometry hash   32 u64 body bytes   40 u8[32] key
 *   72 u32[8] crc32c of the body's first 1..8 planes, each sum including all earlier planes
 *   104 u64 bytes per plane   112 zeros
 *   124 u32 crc32c of header bytes 0..123, and of the body too unless the codec is PLANES
 * Byte 9 and bytes 72 to 111 are zero unless the codec is PLANES. A PLANES payload may lack planes at its end: its size
 * tells how many it has, and the header stays unchanged. The body is token-major for K and V, whatever the engine's
 * orientation. See native/FORMAT.md. */
#ifndef LLMAAS_CHUNK_H
#define LLMAAS_CHUNK_H

#include "llmaas/kv.h"
#include "llmaas/landing.h"

#include <stdbool.h>

#define LLMAAS_CHUNK_HEADER     128u
#define LLMAAS_CHUNK_VERSION    1u
#define LLMAAS_CHUNK_MAX_TOKENS 256u
#define LLMAAS_CHUNK_KEY        32u
#define LLMAAS_CHUNK_BITS       8u

typedef enum llmaas_codec {
    LLMAAS_CODEC_RAW      = 0, /* rows, unchanged */
    LLMAAS_CODEC_LOSSLESS = 1, /* f16 rows: exponents entropy coded, exact for every bit pattern; other types: raw */
    LLMAAS_CODEC_INT8     = 2, /* f16 rows: symmetric int8 in groups of 64 with an f16 scale; other types: raw */
    LLMAAS_CODEC_PLANES   = 3, /* f16 rows: 1 to 8 bit planes, the most significant first; other types: raw */
} llmaas_codec;

typedef struct llmaas_chunk_info {
    uint32_t codec;
    uint32_t n_tokens;
    uint32_t n_layer;
    int32_t  type_k;
    int32_t  type_v;
    uint64_t geom_hash;
    uint64_t body_bytes;
    uint32_t bits; /* planes in this payload; 0 for other codecs */
} llmaas_chunk_info;

/* Return the size in bytes of the largest payload of n_tokens tokens: exact for RAW, INT8 and PLANES, 0 on a bad
 * argument. bits: planes to keep, 1 to LLMAAS_CHUNK_BITS; codecs other than PLANES ignore it. */
LLMAAS_API size_t llmaas_chunk_bound(const llmaas_kv_geom * geom, int codec, uint32_t bits, uint32_t n_tokens);

/* Encode cells [first_cell, first_cell + n_tokens) of a blob of n_cells cells. The caller has checked the blob's
 * layout.
 * INT8 error bound: |x - x'| <= scale/2 plus half an f16 ulp of x', where scale = min(amax/127 rounded up to f16,
 * 515.5).
 * PLANES error bound: |x - x'| <= scale/2^bits plus half an f16 ulp of x'. For V, scale is at most 9/8 of the largest
 * magnitude of 64 values. For K, scale is at most the larger of 6/5 of half a channel's range and 1/14 of its center's
 * magnitude; see native/FORMAT.md.
 * EUNSUPPORTED: a value is not finite (INT8) or beyond 32768 (PLANES); use LOSSLESS. ESPACE: cap is too small; ask
 * llmaas_chunk_bound(). */
LLMAAS_API llmaas_status llmaas_chunk_encode(
    const llmaas_kv_geom * geom, int codec, uint32_t bits, const uint8_t * blob, size_t size, uint32_t n_cells,
    uint32_t first_cell, uint32_t n_tokens, const uint8_t * key, uint8_t * dst, size_t cap, size_t * n_written);

/* Parse an untrusted header; do not read the body. ECORRUPT unless size is exactly header + body; a PLANES payload may
 * lack some of its last planes. EUNSUPPORTED: another version of the format. */
LLMAAS_API llmaas_status llmaas_chunk_peek(const uint8_t * payload, size_t size, llmaas_chunk_info * info);

/* Compute the size of the longest prefix of a payload that is the same chunk with at most `bits` bits. PLANES payloads
 * with more bits lose planes; all others stay whole. The prefix is itself a valid payload. EINVAL: bits is not 1 to
 * LLMAAS_CHUNK_BITS. */
LLMAAS_API llmaas_status llmaas_chunk_cut(const uint8_t * payload, size_t size, uint32_t bits, size_t * new_size);

/* Check the header, then the key (ESTALE if it differs; NULL accepts any key), then the CRC of everything
 * (ECORRUPT). */
LLMAAS_API llmaas_status llmaas_chunk_verify(const uint8_t * payload, size_t size, const uint8_t * key);

/* Decode n payloads into the blob; payload i fills cells from first_cells[i] on. Other cells keep their bytes.
 * Every access is bounds-checked, so a hostile payload yields an error. CRCs are not checked; call llmaas_chunk_verify.
 * *n_done: leading payloads that are completely in place, also when the next one returns an error. */
LLMAAS_API llmaas_status llmaas_chunks_decode(
    const llmaas_kv_geom * geom, uint32_t n, const uint8_t * const * payloads, const uint64_t * sizes,
    const uint32_t * first_cells, uint8_t * blob, size_t blob_size, uint32_t n_cells, uint32_t * n_done);

/* Return whether the landings are those of a blob of n_cells cells: one for each K and V, in the blob's order. */
LLMAAS_API bool llmaas_landings_fit(
    const llmaas_kv_geom * geom, const llmaas_landing * landings, uint32_t n_landings, uint32_t n_cells);

/* Decode like llmaas_chunks_decode, but straight into the places that the landings name. EINVAL: the landings do not
 * fit. */
LLMAAS_API llmaas_status llmaas_chunks_land(
    const llmaas_kv_geom * geom, uint32_t n, const uint8_t * const * payloads, const uint64_t * sizes,
    const uint32_t * first_cells, const llmaas_landing * landings, uint32_t n_landings, uint32_t n_cells,
    uint32_t * n_done);

#endif
