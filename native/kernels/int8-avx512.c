/* AVX-512 F, BW, VL; output is byte-identical to int8-generic.c. */
#include "f16.h"
#include "kernels.h"

#include <immintrin.h>

#include "bytes.h"

static uint16_t amax64(__m512i x0, __m512i x1) {
    const __m512i abs = _mm512_set1_epi16(0x7fff);
    const __m512i m   = _mm512_max_epu16(_mm512_and_si512(x0, abs), _mm512_and_si512(x1, abs));
    const __m256i h   = _mm256_max_epu16(_mm512_castsi512_si256(m), _mm512_extracti64x4_epi64(m, 1));
    const __m128i q   = _mm_max_epu16(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
    /* the hardware has a horizontal minimum only, so find the minimum of the complement */
    const __m128i min = _mm_minpos_epu16(_mm_xor_si128(q, _mm_set1_epi32(-1)));
    return (uint16_t) ~_mm_cvtsi128_si32(min);
}

static uint16_t scale_of(uint16_t amax) {
    const uint16_t scale = _cvtss_sh(_cvtsh_ss(amax) / 127.0f, _MM_FROUND_TO_POS_INF);
    return scale > LLMAAS_INT8_SCALE_MAX ? (uint16_t) LLMAAS_INT8_SCALE_MAX : scale;
}

static __m128i quantize16(__m256i x, __m512 inv) {
    return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_cvtph_ps(x), inv)));
}

static bool encode_group(const uint8_t * src, __mmask64 valid, uint8_t * scale_out, uint8_t * q) {
    const __m512i  x0   = _mm512_maskz_loadu_epi16((__mmask32) valid, src);
    const __m512i  x1   = _mm512_maskz_loadu_epi16((__mmask32) (valid >> 32), src + 64);
    const uint16_t amax = amax64(x0, x1);
    if (amax >= LLMAAS_F16_INF) {
        return false;
    }
    const uint16_t scale = scale_of(amax);
    store_u16(scale_out, scale);
    const __m512 inv = _mm512_set1_ps(scale ? 1.0f / _cvtsh_ss(scale) : 0.0f);
    __m512i out = _mm512_castsi128_si512(quantize16(_mm512_castsi512_si256(x0), inv));
    out = _mm512_inserti32x4(out, quantize16(_mm512_extracti64x4_epi64(x0, 1), inv), 1);
    out = _mm512_inserti32x4(out, quantize16(_mm512_castsi512_si256(x1), inv), 2);
    out = _mm512_inserti32x4(out, quantize16(_mm512_extracti64x4_epi64(x1, 1), inv), 3);
    _mm512_mask_storeu_epi8(q, valid, out);
    return true;
}

bool llmaas_int8_encode_avx512(const uint8_t * src, size_t src_stride, size_t n_rows, size_t n_cols, uint8_t * scales,
                               size_t scale_stride, uint8_t * q, size_t q_stride) {
    const __mmask64 last = n_cols % LLMAAS_GROUP ? (1ull << n_cols % LLMAAS_GROUP) - 1 : ~0ull;
    for (size_t r = 0; r < n_rows; ++r) {
        for (size_t c = 0, g = 0; c < n_cols; c += LLMAAS_GROUP, ++g) {
            const __mmask64 valid = n_cols - c > LLMAAS_GROUP ? ~0ull : last;
            if (!encode_group(src + r * src_stride + 2 * c, valid, scales + r * scale_stride + 2 * g, q + r * q_stride + c)) {
                return false;
            }
        }
    }
    return true;
}

static __m256i dequantize16(__m128i q, __m512 scale) {
    const __m512 x = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q)), scale);
    return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static void decode_group(const uint8_t * q, __m512 scale, uint8_t * dst) {
    for (size_t i = 0; i < 4; ++i) {
        const __m128i v = _mm_loadu_si128((const void *) (q + 16 * i));
        _mm256_storeu_si256((void *) (dst + 32 * i), dequantize16(v, scale));
    }
}

static void decode_partial(const uint8_t * q, size_t n, __m512 scale, uint8_t * dst) {
    for (size_t i = 0; i < n; i += 16) {
        const __mmask16 valid = (__mmask16) (n - i >= 16 ? 0xffffu : (1u << (n - i)) - 1u);
        const __m128i   v     = _mm_maskz_loadu_epi8(valid, q + i);
        _mm256_mask_storeu_epi16(dst + 2 * i, valid, dequantize16(v, scale));
    }
}

void llmaas_int8_decode_avx512(const uint8_t * scales, size_t scale_stride, const uint8_t * q, size_t q_stride,
                               size_t n_rows, size_t n_cols, uint8_t * dst, size_t dst_stride) {
    const size_t n_full = n_cols / LLMAAS_GROUP;
    const size_t n_last = n_cols % LLMAAS_GROUP;
    for (size_t r = 0; r < n_rows; ++r) {
        const uint8_t * s  = scales + r * scale_stride;
        const uint8_t * qr = q + r * q_stride;
        uint8_t *       dr = dst + r * dst_stride;
        for (size_t g = 0; g < n_full; ++g) {
            decode_group(qr + LLMAAS_GROUP * g, _mm512_set1_ps(_cvtsh_ss(load_u16(s + 2 * g))), dr + 2 * LLMAAS_GROUP * g);
        }
        if (n_last) {
            const __m512 scale = _mm512_set1_ps(_cvtsh_ss(load_u16(s + 2 * n_full)));
            decode_partial(qr + LLMAAS_GROUP * n_full, n_last, scale, dr + 2 * LLMAAS_GROUP * n_full);
        }
    }
}
