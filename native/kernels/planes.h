/* The bit stream of the lossless planes, shared by its kernels. */
#ifndef LLMAAS_PLANES_H
#define LLMAAS_PLANES_H

#include "kernels.h"

#include "bytes.h"

static inline uint64_t planes_valid(size_t n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }

/* Append the low k bits of v (bits above k are zero), 0 <= k <= 64. */
static inline void planes_put(llmaas_planes_writer * w, uint64_t v, unsigned k) {
    w->acc |= v << w->n_acc;
    if (w->n_acc + k >= 64) {
        store_u64(w->var, w->acc);
        w->var += 8;
        w->acc = w->n_acc ? v >> (64 - w->n_acc) : 0;
    }
    w->n_acc = (w->n_acc + k) & 63;
}

static inline bool planes_has(const llmaas_planes_reader * r, unsigned k) { return r->end - r->pos >= k; }

/* Return the next 64 bits, of which the caller uses the low k. Reads up to LLMAAS_VAR_PAD bytes past the stream's
 * end. */
static inline uint64_t planes_get(llmaas_planes_reader * r, unsigned k) {
    const uint8_t * p = r->var + (r->pos >> 3);
    const unsigned  s = (unsigned) (r->pos & 7);
    r->pos += k;
    return load_u64(p) >> s | (load_u64(p + 8) << 1) << (63 - s);
}

#endif
