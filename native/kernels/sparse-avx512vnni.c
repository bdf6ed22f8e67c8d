/* AVX-512 VNNI; results are bit-identical to sparse-generic.c. */
#include "kernels.h"
#include "sparse_avx512.h"

SPARSE_INLINE sparse_64 dot(sparse_64 sums, sparse_64 x, __m512i values) {
    return (sparse_64) {_mm512_dpbusd_epi32(sums.a, x.a, values), _mm512_dpbusd_epi32(sums.b, x.b, values),
                        _mm512_dpbusd_epi32(sums.c, x.c, values), _mm512_dpbusd_epi32(sums.d, x.d, values)};
}

/* Compute the sums of the upper halves of bytes from those of whole bytes and of the lower halves. */
SPARSE_INLINE __m512i upper(__m512i whole, __m512i low) { return _mm512_srai_epi32(_mm512_sub_epi32(whole, low), 4); }

SPARSE_INLINE void half_sums(const sparse_block * block, size_t at, sparse_64 * lower, sparse_64 * higher) {
    sparse_64 low = sparse_zeros(), whole = sparse_zeros();
    uint32_t four = 0;
    do {
        const sparse_64 x = sparse_load(block->columns + 4 * four, at);
        const __m512i values = _mm512_set1_epi32(sparse_four(block, four));
        low   = dot(low, sparse_lowers(x), values);
        whole = dot(whole, x, values);
    } while (++four < block->n_fours);
    *lower  = low;
    *higher = (sparse_64) {upper(whole.a, low.a), upper(whole.b, low.b), upper(whole.c, low.c), upper(whole.d, low.d)};
}

SPARSE_INLINE void half8(const sparse_block * block, size_t at, const uint16_t * scales, float * y) {
    sparse_64 sums = sparse_zeros();
    uint32_t four = 0;
    do {
        const __m512i values = _mm512_set1_epi32(sparse_four(block, four));
        sums = dot(sums, sparse_load(block->columns + 4 * four, at), values);
    } while (++four < block->n_fours);
    sparse_add64(block, sums, scales, y);
}

SPARSE_CHUNK void chunk8(const sparse_block * block, size_t at, const uint16_t * scales, float * y) {
    half8(block, at, scales, y);
    half8(block, at + 64, scales + 64, y + 64);
}

SPARSE_KERNEL(avx512vnni)
