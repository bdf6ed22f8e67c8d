/* Transposition by 16 × 16 blocks of u16; the generic kernel handles left-over rows and columns. */
#include "kernels.h"

#include <immintrin.h>

/* Transpose 8 × 8 within each 128-bit lane: r[i] lane L word j → r[j] lane L word i. */
static void transpose_8x8(__m256i r[8]) {
    __m256i t[8], u[8];
    for (size_t i = 0; i < 8; i += 2) {
        t[i]     = _mm256_unpacklo_epi16(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi16(r[i], r[i + 1]);
    }
    for (size_t i = 0; i < 8; i += 4) {
        u[i]     = _mm256_unpacklo_epi32(t[i], t[i + 2]);
        u[i + 1] = _mm256_unpackhi_epi32(t[i], t[i + 2]);
        u[i + 2] = _mm256_unpacklo_epi32(t[i + 1], t[i + 3]);
        u[i + 3] = _mm256_unpackhi_epi32(t[i + 1], t[i + 3]);
    }
    for (size_t i = 0; i < 4; ++i) {
        r[2 * i]     = _mm256_unpacklo_epi64(u[i], u[i + 4]);
        r[2 * i + 1] = _mm256_unpackhi_epi64(u[i], u[i + 4]);
    }
}

static void transpose_16x16(const uint8_t * src, size_t src_stride, uint8_t * dst, size_t dst_stride) {
    __m256i a[8], b[8];
    for (size_t i = 0; i < 8; ++i) {
        a[i] = _mm256_loadu_si256((const void *) (src + i * src_stride));
        b[i] = _mm256_loadu_si256((const void *) (src + (i + 8) * src_stride));
    }
    transpose_8x8(a);
    transpose_8x8(b);
    for (size_t i = 0; i < 8; ++i) {
        _mm256_storeu_si256((void *) (dst + i * dst_stride), _mm256_permute2x128_si256(a[i], b[i], 0x20));
        _mm256_storeu_si256((void *) (dst + (i + 8) * dst_stride), _mm256_permute2x128_si256(a[i], b[i], 0x31));
    }
}

void llmaas_transpose_avx2(const uint8_t * src, size_t src_stride, size_t n_rows, size_t n_cols, uint8_t * dst,
                           size_t dst_stride) {
    const size_t full_rows = n_rows & ~(size_t) 15;
    const size_t full_cols = n_cols & ~(size_t) 15;
    for (size_t r = 0; r < full_rows; r += 16) {
        for (size_t c = 0; c < full_cols; c += 16) {
            transpose_16x16(src + r * src_stride + 2 * c, src_stride, dst + c * dst_stride + 2 * r, dst_stride);
        }
    }
    llmaas_transpose_generic(src + 2 * full_cols, src_stride, full_rows, n_cols - full_cols, dst + full_cols * dst_stride,
                             dst_stride);
    llmaas_transpose_generic(src + full_rows * src_stride, src_stride, n_rows - full_rows, n_cols, dst + 2 * full_rows,
                             dst_stride);
}
