/* AVX2, F16C; results are bit-identical to sparse-generic.c. */
#include "kernels.h"
#include "sparse_blocks.h"

#include <immintrin.h>

/* 32 bits for each of 32 rows. Among the 16 rows of a 128-bit lane, a has the first four, b the next four, and so on. */
typedef struct rows_32 {
    __m256i a, b, c, d;
} rows_32;

SPARSE_INLINE rows_32 zeros(void) {
    const __m256i zero = _mm256_setzero_si256();
    return (rows_32) {zero, zero, zero, zero};
}

SPARSE_INLINE __m256i load32(const uint8_t * p) { return _mm256_loadu_si256((const void *) p); }

/* Load a byte of each of four channels. */
SPARSE_INLINE rows_32 load(const uint8_t * const * columns, size_t at) {
    const __m256i a = load32(columns[0] + at), b = load32(columns[1] + at);
    const __m256i c = load32(columns[2] + at), d = load32(columns[3] + at);
    const __m256i ab_low = _mm256_unpacklo_epi8(a, b), ab_high = _mm256_unpackhi_epi8(a, b);
    const __m256i cd_low = _mm256_unpacklo_epi8(c, d), cd_high = _mm256_unpackhi_epi8(c, d);
    return (rows_32) {_mm256_unpacklo_epi16(ab_low, cd_low), _mm256_unpackhi_epi16(ab_low, cd_low),
                      _mm256_unpacklo_epi16(ab_high, cd_high), _mm256_unpackhi_epi16(ab_high, cd_high)};
}

/* Add products of byte halves to two 16-bit sums per row, which a block cannot overflow: 8 × 2 × 15 × 127. */
SPARSE_INLINE __m256i dot16(__m256i sums, __m256i x, __m256i values) {
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(x, values));
}

SPARSE_INLINE rows_32 dot(rows_32 sums, rows_32 x, __m256i values) {
    return (rows_32) {dot16(sums.a, x.a, values), dot16(sums.b, x.b, values), dot16(sums.c, x.c, values),
                      dot16(sums.d, x.d, values)};
}

SPARSE_INLINE __m256i lower(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }

SPARSE_INLINE __m256i upper(__m256i bytes) { return lower(_mm256_srli_epi16(bytes, 4)); }

SPARSE_INLINE __m256i in_pairs(__m256i sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }

/* Compute the sums of the lower and of the upper halves of 32 bytes. */
SPARSE_INLINE void half_sums(const sparse_block * block, size_t at, rows_32 * lowers, rows_32 * uppers) {
    rows_32 low = zeros(), high = zeros();
    uint32_t four = 0;
    do {
        const rows_32 x = load(block->columns + 4 * four, at);
        const __m256i values = _mm256_set1_epi32(sparse_four(block, four));
        low  = dot(low, (rows_32) {lower(x.a), lower(x.b), lower(x.c), lower(x.d)}, values);
        high = dot(high, (rows_32) {upper(x.a), upper(x.b), upper(x.c), upper(x.d)}, values);
    } while (++four < block->n_fours);
    *lowers = (rows_32) {in_pairs(low.a), in_pairs(low.b), in_pairs(low.c), in_pairs(low.d)};
    *uppers = (rows_32) {in_pairs(high.a), in_pairs(high.b), in_pairs(high.c), in_pairs(high.d)};
}

SPARSE_INLINE void add8(const sparse_block * block, __m256i sums, const uint16_t * scales, float * y) {
    const __m256 s = _mm256_cvtepi32_ps(_mm256_add_epi32(sums, _mm256_set1_epi32(block->zero)));
    const __m256 d = _mm256_cvtph_ps(_mm_loadu_si128((const void *) scales));
    const __m256 product = _mm256_mul_ps(_mm256_mul_ps(_mm256_set1_ps(block->scale), d), s);
    _mm256_storeu_ps(y, _mm256_add_ps(_mm256_loadu_ps(y), product));
}

SPARSE_INLINE void add8_mins(const sparse_block * block, __m256i sums, const uint16_t * scales, const uint16_t * mins,
                             float * y) {
    const __m256 d = _mm256_cvtph_ps(_mm_loadu_si128((const void *) scales));
    const __m256 m = _mm256_cvtph_ps(_mm_loadu_si128((const void *) mins));
    const __m256 least = _mm256_mul_ps(m, _mm256_set1_ps(block->sum));
    const __m256 rest  = _mm256_sub_ps(_mm256_mul_ps(d, _mm256_cvtepi32_ps(sums)), least);
    _mm256_storeu_ps(y, _mm256_add_ps(_mm256_loadu_ps(y), _mm256_mul_ps(_mm256_set1_ps(block->scale), rest)));
}

/* Reorder: eight rows in each register, one after another. */
SPARSE_INLINE rows_32 in_order(rows_32 x) {
    return (rows_32) {_mm256_permute2x128_si256(x.a, x.b, 0x20), _mm256_permute2x128_si256(x.c, x.d, 0x20),
                      _mm256_permute2x128_si256(x.a, x.b, 0x31), _mm256_permute2x128_si256(x.c, x.d, 0x31)};
}

SPARSE_INLINE void add32(const sparse_block * block, rows_32 sums, const uint16_t * scales, float * y) {
    const rows_32 s = in_order(sums);
    add8(block, s.a, scales, y);
    add8(block, s.b, scales + 8, y + 8);
    add8(block, s.c, scales + 16, y + 16);
    add8(block, s.d, scales + 24, y + 24);
}

SPARSE_INLINE void add32_mins(const sparse_block * block, rows_32 sums, const uint16_t * scales, const uint16_t * mins,
                              float * y) {
    const rows_32 s = in_order(sums);
    add8_mins(block, s.a, scales, mins, y);
    add8_mins(block, s.b, scales + 8, mins + 8, y + 8);
    add8_mins(block, s.c, scales + 16, mins + 16, y + 16);
    add8_mins(block, s.d, scales + 24, mins + 24, y + 24);
}

SPARSE_CHUNK void chunk4(const sparse_block * block, size_t at, const uint16_t * scales, float * y) {
    for (size_t r = 0; r < LLMAAS_CHUNK_ROWS / 2; r += 32) {
        rows_32 low, high;
        half_sums(block, at + r, &low, &high);
        add32(block, low, scales + r, y + r);
        add32(block, high, scales + 64 + r, y + 64 + r);
    }
}

SPARSE_CHUNK void chunk4_mins(const sparse_block * block, size_t at, const uint16_t * scales, float * y) {
    const uint16_t * mins = sparse_mins(block, at);
    for (size_t r = 0; r < LLMAAS_CHUNK_ROWS / 2; r += 32) {
        rows_32 low, high;
        half_sums(block, at + r, &low, &high);
        add32_mins(block, low, scales + r, mins + r, y + r);
        add32_mins(block, high, scales + 64 + r, mins + 64 + r, y + 64 + r);
    }
}

SPARSE_INLINE __m256i whole(__m256i low, __m256i high) { return _mm256_add_epi32(low, _mm256_slli_epi32(high, 4)); }

SPARSE_CHUNK void chunk8(const sparse_block * block, size_t at, const uint16_t * scales, float * y) {
    for (size_t r = 0; r < LLMAAS_CHUNK_ROWS; r += 32) {
        rows_32 low, high;
        half_sums(block, at + r, &low, &high);
        const rows_32 sums = {whole(low.a, high.a), whole(low.b, high.b), whole(low.c, high.c), whole(low.d, high.d)};
        add32(block, sums, scales + r, y + r);
    }
}

SPARSE_KERNEL(avx2)
