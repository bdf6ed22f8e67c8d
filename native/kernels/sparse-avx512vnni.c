/* AVX-512 VNNI; a bit-for-bit match of sparse-generic.c. */
#include "kernels.h"
#include "sparse_avx512.h"

SPARSE_INLINE void chunk4(const sparse_block * block, size_t at, const uint16_t * scales, float * y) {
    __m512i low[4], both[4]; /* sums of the lower halves of bytes, and of whole bytes */
    for (int i = 0; i < 4; ++i) {
        low[i] = both[i] = _mm512_setzero_si512();
    }
    for (uint32_t four = 0; four < block->n_fours; ++four) {
        const __m512i values = _mm512_set1_epi32(sparse_four(block, four));
        __m512i fours[4];
        sparse_load_fours(block->columns + 4 * four, at, fours);
        for (int i = 0; i < 4; ++i) {
            low[i]  = _mm512_dpbusd_epi32(low[i], _mm512_and_si512(fours[i], _mm512_set1_epi8(15)), values);
            both[i] = _mm512_dpbusd_epi32(both[i], fours[i], values);
        }
    }
    for (int i = 0; i < 4; ++i) {
        both[i] = _mm512_srai_epi32(_mm512_sub_epi32(both[i], low[i]), 4);
    }
    sparse_add64(block, low, scales, y);
    sparse_add64(block, both, scales + 64, y + 64);
}

SPARSE_INLINE void half8(const sparse_block * block, size_t at, const uint16_t * scales, float * y) {
    __m512i sums[4];
    for (int i = 0; i < 4; ++i) {
        sums[i] = _mm512_setzero_si512();
    }
    for (uint32_t four = 0; four < block->n_fours; ++four) {
        const __m512i values = _mm512_set1_epi32(sparse_four(block, four));
        __m512i fours[4];
        sparse_load_fours(block->columns + 4 * four, at, fours);
        for (int i = 0; i < 4; ++i) {
            sums[i] = _mm512_dpbusd_epi32(sums[i], fours[i], values);
        }
    }
    sparse_add64(block, sums, scales, y);
}

SPARSE_INLINE void chunk8(const sparse_block * block, size_t at, const uint16_t * scales, float * y) {
    half8(block, at, scales, y);
    half8(block, at + 64, scales + 64, y + 64);
}

SPARSE_KERNEL(avx512vnni)
