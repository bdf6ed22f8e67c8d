/* Low-rank terms of products: y += B (A x), in 8 bits.
 *
 * A and the transpose of B have `rank` rows each. They are stored in blocks of 32 columns, one after another: the scales
 * (F16) of all rows, then 32 integers of each row. A value is its integer times its row's scale. The integers beyond the
 * last column are 0. Any address will do. */
#ifndef LLMAAS_LOW_RANK_H
#define LLMAAS_LOW_RANK_H

#include "llmaas/base.h"

#include <stddef.h>

#define LLMAAS_RANK_BLOCK 32
#define LLMAAS_MAX_RANK   64
#define LLMAAS_RANK_BATCH 4 /* most vectors that are multiplied together */

/* Return the bytes of a matrix of n columns. */
static inline size_t llmaas_low_rank_bytes(uint32_t rank, uint32_t n) {
    return ((size_t) n + LLMAAS_RANK_BLOCK - 1) / LLMAAS_RANK_BLOCK * rank * (LLMAAS_RANK_BLOCK + sizeof(uint16_t));
}

/* Compute u[i][r] = sum of A[r][j] x[i][j] over the first n columns, for n_vectors <= LLMAAS_RANK_BATCH vectors; u:
 * [n_vectors][LLMAAS_MAX_RANK]. The result of a vector does not depend on the others. */
void llmaas_low_rank_reduce(
    const uint8_t * a, uint32_t rank, uint32_t n, const float * const * x, uint32_t n_vectors, float * u);

/* Add the sum of B[j][r] u[i][r] over r to y[i][j], for the rows `first` <= j < n; `first` is a multiple of 32. */
void llmaas_low_rank_expand(
    const uint8_t * b, uint32_t rank, uint32_t first, uint32_t n, const float * u, uint32_t n_vectors, float * const * y);

#endif
