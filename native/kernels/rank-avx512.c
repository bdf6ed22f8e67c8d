#include "rank_blocks.h"

#include <immintrin.h>

typedef struct lanes {
    __m512 low, high;
} lanes;

/* Load the 32 values of a row. */
RANK_INLINE lanes values(const rank_blocks * blocks, const uint8_t * block, size_t row) {
    const __m128i * from  = (const void *) rank_values(blocks, block, row);
    const __m512    scale = _mm512_set1_ps(_cvtsh_ss(load_u16(block + row * sizeof(uint16_t))));
    const __m512i   low = _mm512_cvtepi8_epi32(_mm_loadu_si128(from)), high = _mm512_cvtepi8_epi32(_mm_loadu_si128(from + 1));
    return (lanes) {_mm512_mul_ps(_mm512_cvtepi32_ps(low), scale), _mm512_mul_ps(_mm512_cvtepi32_ps(high), scale)};
}

RANK_INLINE void reduce(
    const rank_blocks * blocks, size_t row, int n_rows, const float * const * x, int n_vectors, rank_sums * all) {
    __m512 sums[8][RANK_BATCH];
#pragma GCC unroll 8
    for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < n_vectors; ++i) {
            sums[r][i] = _mm512_loadu_ps(all[row + (size_t) r].of[i]);
        }
    }
    for (size_t b = 0; b < blocks->n; ++b) {
        const uint8_t * block = rank_block(blocks, b);
#pragma GCC unroll 8
        for (int r = 0; r < n_rows; ++r) {
            const lanes v = values(blocks, block, row + (size_t) r);
#pragma GCC unroll 4
            for (int i = 0; i < n_vectors; ++i) {
                const float * from = x[i] + b * RANK_BLOCK;
                sums[r][i] = _mm512_fmadd_ps(v.low, _mm512_loadu_ps(from), sums[r][i]);
                sums[r][i] = _mm512_fmadd_ps(v.high, _mm512_loadu_ps(from + RANK_LANES), sums[r][i]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < n_vectors; ++i) {
            _mm512_storeu_ps(all[row + (size_t) r].of[i], sums[r][i]);
        }
    }
}

RANK_INLINE void expand(const rank_blocks * blocks, const float * u, int n_vectors, float * const * y) {
    for (size_t b = 0; b < blocks->n; ++b) {
        const uint8_t * block = rank_block(blocks, b);
        lanes           sums[RANK_BATCH];
#pragma GCC unroll 4
        for (int i = 0; i < n_vectors; ++i) {
            const float * from = y[i] + b * RANK_BLOCK;
            sums[i] = (lanes) {_mm512_loadu_ps(from), _mm512_loadu_ps(from + RANK_LANES)};
        }
        for (size_t r = 0; r < blocks->rank; ++r) {
            const lanes v = values(blocks, block, r);
#pragma GCC unroll 4
            for (int i = 0; i < n_vectors; ++i) {
                const __m512 factor = _mm512_set1_ps(u[(size_t) i * LLMAAS_MAX_RANK + r]);
                sums[i].low  = _mm512_fmadd_ps(v.low, factor, sums[i].low);
                sums[i].high = _mm512_fmadd_ps(v.high, factor, sums[i].high);
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < n_vectors; ++i) {
            _mm512_storeu_ps(y[i] + b * RANK_BLOCK, sums[i].low);
            _mm512_storeu_ps(y[i] + b * RANK_BLOCK + RANK_LANES, sums[i].high);
        }
    }
}

RANK_KERNELS(avx512, 8, 4)
