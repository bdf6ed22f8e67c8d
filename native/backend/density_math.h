/* The arithmetic of attention scores, in loops that a compiler vectorises. */
#ifndef LLMAAS_DENSITY_MATH_H
#define LLMAAS_DENSITY_MATH_H

#include <stdint.h>

/* A block of queries is multiplied with a tile of keys: floats, transposed, [d][LLMAAS_TILE]. Tiles are made once for
 * all of a thread's queries of a group, and take half as long as ggml-cpu's products of one query and one key. */
enum { LLMAAS_TILE = 16, LLMAAS_BLOCK = 4 };

/* Products of each query, queries[d][LLMAAS_BLOCK], with each key of a tile, which is aligned to 32 bytes:
 * scores[LLMAAS_BLOCK], `stride` floats apart, of LLMAAS_TILE. */
void llmaas_multiply_tile(const float * keys, const float * queries, int64_t d, float * scores, int64_t stride);

/* The largest of n scores; minus infinity: there are none. */
float llmaas_max(const float * scores, int32_t n);

/* scores = exp(scores - max); returns their sum. */
double llmaas_exponentials(float * scores, int32_t n, float max);

/* What a head multiplies the mask by; 1 without ALiBi, when max_bias is 0. */
float llmaas_alibi_slope(float max_bias, int64_t head, int64_t n_head);

#endif
