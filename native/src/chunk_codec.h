/* The body codecs. All but PLANES write one block per plane of the cache. Encoders need llmaas_block_bound() bytes of
 * room. */
#ifndef LLMAAS_CHUNK_CODEC_H
#define LLMAAS_CHUNK_CODEC_H

#include "kv_tile.h"
#include "llmaas/chunk.h"

/* Return the codec actually used for a plane of this type: INT8 and LOSSLESS support f16 only. */
llmaas_codec llmaas_block_codec(int codec, const llmaas_kv_plane * plane);

/* Return the bytes of the largest block of n_tokens rows; exact for RAW and INT8. */
uint64_t llmaas_block_bound(llmaas_codec codec, const llmaas_kv_plane * plane, uint32_t n_tokens);

/* Return how many bytes must follow a body's last block: decoders may load them without using them. */
uint64_t llmaas_body_pad(int codec);

/* Sizes of a PLANES body: first the raw matrices, then the side data (scales and offsets) of all f16 matrices, then the
 * planes. Each plane covers all f16 matrices. */
typedef struct llmaas_embed_sizes {
    uint64_t raw, side, plane;
} llmaas_embed_sizes;

llmaas_embed_sizes llmaas_embed_measure(const llmaas_kv_geom * geom, uint32_t n_tokens);

/* Offsets of the next matrix in such a body. */
typedef struct llmaas_embed_at {
    uint64_t raw, side, plane;
    uint64_t stride; /* from one plane to the next */
    uint32_t bits;
} llmaas_embed_at;

llmaas_embed_at llmaas_embed_begin(const llmaas_embed_sizes * sizes, uint32_t bits);

/* Encode or decode one matrix of any type. Encoding returns false if a value is beyond LLMAAS_EMBED_MAX. */
bool llmaas_embed_encode(const llmaas_kv_span * span, llmaas_embed_at * at, uint8_t * body);
void llmaas_embed_decode(const llmaas_kv_span * span, llmaas_embed_at * at, const uint8_t * body);

void llmaas_raw_encode(const llmaas_kv_span * span, uint8_t * dst);
void llmaas_raw_decode(const llmaas_kv_span * span, const uint8_t * src);

/* Encode or decode an INT8 block. Encoding returns false if a value is not finite. */
bool llmaas_int8_encode(const llmaas_kv_span * span, uint8_t * dst);
void llmaas_int8_decode(const llmaas_kv_span * span, const uint8_t * src);

/* Encode or decode a LOSSLESS block. Encoding returns the block's bytes. Decoding returns the bytes consumed of `left`,
 * 0 if they are corrupt; LLMAAS_VAR_PAD bytes after `left` must be readable. */
uint64_t llmaas_lossless_encode(const llmaas_kv_span * span, uint8_t * dst);
uint64_t llmaas_lossless_decode(const llmaas_kv_span * span, const uint8_t * src, uint64_t left);

#endif
