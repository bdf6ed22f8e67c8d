/* Chunks: n_tokens consecutive cells over all layers, K and V, in a self-describing payload.
 *
 * Payload: header of LLMAAS_CHUNK_HEADER bytes, then the body. Header, little endian:
 *   0 "LKVC"   4 u16 version   6 u16 header bytes   8 u8 codec   9 u8 bits   10 u16 n_tokens   12 u32 n_layer
 *   16 i32 type_k   20 i32 type_v   24 u64 geometry hash   32 u64 body bytes   40 u8[32] key
 *   72 u32[8] crc32c of the body's first 1..8 planes, with all before them   104 u64 bytes of a plane   112 zeros
 *   124 u32 crc32c of header bytes 0..123, followed by the body unless it has planes
 * Bits, and 72 to 111, are zeros in other codecs than PLANES. A PLANES payload may lack planes at its end: its size says
 * how many there are, and the header stays as it is. The body is token-major for K and V whatever the engine's orientation. docs: native/FORMAT.md. */
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
    LLMAAS_CODEC_RAW      = 0, /* rows as they are */
    LLMAAS_CODEC_LOSSLESS = 1, /* f16 rows: exponents entropy coded, exact for every bit pattern; other types raw */
    LLMAAS_CODEC_INT8     = 2, /* f16 rows: symmetric int8 in groups of 64 with an f16 scale; other types raw */
    LLMAAS_CODEC_PLANES   = 3, /* f16 rows: 1 to 8 bit planes, the most significant first; other types raw */
} llmaas_codec;

typedef struct llmaas_chunk_info {
    uint32_t codec;
    uint32_t n_tokens;
    uint32_t n_layer;
    int32_t  type_k;
    int32_t  type_v;
    uint64_t geom_hash;
    uint64_t body_bytes;
    uint32_t bits; /* planes in this payload; 0 in other codecs */
} llmaas_chunk_info;

/* Largest payload of n_tokens tokens (exact for RAW, INT8 and PLANES); 0 on a bad argument. bits: planes to keep, 1 to
 * LLMAAS_CHUNK_BITS; other codecs than PLANES ignore it. */
LLMAAS_API size_t llmaas_chunk_bound(const llmaas_kv_geom * geom, int codec, uint32_t bits, uint32_t n_tokens);

/* Encode cells [first_cell, first_cell + n_tokens) of a blob of n_cells cells whose layout was checked before.
 * INT8: |x - x'| <= scale/2 plus half an f16 ulp of x', where scale = min(amax/127 rounded up to f16, 515.5).
 * PLANES: |x - x'| <= scale/2^bits plus half an f16 ulp of x', where scale is at most 9/8 of the largest magnitude of 64
 * values (V), or 6/5 of half a channel's range and 1/14 of its centre's magnitude, whichever is more (K); see native/FORMAT.md.
 * EUNSUPPORTED: INT8 of a value that is not finite, PLANES of one beyond 32768; use LOSSLESS. ESPACE: cap too small, try llmaas_chunk_bound(). */
LLMAAS_API llmaas_status llmaas_chunk_encode(
    const llmaas_kv_geom * geom, int codec, uint32_t bits, const uint8_t * blob, size_t size, uint32_t n_cells,
    uint32_t first_cell, uint32_t n_tokens, const uint8_t * key, uint8_t * dst, size_t cap, size_t * n_written);

/* Parse an untrusted header; the body is not read. ECORRUPT unless size is exactly header + body, or
 * those of PLANES without some of the last planes. */
LLMAAS_API llmaas_status llmaas_chunk_peek(const uint8_t * payload, size_t size, llmaas_chunk_info * info);

/* Bytes of the longest beginning of a payload that is the same chunk with at most bits bits: PLANES with more lose planes,
 * all others stay whole. That beginning is a payload as it is. EINVAL: bits is not 1 to LLMAAS_CHUNK_BITS. */
LLMAAS_API llmaas_status llmaas_chunk_cut(const uint8_t * payload, size_t size, uint32_t bits, size_t * new_size);

/* Header, key (ESTALE when it differs; NULL: any key), then crc over everything (ECORRUPT). */
LLMAAS_API llmaas_status llmaas_chunk_verify(const uint8_t * payload, size_t size, const uint8_t * key);

/* Decode n payloads into the blob; payload i fills cells from first_cells[i] on. Other cells keep their bytes.
 * Every byte is bounds-checked, so a hostile payload yields an error, but crc is llmaas_chunk_verify's business.
 * *n_done: that many leading payloads are completely in place, also when an error is returned for the next one. */
LLMAAS_API llmaas_status llmaas_chunks_decode(
    const llmaas_kv_geom * geom, uint32_t n, const uint8_t * const * payloads, const uint64_t * sizes,
    const uint32_t * first_cells, uint8_t * blob, size_t blob_size, uint32_t n_cells, uint32_t * n_done);

/* Whether landings are those of a blob of n_cells cells: one for each K and V, in the blob's order. */
LLMAAS_API bool llmaas_landings_fit(
    const llmaas_kv_geom * geom, const llmaas_landing * landings, uint32_t n_landings, uint32_t n_cells);

/* Like llmaas_chunks_decode, but to where the blob's bytes belong. EINVAL: the landings do not fit. */
LLMAAS_API llmaas_status llmaas_chunks_land(
    const llmaas_kv_geom * geom, uint32_t n, const uint8_t * const * payloads, const uint64_t * sizes,
    const uint32_t * first_cells, const llmaas_landing * landings, uint32_t n_landings, uint32_t n_cells,
    uint32_t * n_done);

#endif
