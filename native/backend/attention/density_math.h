/* Arithmetic of attention scores, in loops that compilers vectorize. */
#ifndef LLMAAS_DENSITY_MATH_H
#define LLMAAS_DENSITY_MATH_H

#include <stdint.h>

/* A block of queries is multiplied with a tile of keys: floats, transposed, [d][LLMAAS_TILE]. A thread makes each tile
 * once for all its queries of a group. Tiles take half the time of ggml-cpu's products of single queries and keys. */
enum { LLMAAS_TILE = 16, LLMAAS_BLOCK = 4 };

/* Multiply each query of queries[d][LLMAAS_BLOCK] with each key of a tile, which is aligned to 32 bytes. The products
 * of query j with the LLMAAS_TILE keys start at scores + j * stride. */
void llmaas_multiply_tile(const float * keys, const float * queries, int64_t d, float * scores, int64_t stride);

/* Return the largest of n scores; minus infinity if n is 0. */
float llmaas_max(const float * scores, int32_t n);

/* Replace scores by exp(scores - max); return their sum. */
double llmaas_exponentials(float * scores, int32_t n, float max);

/* Return the factor of the mask for this head; 1 without ALiBi (max_bias is 0). */
float llmaas_alibi_slope(float max_bias, int64_t head, int64_t n_head);

#endif
