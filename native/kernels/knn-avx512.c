/* AVX-512 F, BW, VL; results are bit-identical to knn-generic.c. */
#include "kernels.h"
#include "knn_lanes.h"

#include <immintrin.h>

static __m512i dots32(const uint8_t * codes, const int16_t * query) {
    const __m512i wide = _mm512_cvtepu8_epi16(_mm256_load_si256((const void *) codes));
    return _mm512_madd_epi16(wide, _mm512_load_si512(query));
}

KNN_INLINE void dots_of(int n, size_t apart, const uint8_t * codes, size_t stride, const llmaas_knn_query * query,
                        uint32_t * dots) {
    __m512i sums[KNN_STREAMS];
    for (int s = 0; s < n; ++s) {
        sums[s] = _mm512_setzero_si512();
    }
    for (size_t i = 0; i < stride; i += 64) {
        for (int s = 0; s < n; ++s) {
            const uint8_t * bytes = codes + (size_t) s * apart * stride + i;
            const __m512i both = _mm512_add_epi32(dots32(bytes, query->wide + i), dots32(bytes + 32, query->wide + i + 32));
            sums[s] = _mm512_add_epi32(sums[s], both);
        }
    }
    for (int s = 0; s < n; ++s) {
        dots[(size_t) s * apart] = (uint32_t) _mm512_reduce_add_epi32(sums[s]);
    }
}

void llmaas_knn_dots_avx512(const uint8_t * codes, size_t stride, size_t n_rows, const llmaas_knn_query * query,
                            uint32_t * dots) {
    knn_in_streams(dots_of, codes, stride, n_rows, query, dots);
}

static __m512 squares16(__m256i row, __m512 query) {
    const __m512 difference = _mm512_sub_ps(_mm512_cvtph_ps(row), query);
    return _mm512_mul_ps(difference, difference);
}

float llmaas_knn_distance_avx512(const uint8_t * row, const float * query, size_t n_dims) {
    const size_t whole = n_dims - n_dims % KNN_LANES;
    __m512 sum = _mm512_setzero_ps();
    for (size_t i = 0; i < whole; i += KNN_LANES) {
        sum = _mm512_add_ps(sum, squares16(_mm256_loadu_si256((const void *) (row + 2 * i)), _mm512_loadu_ps(query + i)));
    }
    const __mmask16 rest = (__mmask16) ((1u << (n_dims - whole)) - 1u); /* padding with zeros changes no sum */
    sum = _mm512_add_ps(sum, squares16(_mm256_maskz_loadu_epi16(rest, row + 2 * whole),
                                       _mm512_maskz_loadu_ps(rest, query + whole)));
    float sums[KNN_LANES];
    _mm512_storeu_ps(sums, sum);
    return knn_sum(sums);
}

float llmaas_logits_max_avx512(const float * logits, size_t n, int * is_nan) { return knn_max_lanes(logits, n, is_nan); }

double llmaas_logits_sum_avx512(const float * logits, size_t n, float max) { return knn_exp_tiles(logits, n, max); }
