/* AVX2, FMA, F16C; output is byte-identical to int8-generic.c. The last group of a row goes through a zeroed buffer. */
#include "f16.h"
#include "kernels.h"

#include <immintrin.h>

#include "bytes.h"

static __m256i load256(const uint8_t * p) { return _mm256_loadu_si256((const void *) p); }
static __m128i load128(const uint8_t * p) { return _mm_loadu_si128((const void *) p); }

static uint16_t amax64(const uint8_t * src) {
    const __m256i abs = _mm256_set1_epi16(0x7fff);
    __m256i m = _mm256_and_si256(load256(src), abs);
    for (size_t i = 1; i < 4; ++i) {
        m = _mm256_max_epu16(m, _mm256_and_si256(load256(src + 32 * i), abs));
    }
    const __m128i h   = _mm_max_epu16(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    const __m128i min = _mm_minpos_epu16(_mm_xor_si128(h, _mm_set1_epi32(-1)));
    return (uint16_t) ~_mm_cvtsi128_si32(min);
}

static __m256i round8(const uint8_t * src, __m256 inv) {
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_cvtph_ps(load128(src)), inv));
}

/* Quantize 32 values. The packs work within 128-bit lanes; the permutation restores the order. */
static void quantize32(const uint8_t * src, __m256 inv, uint8_t * q) {
    const __m256i a = _mm256_packs_epi32(round8(src, inv), round8(src + 16, inv));
    const __m256i b = _mm256_packs_epi32(round8(src + 32, inv), round8(src + 48, inv));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((void *) q, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order));
}

static bool encode_group(const uint8_t * src, uint8_t * scale_out, uint8_t * q) {
    const uint16_t amax = amax64(src);
    if (amax >= LLMAAS_F16_INF) {
        return false;
    }
    uint16_t scale = _cvtss_sh(_cvtsh_ss(amax) / 127.0f, _MM_FROUND_TO_POS_INF);
    scale = scale > LLMAAS_INT8_SCALE_MAX ? (uint16_t) LLMAAS_INT8_SCALE_MAX : scale;
    store_u16(scale_out, scale);
    const __m256 inv = _mm256_set1_ps(scale ? 1.0f / _cvtsh_ss(scale) : 0.0f);
    quantize32(src, inv, q);
    quantize32(src + 64, inv, q + 32);
    return true;
}

static bool encode_partial(const uint8_t * src, size_t n, uint8_t * scale_out, uint8_t * q) {
    uint8_t x[2 * LLMAAS_GROUP] = {0};
    uint8_t out[LLMAAS_GROUP];
    memcpy(x, src, 2 * n);
    const bool finite = encode_group(x, scale_out, out);
    memcpy(q, out, finite ? n : 0);
    return finite;
}

bool llmaas_int8_encode_avx2(const uint8_t * src, size_t src_stride, size_t n_rows, size_t n_cols, uint8_t * scales,
                             size_t scale_stride, uint8_t * q, size_t q_stride) {
    const size_t n_full = n_cols / LLMAAS_GROUP;
    const size_t n_last = n_cols % LLMAAS_GROUP;
    for (size_t r = 0; r < n_rows; ++r) {
        const uint8_t * x  = src + r * src_stride;
        uint8_t *       s  = scales + r * scale_stride;
        uint8_t *       qr = q + r * q_stride;
        for (size_t g = 0; g < n_full; ++g) {
            if (!encode_group(x + 2 * LLMAAS_GROUP * g, s + 2 * g, qr + LLMAAS_GROUP * g)) {
                return false;
            }
        }
        if (n_last && !encode_partial(x + 2 * LLMAAS_GROUP * n_full, n_last, s + 2 * n_full, qr + LLMAAS_GROUP * n_full)) {
            return false;
        }
    }
    return true;
}

static void decode_group(const uint8_t * q, __m256 scale, uint8_t * dst) {
    for (size_t i = 0; i < LLMAAS_GROUP; i += 8) {
        const __m256i v = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *) (q + i)));
        const __m256  x = _mm256_mul_ps(_mm256_cvtepi32_ps(v), scale);
        _mm_storeu_si128((void *) (dst + 2 * i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
}

static void decode_partial(const uint8_t * q, size_t n, __m256 scale, uint8_t * dst) {
    uint8_t in[LLMAAS_GROUP] = {0};
    uint8_t out[2 * LLMAAS_GROUP];
    memcpy(in, q, n);
    decode_group(in, scale, out);
    memcpy(dst, out, 2 * n);
}

void llmaas_int8_decode_avx2(const uint8_t * scales, size_t scale_stride, const uint8_t * q, size_t q_stride,
                             size_t n_rows, size_t n_cols, uint8_t * dst, size_t dst_stride) {
    const size_t n_full = n_cols / LLMAAS_GROUP;
    const size_t n_last = n_cols % LLMAAS_GROUP;
    for (size_t r = 0; r < n_rows; ++r) {
        const uint8_t * s  = scales + r * scale_stride;
        const uint8_t * qr = q + r * q_stride;
        uint8_t *       dr = dst + r * dst_stride;
        for (size_t g = 0; g < n_full; ++g) {
            decode_group(qr + LLMAAS_GROUP * g, _mm256_set1_ps(_cvtsh_ss(load_u16(s + 2 * g))), dr + 2 * LLMAAS_GROUP * g);
        }
        if (n_last) {
            const __m256 scale = _mm256_set1_ps(_cvtsh_ss(load_u16(s + 2 * n_full)));
            decode_partial(qr + LLMAAS_GROUP * n_full, n_last, scale, dr + 2 * LLMAAS_GROUP * n_full);
        }
    }
}
