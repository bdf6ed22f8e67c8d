#include "attention/density_math.h"

#include <math.h>
#include <string.h>

/* ggml-cpu's vector exp, exported but not declared in any header: set y = exp(x - max) and return the sum. */
double ggml_vec_soft_max_f32(int n, float * y, const float * x, float max) __attribute__((weak));

typedef float floats8 __attribute__((vector_size(32)));

static inline __attribute__((always_inline)) void multiply_any(
    const float * keys, const float * queries, int64_t d, float * scores, int64_t stride) {
    const floats8 * k                     = (const floats8 *) (const void *) keys;
    floats8         sums[LLMAAS_BLOCK][2] = {0};
    for (int64_t i = 0; i < d; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < LLMAAS_BLOCK; ++j) {
            sums[j][0] += k[2 * i] * queries[LLMAAS_BLOCK * i + j];
            sums[j][1] += k[2 * i + 1] * queries[LLMAAS_BLOCK * i + j];
        }
    }
    for (int j = 0; j < LLMAAS_BLOCK; ++j) {
        memcpy(scores + j * stride, sums[j], sizeof sums[j]);
    }
}

#ifdef __x86_64__
__attribute__((target("avx2"))) static void multiply_avx2(
    const float * keys, const float * queries, int64_t d, float * scores, int64_t stride) {
    multiply_any(keys, queries, d, scores, stride);
}
#endif

void llmaas_multiply_tile(const float * keys, const float * queries, int64_t d, float * scores, int64_t stride) {
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2")) {
        multiply_avx2(keys, queries, d, scores, stride);
        return;
    }
#endif
    multiply_any(keys, queries, d, scores, stride);
}

float llmaas_alibi_slope(float max_bias, int64_t head, int64_t n_head) {
    if (max_bias <= 0.0f) {
        return 1.0f;
    }
    int64_t n_even = 1;
    while (2 * n_even <= n_head) {
        n_even *= 2;
    }
    return head < n_even ? powf(2.0f, -max_bias * (float) (head + 1) / (float) n_even)
                         : powf(2.0f, -max_bias / 2.0f * (float) (2 * (head - n_even) + 1) / (float) n_even);
}

/* Use eight lanes: a single maximum would force the compiler to keep its order. */
float llmaas_max(const float * scores, int32_t n) {
    float   lanes[8];
    int32_t i   = 0;
    float   max = -INFINITY;
    for (int j = 0; j < 8; ++j) {
        lanes[j] = max;
    }
    for (; i + 8 <= n; i += 8) {
        for (int j = 0; j < 8; ++j) {
            lanes[j] = scores[i + j] > lanes[j] ? scores[i + j] : lanes[j];
        }
    }
    for (int j = 0; j < 8; ++j) {
        max = lanes[j] > max ? lanes[j] : max;
    }
    for (; i < n; ++i) {
        max = scores[i] > max ? scores[i] : max;
    }
    return max;
}

double llmaas_exponentials(float * scores, int32_t n, float max) {
    if (ggml_vec_soft_max_f32) {
        return ggml_vec_soft_max_f32(n, scores, scores, max);
    }
    double sum = 0.0;
    for (int32_t i = 0; i < n; ++i) {
        scores[i] = expf(scores[i] - max);
        sum += (double) scores[i];
    }
    return sum;
}
