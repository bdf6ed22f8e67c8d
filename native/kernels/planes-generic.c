/* Lossless bit planes of f16 tiles; native/FORMAT.md describes the stream. The reference implementation of the other
 * planes files. */
#include "kernels.h"
#include "planes.h"

void llmaas_exponents_generic(const uint8_t * src, size_t src_stride, size_t n_rows, size_t n_cols, uint32_t * counts) {
    uint32_t part[4][LLMAAS_SYMBOLS] = {{0}}; /* neighbors often share an exponent: four tables hide the latency */
    for (size_t r = 0; r < n_rows; ++r) {
        const uint8_t * row = src + r * src_stride + 1;
        for (size_t c = 0; c < n_cols; ++c) {
            part[c & 3][(row[2 * c] >> 2) & 31]++;
        }
    }
    for (size_t s = 0; s < LLMAAS_SYMBOLS; ++s) {
        counts[s] += part[0][s] + part[1][s] + part[2][s] + part[3][s];
    }
}

static uint64_t pext(uint64_t bits, uint64_t mask) {
    uint64_t out = 0;
    for (unsigned n = 0; mask; mask &= mask - 1, ++n) {
        out |= (uint64_t) ((bits & mask & -mask) != 0) << n;
    }
    return out;
}

static uint64_t pdep(uint64_t bits, uint64_t mask) {
    uint64_t out = 0;
    for (; mask; mask &= mask - 1, bits >>= 1) {
        out |= (bits & 1) ? mask & -mask : 0;
    }
    return out;
}

static void encode_group(llmaas_planes_writer * w, const uint8_t * src, size_t n) {
    uint64_t fixed[5] = {0};
    uint8_t  rank[LLMAAS_GROUP];
    for (size_t i = 0; i < n; ++i) {
        const unsigned hi = src[2 * i + 1];
        w->low[i] = src[2 * i];
        rank[i]   = w->ranks[(hi >> 2) & 31];
        fixed[0] |= (uint64_t) (hi >> 7) << i;
        fixed[1] |= (uint64_t) ((hi >> 1) & 1) << i;
        fixed[2] |= (uint64_t) (hi & 1) << i;
    }
    uint64_t open = planes_valid(n);
    for (unsigned level = 0; open; ++level) {
        uint64_t a = 0, b = 0, next = 0;
        for (size_t i = 0; i < n; ++i) {
            a    |= (uint64_t) (rank[i] == 3 * level + 1) << i;
            b    |= (uint64_t) (rank[i] == 3 * level + 2) << i;
            next |= (uint64_t) (rank[i] >= 3 * level + 3) << i;
        }
        if (level == 0) {
            fixed[3] = a | next;
            fixed[4] = b | next;
        } else {
            const unsigned k = (unsigned) __builtin_popcountll(open);
            planes_put(w, pext(a | next, open), k);
            planes_put(w, pext(b | next, open), k);
        }
        open = next;
    }
    memcpy(w->fixed, fixed, LLMAAS_FIXED);
    w->fixed += LLMAAS_FIXED;
    w->low   += n;
}

static bool decode_group(llmaas_planes_reader * r, uint8_t * dst, size_t n) {
    const uint8_t * f = r->fixed;
    uint8_t  exps[LLMAAS_GROUP];
    uint64_t open = planes_valid(n);
    uint64_t a = load_u64(f + 24), b = load_u64(f + 32);
    for (unsigned level = 0; open; ++level) {
        if (level == LLMAAS_LEVELS) {
            return false;
        }
        if (level > 0) {
            const unsigned k = (unsigned) __builtin_popcountll(open);
            if (!planes_has(r, 2 * k)) {
                return false;
            }
            a = pdep(planes_get(r, k), open);
            b = pdep(planes_get(r, k), open);
        }
        for (size_t i = 0; i < n; ++i) {
            const unsigned code = (unsigned) (a >> i & 1) + 2 * (unsigned) (b >> i & 1);
            if ((open >> i & 1) && code < 3) {
                exps[i] = r->symbols[3 * level + code];
            }
        }
        open &= a & b;
    }
    for (size_t i = 0; i < n; ++i) {
        const uint64_t hi = exps[i] | (load_u64(f) >> i & 1) << 7 | (load_u64(f + 8) >> i & 1) << 1 | (load_u64(f + 16) >> i & 1);
        dst[2 * i]     = r->low[i];
        dst[2 * i + 1] = (uint8_t) hi;
    }
    r->fixed += LLMAAS_FIXED;
    r->low   += n;
    return true;
}

void llmaas_planes_encode_generic(llmaas_planes_writer * w, const uint8_t * src, size_t src_stride, size_t n_rows,
                                  size_t n_cols) {
    for (size_t i = 0; i < n_rows; ++i) {
        encode_group(w, src + i * src_stride, n_cols);
    }
}

bool llmaas_planes_decode_generic(llmaas_planes_reader * r, size_t n_rows, size_t n_cols, uint8_t * dst, size_t dst_stride) {
    for (size_t i = 0; i < n_rows; ++i) {
        if (!decode_group(r, dst + i * dst_stride, n_cols)) {
            return false;
        }
    }
    return true;
}
