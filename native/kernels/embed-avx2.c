/* AVX2, FMA, F16C; output is byte-identical to embed-generic.c. */
#include "embed.h"

#include <immintrin.h>

enum { LANES = 8, N_LANES = LLMAAS_GROUP / LANES };

static __m256i load256(const uint8_t * p) { return _mm256_loadu_si256((const void *) p); }
static __m256  load8(const uint8_t * src) { return _mm256_cvtph_ps(_mm_loadu_si128((const void *) src)); }

/* Convert 8 bytes of scales to floats. */
static __m256 scales8(__m128i bytes) { return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bytes), 7)); }

static uint16_t row_amax(const uint8_t * row) {
    const __m256i abs = _mm256_set1_epi16(0x7fff);
    __m256i m = _mm256_and_si256(load256(row), abs);
    for (size_t i = 1; i < 4; ++i) {
        m = _mm256_max_epu16(m, _mm256_and_si256(load256(row + 32 * i), abs));
    }
    const __m128i h   = _mm_max_epu16(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    const __m128i min = _mm_minpos_epu16(_mm_xor_si128(h, _mm_set1_epi32(-1)));
    return (uint16_t) ~_mm_cvtsi128_si32(min);
}

/* code = x × inv + bias, for 64 columns. */
typedef struct affine {
    __m256 inv[N_LANES], bias[N_LANES];
} affine;

static void row_affine(uint16_t amax, uint8_t * scale, affine * a) {
    *scale = embed_scale_up(amax);
    const float s = embed_scale(*scale);
    for (size_t i = 0; i < N_LANES; ++i) {
        a->inv[i]  = _mm256_set1_ps(s > 0 ? 128.0f / s : 0.0f);
        a->bias[i] = _mm256_set1_ps(128.0f);
    }
}

/* Return n / s, or 0 where s is 0. */
static __m256 quotient(float n, __m256 s) {
    const __m256 some = _mm256_cmp_ps(s, _mm256_setzero_ps(), _CMP_GT_OQ);
    return _mm256_and_ps(some, _mm256_div_ps(_mm256_set1_ps(n), s));
}

/* Compute columns 8 × i to 8 × i + 7. */
static void channel_affine(const uint8_t * src, size_t stride, size_t n_rows, size_t i, uint8_t * side, affine * a) {
    const uint8_t * x = src + 2 * LANES * i;
    __m256 hi = load8(x), lo = hi;
    for (size_t r = 1; r < n_rows; ++r) {
        const __m256 v = load8(x + r * stride);
        hi = _mm256_max_ps(hi, v);
        lo = _mm256_min_ps(lo, v);
    }
    const __m256  half   = _mm256_set1_ps(0.5f);
    const __m256  center = _mm256_mul_ps(_mm256_add_ps(hi, lo), half);
    const __m256  reach  = _mm256_mul_ps(_mm256_mul_ps(_mm256_sub_ps(hi, lo), half), _mm256_set1_ps(LLMAAS_EMBED_REACH));
    const __m256  abs    = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), center);
    const __m256  far    = _mm256_mul_ps(abs, _mm256_set1_ps(LLMAAS_EMBED_OFFSET));
    const __m128i up     = _mm256_cvtps_ph(_mm256_max_ps(reach, far), _MM_FROUND_TO_POS_INF);
    const __m128i words  = _mm_srli_epi16(_mm_add_epi16(up, _mm_set1_epi16(127)), 7);
    const __m128i bytes  = _mm_packus_epi16(words, words);
    const __m256  s      = scales8(bytes);
    const __m256i offset = _mm256_cvtps_epi32(_mm256_mul_ps(center, quotient(8.0f, s)));
    const __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(offset), _mm256_extracti128_si256(offset, 1));
    _mm_storel_epi64((void *) (side + LANES * i), bytes);
    _mm_storel_epi64((void *) (side + LLMAAS_GROUP + LANES * i), _mm_packs_epi16(packed, packed));
    a->inv[i]  = quotient(128.0f, s);
    a->bias[i] = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_set1_epi32(128), _mm256_slli_epi32(offset, 4)));
}

static __m256i codes8(const uint8_t * row, const affine * a, size_t i) {
    const __m256 t = _mm256_add_ps(_mm256_mul_ps(load8(row + 2 * LANES * i), a->inv[i]), a->bias[i]);
    return _mm256_cvttps_epi32(_mm256_min_ps(_mm256_max_ps(t, _mm256_setzero_ps()), _mm256_set1_ps(255.0f)));
}

