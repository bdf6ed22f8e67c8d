/* What the two AVX-512 sparse kernels share. 64 rows are four vectors of 16. */
#ifndef LLMAAS_SPARSE_AVX512_H
#define LLMAAS_SPARSE_AVX512_H

#include "sparse_blocks.h"

#include <immintrin.h>

/* 64 bytes of each of four channels, the four bytes of a row side by side: of the 16 rows of a 128-bit lane, vector i has
 * the rows from 4 i on. */
SPARSE_INLINE void sparse_load_fours(const uint8_t * const * columns, size_t at, __m512i fours[4]) {
    const __m512i a = _mm512_loadu_si512(columns[0] + at), b = _mm512_loadu_si512(columns[1] + at);
    const __m512i c = _mm512_loadu_si512(columns[2] + at), d = _mm512_loadu_si512(columns[3] + at);
    const __m512i ab_low = _mm512_unpacklo_epi8(a, b), ab_high = _mm512_unpackhi_epi8(a, b);
    const __m512i cd_low = _mm512_unpacklo_epi8(c, d), cd_high = _mm512_unpackhi_epi8(c, d);
    fours[0] = _mm512_unpacklo_epi16(ab_low, cd_low);
    fours[1] = _mm512_unpackhi_epi16(ab_low, cd_low);
    fours[2] = _mm512_unpacklo_epi16(ab_high, cd_high);
    fours[3] = _mm512_unpackhi_epi16(ab_high, cd_high);
}

SPARSE_INLINE void sparse_add16(const sparse_block * block, __m512i sums, const uint16_t * scales, float * y) {
    const __m512 s = _mm512_cvtepi32_ps(_mm512_add_epi32(sums, _mm512_set1_epi32(block->zero)));
    const __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256((const void *) scales));
    const __m512 product = _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(block->scale), d), s);
    _mm512_storeu_ps(y, _mm512_add_ps(_mm512_loadu_ps(y), product));
}

/* Sums in the order of sparse_load_fours. */
SPARSE_INLINE void sparse_add64(const sparse_block * block, const __m512i sums[4], const uint16_t * scales, float * y) {
    const __m512i a = _mm512_shuffle_i32x4(sums[0], sums[1], 0x44), b = _mm512_shuffle_i32x4(sums[2], sums[3], 0x44);
    const __m512i c = _mm512_shuffle_i32x4(sums[0], sums[1], 0xee), d = _mm512_shuffle_i32x4(sums[2], sums[3], 0xee);
    sparse_add16(block, _mm512_shuffle_i32x4(a, b, 0x88), scales, y);
    sparse_add16(block, _mm512_shuffle_i32x4(a, b, 0xdd), scales + 16, y + 16);
    sparse_add16(block, _mm512_shuffle_i32x4(c, d, 0x88), scales + 32, y + 32);
    sparse_add16(block, _mm512_shuffle_i32x4(c, d, 0xdd), scales + 48, y + 48);
}

#endif
