/* The body codecs: one block a plane. Encoders have llmaas_block_bound() bytes of room. */
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
