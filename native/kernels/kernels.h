/* The dispatch table, and the contract of each kernel. Callers use llmaas_k() and never see an instruction set.
 * Matrices are rows of u16 or bytes at any address; strides are in bytes. */
#ifndef LLMAAS_KERNELS_INTERNAL_H
#define LLMAAS_KERNELS_INTERNAL_H

#include "llmaas/knn.h"
#include "llmaas/sparse.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    LLMAAS_GROUP    = 64, /* columns per int8 scale and per bit-plane group */
    LLMAAS_TILE     = 16, /* rows per tile */
    LLMAAS_SYMBOLS  = 32, /* distinct f16 exponents */
    LLMAAS_LEVELS   = 11, /* levels of three symbols that hold LLMAAS_SYMBOLS */
    LLMAAS_FIXED    = 40, /* bytes of the fixed planes of one group */
    LLMAAS_VAR_PAD  = 16, /* readable bytes that must follow the variable planes */
    LLMAAS_BITS     = 8,  /* planes of the embedded code */
    LLMAAS_EMBED_MAX = 0x7800, /* largest magnitude (f16 bits) with an embedded code: 32768 */
};

/* Cursor over the three streams of one lossless block; see native/FORMAT.md. The streams are read and written in tile
 * order: for each 64 columns, all rows. */
typedef struct llmaas_planes_reader {
    const uint8_t * low;    /* low bytes */
    const uint8_t * fixed;  /* sign, two mantissa bits, first level: 5 × u64 per group */
    const uint8_t * var;    /* further levels, a bit stream */
    uint64_t pos;           /* in bits of var */
    uint64_t end;
    uint8_t  symbols[LLMAAS_LEVELS * 3]; /* rank → exponent << 2 */
} llmaas_planes_reader;

typedef struct llmaas_planes_writer {
    uint8_t * low;
    uint8_t * fixed;
    uint8_t * var;          /* where the next whole word goes */
    uint64_t acc;           /* bits not yet in var */
    unsigned n_acc;         /* < 64 */
    uint8_t  ranks[LLMAAS_SYMBOLS]; /* exponent → rank */
} llmaas_planes_writer;

/* A query as integers, |wide| <= LLMAAS_KNN_WIDEST, padded with zeros; wide = 256 high + low. */
typedef struct llmaas_knn_query {
    _Alignas(64) int16_t wide[LLMAAS_KNN_MAX_DIMS];
    _Alignas(64) int8_t  high[LLMAAS_KNN_MAX_DIMS];
    _Alignas(64) int8_t  low[LLMAAS_KNN_MAX_DIMS];
} llmaas_knn_query;

#define LLMAAS_KNN_WIDEST 32512 /* 127 × 256, so that high fits a byte */

typedef struct llmaas_kernels {
    const char * name;

    uint32_t (*crc32c)(uint32_t crc, const uint8_t * data, size_t n);

    /* Transpose: dst[c][r] = src[r][c] for u16 elements. */
    void (*transpose)(const uint8_t * src, size_t src_stride, size_t n_rows, size_t n_cols, uint8_t * dst,
                      size_t dst_stride);

    /* Encode or decode INT8: per row, an f16 scale and int8 values for each group of 64 columns. Encoding returns false
     * if a value is not finite. */
    bool (*int8_encode)(const uint8_t * src, size_t src_stride, size_t n_rows, size_t n_cols, uint8_t * scales,
                        size_t scale_stride, uint8_t * q, size_t q_stride);
    void (*int8_decode)(const uint8_t * scales, size_t scale_stride, const uint8_t * q, size_t q_stride, size_t n_rows,
                        size_t n_cols, uint8_t * dst, size_t dst_stride);

    /* Add the exponents of a matrix to counts[32]. */
    void (*exponents)(const uint8_t * src, size_t src_stride, size_t n_rows, size_t n_cols, uint32_t * counts);

    /* Encode or decode one tile with n_cols <= 64. When encoding, the streams have room. Decoding returns false on a
     * stream that no encoder writes. */
    void (*planes_encode)(llmaas_planes_writer * w, const uint8_t * src, size_t src_stride, size_t n_rows, size_t n_cols);
    bool (*planes_decode)(llmaas_planes_reader * r, size_t n_rows, size_t n_cols, uint8_t * dst, size_t dst_stride);

    /* Encode or decode the embedded code of one tile: n_rows <= 16 rows of exactly 64 columns; see embed.h. A plane is
     * one u64 per row; bit i belongs to column i. side: per channel, 64 scales then 64 offsets; else one scale per row.
     * Encoding returns false if a magnitude is above LLMAAS_EMBED_MAX. With past_cache, decoding may bypass the caches;
     * nobody may read the result before a memory fence. */
    bool (*embed_encode)(const uint8_t * src, size_t src_stride, size_t n_rows, bool per_channel, uint8_t * side,
                         uint8_t * planes, size_t plane_stride, unsigned bits);
    void (*embed_decode)(const uint8_t * side, bool per_channel, const uint8_t * planes, size_t plane_stride, unsigned bits,
                         size_t n_rows, uint8_t * dst, size_t dst_stride, bool past_cache);

    /* Compute dots[r] = sum of codes[r][i] × query->wide[i], modulo 2^32. stride: a multiple of 64; codes are aligned
     * to 64. */
    void (*knn_dots)(const uint8_t * codes, size_t stride, size_t n_rows, const llmaas_knn_query * query, uint32_t * dots);

    /* Return the squared distance between a row of f16 and the query, from 16 partial sums that are added in pairs. */
    float (*knn_distance)(const uint8_t * row, const float * query, size_t n_dims);

    /* Return the largest of n >= 16 logits (*is_nan: whether any is NaN), or the sum of exp(logit - max). */
    float (*logits_max)(const float * logits, size_t n, int * is_nan);
    double (*logits_sum)(const float * logits, size_t n, float max);

    /* Compute llmaas_active_multiply for whole chunks. Their bytes begin at columns[i] + offset, their scales and mins
     * at these pointers. The sum of a block is exact. y = ((0 + scale × scales × sum) + ...), or with mins ((0 + scale
     * × (scales × sum - mins × sum of values)) + ...), each step rounded, blocks in ascending order. */
    void (*active_tile)(const llmaas_active * active, uint32_t n_bits, const uint8_t * const * columns, size_t offset,
                        const uint16_t * scales, const uint16_t * mins, size_t n_scales, size_t n_chunks, float * y);

    /* Compute llmaas_low_rank_reduce or llmaas_low_rank_expand for whole blocks. Values are rounded integer × scale;
     * products are added with fused multiply-adds. A sum over columns has 16 partial sums that are added in pairs; a sum
     * over the rank is added to y in ascending order. */
    void (*rank_reduce)(const uint8_t * a, size_t rank, size_t n_blocks, const float * const * x, size_t n_vectors, float * u);
    void (*rank_expand)(const uint8_t * b, size_t rank, size_t n_blocks, const float * u, size_t n_vectors, float * const * y);
} llmaas_kernels;

