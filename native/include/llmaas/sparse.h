/* Products with some of a matrix's columns: the channels of an activation that are large enough to matter (Top-K
 * sparsity).
 *
 * A channel's bytes are one column's numbers for all rows, in chunks of 128 rows; the last chunk is padded with zero
 * weights. At 4 bits, byte k of a chunk's 64 has row k in its lower half and row 64 + k in its upper half; the number 8
 * stands for 0. At 8 bits, byte k is row k; the number 128 stands for 0. A weight is such a number times the scale of
 * its row and of its block of 32 columns, as in GGUF's Q4_0 and Q8_0.
 *
 * Alternatively, row and block also have a minimum, which is subtracted from that product, as in Q4_1 and Q4_K: 4 bits,
 * 0 to 15. */
#ifndef LLMAAS_SPARSE_H
#define LLMAAS_SPARSE_H

#include "llmaas/base.h"

#define LLMAAS_CHUNK_ROWS    128u
#define LLMAAS_BLOCK_COLUMNS 32u

/* The channels of an activation that are used, and their values: 8 bits each with a scale per block, as ggml quantizes
 * them. */
typedef struct llmaas_active {
    uint32_t   n_channels; /* of the activation; a multiple of 32 */
    uint32_t   n;          /* channels that are used */
    uint32_t * channels;   /* [n], ascending */
    int8_t *   values;     /* [n] */
    uint32_t * first;      /* [n_channels / 32 + 1]: where each block's entries in channels and values begin */
    float *    scales;     /* [n_channels / 32] */
} llmaas_active;

/* Allocate room for n_channels. EINVAL: 0 or not a multiple of 32. ESPACE: out of memory. */
LLMAAS_API llmaas_status llmaas_active_new(uint32_t n_channels, llmaas_active ** active);
LLMAAS_API void          llmaas_active_free(llmaas_active * active); /* NULL is allowed */

/* Use the channels with |x| >= threshold. A value that is not finite is used, and makes products NaN. */
LLMAAS_API void llmaas_active_above(llmaas_active * active, const float * x, float threshold);

/* Use the k largest channels by |x|, the first of equal ones; use all if there are fewer than k. */
LLMAAS_API void llmaas_active_top(llmaas_active * active, const float * x, uint32_t k);

/* Compute y[r] for rows row_begin..row_end-1. row_begin is a multiple of 128; row_end is too, or is the number of rows.
 * columns[i] + offset: bytes of active channel i from row 0 on; alignment to 64 bytes is not required. scales: F16
 * [n_channels / 32][n_scales]; n_scales is a multiple of 128. mins: same shape, or NULL. n_bits: 4 or 8; 4 if there are
 * mins. The result depends neither on how rows are divided among calls nor on the instruction set (NaNs may differ).
 * For full memory speed, take at least 1 KiB of each channel per call: 2048 rows at 4 bits. Thread-safe. */
LLMAAS_API void llmaas_active_multiply(
    const llmaas_active * active, uint32_t n_bits, const uint8_t * const * columns, size_t offset, const uint16_t * scales,
    const uint16_t * mins, uint32_t n_scales, uint32_t row_begin, uint32_t row_end, float * y);

#endif
