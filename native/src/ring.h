/* Places in a ring of bytes that are taken behind each other, each in one piece, and given back in the same order. */
#ifndef LLMAAS_RING_H
#define LLMAAS_RING_H

#include <stdbool.h>
#include <stddef.h>

/* Find n bytes behind those that are taken: from `first` on, the last of them at `last` and up to `end`. False: the first
 * ones are in the way. */
static inline bool llmaas_ring_place(size_t n_ring, size_t first, size_t last, size_t end, size_t n, size_t * at) {
    if (last < first) { /* it went back to the front before */
        *at = end;
        return n <= first - end;
    }
    *at = n <= n_ring - end ? end : 0;
    return *at == end || n <= first;
}

#endif
