/* The shape of all kernels for low-rank terms: rows and vectors are taken in groups of a fixed size, so that the compiler
 * keeps a group's sums in registers. An instruction set defines reduce() and expand() for one group. */
#ifndef LLMAAS_RANK_BLOCKS_H
#define LLMAAS_RANK_BLOCKS_H

#include "bytes.h"
#include "kernels.h"

#include "llmaas/low_rank.h"

#include <string.h>

#define RANK_INLINE static inline __attribute__((always_inline))

enum {
    RANK_BLOCK = LLMAAS_RANK_BLOCK,
    RANK_LANES = 16,
    RANK_BATCH = LLMAAS_RANK_BATCH,
    RANK_PIECE = 32, /* blocks */
};

/* Blocks of a matrix. */
typedef struct rank_blocks {
    const uint8_t * bytes;
    size_t          rank, n;
} rank_blocks;

/* Partial sums of a row's products, for each vector. */
typedef struct rank_sums {
    float of[RANK_BATCH][RANK_LANES];
} rank_sums;

RANK_INLINE const uint8_t * rank_block(const rank_blocks * blocks, size_t i) {
    return blocks->bytes + i * blocks->rank * (RANK_BLOCK + sizeof(uint16_t));
}

RANK_INLINE const uint8_t * rank_values(const rank_blocks * blocks, const uint8_t * block, size_t row) {
    return block + blocks->rank * sizeof(uint16_t) + row * RANK_BLOCK;
}

/* Add 16 partial sums in pairs. */
RANK_INLINE float rank_sum(const float * sums) {
    float half[RANK_LANES / 2];
    for (int i = 0; i < RANK_LANES / 2; ++i) {
        half[i] = sums[i] + sums[i + RANK_LANES / 2];
    }
    for (int n = RANK_LANES / 4; n > 0; n /= 2) {
        for (int i = 0; i < n; ++i) {
            half[i] += half[i + n];
        }
    }
    return half[0];
}

/* Add the products of n_rows rows from `row` on with n_vectors vectors to their partial sums. */
RANK_INLINE void reduce(
    const rank_blocks * blocks, size_t row, int n_rows, const float * const * x, int n_vectors, rank_sums * sums);

/* Add all rows to n_vectors vectors. */
RANK_INLINE void expand(const rank_blocks * blocks, const float * u, int n_vectors, float * const * y);

/* Compute the sums of all rows, `group` rows at a time. A piece of the vectors stays in the first-level cache until all
 * rows are multiplied with it. */
RANK_INLINE void rank_reduce(
    const rank_blocks * all, int group, const float * const * x, int n_vectors, float * u) {
    rank_sums sums[LLMAAS_MAX_RANK];
    memset(sums, 0, all->rank * sizeof *sums);
    for (size_t first = 0; first < all->n; first += RANK_PIECE) {
        const rank_blocks blocks = {
            rank_block(all, first), all->rank, all->n - first < RANK_PIECE ? all->n - first : RANK_PIECE};
        const float * from[RANK_BATCH];
        for (int i = 0; i < n_vectors; ++i) {
            from[i] = x[i] + first * RANK_BLOCK;
        }
        size_t row = 0;
        for (; row + (size_t) group <= all->rank; row += (size_t) group) {
            reduce(&blocks, row, group, from, n_vectors, sums);
        }
        for (; row < all->rank; ++row) {
            reduce(&blocks, row, 1, from, n_vectors, sums);
        }
    }
    for (size_t row = 0; row < all->rank; ++row) {
        for (int i = 0; i < n_vectors; ++i) {
            u[(size_t) i * LLMAAS_MAX_RANK + row] = rank_sum(sums[row].of[i]);
        }
    }
}

/* Define the kernels: `one` and `many` are the rows of a group for one vector, and for a batch. */
#define RANK_KERNELS(isa, one, many)                                                                                      \
    void llmaas_rank_reduce_##isa(                                                                                        \
        const uint8_t * bytes, size_t rank, size_t n, const float * const * x, size_t n_vectors, float * u) {             \
        const rank_blocks blocks = {bytes, rank, n};                                                                      \
        if (n_vectors == RANK_BATCH) {                                                                                    \
            rank_reduce(&blocks, many, x, RANK_BATCH, u);                                                                 \
            return;                                                                                                       \
        }                                                                                                                 \
        for (size_t i = 0; i < n_vectors; ++i) {                                                                          \
            rank_reduce(&blocks, one, x + i, 1, u + i * LLMAAS_MAX_RANK);                                                 \
        }                                                                                                                 \
    }                                                                                                                     \
    void llmaas_rank_expand_##isa(                                                                                        \
        const uint8_t * bytes, size_t rank, size_t n, const float * u, size_t n_vectors, float * const * y) {             \
        const rank_blocks blocks = {bytes, rank, n};                                                                      \
        if (n_vectors == RANK_BATCH) {                                                                                    \
            expand(&blocks, u, RANK_BATCH, y);                                                                            \
            return;                                                                                                       \
        }                                                                                                                 \
        for (size_t i = 0; i < n_vectors; ++i) {                                                                          \
            expand(&blocks, u + i * LLMAAS_MAX_RANK, 1, y + i);                                                           \
        }                                                                                                                 \
    }

#endif
