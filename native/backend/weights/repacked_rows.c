#include "weights/repacked_rows.h"

#if defined(__x86_64__)

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define LLMAAS_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")))

enum { STREAMS = LLMAAS_STREAMS, PAIRS = STREAMS / 2 };

/* ggml-cpu's blocks: eight rows of 4-bit values in chunks of eight bytes, and blocks of quantized activations. */
struct q4_0x8 {
    uint16_t d[8];
    uint8_t  qs[128];
};

struct q4_kx8 {
    uint16_t d[8];
    uint16_t dmin[8];
    uint8_t  scales[96];
    uint8_t  qs[1024];
};

struct q8_0 {
    uint16_t d;
    int8_t   qs[32];
};

struct q8_k {
    float   d;
    int8_t  qs[256];
    int16_t bsums[16];
};

LLMAAS_TARGET static inline __m512i load(const void * p) { return _mm512_loadu_si512(p); }

/* Prefetch the block that the next call will want in this block's place. */
LLMAAS_TARGET static inline void prefetch_next(const void * block, size_t size, size_t ahead) {
    for (size_t i = 0; i < size; i += 64) {
        _mm_prefetch((const char *) block + ahead + i, _MM_HINT_T1);
    }
}

/* Load eight activations, repeated for all eight rows. */
LLMAAS_TARGET static inline __m512i eight(const int8_t * p) {
    long long bytes;
    memcpy(&bytes, p, sizeof bytes);
    return _mm512_set1_epi64(bytes);
}

LLMAAS_TARGET static inline __m512i low(__m512i v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
LLMAAS_TARGET static inline __m512i high(__m512i v) { return low(_mm512_srli_epi16(v, 4)); }

/* Add the two lanes of each row: sixteen rows of two groups. */
LLMAAS_TARGET static inline __m512i sum_rows(__m512i first, __m512i second) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd  = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return _mm512_add_epi32(
        _mm512_permutex2var_epi32(first, even, second), _mm512_permutex2var_epi32(first, odd, second));
}

LLMAAS_TARGET static inline __m512 halves(const uint16_t * first, const uint16_t * second) {
    const __m128i a = _mm_loadu_si128((const __m128i *) (const void *) first);
    const __m128i b = _mm_loadu_si128((const __m128i *) (const void *) second);
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1));
}

/* 4-bit values stand for table[value] - bias, as one operand of dpbusd must be unsigned. */
LLMAAS_TARGET static inline void rows_q4_0(
    int n, float * to, const char * groups, size_t stride, size_t ahead, const void * activations, __m512i table,
    uint8_t bias) {
    const struct q8_0 * a = activations;
    __m512              sums[PAIRS];
    for (int p = 0; p < PAIRS; ++p) {
        sums[p] = _mm512_setzero_ps();
    }
    for (int b = 0; b < n / 32; ++b) {
        const __m512i a0 = eight(a[b].qs), a1 = eight(a[b].qs + 8), a2 = eight(a[b].qs + 16), a3 = eight(a[b].qs + 24);
        const __m512i biases = _mm512_set1_epi8((char) bias);
        __m512i       less   = _mm512_dpbusd_epi32(_mm512_setzero_si512(), biases, a0);
        less                 = _mm512_dpbusd_epi32(less, biases, a1);
        less                 = _mm512_dpbusd_epi32(less, biases, a2);
        less                 = _mm512_dpbusd_epi32(less, biases, a3);
        less                 = _mm512_sub_epi32(_mm512_setzero_si512(), less);
        const __m512 scale   = _mm512_set1_ps(_cvtsh_ss(a[b].d));
        for (int p = 0; p < PAIRS; ++p) {
            const struct q4_0x8 * block[2];
            __m512i               dot[2];
            for (int i = 0; i < 2; ++i) {
                block[i] = (const struct q4_0x8 *) (const void *) (groups + (size_t) (2 * p + i) * stride) + b;
                prefetch_next(block[i], sizeof *block[i], ahead);
                const __m512i x = load(block[i]->qs), y = load(block[i]->qs + 64);
                __m512i       d = _mm512_dpbusd_epi32(less, _mm512_shuffle_epi8(table, low(x)), a0);
                d               = _mm512_dpbusd_epi32(d, _mm512_shuffle_epi8(table, low(y)), a1);
                d               = _mm512_dpbusd_epi32(d, _mm512_shuffle_epi8(table, high(x)), a2);
                dot[i]          = _mm512_dpbusd_epi32(d, _mm512_shuffle_epi8(table, high(y)), a3);
            }
            sums[p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum_rows(dot[0], dot[1])),
                _mm512_mul_ps(halves(block[0]->d, block[1]->d), scale), sums[p]);
        }
    }
    for (int p = 0; p < PAIRS; ++p) {
        _mm512_storeu_ps(to + 16 * p, sums[p]);
    }
}

