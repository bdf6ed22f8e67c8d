#include "llmaas/sparse.h"

#include "../kernels/f16.h"
#include "../kernels/kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    TILE_CHUNKS = 64, /* most chunks per kernel call: long enough runs (4 KiB) for full memory speed, and results that
                       * stay in caches */
    TILE_ROWS   = TILE_CHUNKS * LLMAAS_CHUNK_ROWS,
};

#define LARGEST 127

/* Allocate everything in one piece of memory, the widest element types first. */
llmaas_status llmaas_active_new(uint32_t n_channels, llmaas_active ** active) {
    const size_t n = n_channels, n_blocks = n / LLMAAS_BLOCK_COLUMNS;
    if (!active || n == 0 || n % LLMAAS_BLOCK_COLUMNS) {
        return LLMAAS_EINVAL;
    }
    llmaas_active * a = calloc(1, sizeof *a + (n + n_blocks + 1) * sizeof(uint32_t) + n_blocks * sizeof(float) + n);
    if (!a) {
        return LLMAAS_ESPACE;
    }
    a->n_channels = n_channels;
    a->channels   = (void *) (a + 1);
    a->first      = a->channels + n;
    a->scales     = (void *) (a->first + n_blocks + 1);
    a->values     = (void *) (a->scales + n_blocks);
    *active       = a;
    return LLMAAS_OK;
}

void llmaas_active_free(llmaas_active * active) { free(active); }

/* Return a number that orders values by |x|; NaN comes after infinity. */
static int32_t size_bits(float x) { return (int32_t) (f32_bits(x) & 0x7fffffffu); }

/* Round to nearest, halves away from zero; |x| < 2^31. */
static int32_t rounded(float x) {
    const int32_t whole = (int32_t) x;
    const float   rest  = x - (float) whole;
    return whole + (rest >= 0.5f) - (rest <= -0.5f);
}

/* Quantize a block and return its scale. If the scale has no finite inverse or is not finite, the values are zeros. */
static float quantize(const float * x, int32_t * values) {
    int32_t largest = 0;
    for (uint32_t j = 0; j < LLMAAS_BLOCK_COLUMNS; ++j) {
        largest = size_bits(x[j]) > largest ? size_bits(x[j]) : largest;
    }
    const float scale = f32_from_bits((uint32_t) largest) / LARGEST, inverse = 1 / scale;
    if (!(scale < INFINITY && inverse < INFINITY)) {
        memset(values, 0, LLMAAS_BLOCK_COLUMNS * sizeof *values);
        return scale < INFINITY ? scale : NAN;
    }
    for (uint32_t j = 0; j < LLMAAS_BLOCK_COLUMNS; ++j) {
        values[j] = rounded(x[j] * inverse);
    }
    return scale;
}

/* Add a block; call for one block after another. A mask is ~0 for a used channel and 0 for any other. */
static void use_block(llmaas_active * active, uint32_t b, const float * x, const uint32_t * masks) {
    float      kept[LLMAAS_BLOCK_COLUMNS];
    int32_t    values[LLMAAS_BLOCK_COLUMNS];
    uint32_t   n = active->first[b];
    uint32_t * channels = active->channels;
    int8_t *   used = active->values;
    for (uint32_t j = 0; j < LLMAAS_BLOCK_COLUMNS; ++j) {
        kept[j] = f32_from_bits(f32_bits(x[j]) & masks[j]);
    }
    active->scales[b] = quantize(kept, values);
    for (uint32_t j = 0; j < LLMAAS_BLOCK_COLUMNS; ++j) {
        channels[n] = b * LLMAAS_BLOCK_COLUMNS + j;
        used[n]     = (int8_t) values[j];
        n -= masks[j];
    }
    active->first[b + 1] = active->n = n;
}

