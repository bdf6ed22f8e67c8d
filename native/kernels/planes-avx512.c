/* AVX-512 F, BW, VL and BMI2; output is byte-identical to planes-generic.c. 64 elements are one byte vector, planes are
 * mask registers, and pext and pdep pack and unpack the planes of the elements still open. */
#include "kernels.h"
#include "planes.h"

#include <immintrin.h>

static __m512i even_odd(__m512i packed) { /* undo the lane order of packus */
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed);
}

/* Write the levels from the second on. */
static void put_levels(llmaas_planes_writer * w, __m512i rank, uint64_t open) {
    for (char first = 3; open; first = (char) (first + 3)) {
        const uint64_t next = _mm512_cmpge_epu8_mask(rank, _mm512_set1_epi8((char) (first + 3)));
        const uint64_t a    = next | _mm512_cmpeq_epi8_mask(rank, _mm512_set1_epi8((char) (first + 1)));
        const uint64_t b    = next | _mm512_cmpeq_epi8_mask(rank, _mm512_set1_epi8((char) (first + 2)));
        const unsigned k    = (unsigned) _mm_popcnt_u64(open);
        planes_put(w, _pext_u64(a, open), k);
        planes_put(w, _pext_u64(b, open), k);
        open = next;
    }
}

static void encode_group(llmaas_planes_writer * w, __m512i ranks_lo, __m512i ranks_hi, const uint8_t * src, size_t n) {
    const uint64_t valid = planes_valid(n);
    const __m512i  x0    = _mm512_maskz_loadu_epi16((__mmask32) valid, src);
    const __m512i  x1    = _mm512_maskz_loadu_epi16((__mmask32) (valid >> 32), src + 64);
    const __m512i  byte  = _mm512_set1_epi16(0xff);
    const __m512i  low   = even_odd(_mm512_packus_epi16(_mm512_and_si512(x0, byte), _mm512_and_si512(x1, byte)));
    const __m512i  high  = even_odd(_mm512_packus_epi16(_mm512_srli_epi16(x0, 8), _mm512_srli_epi16(x1, 8)));
    const __m512i  exps  = _mm512_and_si512(_mm512_srli_epi16(high, 2), _mm512_set1_epi8(31));
    const __m512i  rank  = _mm512_mask_shuffle_epi8(
        _mm512_shuffle_epi8(ranks_lo, exps), _mm512_test_epi8_mask(exps, _mm512_set1_epi8(16)), ranks_hi, exps);
    _mm512_mask_storeu_epi8(w->low, valid, low);
    const uint64_t open = valid & _mm512_cmpge_epu8_mask(rank, _mm512_set1_epi8(3));
    store_u64(w->fixed, _mm512_movepi8_mask(high));
    store_u64(w->fixed + 8, _mm512_test_epi8_mask(high, _mm512_set1_epi8(2)));
    store_u64(w->fixed + 16, _mm512_test_epi8_mask(high, _mm512_set1_epi8(1)));
    store_u64(w->fixed + 24, open | (valid & _mm512_cmpeq_epi8_mask(rank, _mm512_set1_epi8(1))));
    store_u64(w->fixed + 32, open | (valid & _mm512_cmpeq_epi8_mask(rank, _mm512_set1_epi8(2))));
    w->low   += n;
    w->fixed += LLMAAS_FIXED;
    /* absent elements must not open further levels */
    put_levels(w, _mm512_maskz_mov_epi8(valid, rank), open);
}

void llmaas_planes_encode_avx512(llmaas_planes_writer * w, const uint8_t * src, size_t src_stride, size_t n_rows,
                                 size_t n_cols) {
    const __m512i lo = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *) w->ranks));
    const __m512i hi = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *) (w->ranks + 16)));
    for (size_t i = 0; i < n_rows; ++i) {
        encode_group(w, lo, hi, src + i * src_stride, n_cols);
    }
}

static __m512i symbol(const llmaas_planes_reader * r, unsigned rank) { return _mm512_set1_epi8((char) r->symbols[rank]); }

/* Read the exponents of the elements that the first level left open. False on a stream that no encoder writes. */
static bool get_levels(llmaas_planes_reader * r, uint64_t open, __m512i * exps) {
    for (unsigned first = 3; open; first += 3) {
        const unsigned k = (unsigned) _mm_popcnt_u64(open);
        if (first == 3 * LLMAAS_LEVELS || !planes_has(r, 2 * k)) {
            return false;
        }
        const uint64_t a = _pdep_u64(planes_get(r, k), open);
        const uint64_t b = _pdep_u64(planes_get(r, k), open);
        *exps = _mm512_mask_mov_epi8(*exps, open, symbol(r, first));
        *exps = _mm512_mask_mov_epi8(*exps, a, symbol(r, first + 1));
        *exps = _mm512_mask_mov_epi8(*exps, b, symbol(r, first + 2));
        open  = a & b;
    }
    return true;
}

static bool decode_group(llmaas_planes_reader * r, uint8_t * dst, size_t n) {
    const uint64_t  valid = planes_valid(n);
    const uint8_t * f     = r->fixed;
    const uint64_t  a = load_u64(f + 24), b = load_u64(f + 32);
    __m512i high = symbol(r, 0);
    high = _mm512_mask_mov_epi8(high, a, symbol(r, 1));
    high = _mm512_mask_mov_epi8(high, b, symbol(r, 2));
    if (!get_levels(r, a & b & valid, &high)) {
        return false;
    }
    /* the bits are clear in every symbol, so adding sets them */
    high = _mm512_mask_add_epi8(high, load_u64(f), high, _mm512_set1_epi8((char) 0x80));
    high = _mm512_mask_add_epi8(high, load_u64(f + 8), high, _mm512_set1_epi8(2));
    high = _mm512_mask_add_epi8(high, load_u64(f + 16), high, _mm512_set1_epi8(1));
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); /* the lane order that unpack needs */
    const __m512i lo = _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi8(valid, r->low));
    const __m512i hi = _mm512_permutexvar_epi64(order, high);
    _mm512_mask_storeu_epi16(dst, (__mmask32) valid, _mm512_unpacklo_epi8(lo, hi));
    _mm512_mask_storeu_epi16(dst + 64, (__mmask32) (valid >> 32), _mm512_unpackhi_epi8(lo, hi));
    r->low   += n;
    r->fixed += LLMAAS_FIXED;
    return true;
}

bool llmaas_planes_decode_avx512(llmaas_planes_reader * r, size_t n_rows, size_t n_cols, uint8_t * dst, size_t dst_stride) {
    for (size_t i = 0; i < n_rows; ++i) {
        if (!decode_group(r, dst + i * dst_stride, n_cols)) {
            return false;
        }
    }
    return true;
}
