/* The reference implementation: every other int8 kernel must give the same bytes. */
#include "f16.h"
#include "kernels.h"

#include <math.h>

#include "bytes.h"

static uint16_t group_amax(const uint8_t * src, size_t n) {
    uint16_t amax = 0;
    for (size_t i = 0; i < n; ++i) {
        const uint16_t mag = load_u16(src + 2 * i) & 0x7fff; /* f16 magnitudes sort like integers */
        amax = mag > amax ? mag : amax;
    }
    return amax;
}

static void encode_group(const uint8_t * src, size_t n, uint16_t scale, uint8_t * q) {
    if (scale == 0) {
        memset(q, 0, n);
        return;
    }
    const float inv = 1.0f / f16_to_f32(scale);
    for (size_t i = 0; i < n; ++i) {
        const float x = f16_to_f32(load_u16(src + 2 * i)) * inv;
        q[i] = (uint8_t) (int8_t) lrintf(x); /* |x| <= 127.07 */
    }
}

bool llmaas_int8_encode_generic(const uint8_t * src, size_t src_stride, size_t n_rows, size_t n_cols, uint8_t * scales,
                                size_t scale_stride, uint8_t * q, size_t q_stride) {
    for (size_t r = 0; r < n_rows; ++r) {
        for (size_t c = 0, g = 0; c < n_cols; c += LLMAAS_GROUP, ++g) {
            const size_t    n     = n_cols - c < LLMAAS_GROUP ? n_cols - c : LLMAAS_GROUP;
            const uint8_t * x     = src + r * src_stride + 2 * c;
            const uint16_t  amax  = group_amax(x, n);
            if (amax >= LLMAAS_F16_INF) {
                return false;
            }
            const uint16_t scale = int8_scale(amax);
            store_u16(scales + r * scale_stride + 2 * g, scale);
            encode_group(x, n, scale, q + r * q_stride + c);
        }
    }
    return true;
}

void llmaas_int8_decode_generic(const uint8_t * scales, size_t scale_stride, const uint8_t * q, size_t q_stride,
                                size_t n_rows, size_t n_cols, uint8_t * dst, size_t dst_stride) {
    for (size_t r = 0; r < n_rows; ++r) {
        for (size_t c = 0; c < n_cols; ++c) {
            const float scale = f16_to_f32(load_u16(scales + r * scale_stride + 2 * (c / LLMAAS_GROUP)));
            const float x     = (float) (int8_t) q[r * q_stride + c] * scale;
            store_u16(dst + r * dst_stride + 2 * c, f16_from_f32(x));
        }
    }
}
