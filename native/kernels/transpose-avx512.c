/* Transposition by 16 × 32 blocks (tokens to channels, decoding) and 32 × 16 blocks (channels to tokens, encoding) of
 * u16; the AVX2 kernel handles what is left over. */
#include "kernels.h"

#include <immintrin.h>

/* Transpose 8 × 8 within each 128-bit lane: r[i] lane L word j → r[j] lane L word i. */
static void transpose_8x8(__m512i r[8]) {
    __m512i t[8], u[8];
    for (size_t i = 0; i < 8; i += 2) {
        t[i]     = _mm512_unpacklo_epi16(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi16(r[i], r[i + 1]);
    }
    for (size_t i = 0; i < 8; i += 4) {
        u[i]     = _mm512_unpacklo_epi32(t[i], t[i + 2]);
        u[i + 1] = _mm512_unpackhi_epi32(t[i], t[i + 2]);
        u[i + 2] = _mm512_unpacklo_epi32(t[i + 1], t[i + 3]);
        u[i + 3] = _mm512_unpackhi_epi32(t[i + 1], t[i + 3]);
    }
    for (size_t i = 0; i < 4; ++i) {
        r[2 * i]     = _mm512_unpacklo_epi64(u[i], u[i + 4]);
        r[2 * i + 1] = _mm512_unpackhi_epi64(u[i], u[i + 4]);
    }
}

static void store_halves(uint8_t * lo, uint8_t * hi, __m512i v) {
    _mm256_storeu_si256((void *) lo, _mm512_castsi512_si256(v));
    _mm256_storeu_si256((void *) hi, _mm512_extracti64x4_epi64(v, 1));
}

/* Transpose 16 × 32. After the 8 × 8 steps, lane L of a[i] (b[i]) holds rows 0..7 (8..15) of column 8 L + i. */
static void transpose_16x32(const uint8_t * src, size_t src_stride, uint8_t * dst, size_t dst_stride) {
    const __m512i first  = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    __m512i a[8], b[8];
    for (size_t i = 0; i < 8; ++i) {
        a[i] = _mm512_loadu_si512(src + i * src_stride);
        b[i] = _mm512_loadu_si512(src + (i + 8) * src_stride);
    }
    transpose_8x8(a);
    transpose_8x8(b);
    for (size_t i = 0; i < 8; ++i) {
        uint8_t * d = dst + i * dst_stride;
        store_halves(d, d + 8 * dst_stride, _mm512_permutex2var_epi64(a[i], first, b[i]));
        store_halves(d + 16 * dst_stride, d + 24 * dst_stride, _mm512_permutex2var_epi64(a[i], second, b[i]));
    }
}

static __m512i load_halves(const uint8_t * lo, const uint8_t * hi) {
    const __m512i v = _mm512_castsi256_si512(_mm256_loadu_si256((const void *) lo));
    return _mm512_inserti64x4(v, _mm256_loadu_si256((const void *) hi), 1);
}

/* Transpose 32 × 16, in the reverse way: lane L of a[i] (b[i]) is columns 0..7 (8..15) of row 8 L + i. */
static void transpose_32x16(const uint8_t * src, size_t src_stride, uint8_t * dst, size_t dst_stride) {
    __m512i a[8], b[8];
    for (size_t i = 0; i < 8; ++i) {
        const uint8_t * s = src + i * src_stride;
        const __m512i   p = load_halves(s, s + 8 * src_stride);
        const __m512i   q = load_halves(s + 16 * src_stride, s + 24 * src_stride);
        a[i] = _mm512_shuffle_i64x2(p, q, 0x88);
        b[i] = _mm512_shuffle_i64x2(p, q, 0xdd);
    }
    transpose_8x8(a);
    transpose_8x8(b);
    for (size_t i = 0; i < 8; ++i) {
        _mm512_storeu_si512(dst + i * dst_stride, a[i]);
        _mm512_storeu_si512(dst + (i + 8) * dst_stride, b[i]);
    }
}

void llmaas_transpose_avx512(const uint8_t * src, size_t src_stride, size_t n_rows, size_t n_cols, uint8_t * dst,
                             size_t dst_stride) {
    if (n_rows == 16) {
        for (; n_cols >= 32; n_cols -= 32, src += 64, dst += 32 * dst_stride) {
            transpose_16x32(src, src_stride, dst, dst_stride);
        }
    } else if (n_cols == 16) {
        for (; n_rows >= 32; n_rows -= 32, src += 32 * src_stride, dst += 64) {
            transpose_32x16(src, src_stride, dst, dst_stride);
        }
    }
    if (n_rows && n_cols) {
        llmaas_transpose_avx2(src, src_stride, n_rows, n_cols, dst, dst_stride);
    }
}