/* Return the codes of 32 columns. The packs work within 128-bit lanes; the permutation restores the order. */
static __m256i codes32(const uint8_t * row, const affine * a, size_t i) {
    const __m256i x = _mm256_packs_epi32(codes8(row, a, i), codes8(row, a, i + 1));
    const __m256i y = _mm256_packs_epi32(codes8(row, a, i + 2), codes8(row, a, i + 3));
    return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(x, y), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

static void encode_row(const uint8_t * row, const affine * a, uint8_t * planes, size_t plane_stride, unsigned bits) {
    __m256i x = codes32(row, a, 0);
    __m256i y = codes32(row, a, 4);
    for (size_t p = 0; p < bits; ++p) {
        store_u32(planes + p * plane_stride, (uint32_t) _mm256_movemask_epi8(x));
        store_u32(planes + p * plane_stride + 4, (uint32_t) _mm256_movemask_epi8(y));
        x = _mm256_add_epi8(x, x);
        y = _mm256_add_epi8(y, y);
    }
}

bool llmaas_embed_encode_avx2(const uint8_t * src, size_t src_stride, size_t n_rows, bool per_channel, uint8_t * side,
                              uint8_t * planes, size_t plane_stride, unsigned bits) {
    for (size_t r = 0; r < n_rows; ++r) {
        if (row_amax(src + r * src_stride) > LLMAAS_EMBED_MAX) {
            return false;
        }
    }
    affine a;
    for (size_t i = 0; per_channel && i < N_LANES; ++i) {
        channel_affine(src, src_stride, n_rows, i, side, &a);
    }
    for (size_t r = 0; r < n_rows; ++r) {
        const uint8_t * row = src + r * src_stride;
        if (!per_channel) {
            row_affine(row_amax(row), side + r, &a);
        }
        encode_row(row, &a, planes + 8 * r, plane_stride, bits);
    }
    return true;
}

/* x' = code × step + shift, for 64 columns. */
typedef struct steps {
    __m256 step[N_LANES], shift[N_LANES];
} steps;

static void channel_steps(const uint8_t * side, float center, steps * out) {
    for (size_t i = 0; i < N_LANES; ++i) {
        const __m256  s      = scales8(_mm_loadl_epi64((const void *) (side + LANES * i)));
        const __m128i offset = _mm_loadl_epi64((const void *) (side + LLMAAS_GROUP + LANES * i));
        const __m256  k      = _mm256_cvtepi32_ps(_mm256_slli_epi32(_mm256_cvtepi8_epi32(offset), 4));
        out->step[i]  = _mm256_mul_ps(s, _mm256_set1_ps(1.0f / 128.0f));
        out->shift[i] = _mm256_mul_ps(_mm256_add_ps(k, _mm256_set1_ps(center)), out->step[i]);
    }
}

static void row_steps(uint8_t scale, float center, steps * out) {
    const float step = _cvtsh_ss((unsigned short) (scale << 7)) / 128.0f;
    for (size_t i = 0; i < N_LANES; ++i) {
        out->step[i]  = _mm256_set1_ps(step);
        out->shift[i] = _mm256_set1_ps(center * step);
    }
}

/* Gather the codes of 32 columns: each byte picks its byte of the word, then its bit. */
static __m256i gather32(const uint8_t * planes, size_t plane_stride, unsigned bits) {
    const __m256i pick = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3,
                                          3, 3, 3, 3);
    const __m256i bit  = _mm256_set1_epi64x((int64_t) 0x8040201008040201ull);
    __m256i codes = _mm256_setzero_si256();
    for (size_t p = 0; p < bits; ++p) {
        const __m256i word = _mm256_set1_epi32((int32_t) load_u32(planes + p * plane_stride));
        const __m256i set  = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(word, pick), bit), bit);
        codes = _mm256_or_si256(codes, _mm256_and_si256(set, _mm256_set1_epi8((char) (0x80 >> p))));
    }
    return codes;
}

static void decode_row(const uint8_t * codes, const steps * s, uint8_t * dst, bool past_cache) {
    const bool is_streamed = past_cache && (uintptr_t) dst % 16 == 0;
    for (size_t i = 0; i < N_LANES; ++i) {
        const __m256i q = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *) (codes + LANES * i)));
        const __m256  x = _mm256_fmadd_ps(_mm256_cvtepi32_ps(q), s->step[i], s->shift[i]);
        const __m128i y = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
        void *        to = dst + 2 * LANES * i;
        if (is_streamed) {
            _mm_stream_si128(to, y);
        } else {
            _mm_storeu_si128(to, y);
        }
    }
}

void llmaas_embed_decode_avx2(const uint8_t * side, bool per_channel, const uint8_t * planes, size_t plane_stride,
                              unsigned bits, size_t n_rows, uint8_t * dst, size_t dst_stride, bool past_cache) {
    const float center = embed_center(bits);
    steps s;
    if (per_channel) {
        channel_steps(side, center, &s);
    }
    for (size_t r = 0; r < n_rows; ++r) {
        uint8_t codes[LLMAAS_GROUP];
        _mm256_storeu_si256((void *) codes, gather32(planes + 8 * r, plane_stride, bits));
        _mm256_storeu_si256((void *) (codes + 32), gather32(planes + 8 * r + 4, plane_stride, bits));
        if (!per_channel) {
            row_steps(side[r], center, &s);
        }
        decode_row(codes, &s, dst + r * dst_stride, past_cache);
    }
}
