/* AVX-512 F, BW, VL; a bit-for-bit match of sparse-generic.c. */
#include "kernels.h"
#include "sparse_avx512.h"

/* Sums of the lower and of the upper halves of 64 bytes. A block's sums of pairs stay in 16 bits: 8 × 2 × 15 × 127. */
SPARSE_INLINE void half_sums(const sparse_block * block, size_t at, __m512i low[4], __m512i high[4]) {
    const __m512i mask = _mm512_set1_epi8(15), ones = _mm512_set1_epi16(1);
    for (int i = 0; i < 4; ++i) {
        low[i] = high[i] = _mm512_setzero_si512();
    }
    for (uint32_t four = 0; four < block->n_fours; ++four) {
        const __m512i values = _mm512_set1_epi32(sparse_four(block, four));
        __m512i fours[4];
        sparse_load_fours(block->columns + 4 * four, at, fours);
        for (int i = 0; i < 4; ++i) {
            const __m512i upper = _mm512_and_si512(_mm512_srli_epi16(fours[i], 4), mask);
            low[i]  = _mm512_add_epi16(low[i], _mm512_maddubs_epi16(_mm512_and_si512(fours[i], mask), values));
            high[i] = _mm512_add_epi16(high[i], _mm512_maddubs_epi16(upper, values));
        }
    }
    for (int i = 0; i < 4; ++i) {
        low[i]  = _mm512_madd_epi16(low[i], ones);
        high[i] = _mm512_madd_epi16(high[i], ones);
    }
}

SPARSE_INLINE void chunk4(const sparse_block * block, size_t at, const uint16_t * scales, float * y) {
    __m512i low[4], high[4];
    half_sums(block, at, low, high);
    sparse_add64(block, low, scales, y);
    sparse_add64(block, high, scales + 64, y + 64);
}

SPARSE_INLINE void half8(const sparse_block * block, size_t at, const uint16_t * scales, float * y) {
    __m512i low[4], high[4];
    half_sums(block, at, low, high);
    for (int i = 0; i < 4; ++i) {
        low[i] = _mm512_add_epi32(low[i], _mm512_slli_epi32(high[i], 4));
    }
    sparse_add64(block, low, scales, y);
}

SPARSE_INLINE void chunk8(const sparse_block * block, size_t at, const uint16_t * scales, float * y) {
    half8(block, at, scales, y);
    half8(block, at + 64, scales + 64, y + 64);
}

SPARSE_KERNEL(avx512)
