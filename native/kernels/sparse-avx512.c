/* AVX-512 F, BW, VL; results are bit-identical to sparse-generic.c. */
#include "kernels.h"
#include "sparse_avx512.h"

/* Add products of byte halves to two 16-bit sums per row, which a block cannot overflow: 8 × 2 × 15 × 127. */
SPARSE_INLINE __m512i dot16(__m512i sums, __m512i x, __m512i values) {
    return _mm512_add_epi16(sums, _mm512_maddubs_epi16(x, values));
}

SPARSE_INLINE sparse_64 dot(sparse_64 sums, sparse_64 x, __m512i values) {
    return (sparse_64) {dot16(sums.a, x.a, values), dot16(sums.b, x.b, values), dot16(sums.c, x.c, values),
                        dot16(sums.d, x.d, values)};
}

SPARSE_INLINE sparse_64 uppers(sparse_64 x) {
    const sparse_64 shifted = {_mm512_srli_epi16(x.a, 4), _mm512_srli_epi16(x.b, 4), _mm512_srli_epi16(x.c, 4),
                               _mm512_srli_epi16(x.d, 4)};
    return sparse_lowers(shifted);
}

SPARSE_INLINE sparse_64 in_pairs(sparse_64 sums) {
    const __m512i ones = _mm512_set1_epi16(1);
    return (sparse_64) {_mm512_madd_epi16(sums.a, ones), _mm512_madd_epi16(sums.b, ones), _mm512_madd_epi16(sums.c, ones),
                        _mm512_madd_epi16(sums.d, ones)};
}

SPARSE_INLINE void half_sums(const sparse_block * block, size_t at, sparse_64 * lower, sparse_64 * upper) {
    sparse_64 low = sparse_zeros(), high = sparse_zeros();
    uint32_t four = 0;
    do {
        const sparse_64 x = sparse_load(block->columns + 4 * four, at);
        const __m512i values = _mm512_set1_epi32(sparse_four(block, four));
        low  = dot(low, sparse_lowers(x), values);
        high = dot(high, uppers(x), values);
    } while (++four < block->n_fours);
    *lower = in_pairs(low);
    *upper = in_pairs(high);
}

SPARSE_INLINE __m512i whole(__m512i low, __m512i high) { return _mm512_add_epi32(low, _mm512_slli_epi32(high, 4)); }

SPARSE_INLINE void half8(const sparse_block * block, size_t at, const uint16_t * scales, float * y) {
    sparse_64 low, high;
    half_sums(block, at, &low, &high);
    const sparse_64 sums = {whole(low.a, high.a), whole(low.b, high.b), whole(low.c, high.c), whole(low.d, high.d)};
    sparse_add64(block, sums, scales, y);
}

SPARSE_CHUNK void chunk8(const sparse_block * block, size_t at, const uint16_t * scales, float * y) {
    half8(block, at, scales, y);
    half8(block, at + 64, scales + 64, y + 64);
}

SPARSE_KERNEL(avx512)
