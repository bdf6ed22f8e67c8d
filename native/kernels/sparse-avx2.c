/* AVX2, F16C; a bit-for-bit match of sparse-generic.c. 32 rows are four vectors of eight. */
#include "kernels.h"
#include "sparse_blocks.h"

#include <immintrin.h>

SPARSE_INLINE __m256i load(const uint8_t * p) { return _mm256_loadu_si256((const void *) p); }

/* 32 bytes of each of four channels, the four bytes of a row side by side: of the 16 rows of a 128-bit lane, vector i has
 * the rows from 4 i on. */
SPARSE_INLINE void load_fours(const uint8_t * const * columns, size_t at, __m256i fours[4]) {
    const __m256i a = load(columns[0] + at), b = load(columns[1] + at);
    const __m256i c = load(columns[2] + at), d = load(columns[3] + at);
    const __m256i ab_low = _mm256_unpacklo_epi8(a, b), ab_high = _mm256_unpackhi_epi8(a, b);
    const __m256i cd_low = _mm256_unpacklo_epi8(c, d), cd_high = _mm256_unpackhi_epi8(c, d);
    fours[0] = _mm256_unpacklo_epi16(ab_low, cd_low);
    fours[1] = _mm256_unpackhi_epi16(ab_low, cd_low);
    fours[2] = _mm256_unpacklo_epi16(ab_high, cd_high);
    fours[3] = _mm256_unpackhi_epi16(ab_high, cd_high);
}

/* Sums of the lower and of the upper halves of 32 bytes. A block's sums of pairs stay in 16 bits: 8 × 2 × 15 × 127. */
SPARSE_INLINE void half_sums(const sparse_block * block, size_t at, __m256i low[4], __m256i high[4]) {
    const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    for (int i = 0; i < 4; ++i) {
        low[i] = high[i] = _mm256_setzero_si256();
    }
    for (uint32_t four = 0; four < block->n_fours; ++four) {
        const __m256i values = _mm256_set1_epi32(sparse_four(block, four));
        __m256i fours[4];
        load_fours(block->columns + 4 * four, at, fours);
        for (int i = 0; i < 4; ++i) {
            const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(fours[i], 4), mask);
            low[i]  = _mm256_add_epi16(low[i], _mm256_maddubs_epi16(_mm256_and_si256(fours[i], mask), values));
            high[i] = _mm256_add_epi16(high[i], _mm256_maddubs_epi16(upper, values));
        }
    }
    for (int i = 0; i < 4; ++i) {
        low[i]  = _mm256_madd_epi16(low[i], ones);
        high[i] = _mm256_madd_epi16(high[i], ones);
    }
}

SPARSE_INLINE void add8(const sparse_block * block, __m256i sums, const uint16_t * scales, float * y) {
    const __m256 s = _mm256_cvtepi32_ps(_mm256_add_epi32(sums, _mm256_set1_epi32(block->zero)));
    const __m256 d = _mm256_cvtph_ps(_mm_loadu_si128((const void *) scales));
    const __m256 product = _mm256_mul_ps(_mm256_mul_ps(_mm256_set1_ps(block->scale), d), s);
    _mm256_storeu_ps(y, _mm256_add_ps(_mm256_loadu_ps(y), product));
}

/* Sums in the order of load_fours. */
SPARSE_INLINE void add32(const sparse_block * block, const __m256i sums[4], const uint16_t * scales, float * y) {
    add8(block, _mm256_permute2x128_si256(sums[0], sums[1], 0x20), scales, y);
    add8(block, _mm256_permute2x128_si256(sums[2], sums[3], 0x20), scales + 8, y + 8);
    add8(block, _mm256_permute2x128_si256(sums[0], sums[1], 0x31), scales + 16, y + 16);
    add8(block, _mm256_permute2x128_si256(sums[2], sums[3], 0x31), scales + 24, y + 24);
}

SPARSE_INLINE void chunk4(const sparse_block * block, size_t at, const uint16_t * scales, float * y) {
    for (size_t r = 0; r < LLMAAS_CHUNK_ROWS / 2; r += 32) {
        __m256i low[4], high[4];
        half_sums(block, at + r, low, high);
        add32(block, low, scales + r, y + r);
        add32(block, high, scales + 64 + r, y + 64 + r);
    }
}

SPARSE_INLINE void chunk8(const sparse_block * block, size_t at, const uint16_t * scales, float * y) {
    for (size_t r = 0; r < LLMAAS_CHUNK_ROWS; r += 32) {
        __m256i low[4], high[4];
        half_sums(block, at + r, low, high);
        for (int i = 0; i < 4; ++i) {
            low[i] = _mm256_add_epi32(low[i], _mm256_slli_epi32(high[i], 4));
        }
        add32(block, low, scales + r, y + r);
    }
}

SPARSE_KERNEL(avx2)
