/* AVX2 and BMI2; output is byte-identical to planes-generic.c. 64 elements are two byte vectors; planes are converted
 * to byte masks and back. Groups shorter than 64 go through a buffer. */
#include "kernels.h"
#include "planes.h"

#include <immintrin.h>

static __m256i bytes(unsigned v) { return _mm256_set1_epi8((char) v); }

static uint64_t mask64(__m256i lo, __m256i hi) {
    return (uint32_t) _mm256_movemask_epi8(lo) | (uint64_t) (uint32_t) _mm256_movemask_epi8(hi) << 32;
}

static uint64_t equal(const __m256i v[2], unsigned to) {
    return mask64(_mm256_cmpeq_epi8(v[0], bytes(to)), _mm256_cmpeq_epi8(v[1], bytes(to)));
}

static uint64_t at_least(const __m256i v[2], unsigned limit) { /* both below 128 */
    return mask64(_mm256_cmpgt_epi8(v[0], bytes(limit - 1)), _mm256_cmpgt_epi8(v[1], bytes(limit - 1)));
}

static uint64_t bit(const __m256i v[2], int shift) { /* shift left by at most 7, into each byte's sign bit */
    return mask64(_mm256_slli_epi16(v[0], shift), _mm256_slli_epi16(v[1], shift));
}

/* Split 32 elements into low and high bytes. */
static void split32(const uint8_t * src, __m256i * low, __m256i * high) {
    const __m256i x0   = _mm256_loadu_si256((const void *) src);
    const __m256i x1   = _mm256_loadu_si256((const void *) (src + 32));
    const __m256i byte = _mm256_set1_epi16(0xff);
    *low  = _mm256_permute4x64_epi64(_mm256_packus_epi16(_mm256_and_si256(x0, byte), _mm256_and_si256(x1, byte)), 0xd8);
    *high = _mm256_permute4x64_epi64(_mm256_packus_epi16(_mm256_srli_epi16(x0, 8), _mm256_srli_epi16(x1, 8)), 0xd8);
}

static __m256i ranks_of(const llmaas_planes_writer * w, __m256i high) {
    const __m256i lo   = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *) w->ranks));
    const __m256i hi   = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *) (w->ranks + 16)));
    const __m256i exps = _mm256_and_si256(_mm256_srli_epi16(high, 2), bytes(31));
    const __m256i big  = _mm256_cmpgt_epi8(exps, bytes(15));
    return _mm256_blendv_epi8(_mm256_shuffle_epi8(lo, exps), _mm256_shuffle_epi8(hi, exps), big);
}

/* Encode a group. src has 64 elements, of which the first n are valid. */
static void encode_group(llmaas_planes_writer * w, const uint8_t * src, uint8_t * low_out, size_t n) {
    const uint64_t valid = planes_valid(n);
    __m256i high[2], rank[2];
    for (size_t h = 0; h < 2; ++h) {
        __m256i low;
        split32(src + 64 * h, &low, &high[h]);
        rank[h] = ranks_of(w, high[h]);
        _mm256_storeu_si256((void *) (low_out + 32 * h), low);
    }
    uint64_t open = valid & at_least(rank, 3);
    store_u64(w->fixed, valid & bit(high, 0));
    store_u64(w->fixed + 8, valid & bit(high, 6));
    store_u64(w->fixed + 16, valid & bit(high, 7));
    store_u64(w->fixed + 24, open | (valid & equal(rank, 1)));
    store_u64(w->fixed + 32, open | (valid & equal(rank, 2)));
    for (unsigned first = 3; open; first += 3) {
        const uint64_t next = valid & at_least(rank, first + 3);
        const unsigned k    = (unsigned) _mm_popcnt_u64(open);
        planes_put(w, _pext_u64(next | equal(rank, first + 1), open), k);
        planes_put(w, _pext_u64(next | equal(rank, first + 2), open), k);
        open = next;
    }
    w->low   += n;
    w->fixed += LLMAAS_FIXED;
}

