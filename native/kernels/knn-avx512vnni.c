/* AVX-512 VNNI; results are bit-identical to knn-generic.c. */
#include "kernels.h"
#include "knn_lanes.h"

#include <immintrin.h>

/* Multiply bytes with bytes, with the query as 256 high + low. */
KNN_INLINE void dots_of(int n, size_t apart, const uint8_t * codes, size_t stride, const llmaas_knn_query * query,
                        uint32_t * dots) {
    __m512i high[KNN_STREAMS], low[KNN_STREAMS];
    for (int s = 0; s < n; ++s) {
        high[s] = low[s] = _mm512_setzero_si512();
    }
    for (size_t i = 0; i < stride; i += 64) {
        const __m512i q_high = _mm512_load_si512(query->high + i), q_low = _mm512_load_si512(query->low + i);
        for (int s = 0; s < n; ++s) {
            const __m512i bytes = _mm512_load_si512(codes + (size_t) s * apart * stride + i);
            high[s] = _mm512_dpbusd_epi32(high[s], bytes, q_high);
            low[s]  = _mm512_dpbusd_epi32(low[s], bytes, q_low);
        }
    }
    for (int s = 0; s < n; ++s) {
        const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[s], 8), low[s]);
        dots[(size_t) s * apart] = (uint32_t) _mm512_reduce_add_epi32(sum);
    }
}

void llmaas_knn_dots_avx512vnni(const uint8_t * codes, size_t stride, size_t n_rows, const llmaas_knn_query * query,
                                uint32_t * dots) {
    knn_in_streams(dots_of, codes, stride, n_rows, query, dots);
}
