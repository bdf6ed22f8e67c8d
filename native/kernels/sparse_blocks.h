/* Shared by the sparse kernels: the walk through blocks of active channels, four channels at a time. */
#ifndef LLMAAS_SPARSE_BLOCKS_H
#define LLMAAS_SPARSE_BLOCKS_H

#include "kernels.h"

#include <string.h>

#define SPARSE_AHEAD 16u /* how many chunks of a block ahead to prefetch */

#define SPARSE_INLINE static inline __attribute__((always_inline))
#define SPARSE_CHUNK  static __attribute__((noinline)) /* inlined into loops, it would need more address registers than
                                                        * there are */

/* The active channels of one block; the last four are padded with values of 0. */
typedef struct sparse_block {
    const uint8_t * columns[LLMAAS_BLOCK_COLUMNS];
    int8_t   values[LLMAAS_BLOCK_COLUMNS];
    uint32_t n_fours;
    int32_t  zero;  /* the negated sum of a row whose weights are all 0 */
    float    scale;
    float    sum;   /* sum of the values */
    const uint16_t * mins; /* of all rows; NULL: none */
} sparse_block;

/* Add a block to a chunk of 128 rows, whose bytes are at columns[i] + at: y += scale × scales × sum, in this order;
 * with mins y += scale × (scales × sum - mins × sum of values). */
typedef void sparse_chunk_of(const sparse_block * block, size_t at, const uint16_t * scales, float * y);

SPARSE_INLINE int32_t sparse_four(const sparse_block * block, uint32_t four) {
    int32_t values;
    memcpy(&values, block->values + 4 * four, sizeof values);
    return values;
}

SPARSE_INLINE void sparse_gather(const llmaas_active * active, uint32_t b, const uint8_t * const * columns, size_t offset,
                                 int32_t zero, sparse_block * block) {
    const uint32_t first = active->first[b], n = active->first[b + 1] - first;
    int32_t sum = 0;
    memset(block->values, 0, sizeof block->values);
    for (uint32_t i = 0; i < n; ++i) {
        block->columns[i] = columns[first + i] + offset;
        block->values[i]  = active->values[first + i];
        sum += active->values[first + i];
    }
    for (uint32_t i = n; i % 4; ++i) {
        block->columns[i] = block->columns[n - 1];
    }
    block->n_fours = (n + 3) / 4;
    block->zero    = -zero * sum;
    block->scale   = active->scales[b];
    block->sum     = (float) sum;
}

/* Return the mins of a chunk whose 4-bit numbers are at columns[i] + at. */
SPARSE_INLINE const uint16_t * sparse_mins(const sparse_block * block, size_t at) { return block->mins + 2 * at; }

/* Prefetch into the second-level cache: the first-level cache takes only few requests at a time. */
SPARSE_INLINE void sparse_prefetch(const sparse_block * block, size_t at, size_t n_bytes) {
    for (uint32_t i = 0; i < 4 * block->n_fours; ++i) {
        for (size_t byte = 0; byte < n_bytes; byte += 64) {
            __builtin_prefetch(block->columns[i] + at + byte, 0, 2);
        }
    }
}

/* Gather the next block from b on that has active channels. Return its number. */
SPARSE_INLINE uint32_t sparse_next(const llmaas_active * active, uint32_t b, const uint8_t * const * columns, size_t offset,
                                   int32_t zero, sparse_block * block) {
    const uint32_t n_blocks = active->n_channels / LLMAAS_BLOCK_COLUMNS;
    while (b < n_blocks && active->first[b] == active->first[b + 1]) {
        ++b;
    }
    if (b < n_blocks) {
        sparse_gather(active, b, columns, offset, zero, block);
    } else {
        block->n_fours = 0;
    }
    return b;
}

SPARSE_INLINE void sparse_tile(sparse_chunk_of chunk_of, size_t chunk_bytes, int32_t zero, const llmaas_active * active,
                               const uint8_t * const * columns, size_t offset, const uint16_t * scales,
                               const uint16_t * mins, size_t n_scales, size_t n_chunks, float * y) {
    const size_t ahead = n_chunks < SPARSE_AHEAD ? n_chunks : SPARSE_AHEAD;
    sparse_block blocks[2]; /* this block and the next, alternating */
    memset(y, 0, n_chunks * LLMAAS_CHUNK_ROWS * sizeof *y);
    uint32_t b = sparse_next(active, 0, columns, offset, zero, &blocks[0]);
    for (uint32_t i = 0; blocks[i].n_fours; i = 1 - i) {
        const uint32_t next = sparse_next(active, b + 1, columns, offset, zero, &blocks[1 - i]);
        blocks[i].mins = mins ? mins + b * n_scales : NULL;
        for (size_t c = 0; c < n_chunks; ++c) {
            if (c + ahead < n_chunks) {
                sparse_prefetch(&blocks[i], (c + ahead) * chunk_bytes, chunk_bytes);
            } else {
                sparse_prefetch(&blocks[1 - i], (c + ahead - n_chunks) * chunk_bytes, chunk_bytes);
            }
            chunk_of(&blocks[i], c * chunk_bytes, scales + b * n_scales + c * LLMAAS_CHUNK_ROWS, y + c * LLMAAS_CHUNK_ROWS);
        }
        b = next;
    }
}

#define SPARSE_CHUNK_BYTES(n_bits) (LLMAAS_CHUNK_ROWS * (n_bits) / 8)

/* Define the kernel of an instruction set that has chunk4, chunk4_mins and chunk8. */
#define SPARSE_KERNEL(isa)                                                                                                \
    void llmaas_active_tile_##isa(const llmaas_active * active, uint32_t n_bits, const uint8_t * const * columns,         \
                                  size_t offset, const uint16_t * scales, const uint16_t * mins, size_t n_scales,         \
                                  size_t n_chunks, float * y) {                                                           \
        if (n_bits == 8) {                                                                                                \
            sparse_tile(chunk8, SPARSE_CHUNK_BYTES(8), 128, active, columns, offset, scales, NULL, n_scales, n_chunks, y); \
        } else if (mins) {                                                                                                \
            sparse_tile(chunk4_mins, SPARSE_CHUNK_BYTES(4), 0, active, columns, offset, scales, mins, n_scales, n_chunks, \
                        y);                                                                                               \
        } else {                                                                                                          \
            sparse_tile(chunk4, SPARSE_CHUNK_BYTES(4), 8, active, columns, offset, scales, NULL, n_scales, n_chunks, y);  \
        }                                                                                                                 \
    }

#endif