LLMAAS_TARGET static void gemv_q4_0(
    int n, float * to, const char * groups, size_t stride, size_t ahead, const void * activations) {
    /* two's complement nibbles */
    const __m128i table = _mm_setr_epi8(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    rows_q4_0(n, to, groups, stride, ahead, activations, _mm512_broadcast_i32x4(table), 8);
}

LLMAAS_TARGET static void gemv_iq4_nl(
    int n, float * to, const char * groups, size_t stride, size_t ahead, const void * activations) {
    const __m256i table = _mm256_setr_epi16(1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241);
    rows_q4_0(n, to, groups, stride, ahead, activations, _mm512_broadcast_i32x4(_mm256_cvtepi16_epi8(table)), 128);
}

/* The 6-bit scales and mins of eight rows; the packed form has 12 bytes for each of eight sub-blocks. Here each
 * sub-block is a lane and each row a byte. */
struct six_bits {
    __m512i  scales;
    uint64_t mins[8];
};

LLMAAS_TARGET static inline struct six_bits unpack(const uint8_t * packed) {
    const __m512i first  = load(packed);
    const __m512i second = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *) (const void *) (packed + 64)));
    const __m512i third  = _mm512_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i zip    = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i one = _mm512_set1_epi32(1), low6 = _mm512_set1_epi8(0x3f), top2 = _mm512_set1_epi8(0x30);
    const __m512i w0 = _mm512_permutex2var_epi32(first, third, second);
    const __m512i w1 = _mm512_permutex2var_epi32(first, _mm512_add_epi32(third, one), second);
    const __m512i w2 = _mm512_permutex2var_epi32(first, _mm512_add_epi32(third, _mm512_add_epi32(one, one)), second);
    const __m512i s  = _mm512_or_si512(low(w2), _mm512_and_si512(_mm512_srli_epi32(w0, 2), top2));
    const __m512i m  = _mm512_or_si512(high(w2), _mm512_and_si512(_mm512_srli_epi32(w1, 2), top2));
    struct six_bits six = {.scales = _mm512_permutex2var_epi32(_mm512_and_si512(w0, low6), zip, s)};
    _mm512_storeu_si512(six.mins, _mm512_permutex2var_epi32(_mm512_and_si512(w1, low6), zip, m));
    return six;
}

/* Multiply sums of four products per lane, which fit in 16 bits, by their row's scale in sub-block i. */
LLMAAS_TARGET static inline __m512i scaled(__m512i sums, const struct six_bits * six, int i) {
    const __m512i row   = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i rows  = _mm512_or_si512(_mm512_set1_epi32((int) 0x80808000), row); /* the upper bytes become zero */
    const __m512i bytes = _mm512_permutexvar_epi64(_mm512_set1_epi64(i), six->scales);
    return _mm512_madd_epi16(sums, _mm512_shuffle_epi8(bytes, rows));
}

/* Sum the activations of each sub-block: pairs of adjacent sub-blocks, side by side, four times. */
LLMAAS_TARGET static inline __m128i sums_q8_k(const struct q8_k * a) {
    const __m256i of_16 = _mm256_loadu_si256((const __m256i *) (const void *) a->bsums);
    const __m256i sums  = _mm256_madd_epi16(of_16, _mm256_set1_epi16(1));
    return _mm_packs_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
}

LLMAAS_TARGET static inline __m256i min_q4_k(__m128i sums, const struct six_bits * six) {
    __m256i min = _mm256_setzero_si256();
    for (int half = 0; half < 4; ++half) {
        const __m128i bytes = _mm_unpacklo_epi8(
            _mm_cvtsi64_si128((long long) six->mins[2 * half]), _mm_cvtsi64_si128((long long) six->mins[2 * half + 1]));
        min  = _mm256_add_epi32(min, _mm256_madd_epi16(_mm256_cvtepu8_epi16(bytes), _mm256_broadcastd_epi32(sums)));
        sums = _mm_bsrli_si128(sums, 4);
    }
    return min;
}

