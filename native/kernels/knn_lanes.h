/* Shared by the knn kernels: 16 partial sums, so that every instruction set adds in the same order. */
#ifndef LLMAAS_KNN_LANES_H
#define LLMAAS_KNN_LANES_H

#include "kernels.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KNN_LANES   16u
#define KNN_STREAMS 4     /* rows read in parallel: a single stream of reads does not reach full memory speed */
#define KNN_TILE    4096u /* logits summed in float before the sum continues in double */

typedef float   knn_f32 __attribute__((vector_size(32)));
typedef int32_t knn_i32 __attribute__((vector_size(32)));
typedef uint32_t knn_u32 __attribute__((vector_size(32)));

/* Multiply a query with n rows, each `apart` rows after the previous one. */
typedef void knn_dots_of(int n, size_t apart, const uint8_t * codes, size_t stride, const llmaas_knn_query * query,
                         uint32_t * dots);

#define KNN_INLINE static inline __attribute__((always_inline))

KNN_INLINE void knn_in_streams(knn_dots_of dots_of, const uint8_t * codes, size_t stride, size_t n_rows,
                               const llmaas_knn_query * query, uint32_t * dots) {
    const size_t apart = n_rows / KNN_STREAMS;
    for (size_t r = 0; r < apart; ++r) {
        dots_of(KNN_STREAMS, apart, codes + r * stride, stride, query, dots + r);
    }
    for (size_t r = KNN_STREAMS * apart; r < n_rows; ++r) {
        dots_of(1, 0, codes + r * stride, stride, query, dots + r);
    }
}

static inline float knn_sum(const float * lanes) {
    float sums[KNN_LANES];
    memcpy(sums, lanes, sizeof sums);
    for (size_t half = KNN_LANES / 2; half > 0; half /= 2) {
        for (size_t i = 0; i < half; ++i) {
            sums[i] += sums[i + half];
        }
    }
    return sums[0];
}

/* These use the compiler's vector types instead of intrinsics, so that one source serves all instruction sets. Vectors
 * are passed by pointer: passing them by value would depend on the instruction set. */

static inline void knn_load(knn_f32 * v, const float * p) { memcpy(v, p, sizeof *v); }

/* Compute exp of x <= 0 to about one ulp; 0 below exp(-87). x = n ln 2 + r with |r| <= ln 2 / 2, then a Taylor series
 * for r. */
static inline void knn_exp(knn_f32 * x) {
    const knn_i32 is_normal = *x >= -87.0f;
    const knn_f32 magic = (knn_f32) {0} + 0x1.8p23f;
    const knn_f32 shifted = *x * 0x1.715476p+0f + magic; /* the low bits are n */
    const knn_f32 n = shifted - magic;
    const knn_f32 r = *x - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f;
    knn_f32 sum = r * (1.0f / 5040) + (1.0f / 720);
    sum = sum * r + (1.0f / 120);
    sum = sum * r + (1.0f / 24);
    sum = sum * r + (1.0f / 6);
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    const knn_u32 power = (knn_u32) shifted - (knn_u32) magic;
    *x = (knn_f32) (((knn_u32) sum + (power << 23)) & (knn_u32) is_normal);
}

/* Return the largest of n >= 16 logits; *is_nan: whether any is NaN. */
static inline float knn_max_lanes(const float * x, size_t n, int * is_nan) {
    knn_f32 max[2];
    memcpy(max, x, sizeof max);
    knn_i32 odd[2] = {max[0] != max[0], max[1] != max[1]};
    for (size_t i = KNN_LANES; i + KNN_LANES <= n; i += KNN_LANES) {
        for (size_t j = 0; j < 2; ++j) {
            knn_f32 v;
            knn_load(&v, x + i + 8 * j);
            const knn_i32 above = v > max[j];
            max[j] = (knn_f32) (((knn_i32) v & above) | ((knn_i32) max[j] & ~above));
            odd[j] |= v != v;
        }
    }
    float most = max[0][0];
    *is_nan = 0;
    for (size_t i = 0; i < KNN_LANES; ++i) {
        most = max[i / 8][i % 8] > most ? max[i / 8][i % 8] : most;
        *is_nan |= odd[i / 8][i % 8];
    }
    for (size_t i = n - n % KNN_LANES; i < n; ++i) {
        most = x[i] > most ? x[i] : most;
        *is_nan |= x[i] != x[i];
    }
    return most;
}

/* Sum exp(logit - max) over at most KNN_TILE logits, a multiple of 16. */
static inline float knn_exp_lanes(const float * x, size_t n, float max) {
    knn_f32 sum[2] = {{0}, {0}};
    for (size_t i = 0; i < n; i += KNN_LANES) {
        for (size_t j = 0; j < 2; ++j) {
            knn_f32 v;
            knn_load(&v, x + i + 8 * j);
            v -= max;
            knn_exp(&v);
            sum[j] += v;
        }
    }
    float lanes[KNN_LANES];
    memcpy(lanes, sum, sizeof lanes);
    return knn_sum(lanes);
}

static inline double knn_exp_tiles(const float * x, size_t n, float max) {
    double sum = 0;
    const size_t whole = n - n % KNN_LANES;
    for (size_t i = 0; i < whole; i += KNN_TILE) {
        sum += (double) knn_exp_lanes(x + i, whole - i < KNN_TILE ? whole - i : KNN_TILE, max);
    }
    float rest[KNN_LANES];
    for (size_t i = 0; i < KNN_LANES; ++i) {
        rest[i] = whole + i < n ? x[whole + i] : -__builtin_inff();
    }
    return sum + (double) knn_exp_lanes(rest, KNN_LANES, max);
}

#endif
