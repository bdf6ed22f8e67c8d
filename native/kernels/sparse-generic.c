/* The reference implementation: every other sparse kernel must give the same bits. */
#include "f16.h"
#include "kernels.h"
#include "sparse_blocks.h"

/* Rows of a 4-bit chunk that share one half (lower or upper) of its bytes. */
enum { HALF_ROWS = LLMAAS_CHUNK_ROWS / 2 };

static void add_rows(const sparse_block * block, const int32_t * sums, const uint16_t * scales, float * y) {
    for (uint32_t r = 0; r < LLMAAS_CHUNK_ROWS; ++r) {
        y[r] += block->scale * f16_to_f32(scales[r]) * (float) (sums[r] + block->zero);
    }
}

static void add_rows_mins(const sparse_block * block, const int32_t * sums, const uint16_t * scales, const uint16_t * mins,
                          float * y) {
    for (uint32_t r = 0; r < LLMAAS_CHUNK_ROWS; ++r) {
        y[r] += block->scale * (f16_to_f32(scales[r]) * (float) sums[r] - f16_to_f32(mins[r]) * block->sum);
    }
}

/* Compute the sums of the lower and of the upper halves of bytes. */
static void half_sums(const sparse_block * block, size_t at, int32_t * sums) {
    memset(sums, 0, LLMAAS_CHUNK_ROWS * sizeof *sums);
    for (uint32_t i = 0; i < 4 * block->n_fours; ++i) {
        for (uint32_t r = 0; r < HALF_ROWS; ++r) {
            const uint8_t both = block->columns[i][at + r];
            sums[r] += block->values[i] * (both & 15);
            sums[HALF_ROWS + r] += block->values[i] * (both >> 4);
        }
    }
}

SPARSE_CHUNK void chunk4(const sparse_block * block, size_t at, const uint16_t * scales, float * y) {
    int32_t sums[LLMAAS_CHUNK_ROWS];
    half_sums(block, at, sums);
    add_rows(block, sums, scales, y);
}

SPARSE_CHUNK void chunk4_mins(const sparse_block * block, size_t at, const uint16_t * scales, float * y) {
    int32_t sums[LLMAAS_CHUNK_ROWS];
    half_sums(block, at, sums);
    add_rows_mins(block, sums, scales, sparse_mins(block, at), y);
}

SPARSE_CHUNK void chunk8(const sparse_block * block, size_t at, const uint16_t * scales, float * y) {
    int32_t sums[LLMAAS_CHUNK_ROWS] = {0};
    for (uint32_t i = 0; i < 4 * block->n_fours; ++i) {
        for (uint32_t r = 0; r < LLMAAS_CHUNK_ROWS; ++r) {
            sums[r] += block->values[i] * block->columns[i][at + r];
        }
    }
    add_rows(block, sums, scales, y);
}

SPARSE_KERNEL(generic)