LLMAAS_TARGET static void gemv_q4_k(
    int n, float * to, const char * groups, size_t stride, size_t ahead, const void * activations) {
    const struct q8_k * a = activations;
    __m512              sums[PAIRS], mins[PAIRS];
    for (int p = 0; p < PAIRS; ++p) {
        sums[p] = mins[p] = _mm512_setzero_ps();
    }
    for (int b = 0; b < n / 256; ++b) {
        const __m512  scale     = _mm512_set1_ps(a[b].d);
        const __m128i pair_sums = sums_q8_k(a + b);
        for (int p = 0; p < PAIRS; ++p) {
            const char *          pair = groups + (size_t) (2 * p) * stride;
            const struct q4_kx8 * x    = (const struct q4_kx8 *) (const void *) pair + b;
            const struct q4_kx8 * y    = (const struct q4_kx8 *) (const void *) (pair + stride) + b;
            prefetch_next(x, 128, ahead);
            prefetch_next(y, 128, ahead);
            const struct six_bits six_x = unpack(x->scales), six_y = unpack(y->scales);
            __m512i               dot_x = _mm512_setzero_si512(), dot_y = dot_x;
#pragma GCC unroll 4
            for (int half = 0; half < 4; ++half) {
                __m512i x0 = _mm512_setzero_si512(), x1 = x0, y0 = x0, y1 = x0;
#pragma GCC unroll 4
                for (int k = 0; k < 4; ++k) {
                    const __m512i a0 = eight(a[b].qs + 64 * half + 8 * k), a1 = eight(a[b].qs + 64 * half + 32 + 8 * k);
                    const uint8_t *from_x = x->qs + 256 * half + 64 * k, *from_y = y->qs + 256 * half + 64 * k;
                    prefetch_next(from_x, 64, ahead);
                    prefetch_next(from_y, 64, ahead);
                    x0 = _mm512_dpbusd_epi32(x0, low(load(from_x)), a0);
                    x1 = _mm512_dpbusd_epi32(x1, high(load(from_x)), a1);
                    y0 = _mm512_dpbusd_epi32(y0, low(load(from_y)), a0);
                    y1 = _mm512_dpbusd_epi32(y1, high(load(from_y)), a1);
                }
                dot_x = _mm512_add_epi32(dot_x, scaled(x0, &six_x, 2 * half));
                dot_x = _mm512_add_epi32(dot_x, scaled(x1, &six_x, 2 * half + 1));
                dot_y = _mm512_add_epi32(dot_y, scaled(y0, &six_y, 2 * half));
                dot_y = _mm512_add_epi32(dot_y, scaled(y1, &six_y, 2 * half + 1));
            }
            const __m512i min_x = _mm512_castsi256_si512(min_q4_k(pair_sums, &six_x));
            const __m512i min   = _mm512_inserti64x4(min_x, min_q4_k(pair_sums, &six_y), 1);
            const __m512i dot   = sum_rows(dot_x, dot_y);
            sums[p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(halves(x->d, y->d), scale), sums[p]);
            mins[p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(min), _mm512_mul_ps(halves(x->dmin, y->dmin), scale), mins[p]);
        }
    }
    for (int p = 0; p < PAIRS; ++p) {
        _mm512_storeu_ps(to + 16 * p, _mm512_sub_ps(sums[p], mins[p]));
    }
}

static bool processor_can(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

llmaas_rows_kernel llmaas_rows_kernel_of(enum ggml_type type) {
    if (!processor_can()) {
        return NULL;
    }
    switch (type) {
        case GGML_TYPE_Q4_0:
            return gemv_q4_0;
        case GGML_TYPE_IQ4_NL:
            return gemv_iq4_nl;
        case GGML_TYPE_Q4_K:
            return gemv_q4_k;
        default:
            return NULL;
    }
}

#else

llmaas_rows_kernel llmaas_rows_kernel_of(enum ggml_type type) {
    (void) type;
    return NULL;
}

#endif
