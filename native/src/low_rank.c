#include "llmaas/low_rank.h"

#include "../kernels/kernels.h"

#include <string.h>

enum { BLOCK = LLMAAS_RANK_BLOCK, BATCH = LLMAAS_RANK_BATCH, MAX_RANK = LLMAAS_MAX_RANK };

static size_t block_bytes(uint32_t rank) { return llmaas_low_rank_bytes(rank, BLOCK); }

void llmaas_low_rank_reduce(
    const uint8_t * a, uint32_t rank, uint32_t n, const float * const * x, uint32_t n_vectors, float * u) {
    const uint32_t n_blocks = n / BLOCK, n_left = n % BLOCK;
    llmaas_k()->rank_reduce(a, rank, n_blocks, x, n_vectors, u);
    if (n_left == 0) {
        return;
    }
    float         tails[BATCH][BLOCK] = {{0}}, sums[BATCH * MAX_RANK];
    const float * padded[BATCH];
    for (uint32_t i = 0; i < n_vectors; ++i) {
        padded[i] = memcpy(tails[i], x[i] + (size_t) n_blocks * BLOCK, n_left * sizeof(float));
    }
    llmaas_k()->rank_reduce(a + n_blocks * block_bytes(rank), rank, 1, padded, n_vectors, sums);
    for (uint32_t i = 0; i < n_vectors; ++i) {
        for (uint32_t r = 0; r < rank; ++r) {
            u[i * MAX_RANK + r] += sums[i * MAX_RANK + r];
        }
    }
}

void llmaas_low_rank_expand(
    const uint8_t * b, uint32_t rank, uint32_t first, uint32_t n, const float * u, uint32_t n_vectors, float * const * y) {
    const uint32_t n_blocks = (n - first) / BLOCK, n_left = (n - first) % BLOCK;
    float *        rows[BATCH];
    for (uint32_t i = 0; i < n_vectors; ++i) {
        rows[i] = y[i] + first;
    }
    b += first / BLOCK * block_bytes(rank);
    llmaas_k()->rank_expand(b, rank, n_blocks, u, n_vectors, rows);
    if (n_left == 0) {
        return;
    }
    float   tails[BATCH][BLOCK] = {{0}};
    float * padded[BATCH];
    for (uint32_t i = 0; i < n_vectors; ++i) {
        padded[i] = memcpy(tails[i], rows[i] + (size_t) n_blocks * BLOCK, n_left * sizeof(float));
    }
    llmaas_k()->rank_expand(b + n_blocks * block_bytes(rank), rank, 1, u, n_vectors, padded);
    for (uint32_t i = 0; i < n_vectors; ++i) {
        memcpy(rows[i] + (size_t) n_blocks * BLOCK, tails[i], n_left * sizeof(float));
    }
}
