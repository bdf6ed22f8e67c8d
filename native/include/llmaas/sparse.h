/* Products with some of a matrix's columns: the channels of an activation that are large enough to matter (Top-K sparsity).
 *
 * A channel's bytes are the numbers that one column has for all rows, in chunks of 128 rows, the last one padded with zeros of
 * the matrix: at 4 bits, byte k of a chunk's 64 is row k's number and, in the upper half, row 64 + k's, 8 stands for 0; at 8
 * bits, byte k is row k's, and 128 stands for 0. A weight is such a number times the scale of its row and of its block of 32
 * columns, as in GGUF's Q4_0 and Q8_0.
 *
 * Or its row and block have a minimum as well, which is subtracted from that product, as in Q4_1 and Q4_K: 4 bits, 0 to 15. */
#ifndef LLMAAS_SPARSE_H
#define LLMAAS_SPARSE_H

#include "llmaas/base.h"

#define LLMAAS_CHUNK_ROWS    128u
#define LLMAAS_BLOCK_COLUMNS 32u

/* The channels of an activation that are used, and their values: 8 bits each, with a scale a block, as ggml quantises them. */
typedef struct llmaas_active {
    uint32_t   n_channels; /* of the activation; a multiple of 32 */
    uint32_t   n;          /* that are used */
    uint32_t * channels;   /* [n], rising */
    int8_t *   values;     /* [n] */
    uint32_t * first;      /* [n_channels / 32 + 1]: where in these a block's begin */
    float *    scales;     /* [n_channels / 32] */
} llmaas_active;

/* Room for n_channels. EINVAL: no multiple of 32, or 0. ESPACE: out of memory. */
LLMAAS_API llmaas_status llmaas_active_new(uint32_t n_channels, llmaas_active ** active);
LLMAAS_API void          llmaas_active_free(llmaas_active * active); /* NULL is fine */

/* Use those with |x| >= threshold. What is not finite is used, and makes products NaN. */
LLMAAS_API void llmaas_active_above(llmaas_active * active, const float * x, float threshold);

/* Use the k largest by |x|, of equal ones the first; all if there are fewer. */
LLMAAS_API void llmaas_active_top(llmaas_active * active, const float * x, uint32_t k);

/* y[r] for rows r of row_begin..row_end-1, begin a multiple of 128, and end too, or the number of rows.
 * columns[i] + offset: bytes of active channel i from row 0 on, 64-byte aligned or not. scales: F16
 * [n_channels / 32][n_scales], of which a row has n_scales, a multiple of 128. mins: likewise; NULL: there are none. n_bits: 4
 * or 8, with mins 4. The result does not depend on how rows are shared out, nor on the instruction set (NaNs may differ).
 * Memory is fastest where a call takes 1 KiB of each channel or more: 2048 rows at 4 bits. Thread-safe. */
LLMAAS_API void llmaas_active_multiply(
    const llmaas_active * active, uint32_t n_bits, const uint8_t * const * columns, size_t offset, const uint16_t * scales,
    const uint16_t * mins, uint32_t n_scales, uint32_t row_begin, uint32_t row_end, float * y);

#endif
