/* AVX-512 VNNI; a bit-for-bit match of knn-generic.c. */
#include "kernels.h"

#include <immintrin.h>

/* Products of bytes with bytes, so the query comes as 256 high + low. */
void llmaas_knn_dots_avx512vnni(const uint8_t * codes, size_t stride, size_t n_rows, const llmaas_knn_query * query,
                                uint32_t * dots) {
    for (size_t r = 0; r < n_rows; ++r, codes += stride) {
        __m512i high = _mm512_setzero_si512(), low = high;
        for (size_t i = 0; i < stride; i += 64) {
            const __m512i bytes = _mm512_load_si512(codes + i);
            high = _mm512_dpbusd_epi32(high, bytes, _mm512_load_si512(query->high + i));
            low  = _mm512_dpbusd_epi32(low, bytes, _mm512_load_si512(query->low + i));
        }
        dots[r] = (uint32_t) _mm512_reduce_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
    }
}
