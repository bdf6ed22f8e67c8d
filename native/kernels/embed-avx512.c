/* AVX-512 F, BW, VL, DQ; output is byte-identical to embed-generic.c. A plane's word is a mask register. */
#include "embed.h"

#include <immintrin.h>

enum { QUARTER = 16, N_QUARTERS = LLMAAS_GROUP / QUARTER };

static __m512 load16(const uint8_t * src) { return _mm512_cvtph_ps(_mm256_loadu_si256((const void *) src)); }

/* Convert 16 bytes of scales to floats. */
static __m512 scales16(__m128i bytes) { return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 7)); }

static __m512i amax_words(const uint8_t * row) {
    const __m512i abs = _mm512_set1_epi16(0x7fff);
    const __m512i x0  = _mm512_and_si512(_mm512_loadu_si512(row), abs);
    return _mm512_max_epu16(x0, _mm512_and_si512(_mm512_loadu_si512(row + 64), abs));
}

static uint16_t amax_of(__m512i words) {
    const __m256i h = _mm256_max_epu16(_mm512_castsi512_si256(words), _mm512_extracti64x4_epi64(words, 1));
    const __m128i q = _mm_max_epu16(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
    /* the hardware has a horizontal minimum only, so find the minimum of the complement */
    return (uint16_t) ~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(q, _mm_set1_epi32(-1))));
}

/* code = x × inv + bias, for 64 columns. */
typedef struct affine {
    __m512 inv[N_QUARTERS], bias[N_QUARTERS];
} affine;

static void row_affine(uint16_t amax, uint8_t * scale, affine * a) {
    *scale = embed_scale_up(amax);
    const float s = embed_scale(*scale);
    for (size_t i = 0; i < N_QUARTERS; ++i) {
        a->inv[i]  = _mm512_set1_ps(s > 0 ? 128.0f / s : 0.0f);
        a->bias[i] = _mm512_set1_ps(128.0f);
    }
}

/* Compute columns 16 × i to 16 × i + 15. */
static void channel_affine(const uint8_t * src, size_t stride, size_t n_rows, size_t i, uint8_t * side, affine * a) {
    const uint8_t * x = src + 2 * QUARTER * i;
    __m512 hi = load16(x), lo = hi;
    for (size_t r = 1; r < n_rows; ++r) {
        const __m512 v = load16(x + r * stride);
        hi = _mm512_max_ps(hi, v);
        lo = _mm512_min_ps(lo, v);
    }
    const __m512  half   = _mm512_set1_ps(0.5f);
    const __m512  center = _mm512_mul_ps(_mm512_add_ps(hi, lo), half);
    const __m512  reach  = _mm512_mul_ps(_mm512_mul_ps(_mm512_sub_ps(hi, lo), half), _mm512_set1_ps(LLMAAS_EMBED_REACH));
    const __m512  far    = _mm512_mul_ps(_mm512_abs_ps(center), _mm512_set1_ps(LLMAAS_EMBED_OFFSET));
    const __m256i up     = _mm512_cvtps_ph(_mm512_max_ps(reach, far), _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
    const __m128i bytes  = _mm256_cvtepi16_epi8(_mm256_srli_epi16(_mm256_add_epi16(up, _mm256_set1_epi16(127)), 7));
    const __m512  s      = scales16(bytes);
    const __mmask16 some = _mm512_cmp_ps_mask(s, _mm512_setzero_ps(), _CMP_GT_OQ);
    const __m512  eighth = _mm512_mul_ps(center, _mm512_maskz_div_ps(some, _mm512_set1_ps(8.0f), s));
    const __m512i offset = _mm512_cvtps_epi32(eighth);
    _mm_storeu_si128((void *) (side + QUARTER * i), bytes);
    _mm_storeu_si128((void *) (side + LLMAAS_GROUP + QUARTER * i), _mm512_cvtepi32_epi8(offset));
    a->inv[i]  = _mm512_maskz_div_ps(some, _mm512_set1_ps(128.0f), s);
    a->bias[i] = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_set1_epi32(128), _mm512_slli_epi32(offset, 4)));
}

static __m128i codes16(const uint8_t * src, __m512 inv, __m512 bias) {
    const __m512 t = _mm512_add_ps(_mm512_mul_ps(load16(src), inv), bias);
    const __m512 c = _mm512_min_ps(_mm512_max_ps(t, _mm512_setzero_ps()), _mm512_set1_ps(255.0f));
    return _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(c));
}

