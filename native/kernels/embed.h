/* The embedded code: a value becomes one byte that spans its channel's or row's range, and the byte's top bits are its
 * shorter codes.
 *
 *   code = floor((x - offset × scale/8) / scale × 128) + 128, in 0..255
 *   x'   = f16((center of the codes with the same top bits - 128 + 16 × offset) × scale/128)
 *
 * Scales are f16 numbers with three mantissa bits, rounded up, of which bits 7 to 14 are kept. Every product and sum of
 * a decoder is exact in f32; encoders do the operations of embed-generic.c in its order. */
#ifndef LLMAAS_EMBED_H
#define LLMAAS_EMBED_H

#include "f16.h"
#include "kernels.h"

#include "bytes.h"

/* A scale must cover half a channel's range plus the offset's error of 1/16, and 127 offsets must reach the center. */
#define LLMAAS_EMBED_REACH  (16.0f / 15.0f)
#define LLMAAS_EMBED_OFFSET (8.0f / 127.0f)

static inline uint8_t embed_scale_up(uint16_t magnitude) { return (uint8_t) ((magnitude + 127u) >> 7); }
static inline float   embed_scale(uint8_t byte) { return f16_to_f32((uint16_t) (byte << 7)); }

/* Return what decoding adds to a code of this many bits, before the offset. */
static inline float embed_center(unsigned bits) { return (float) (1u << (8 - bits)) / 2 - 128.0f; }

#endif