const llmaas_kernels * llmaas_k(void);

#define LLMAAS_DECLARE_KERNELS(isa)                                                                                       \
    void llmaas_transpose_##isa(const uint8_t *, size_t, size_t, size_t, uint8_t *, size_t);                              \
    bool llmaas_int8_encode_##isa(const uint8_t *, size_t, size_t, size_t, uint8_t *, size_t, uint8_t *, size_t);         \
    void llmaas_int8_decode_##isa(                                                                                        \
        const uint8_t *, size_t, const uint8_t *, size_t, size_t, size_t, uint8_t *, size_t);                             \
    void llmaas_planes_encode_##isa(llmaas_planes_writer *, const uint8_t *, size_t, size_t, size_t);                     \
    bool llmaas_planes_decode_##isa(llmaas_planes_reader *, size_t, size_t, uint8_t *, size_t);                           \
    bool llmaas_embed_encode_##isa(const uint8_t *, size_t, size_t, bool, uint8_t *, uint8_t *, size_t, unsigned);        \
    void llmaas_embed_decode_##isa(const uint8_t *, bool, const uint8_t *, size_t, unsigned, size_t, uint8_t *, size_t, bool); \
    void llmaas_knn_dots_##isa(const uint8_t *, size_t, size_t, const llmaas_knn_query *, uint32_t *);                    \
    float llmaas_knn_distance_##isa(const uint8_t *, const float *, size_t);                                              \
    float llmaas_logits_max_##isa(const float *, size_t, int *);                                                          \
    double llmaas_logits_sum_##isa(const float *, size_t, float);                                                         \
    void llmaas_active_tile_##isa(const llmaas_active *, uint32_t, const uint8_t * const *, size_t, const uint16_t *,      \
                                  const uint16_t *, size_t, size_t, float *);                                             \
    void llmaas_rank_reduce_##isa(const uint8_t *, size_t, size_t, const float * const *, size_t, float *);               \
    void llmaas_rank_expand_##isa(const uint8_t *, size_t, size_t, const float *, size_t, float * const *)

LLMAAS_DECLARE_KERNELS(generic);
LLMAAS_DECLARE_KERNELS(avx2);
LLMAAS_DECLARE_KERNELS(avx512);

void llmaas_knn_dots_avx512vnni(const uint8_t *, size_t, size_t, const llmaas_knn_query *, uint32_t *);
void llmaas_active_tile_avx512vnni(const llmaas_active *, uint32_t, const uint8_t * const *, size_t, const uint16_t *,
                                   const uint16_t *, size_t, size_t, float *);
void llmaas_exponents_generic(const uint8_t *, size_t, size_t, size_t, uint32_t *);
uint32_t llmaas_crc32c_generic(uint32_t crc, const uint8_t * data, size_t n);
uint32_t llmaas_crc32c_sse42(uint32_t crc, const uint8_t * data, size_t n);

#endif
