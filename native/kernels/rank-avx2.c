#include "rank_blocks.h"

#include <immintrin.h>

enum { QUARTERS = 4, HALF = 8 };

/* The 32 values of a row, 8 in each. */
typedef struct lanes {
    __m256 of[QUARTERS];
} lanes;

RANK_INLINE lanes values(const rank_blocks * blocks, const uint8_t * block, size_t row) {
    const uint8_t * from  = rank_values(blocks, block, row);
    const __m256    scale = _mm256_set1_ps(_cvtsh_ss(load_u16(block + row * sizeof(uint16_t))));
    lanes           v;
#pragma GCC unroll 4
    for (int q = 0; q < QUARTERS; ++q) {
        const __m256i integers = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *) (from + HALF * q)));
        v.of[q] = _mm256_mul_ps(_mm256_cvtepi32_ps(integers), scale);
    }
    return v;
}

RANK_INLINE void reduce(
    const rank_blocks * blocks, size_t row, int n_rows, const float * const * x, int n_vectors, rank_sums * all) {
    __m256 sums[4][RANK_BATCH][2]; /* lanes 0 to 7, and 8 to 15 */
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < n_vectors; ++i) {
            sums[r][i][0] = _mm256_loadu_ps(all[row + (size_t) r].of[i]);
            sums[r][i][1] = _mm256_loadu_ps(all[row + (size_t) r].of[i] + HALF);
        }
    }
    for (size_t b = 0; b < blocks->n; ++b) {
        const uint8_t * block = rank_block(blocks, b);
#pragma GCC unroll 4
        for (int r = 0; r < n_rows; ++r) {
            const lanes v = values(blocks, block, row + (size_t) r);
#pragma GCC unroll 4
            for (int i = 0; i < n_vectors; ++i) {
                const float * from = x[i] + b * RANK_BLOCK;
#pragma GCC unroll 4
                for (int q = 0; q < QUARTERS; ++q) {
                    sums[r][i][q % 2] = _mm256_fmadd_ps(v.of[q], _mm256_loadu_ps(from + HALF * q), sums[r][i][q % 2]);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < n_vectors; ++i) {
            _mm256_storeu_ps(all[row + (size_t) r].of[i], sums[r][i][0]);
            _mm256_storeu_ps(all[row + (size_t) r].of[i] + HALF, sums[r][i][1]);
        }
    }
}

RANK_INLINE void expand(const rank_blocks * blocks, const float * u, int n_vectors, float * const * y) {
    for (size_t b = 0; b < blocks->n; ++b) {
        const uint8_t * block = rank_block(blocks, b);
        lanes           sums[RANK_BATCH];
#pragma GCC unroll 4
        for (int i = 0; i < n_vectors; ++i) {
#pragma GCC unroll 4
            for (int q = 0; q < QUARTERS; ++q) {
                sums[i].of[q] = _mm256_loadu_ps(y[i] + b * RANK_BLOCK + HALF * q);
            }
        }
        for (size_t r = 0; r < blocks->rank; ++r) {
            const lanes v = values(blocks, block, r);
#pragma GCC unroll 4
            for (int i = 0; i < n_vectors; ++i) {
                const __m256 factor = _mm256_set1_ps(u[(size_t) i * LLMAAS_MAX_RANK + r]);
#pragma GCC unroll 4
                for (int q = 0; q < QUARTERS; ++q) {
                    sums[i].of[q] = _mm256_fmadd_ps(v.of[q], factor, sums[i].of[q]);
                }
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < n_vectors; ++i) {
#pragma GCC unroll 4
            for (int q = 0; q < QUARTERS; ++q) {
                _mm256_storeu_ps(y[i] + b * RANK_BLOCK + HALF * q, sums[i].of[q]);
            }
        }
    }
}

RANK_KERNELS(avx2, 4, 1)
