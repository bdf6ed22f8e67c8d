/* The body codecs: one block a plane of the cache, but for PLANES. Encoders have llmaas_block_bound() bytes of room. */
#ifndef LLMAAS_CHUNK_CODEC_H
#define LLMAAS_CHUNK_CODEC_H

#include "kv_tile.h"
#include "llmaas/chunk.h"

/* What a codec does with a plane of this type: INT8 and LOSSLESS know f16 only. */
llmaas_codec llmaas_block_codec(int codec, const llmaas_kv_plane * plane);

/* Largest block of n_tokens rows; exact for RAW and INT8. */
uint64_t llmaas_block_bound(llmaas_codec codec, const llmaas_kv_plane * plane, uint32_t n_tokens);

/* Bytes after the last block of a body that decoders may load without using them. */
uint64_t llmaas_body_pad(int codec);

/* The body of PLANES: the raw matrices, what every f16 matrix needs besides its planes (scales and offsets), then plane
 * after plane, each of all f16 matrices. */
typedef struct llmaas_embed_sizes {
    uint64_t raw, side, plane;
} llmaas_embed_sizes;

llmaas_embed_sizes llmaas_embed_measure(const llmaas_kv_geom * geom, uint32_t n_tokens);

/* Where the next matrix lies in such a body. */
typedef struct llmaas_embed_at {
    uint64_t raw, side, plane;
    uint64_t stride; /* from plane to plane */
    uint32_t bits;
} llmaas_embed_at;

llmaas_embed_at llmaas_embed_begin(const llmaas_embed_sizes * sizes, uint32_t bits);

/* One matrix, of any type. False when a value is beyond LLMAAS_EMBED_MAX. */
bool llmaas_embed_encode(const llmaas_kv_span * span, llmaas_embed_at * at, uint8_t * body);
void llmaas_embed_decode(const llmaas_kv_span * span, llmaas_embed_at * at, const uint8_t * body);

void llmaas_raw_encode(const llmaas_kv_span * span, uint8_t * dst);
void llmaas_raw_decode(const llmaas_kv_span * span, const uint8_t * src);

/* False when a value is not finite. */
bool llmaas_int8_encode(const llmaas_kv_span * span, uint8_t * dst);
void llmaas_int8_decode(const llmaas_kv_span * span, const uint8_t * src);

/* Encoding returns the block's bytes. Decoding returns the bytes taken out of left, 0 when they are corrupt;
 * LLMAAS_VAR_PAD bytes after left are readable. */
uint64_t llmaas_lossless_encode(const llmaas_kv_span * span, uint8_t * dst);
uint64_t llmaas_lossless_decode(const llmaas_kv_span * span, const uint8_t * src, uint64_t left);

#endif
