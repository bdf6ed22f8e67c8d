/* AVX2, F16C; a bit-for-bit match of knn-generic.c. */
#include "kernels.h"
#include "knn_lanes.h"

#include <immintrin.h>

static __m256i dots16(const uint8_t * codes, const int16_t * query) {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_load_si128((const void *) codes));
    return _mm256_madd_epi16(wide, _mm256_load_si256((const void *) query));
}

static uint32_t sum8(__m256i v) {
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return (uint32_t) _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

/* One row after another and no prefetch by hand: one stream is what the processor follows best. */
void llmaas_knn_dots_avx2(const uint8_t * codes, size_t stride, size_t n_rows, const llmaas_knn_query * query,
                          uint32_t * dots) {
    for (size_t r = 0; r < n_rows; ++r, codes += stride) {
        __m256i a = _mm256_setzero_si256(), b = a;
        for (size_t i = 0; i < stride; i += 64) {
            a = _mm256_add_epi32(a, dots16(codes + i, query->wide + i));
            b = _mm256_add_epi32(b, dots16(codes + i + 16, query->wide + i + 16));
            a = _mm256_add_epi32(a, dots16(codes + i + 32, query->wide + i + 32));
            b = _mm256_add_epi32(b, dots16(codes + i + 48, query->wide + i + 48));
        }
        dots[r] = sum8(_mm256_add_epi32(a, b));
    }
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
    if (rest) { /* zeros change no sum */
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
