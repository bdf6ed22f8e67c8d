/* Shared by the two AVX-512 sparse kernels. */
#ifndef LLMAAS_SPARSE_AVX512_H
#define LLMAAS_SPARSE_AVX512_H

#include "sparse_blocks.h"

#include <immintrin.h>

/* 32 bits for each of 64 rows. Among the 16 rows of a 128-bit lane, a has the first four, b the next four, and so on. */
typedef struct sparse_64 {
    __m512i a, b, c, d;
} sparse_64;

SPARSE_INLINE sparse_64 sparse_zeros(void) {
    const __m512i zero = _mm512_setzero_si512();
    return (sparse_64) {zero, zero, zero, zero};
}

/* Load a byte of each of four channels. */
SPARSE_INLINE sparse_64 sparse_load(const uint8_t * const * columns, size_t at) {
    const __m512i a = _mm512_loadu_si512(columns[0] + at), b = _mm512_loadu_si512(columns[1] + at);
    const __m512i c = _mm512_loadu_si512(columns[2] + at), d = _mm512_loadu_si512(columns[3] + at);
    const __m512i ab_low = _mm512_unpacklo_epi8(a, b), ab_high = _mm512_unpackhi_epi8(a, b);
    const __m512i cd_low = _mm512_unpacklo_epi8(c, d), cd_high = _mm512_unpackhi_epi8(c, d);
    return (sparse_64) {_mm512_unpacklo_epi16(ab_low, cd_low), _mm512_unpackhi_epi16(ab_low, cd_low),
                        _mm512_unpacklo_epi16(ab_high, cd_high), _mm512_unpackhi_epi16(ab_high, cd_high)};
}

SPARSE_INLINE __m512i sparse_lower(__m512i bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }

SPARSE_INLINE sparse_64 sparse_lowers(sparse_64 x) {
    return (sparse_64) {sparse_lower(x.a), sparse_lower(x.b), sparse_lower(x.c), sparse_lower(x.d)};
}

SPARSE_INLINE void sparse_add16(const sparse_block * block, __m512i sums, const uint16_t * scales, float * y) {
    const __m512 s = _mm512_cvtepi32_ps(_mm512_add_epi32(sums, _mm512_set1_epi32(block->zero)));
    const __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256((const void *) scales));
    const __m512 product = _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(block->scale), d), s);
    _mm512_storeu_ps(y, _mm512_add_ps(_mm512_loadu_ps(y), product));
}

SPARSE_INLINE void sparse_add16_mins(const sparse_block * block, __m512i sums, const uint16_t * scales,
                                     const uint16_t * mins, float * y) {
    const __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256((const void *) scales));
    const __m512 m = _mm512_cvtph_ps(_mm256_loadu_si256((const void *) mins));
    const __m512 least = _mm512_mul_ps(m, _mm512_set1_ps(block->sum));
    const __m512 rest  = _mm512_sub_ps(_mm512_mul_ps(d, _mm512_cvtepi32_ps(sums)), least);
    _mm512_storeu_ps(y, _mm512_add_ps(_mm512_loadu_ps(y), _mm512_mul_ps(_mm512_set1_ps(block->scale), rest)));
}

/* Reorder: 16 rows in each register, one after another. */
SPARSE_INLINE sparse_64 sparse_in_order(sparse_64 x) {
    const __m512i a = _mm512_shuffle_i32x4(x.a, x.b, 0x44), b = _mm512_shuffle_i32x4(x.c, x.d, 0x44);
    const __m512i c = _mm512_shuffle_i32x4(x.a, x.b, 0xee), d = _mm512_shuffle_i32x4(x.c, x.d, 0xee);
    return (sparse_64) {_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd),
                        _mm512_shuffle_i32x4(c, d, 0x88), _mm512_shuffle_i32x4(c, d, 0xdd)};
}

SPARSE_INLINE void sparse_add64(const sparse_block * block, sparse_64 sums, const uint16_t * scales, float * y) {
    const sparse_64 s = sparse_in_order(sums);
    sparse_add16(block, s.a, scales, y);
    sparse_add16(block, s.b, scales + 16, y + 16);
    sparse_add16(block, s.c, scales + 32, y + 32);
    sparse_add16(block, s.d, scales + 48, y + 48);
}

SPARSE_INLINE void sparse_add64_mins(const sparse_block * block, sparse_64 sums, const uint16_t * scales,
                                     const uint16_t * mins, float * y) {
    const sparse_64 s = sparse_in_order(sums);
    sparse_add16_mins(block, s.a, scales, mins, y);
    sparse_add16_mins(block, s.b, scales + 16, mins + 16, y + 16);
    sparse_add16_mins(block, s.c, scales + 32, mins + 32, y + 32);
    sparse_add16_mins(block, s.d, scales + 48, mins + 48, y + 48);
}

/* Compute the sums of the lower and of the upper halves of 64 bytes; each instruction set has its own version. */
SPARSE_INLINE void half_sums(const sparse_block * block, size_t at, sparse_64 * lower, sparse_64 * upper);

SPARSE_CHUNK void chunk4(const sparse_block * block, size_t at, const uint16_t * scales, float * y) {
    sparse_64 low, high;
    half_sums(block, at, &low, &high);
    sparse_add64(block, low, scales, y);
    sparse_add64(block, high, scales + 64, y + 64);
}

SPARSE_CHUNK void chunk4_mins(const sparse_block * block, size_t at, const uint16_t * scales, float * y) {
    const uint16_t * mins = sparse_mins(block, at);
    sparse_64 low, high;
    half_sums(block, at, &low, &high);
    sparse_add64_mins(block, low, scales, mins, y);
    sparse_add64_mins(block, high, scales + 64, mins + 64, y + 64);
}

#endif