void llmaas_active_above(llmaas_active * active, const float * x, float threshold) {
    for (uint32_t b = 0; b < active->n_channels / LLMAAS_BLOCK_COLUMNS; ++b, x += LLMAAS_BLOCK_COLUMNS) {
        uint32_t masks[LLMAAS_BLOCK_COLUMNS];
        for (uint32_t j = 0; j < LLMAAS_BLOCK_COLUMNS; ++j) {
            masks[j] = fabsf(x[j]) < threshold ? 0 : ~0u;
        }
        use_block(active, b, x, masks);
    }
}

/* Find the k-th largest of n sizes, 0 < k <= n, digit by digit; only sizes with the right digit stay. *n_equal: how
 * many sizes equal to it are among the k largest. */
static int32_t kth_largest(uint32_t * sizes, uint32_t n, uint32_t k, uint32_t * n_equal) {
    enum { DIGITS = 1 << 11 };
    static const uint32_t shifts[] = {20, 9, 0};
    for (int i = 0; i < 3; ++i) {
        uint32_t counts[DIGITS] = {0}, digit = DIGITS - 1, n_kept = 0;
        for (uint32_t j = 0; j < n; ++j) {
            ++counts[sizes[j] >> shifts[i] & (DIGITS - 1)];
        }
        while (counts[digit] < k) {
            k -= counts[digit--];
        }
        for (uint32_t j = 0; j < n; ++j) {
            const uint32_t size = sizes[j];
            sizes[n_kept] = size;
            n_kept += (size >> shifts[i] & (DIGITS - 1)) == digit;
        }
        n = n_kept;
    }
    *n_equal = k;
    return (int32_t) sizes[0];
}

void llmaas_active_top(llmaas_active * active, const float * x, uint32_t k) {
    const uint32_t n = active->n_channels;
    uint32_t n_equal = 0;
    for (uint32_t j = 0; j < n; ++j) {
        active->channels[j] = (uint32_t) size_bits(x[j]);
    }
    const int32_t least = k == 0 ? INT32_MAX : kth_largest(active->channels, n, k < n ? k : n, &n_equal);
    for (uint32_t b = 0; b < n / LLMAAS_BLOCK_COLUMNS; ++b, x += LLMAAS_BLOCK_COLUMNS) {
        uint32_t masks[LLMAAS_BLOCK_COLUMNS];
        for (uint32_t j = 0; j < LLMAAS_BLOCK_COLUMNS; ++j) {
            masks[j] = size_bits(x[j]) > least ? ~0u : 0;
        }
        for (uint32_t j = 0; n_equal > 0 && j < LLMAAS_BLOCK_COLUMNS; ++j) {
            const uint32_t is_equal = size_bits(x[j]) == least;
            masks[j] |= 0 - is_equal;
            n_equal -= is_equal;
        }
        use_block(active, b, x, masks);
    }
}

/* Multiply in tiles of about equal size, since short runs are slow. */
void llmaas_active_multiply(
    const llmaas_active * active, uint32_t n_bits, const uint8_t * const * columns, size_t offset, const uint16_t * scales,
    const uint16_t * mins, uint32_t n_scales, uint32_t row_begin, uint32_t row_end, float * y) {
    const llmaas_kernels * k = llmaas_k();
    const uint32_t n_chunks = (row_end - row_begin + LLMAAS_CHUNK_ROWS - 1) / LLMAAS_CHUNK_ROWS;
    const uint32_t n_tiles  = (n_chunks + TILE_CHUNKS - 1) / TILE_CHUNKS;
    _Alignas(64) float tile[TILE_ROWS];
    for (uint32_t t = 0; t < n_tiles; ++t) {
        const uint32_t first = n_chunks * t / n_tiles, n = n_chunks * (t + 1) / n_tiles - first;
        const uint32_t row = row_begin + first * LLMAAS_CHUNK_ROWS, rest = row_end - row;
        k->active_tile(active, n_bits, columns, offset + (size_t) row * n_bits / 8, scales + row, mins ? mins + row : NULL,
                       n_scales, n, tile);
        memcpy(y + row, tile, (rest < n * LLMAAS_CHUNK_ROWS ? rest : n * LLMAAS_CHUNK_ROWS) * sizeof *y);
    }
}