void llmaas_planes_encode_avx2(llmaas_planes_writer * w, const uint8_t * src, size_t src_stride, size_t n_rows, size_t n_cols) {
    for (size_t i = 0; i < n_rows; ++i, src += src_stride) {
        if (n_cols == LLMAAS_GROUP) {
            encode_group(w, src, w->low, n_cols);
            continue;
        }
        uint8_t   x[2 * LLMAAS_GROUP] = {0};
        uint8_t   low[LLMAAS_GROUP];
        uint8_t * at = w->low;
        memcpy(x, src, 2 * n_cols);
        encode_group(w, x, low, n_cols);
        memcpy(at, low, n_cols);
    }
}

/* Expand 32 bits to 32 byte masks: byte i looks at bit i % 8 of source byte i / 8. */
static __m256i expand(uint32_t bits) {
    const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3,
                                            3, 3, 3);
    const __m256i select = _mm256_set1_epi64x((long long) 0x8040201008040201ull);
    const __m256i v      = _mm256_shuffle_epi8(_mm256_set1_epi32((int) bits), spread);
    return _mm256_cmpeq_epi8(_mm256_and_si256(v, select), select);
}

static void assign(__m256i v[2], uint64_t mask, uint8_t value) {
    v[0] = _mm256_blendv_epi8(v[0], bytes(value), expand((uint32_t) mask));
    v[1] = _mm256_blendv_epi8(v[1], bytes(value), expand((uint32_t) (mask >> 32)));
}

static void set_bits(__m256i v[2], uint64_t mask, uint8_t value) {
    v[0] = _mm256_or_si256(v[0], _mm256_and_si256(expand((uint32_t) mask), bytes(value)));
    v[1] = _mm256_or_si256(v[1], _mm256_and_si256(expand((uint32_t) (mask >> 32)), bytes(value)));
}

static void join32(__m256i low, __m256i high, uint8_t * dst) {
    const __m256i l = _mm256_permute4x64_epi64(low, 0xd8);
    const __m256i h = _mm256_permute4x64_epi64(high, 0xd8);
    _mm256_storeu_si256((void *) dst, _mm256_unpacklo_epi8(l, h));
    _mm256_storeu_si256((void *) (dst + 32), _mm256_unpackhi_epi8(l, h));
}

/* Decode a group. dst and low have 64 elements, of which the first n are valid. */
static bool decode_group(llmaas_planes_reader * r, const uint8_t * low, uint8_t * dst, size_t n) {
    const uint8_t * f = r->fixed;
    uint64_t a = load_u64(f + 24), b = load_u64(f + 32);
    __m256i  high[2] = {bytes(r->symbols[0]), bytes(r->symbols[0])};
    assign(high, a, r->symbols[1]);
    assign(high, b, r->symbols[2]);
    uint64_t open = a & b & planes_valid(n);
    for (unsigned first = 3; open; first += 3) {
        const unsigned k = (unsigned) _mm_popcnt_u64(open);
        if (first == 3 * LLMAAS_LEVELS || !planes_has(r, 2 * k)) {
            return false;
        }
        a = _pdep_u64(planes_get(r, k), open);
        b = _pdep_u64(planes_get(r, k), open);
        assign(high, open, r->symbols[first]);
        assign(high, a, r->symbols[first + 1]);
        assign(high, b, r->symbols[first + 2]);
        open = a & b;
    }
    set_bits(high, load_u64(f), 0x80);
    set_bits(high, load_u64(f + 8), 2);
    set_bits(high, load_u64(f + 16), 1);
    join32(_mm256_loadu_si256((const void *) low), high[0], dst);
    join32(_mm256_loadu_si256((const void *) (low + 32)), high[1], dst + 64);
    r->low   += n;
    r->fixed += LLMAAS_FIXED;
    return true;
}

bool llmaas_planes_decode_avx2(llmaas_planes_reader * r, size_t n_rows, size_t n_cols, uint8_t * dst, size_t dst_stride) {
    for (size_t i = 0; i < n_rows; ++i, dst += dst_stride) {
        if (n_cols == LLMAAS_GROUP) {
            if (!decode_group(r, r->low, dst, n_cols)) {
                return false;
            }
            continue;
        }
        uint8_t low[LLMAAS_GROUP] = {0};
        uint8_t x[2 * LLMAAS_GROUP];
        memcpy(low, r->low, n_cols);
        if (!decode_group(r, low, x, n_cols)) {
            return false;
        }
        memcpy(dst, x, 2 * n_cols);
    }
    return true;
}
