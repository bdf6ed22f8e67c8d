/* The reference implementation: every other kernel for low-rank terms must give the same bits. */
#include "f16.h"
#include "rank_blocks.h"

#include <math.h>

/* Return value j of a row: its integer times its scale. */
RANK_INLINE float value(const rank_blocks * blocks, const uint8_t * block, size_t row, size_t j) {
    const float scale = f16_to_f32(load_u16(block + row * sizeof(uint16_t)));
    return (float) (int8_t) rank_values(blocks, block, row)[j] * scale;
}

RANK_INLINE void reduce(
    const rank_blocks * blocks, size_t row, int n_rows, const float * const * x, int n_vectors, rank_sums * all) {
    for (int i = 0; i < n_vectors; ++i) {
        for (size_t r = row; r < row + (size_t) n_rows; ++r) {
            float * sums = all[r].of[i];
            for (size_t b = 0; b < blocks->n; ++b) {
                for (size_t j = 0; j < RANK_BLOCK; ++j) {
                    const float factor = x[i][b * RANK_BLOCK + j];
                    sums[j % RANK_LANES] = fmaf(value(blocks, rank_block(blocks, b), r, j), factor, sums[j % RANK_LANES]);
                }
            }
        }
    }
}

RANK_INLINE void expand(const rank_blocks * blocks, const float * u, int n_vectors, float * const * y) {
    for (int i = 0; i < n_vectors; ++i) {
        for (size_t b = 0; b < blocks->n; ++b) {
            for (size_t j = 0; j < RANK_BLOCK; ++j) {
                float sum = y[i][b * RANK_BLOCK + j];
                for (size_t r = 0; r < blocks->rank; ++r) {
                    sum = fmaf(value(blocks, rank_block(blocks, b), r, j), u[(size_t) i * LLMAAS_MAX_RANK + r], sum);
                }
                y[i][b * RANK_BLOCK + j] = sum;
            }
        }
    }
}

RANK_KERNELS(generic, 1, 1)
