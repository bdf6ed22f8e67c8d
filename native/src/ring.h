/* A ring of bytes. Places are taken one behind another, each contiguous, and given back in the same order. */
#ifndef LLMAAS_RING_H
#define LLMAAS_RING_H

#include <stdbool.h>
#include <stddef.h>

/* Find n bytes behind the places taken. These begin at `first`; the last one lies from `last` to `end`. False if the
 * first ones are in the way. */
static inline bool llmaas_ring_place(size_t n_ring, size_t first, size_t last, size_t end, size_t n, size_t * at) {
    if (last < first) { /* the places wrapped around to the front */
        *at = end;
        return n <= first - end;
    }
    *at = n <= n_ring - end ? end : 0;
    return *at == end || n <= first;
}

#endif
