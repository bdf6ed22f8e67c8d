/* The reference implementation: every other kernel of the embedded code must give the same bytes. */
#include "embed.h"

#include <math.h>

/* code = x × inv + bias, clamped to 0..255. */
typedef struct affine {
    float inv, bias;
} affine;

static affine affine_of(uint8_t scale, int offset) {
    const float s = embed_scale(scale);
    return (affine) {s > 0 ? 128.0f / s : 0.0f, (float) (128 - 16 * offset)};
}

static uint16_t row_amax(const uint8_t * row) {
    uint16_t amax = 0;
    for (size_t c = 0; c < LLMAAS_GROUP; ++c) {
        const uint16_t mag = load_u16(row + 2 * c) & 0x7fff; /* f16 magnitudes sort like integers */
        amax = mag > amax ? mag : amax;
    }
    return amax;
}

static affine row_affine(uint16_t amax, uint8_t * scale) {
    *scale = embed_scale_up(amax);
    return affine_of(*scale, 0);
}

static affine channel_affine(const uint8_t * src, size_t stride, size_t n_rows, uint8_t * scale, uint8_t * offset) {
    float hi = f16_to_f32(load_u16(src));
    float lo = hi;
    for (size_t r = 1; r < n_rows; ++r) {
        const float x = f16_to_f32(load_u16(src + r * stride));
        hi = x > hi ? x : hi;
        lo = x < lo ? x : lo;
    }
    const float center = (hi + lo) * 0.5f;
    const float reach  = (hi - lo) * 0.5f * LLMAAS_EMBED_REACH;
    const float far    = fabsf(center) * LLMAAS_EMBED_OFFSET;
    *scale = embed_scale_up(f16_from_magnitude(reach > far ? reach : far, 1));
    const float s = embed_scale(*scale);
    const int   k = s > 0 ? (int) lrintf(center * (8.0f / s)) : 0; /* |k| <= 127, because the scale is at least `far` */
    *offset = (uint8_t) (int8_t) k;
    return affine_of(*scale, k);
}

static unsigned code(uint16_t value, affine a) {
    const float t = f16_to_f32(value) * a.inv + a.bias;
    return t < 0 ? 0 : t > 255 ? 255 : (unsigned) t;
}

bool llmaas_embed_encode_generic(const uint8_t * src, size_t src_stride, size_t n_rows, bool per_channel, uint8_t * side,
                                 uint8_t * planes, size_t plane_stride, unsigned bits) {
    affine columns[LLMAAS_GROUP];
    for (size_t r = 0; r < n_rows; ++r) {
        if (row_amax(src + r * src_stride) > LLMAAS_EMBED_MAX) {
            return false;
        }
    }
    for (size_t c = 0; per_channel && c < LLMAAS_GROUP; ++c) {
        columns[c] = channel_affine(src + 2 * c, src_stride, n_rows, side + c, side + LLMAAS_GROUP + c);
    }
    for (size_t r = 0; r < n_rows; ++r) {
        const uint8_t * row = src + r * src_stride;
        const affine    one = per_channel ? columns[0] : row_affine(row_amax(row), side + r);
        uint64_t        words[LLMAAS_BITS] = {0};
        for (size_t c = 0; c < LLMAAS_GROUP; ++c) {
            const uint64_t q = code(load_u16(row + 2 * c), per_channel ? columns[c] : one);
            for (size_t p = 0; p < LLMAAS_BITS; ++p) {
                words[p] |= (q >> (LLMAAS_BITS - 1 - p) & 1) << c;
            }
        }
        for (size_t p = 0; p < bits; ++p) {
            store_u64(planes + p * plane_stride + 8 * r, words[p]);
        }
    }
    return true;
}

void llmaas_embed_decode_generic(const uint8_t * side, bool per_channel, const uint8_t * planes, size_t plane_stride,
                                 unsigned bits, size_t n_rows, uint8_t * dst, size_t dst_stride, bool past_cache) {
    (void) past_cache;
    for (size_t r = 0; r < n_rows; ++r) {
        for (size_t c = 0; c < LLMAAS_GROUP; ++c) {
            unsigned q = 0;
            for (size_t p = 0; p < bits; ++p) {
                q |= (unsigned) (load_u64(planes + p * plane_stride + 8 * r) >> c & 1) << (LLMAAS_BITS - 1 - p);
            }
            const float step  = embed_scale(side[per_channel ? c : r]) / 128.0f;
            const float shift = embed_center(bits) + (per_channel ? 16.0f * (float) (int8_t) side[LLMAAS_GROUP + c] : 0.0f);
            store_u16(dst + r * dst_stride + 2 * c, f16_from_f32((float) q * step + shift * step));
        }
    }
}