static void encode_row(const uint8_t * row, const affine * a, uint8_t * planes, size_t plane_stride, unsigned bits) {
    __m512i codes = _mm512_castsi128_si512(codes16(row, a->inv[0], a->bias[0]));
    codes = _mm512_inserti32x4(codes, codes16(row + 32, a->inv[1], a->bias[1]), 1);
    codes = _mm512_inserti32x4(codes, codes16(row + 64, a->inv[2], a->bias[2]), 2);
    codes = _mm512_inserti32x4(codes, codes16(row + 96, a->inv[3], a->bias[3]), 3);
    for (size_t p = 0; p < bits; ++p) {
        store_u64(planes + p * plane_stride, _mm512_movepi8_mask(codes));
        codes = _mm512_add_epi8(codes, codes);
    }
}

bool llmaas_embed_encode_avx512(const uint8_t * src, size_t src_stride, size_t n_rows, bool per_channel, uint8_t * side,
                                uint8_t * planes, size_t plane_stride, unsigned bits) {
    __m512i amax = _mm512_setzero_si512();
    for (size_t r = 0; r < n_rows; ++r) {
        amax = _mm512_max_epu16(amax, amax_words(src + r * src_stride));
    }
    if (amax_of(amax) > LLMAAS_EMBED_MAX) {
        return false;
    }
    affine a;
    for (size_t i = 0; per_channel && i < N_QUARTERS; ++i) {
        channel_affine(src, src_stride, n_rows, i, side, &a);
    }
    for (size_t r = 0; r < n_rows; ++r) {
        const uint8_t * row = src + r * src_stride;
        if (!per_channel) {
            row_affine(amax_of(amax_words(row)), side + r, &a);
        }
        encode_row(row, &a, planes + 8 * r, plane_stride, bits);
    }
    return true;
}

/* x' = code × step + shift, for 64 columns. */
typedef struct steps {
    __m512 step[N_QUARTERS], shift[N_QUARTERS];
} steps;

static steps channel_steps(const uint8_t * side, float center) {
    steps out;
    for (size_t i = 0; i < N_QUARTERS; ++i) {
        const __m512 s = scales16(_mm_loadu_si128((const void *) (side + QUARTER * i)));
        const __m128i offset = _mm_loadu_si128((const void *) (side + LLMAAS_GROUP + QUARTER * i));
        const __m512 k = _mm512_cvtepi32_ps(_mm512_slli_epi32(_mm512_cvtepi8_epi32(offset), 4));
        out.step[i]  = _mm512_mul_ps(s, _mm512_set1_ps(1.0f / 128.0f));
        out.shift[i] = _mm512_mul_ps(_mm512_add_ps(k, _mm512_set1_ps(center)), out.step[i]);
    }
    return out;
}

static steps row_steps(uint8_t scale, float center) {
    const float  step = _cvtsh_ss((unsigned short) (scale << 7)) / 128.0f;
    const __m512 s = _mm512_set1_ps(step), b = _mm512_set1_ps(center * step);
    return (steps) {{s, s, s, s}, {b, b, b, b}};
}

static __m256i decode16(__m128i codes, __m512 step, __m512 shift) {
    const __m512 x = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes)), step, shift);
    return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static void decode_row(__m512i codes, const steps * s, uint8_t * dst, bool past_cache) {
    const __m256i a = decode16(_mm512_castsi512_si128(codes), s->step[0], s->shift[0]);
    const __m256i b = decode16(_mm512_extracti32x4_epi32(codes, 1), s->step[1], s->shift[1]);
    const __m256i c = decode16(_mm512_extracti32x4_epi32(codes, 2), s->step[2], s->shift[2]);
    const __m256i d = decode16(_mm512_extracti32x4_epi32(codes, 3), s->step[3], s->shift[3]);
    const __m512i low  = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
    const __m512i high = _mm512_inserti64x4(_mm512_castsi256_si512(c), d, 1);
    if (past_cache && (uintptr_t) dst % 64 == 0) {
        _mm512_stream_si512((void *) dst, low);
        _mm512_stream_si512((void *) (dst + 64), high);
    } else {
        _mm512_storeu_si512(dst, low);
        _mm512_storeu_si512(dst + 64, high);
    }
}

void llmaas_embed_decode_avx512(const uint8_t * side, bool per_channel, const uint8_t * planes, size_t plane_stride,
                                unsigned bits, size_t n_rows, uint8_t * dst, size_t dst_stride, bool past_cache) {
    const float center = embed_center(bits);
    steps s = {0};
    if (per_channel) {
        s = channel_steps(side, center);
    }
    for (size_t r = 0; r < n_rows; ++r) {
        __m512i codes = _mm512_setzero_si512();
        for (size_t p = 0; p < bits; ++p) {
            const __m512i weight = _mm512_set1_epi8((char) (0x80 >> p));
            codes = _mm512_mask_add_epi8(codes, load_u64(planes + p * plane_stride + 8 * r), codes, weight);
        }
        if (!per_channel) {
            s = row_steps(side[r], center);
        }
        decode_row(codes, &s, dst + r * dst_stride, past_cache);
    }
}
