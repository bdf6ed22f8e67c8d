/* AVX2, F16C; results are bit-identical to knn-generic.c. */
#include "kernels.h"
#include "knn_lanes.h"

#include <immintrin.h>

static __m256i dots16(const uint8_t * codes, const int16_t * query) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_load_si128((const void *) codes));
    return _mm256_madd_epi16(wide, _mm256_load_si256((const void *) query));
}

static __m256i dots64(const uint8_t * codes, const int16_t * query) {
    const __m256i left  = _mm256_add_epi32(dots16(codes, query), dots16(codes + 16, query + 16));
    const __m256i right = _mm256_add_epi32(dots16(codes + 32, query + 32), dots16(codes + 48, query + 48));
    return _mm256_add_epi32(left, right);
}

static uint32_t sum8(__m256i v) {
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return (uint32_t) _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

KNN_INLINE void dots_of(int n, size_t apart, const uint8_t * codes, size_t stride, const llmaas_knn_query * query,
                        uint32_t * dots) {
    __m256i sums[KNN_STREAMS];
    for (int s = 0; s < n; ++s) {
        sums[s] = _mm256_setzero_si256();
    }
    for (size_t i = 0; i < stride; i += 64) {
        for (int s = 0; s < n; ++s) {
            const uint8_t * bytes = codes + (size_t) s * apart * stride + i;
            sums[s] = _mm256_add_epi32(sums[s], dots64(bytes, query->wide + i));
        }
    }
    for (int s = 0; s < n; ++s) {
        dots[(size_t) s * apart] = sum8(sums[s]);
    }
}

void llmaas_knn_dots_avx2(const uint8_t * codes, size_t stride, size_t n_rows, const llmaas_knn_query * query,
                          uint32_t * dots) {
    knn_in_streams(dots_of, codes, stride, n_rows, query, dots);
}

static __m256 squares8(const uint8_t * row, const float * query) {
    const __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const void *) row));
    const __m256 difference = _mm256_sub_ps(x, _mm256_loadu_ps(query));
    return _mm256_mul_ps(difference, difference);
}

float llmaas_knn_distance_avx2(const uint8_t * row, const float * query, size_t n_dims) {
    const size_t whole = n_dims - n_dims % KNN_LANES, rest = n_dims - whole;
    __m256 a = _mm256_setzero_ps(), b = a;
    for (size_t i = 0; i < whole; i += KNN_LANES) {
        a = _mm256_add_ps(a, squares8(row + 2 * i, query + i));
        b = _mm256_add_ps(b, squares8(row + 2 * i + 16, query + i + 8));
    }
    if (rest) { /* padding with zeros changes no sum */
        uint8_t last_row[2 * KNN_LANES] = {0};
        float   last_query[KNN_LANES] = {0};
        memcpy(last_row, row + 2 * whole, 2 * rest);
        memcpy(last_query, query + whole, rest * sizeof *query);
        a = _mm256_add_ps(a, squares8(last_row, last_query));
        b = _mm256_add_ps(b, squares8(last_row + 16, last_query + 8));
    }
    float sums[KNN_LANES];
    _mm256_storeu_ps(sums, a);
    _mm256_storeu_ps(sums + 8, b);
    return knn_sum(sums);
}

float llmaas_logits_max_avx2(const float * logits, size_t n, int * is_nan) { return knn_max_lanes(logits, n, is_nan); }

double llmaas_logits_sum_avx2(const float * logits, size_t n, float max) { return knn_exp_tiles(logits, n, max); }
