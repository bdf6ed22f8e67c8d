/* Low-rank terms: compared with plain sums in double; bit-identical on every instruction set, however vectors are batched
 * and rows are divided. Nothing beyond the last column or row is read or written. */
#include "check.h"
#include "f16.h"

#include "llmaas/kernels.h"
#include "llmaas/low_rank.h"

#include <math.h>

enum { BLOCK = LLMAAS_RANK_BLOCK, STRIDE = LLMAAS_MAX_RANK, BATCH = LLMAAS_RANK_BATCH };

/* Return a random matrix of `rank` rows and n columns, in a piece of memory of exactly its size. */
static uint8_t * random_matrix(uint32_t rank, uint32_t n) {
    const size_t n_bytes = llmaas_low_rank_bytes(rank, n), block_bytes = llmaas_low_rank_bytes(rank, BLOCK);
    uint8_t *    bytes   = exact(n_bytes);
    fill_random(bytes, n_bytes);
    for (size_t b = 0; b < n_bytes / block_bytes; ++b) {
        uint8_t * block = bytes + b * block_bytes;
        for (uint32_t r = 0; r < rank; ++r) {
            const uint16_t scale = (uint16_t) ((rnd() & 0x83ff) | rnd_below(16) << 10); /* some are subnormal */
            memcpy(block + 2 * r, &scale, sizeof scale);
            for (uint32_t j = 0; b * BLOCK + BLOCK > n && j < BLOCK; ++j) {
                uint8_t * value = block + 2 * rank + r * BLOCK + j;
                *value = b * BLOCK + j < n ? *value : 0;
            }
        }
    }
    return bytes;
}

static double value_of(const uint8_t * bytes, uint32_t rank, uint32_t row, uint32_t column) {
    const uint8_t * block = bytes + column / BLOCK * llmaas_low_rank_bytes(rank, BLOCK);
    uint16_t        scale;
    memcpy(&scale, block + 2 * row, sizeof scale);
    return (double) f16_to_f32(scale) * (int8_t) block[2 * rank + row * BLOCK + column % BLOCK];
}

static float * random_vector(uint32_t n) {
    float * x = (void *) exact(n * sizeof *x);
    for (uint32_t i = 0; i < n; ++i) {
        x[i] = (float) rnd_below(2001) / 1000.0f - 1.0f;
    }
    return x;
}

static void check_reduced(const uint8_t * a, uint32_t rank, uint32_t n, const float * x, const float * u) {
    for (uint32_t r = 0; r < rank; ++r) {
        double sum = 0, size = 0;
        for (uint32_t j = 0; j < n; ++j) {
            sum += value_of(a, rank, r, j) * (double) x[j];
            size += fabs(value_of(a, rank, r, j) * (double) x[j]);
        }
        CHECK(fabs(sum - (double) u[r]) <= 1e-6 * size);
    }
}

static void check_expanded(
    const uint8_t * b, uint32_t rank, uint32_t first, uint32_t n, const float * u, const float * before, const float * y) {
    for (uint32_t j = 0; j < n; ++j) {
        double sum = (double) before[j], size = fabs(sum);
        for (uint32_t r = 0; j >= first && r < rank; ++r) {
            sum += value_of(b, rank, r, j) * (double) u[r];
            size += fabs(value_of(b, rank, r, j) * (double) u[r]);
        }
        CHECK(fabs(sum - (double) y[j]) <= 1e-6 * size);
    }
}

/* Check one shape with all instruction sets. The generic kernels come first. */
static void check_shape(uint32_t rank, uint32_t n_columns, uint32_t n_rows) {
    uint8_t *      a = random_matrix(rank, n_columns), * b = random_matrix(rank, n_rows);
    const float *  x[BATCH];
    float *        before[BATCH], * y[BATCH], expected_u[BATCH * STRIDE], * expected_y[BATCH];
    const uint32_t first = n_rows > BLOCK ? rnd_below(n_rows / BLOCK) * BLOCK : 0;
    for (int i = 0; i < BATCH; ++i) {
        x[i]          = random_vector(n_columns);
        before[i]     = random_vector(n_rows);
        y[i]          = random_vector(n_rows);
        expected_y[i] = random_vector(n_rows);
    }
    for (size_t isa = 0; isa < sizeof check_isas / sizeof *check_isas; ++isa) {
        if (llmaas_kernels_select(check_isas[isa]) != LLMAAS_OK) {
            continue;
        }
        for (uint32_t n = 1; n <= BATCH; ++n) {
            float u[BATCH * STRIDE];
            llmaas_low_rank_reduce(a, rank, n_columns, x, n, u);
            for (uint32_t i = 0; i < n; ++i) {
                memcpy(y[i], before[i], n_rows * sizeof *y[i]);
            }
            llmaas_low_rank_expand(b, rank, first, n_rows, u, n, y);
            for (uint32_t i = 0; i < n; ++i) {
                if (isa == 0 && n == i + 1) {
                    memcpy(expected_u + i * STRIDE, u + i * STRIDE, STRIDE * sizeof *u);
                    memcpy(expected_y[i], y[i], n_rows * sizeof *y[i]);
                    check_reduced(a, rank, n_columns, x[i], u + i * STRIDE);
                    check_expanded(b, rank, first, n_rows, u + i * STRIDE, before[i], y[i]);
                }
                CHECK(memcmp(expected_u + i * STRIDE, u + i * STRIDE, rank * sizeof *u) == 0);
                CHECK(memcmp(expected_y[i], y[i], n_rows * sizeof *y[i]) == 0);
            }
        }
    }
    for (int i = 0; i < BATCH; ++i) {
        free((void *) (uintptr_t) x[i]);
        free(before[i]);
        free(y[i]);
        free(expected_y[i]);
    }
    free(a);
    free(b);
}

/* Rows that are divided among threads have the same sums. */
static void check_divided(uint32_t rank, uint32_t n_rows) {
    uint8_t * b = random_matrix(rank, n_rows);
    float *   u = random_vector(STRIDE), * whole = random_vector(n_rows), * parts = random_vector(n_rows);
    memcpy(parts, whole, n_rows * sizeof *whole);
    llmaas_low_rank_expand(b, rank, 0, n_rows, u, 1, &whole);
    for (uint32_t first = 0; first < n_rows;) {
        const uint32_t n = first + (1 + rnd_below(3)) * BLOCK;
        llmaas_low_rank_expand(b, rank, first, n < n_rows ? n : n_rows, u, 1, &parts);
        first = n;
    }
    CHECK(memcmp(whole, parts, n_rows * sizeof *whole) == 0);
    free(b);
    free(u);
    free(whole);
    free(parts);
}

int main(void) {
    for (uint32_t rank = 1; rank <= 17; ++rank) {
        check_shape(rank, 1 + rnd_below(300), 1 + rnd_below(300));
        check_shape(rank, BLOCK * (1 + rnd_below(9)), BLOCK * (1 + rnd_below(9)));
        check_divided(rank, 1 + rnd_below(500));
    }
    check_shape(LLMAAS_MAX_RANK, 1, 1);
    check_shape(LLMAAS_MAX_RANK, 1000, 97);
    return 0;
}
